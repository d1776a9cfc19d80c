"""How the DQN scripts train, by vectors and by images alike: updates, logs, the same runs again, resumed runs, errors.

dqn_balancing_plate.py trains by the text of dqn_cartpole_vec.py, which a test in test_dqn.py compares.
"""

import math
import signal
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from dqn_runs import interrupt, tiny, turns_of, updates_of
from short_runs import assert_equal, command_line, failed, flags_of, load, only_run, resume, scalars, spy_runs

import dqn_atari
import dqn_cartpole_vec


@pytest.fixture(params=[dqn_cartpole_vec, dqn_atari], ids=lambda script: script.__name__)
def script(request):
    return request.param


# ----- When updates happen -----
@pytest.mark.parametrize(
    ("changes", "turns"),
    [
        # Steps 10, 20, 30, 40 call for an update and 20, 40 for the target network's; turns end at 4, 8, 12, ...
        (
            {"num_envs": 4, "train_frequency": 10, "target_network_frequency": 20, "total_timesteps": 40},
            ["", "", "u", "", "uc", "", "", "u", "", "uc"],
        ),
        # 1 to 25: updates at 10 and 20, the target network's at 25. And so on: 30, 40, 50; 60, 70; 80, 90, 100.
        (
            {"num_envs": 25, "train_frequency": 10, "target_network_frequency": 25, "total_timesteps": 100},
            ["uuc", "uuuc", "uuc", "uuuc"],
        ),
        # One turn meets several target updates, each after the update of its step.
        ({"num_envs": 6, "train_frequency": 2, "target_network_frequency": 2, "total_timesteps": 12}, ["ucucuc"] * 2),
        # From step 11 on, which is the second of the turn of 10 to 12; a last turn to 21 would go beyond 20.
        (
            {
                "num_envs": 3,
                "train_frequency": 2,
                "target_network_frequency": 6,
                "total_timesteps": 20,
                "learning_starts": 10,
            },
            ["", "", "", "uc", "u", "uuc"],
        ),
        # Each step after the 2nd.
        (
            {
                "num_envs": 1,
                "train_frequency": 1,
                "target_network_frequency": 3,
                "total_timesteps": 6,
                "learning_starts": 2,
            },
            ["", "", "uc", "u", "u", "uc"],
        ),
    ],
)
def test_every_step_that_calls_for_an_update_gets_one(script, tmp_path, monkeypatch, changes, turns):
    got = turns_of(script, monkeypatch)
    script.train(tiny(script, tmp_path, **{"learning_starts": 0, **changes}))
    assert got == turns
    checkpoint = load(only_run(tmp_path))
    assert checkpoint["counters"]["global_step"] == len(turns) * changes["num_envs"]
    assert updates_of(checkpoint) == "".join(turns).count("u")


def test_a_target_network_is_the_network_of_its_last_update(script, tmp_path):
    """Updates at 4, 8, ..., 40 and copies at 16 and 32: the copy of step 32 is no longer the network of step 40."""
    changes = {"learning_starts": 0, "target_network_frequency": 16, "anneal_lr": False, "start_e": 0, "end_e": 0}
    for steps in (2, 32, 40):
        script.train(tiny(script, tmp_path / str(steps), total_timesteps=steps, **changes))
    untrained, first, second = (load(only_run(tmp_path / name)) for name in ("2", "32", "40"))
    assert_equal(first["target_network"], first["agent"])
    assert_equal(second["target_network"], first["agent"])
    for name, weights in first["agent"].items():
        assert not torch.equal(weights, untrained["agent"][name]), name
        assert not torch.equal(weights, second["agent"][name]), name


# ----- What a run logs -----
LOSSES = {"losses/td_loss", "losses/q_values", "losses/grad_norm"}
EVALUATIONS = {"eval/return_mean", "eval/return_std", "eval/length_mean"}


def test_a_run_logs_what_is_expected_at_its_steps(script, tmp_path):
    _, scores = script.train(tiny(script, tmp_path, eval_every=200))
    assert scores.tolist() == [3.0, 3.0]
    logged = scalars(only_run(tmp_path))
    schedules = {"charts/epsilon", "charts/learning_rate", "charts/SPS"}
    assert set(logged) == LOSSES | EVALUATIONS | schedules | {"charts/episodic_return", "charts/episodic_length"}
    for tag in LOSSES | schedules:
        assert [step for step, _ in logged[tag]] == [100, 200, 300, 400], tag
        assert all(math.isfinite(value) for _, value in logged[tag]), tag
    for tag in EVALUATIONS:
        assert [step for step, _ in logged[tag]] == [200, 400], tag
    # The last turn before step 100 began at 98: 1 - 0.95 * 98 / 200; from step 200 on it is 0.05.
    epsilons = [value for _, value in logged["charts/epsilon"]]
    assert epsilons == pytest.approx([0.5345, 0.0595, 0.05, 0.05], rel=1e-6)
    # What is left of the run at 98, 198, 298, 398 of 400.
    rates = [value for _, value in logged["charts/learning_rate"]]
    assert rates == pytest.approx([1e-3 * x for x in (0.755, 0.505, 0.255, 0.005)], rel=1e-5)
    # Both environments end at each third of 200 turns: two points at 6, 12, ..., 396, of 3 steps that pay 1.
    ends = [6 * k for k in range(1, 67) for _ in range(2)]
    for tag in ("charts/episodic_return", "charts/episodic_length"):
        assert logged[tag] == [(step, 3.0) for step in ends], tag


def test_points_of_several_environments_fall_on_the_first_step_after_each_hundred(script, tmp_path):
    script.train(tiny(script, tmp_path, num_envs=3, total_timesteps=310, learning_starts=150))
    logged = scalars(only_run(tmp_path))
    # 3 * 34, 3 * 67, 3 * 100, and the last one of the run, 3 * 103.
    assert [step for step, _ in logged["charts/epsilon"]] == [102, 201, 300, 309]
    # There is no loss before the first update.
    assert [step for step, _ in logged["losses/td_loss"]] == [201, 300, 309]


def test_a_logged_loss_is_the_mean_over_its_updates(script, tmp_path, monkeypatch):
    losses, function = [], script.q_learning_loss

    def noting(*args):
        result = function(*args)
        losses.append([result[0].item(), result[1].item()])
        return result

    monkeypatch.setattr(script, "q_learning_loss", noting)
    script.train(tiny(script, tmp_path))
    logged = scalars(only_run(tmp_path))
    # Updates at 44, ..., 100 are 15, and then 25 each hundred steps.
    parts = np.split(np.array(losses), [15, 40, 65])
    assert len(parts[3]) == 25
    for column, tag in enumerate(("losses/td_loss", "losses/q_values")):
        got = [value for _, value in logged[tag]]
        assert got == pytest.approx([part[:, column].mean() for part in parts], rel=1e-5), tag


def test_the_learning_rate_that_is_logged_is_the_one_that_is_used(script, tmp_path, monkeypatch):
    rates = []
    step = torch.optim.Adam.step

    def noting(self, *args, **kwargs):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", noting)
    script.train(tiny(script, tmp_path / "annealed", total_timesteps=200))
    assert len(rates) == 40
    # The first update, of step 44, comes in the turn from 42 on, the last one in the turn from 198 on.
    assert (rates[0], rates[-1]) == pytest.approx((1e-3 * (1 - 42 / 200), 1e-3 * (1 - 198 / 200)))
    rates.clear()
    script.train(tiny(script, tmp_path / "constant", total_timesteps=100, anneal_lr=False))
    assert set(rates) == {1e-3}


# ----- Reproducibility -----
def test_the_same_seed_gives_the_same_run_whatever_is_evaluated_and_saved(script, tmp_path):
    runs = {
        "plain": {},
        "evaluated, saved": {"eval_every": 100, "eval_episodes": 3, "checkpoint_every": 100, "save_replay": True},
        "async": {"vector": "async"},
    }
    found = {}
    for name, changes in runs.items():
        # What another part of the program drew meanwhile must not matter.
        torch.rand(3)
        np.random.rand(3)  # noqa: NPY002
        script.train(tiny(script, tmp_path / name, "RightAction", total_timesteps=200, **changes))
        folder = only_run(tmp_path / name)
        found[name] = (load(folder), scalars(folder))
        checkpoint, logged = found[name]
        for part in ("agent", "target_network", "optimizer"):
            assert_equal(checkpoint[part], found["plain"][0][part], f"{name}: {part}")
        for tag, points in found["plain"][1].items():
            if tag != "charts/SPS" and not tag.startswith("eval/"):
                assert logged[tag] == points, f"{name}: {tag}"
    script.train(tiny(script, tmp_path / "other", "RightAction", total_timesteps=200, seed=2))
    for name, weights in load(only_run(tmp_path / "other"))["agent"].items():
        assert not torch.equal(weights, found["plain"][0]["agent"][name]), name


# ----- Resumed runs -----
def contents(state):
    """Returns a memory's state in parts that compare; of rows that nothing was written to, the bytes."""
    if isinstance(state, dict):
        return {name: contents(part) for name, part in state.items()}
    if isinstance(state, list | tuple):
        return [contents(part) for part in state]
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "no memory"])
def test_a_resumed_run_goes_on_where_it_was(script, tmp_path, monkeypatch, capsys, memory):
    """The signal comes in turn 75, so at step 150, between two points of the log."""
    script.train(tiny(script, tmp_path / "straight", "SignalAt"))
    straight = only_run(tmp_path / "straight")
    capsys.readouterr()
    folder = interrupt(script, monkeypatch, tiny(script, tmp_path / "cut", save_replay=memory), 75)
    go_on = f"interrupted at step 150; go on with: {sys.executable} {script.__name__}.py --resume {folder}\n"
    assert go_on in capsys.readouterr().out
    stopped = load(folder)
    # Updates at 44, 48, ..., 148.
    assert (stopped["counters"]["global_step"], updates_of(stopped)) == (150, 27)
    assert ("replay" in stopped) == memory
    # Each episode is in the log up to here.
    assert [step for step, _ in scalars(folder)["charts/episodic_return"]][-2:] == [150, 150]
    assert [step for step, _ in scalars(folder)["charts/epsilon"]] == [100]

    def note(run):
        for name in ("agent", "target_network", "optimizer"):
            assert_equal(dict(run.modules[name].state_dict()), dict(stopped[name]), name)
        if memory:
            assert contents(run.modules["replay"].state_dict()) == contents(stopped["replay"])

    # What is loaded is what was saved, of the memory too.
    spy_runs(monkeypatch, script, note)
    turns = turns_of(script, monkeypatch)
    resume(script, monkeypatch, folder)
    if memory:
        assert stopped["replay"]["added"] == 150
        # At once: the first turn reaches step 152.
        assert turns[:2] == ["u", ""]
    else:
        # Not before 40 steps more: up to step 190, after 20 turns, there is none.
        assert turns[:20] == [""] * 20
        assert turns[20] == "u"
    resumed = load(folder)
    assert resumed["counters"]["global_step"] == load(straight)["counters"]["global_step"] == 400
    assert updates_of(resumed) == (90 if memory else 27 + 53)
    assert updates_of(load(straight)) == 90
    logged, logged_straight = scalars(folder), scalars(straight)
    for tag in ("charts/epsilon", "charts/learning_rate"):
        assert logged[tag] == logged_straight[tag], tag
    # The same run up to the signal.
    assert logged["losses/td_loss"][0] == logged_straight["losses/td_loss"][0]
    # New episodes begin at step 150, and none is logged twice or missing.
    ends = [6 * k for k in range(1, 26)] + [150 + 6 * k for k in range(1, 42)]
    for tag in ("charts/episodic_return", "charts/episodic_length"):
        assert logged[tag] == [(step, 3.0) for step in ends for _ in range(2)], tag
    if memory:
        assert resumed["replay"]["added"] == 400


def test_a_memory_goes_on_only_with_its_sizes(script, tmp_path, monkeypatch, capsys):
    folder = interrupt(script, monkeypatch, tiny(script, tmp_path, save_replay=True), 75)
    flags = ("--resume", str(folder), "--buffer-size=604", "--total-timesteps=200")
    status, text = failed(script, monkeypatch, capsys, *flags)
    assert status == 2
    assert "the replay memory has other sizes; --no-save-replay starts a new one" in text
    turns = turns_of(script, monkeypatch)
    resume(script, monkeypatch, folder, *flags[2:], "--no-save-replay")
    # 40 steps without an update, then at 192, 196 and 200.
    assert turns == [""] * 20 + ["u", "", "u", "", "uc"]
    assert "replay" not in load(folder)


def test_the_best_model_is_stored_without_its_memory(script, tmp_path):
    script.train(tiny(script, tmp_path, save_replay=True, total_timesteps=100))
    folder = only_run(tmp_path)
    assert load(folder)["replay"]["added"] == 100
    assert "replay" not in load(folder, "best.pt")


def test_a_run_that_was_interrupted_again_starts_to_learn_when_it_would_have(script, tmp_path, monkeypatch):
    """Without a memory no update until step 190; saved at 160 with its memory, the run still waits until then."""
    folder = interrupt(script, monkeypatch, tiny(script, tmp_path), 75)
    monkeypatch.setenv("SIGNAL_AT", "5:SIGTERM")
    with pytest.raises(SystemExit) as exit_info:
        resume(script, monkeypatch, folder, "--save-replay")
    assert exit_info.value.code == 143
    assert load(folder)["counters"]["global_step"] == 160
    turns = turns_of(script, monkeypatch)
    resume(script, monkeypatch, folder, "--total-timesteps=200")
    assert turns == [""] * 15 + ["u", "", "u", "", "uc"]


def test_a_run_interrupted_at_its_start_goes_on(script, tmp_path, monkeypatch):
    """The signal comes before the first step: the memory that is saved is empty, and no damage."""
    with monkeypatch.context() as patch:
        spy_runs(patch, script, lambda _: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit) as exit_info:
            command_line(script, patch, *flags_of(tiny(script, tmp_path, save_replay=True)))
    assert exit_info.value.code == 143
    folder = only_run(tmp_path)
    assert (load(folder)["counters"]["global_step"], load(folder)["replay"]["added"]) == (0, 0)
    resume(script, monkeypatch, folder, "--total-timesteps=100")
    assert (load(folder)["counters"]["global_step"], updates_of(load(folder))) == (100, 15)


def test_a_finished_run_logs_nothing_and_goes_on_with_its_memory(script, tmp_path, monkeypatch, capsys):
    script.train(tiny(script, tmp_path, save_replay=True))
    folder = only_run(tmp_path)
    before, logged = (folder / "latest.pt").read_bytes(), scalars(folder)
    of_run = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval:")]
    turns = turns_of(script, monkeypatch)
    resume(script, monkeypatch, folder)
    out = capsys.readouterr().out
    assert "this run is finished" in out
    assert [line for line in out.splitlines() if line.startswith("eval:")] == of_run
    assert ((folder / "latest.pt").read_bytes(), scalars(folder), turns) == (before, logged, [])
    resume(script, monkeypatch, folder, "--total-timesteps=420")
    assert turns == ["", "u", "", "u", "", "u", "", "u", "", "uc"]
    assert updates_of(load(folder)) == 95


def test_a_loss_that_overflows_ends_the_run_and_keeps_the_checkpoint(script, tmp_path, monkeypatch, capsys):
    """From the 50th step of each of two environments on, which is step 100."""
    args = tiny(script, tmp_path, "HugeLater", checkpoint_every=90)
    status, text = failed(script, monkeypatch, capsys, *flags_of(args))
    assert (status, text) == (1, "error: losses/td_loss is not finite at step 180: lower --learning-rate\n")
    assert load(only_run(tmp_path))["counters"]["global_step"] == 90


# ----- What a wrong use gets -----
@pytest.mark.parametrize(("flags", "message"), [
    (["--gamma=1.5"], "--gamma 1.5 must be between 0 and 1"),
    (["--gamma=nan"], "--gamma nan must be between 0 and 1"),
    (["--tau=0"], "--tau 0.0 must be between 1e-12 and 1"),
    (["--tau=1.01"], "--tau 1.01 must be between 1e-12 and 1"),
    (["--start-e=1.1"], "--start-e 1.1 must be between 0 and 1"),
    (["--end-e=-0.1"], "--end-e -0.1 must be between 0 and 1"),
    (["--exploration-fraction=2"], "--exploration-fraction 2.0 must be between 0 and 1"),
    (["--learning-rate=0"], "--learning-rate 0.0 must be between 1e-12 and 1"),
    (["--learning-rate=1.1"], "--learning-rate 1.1 must be between 1e-12 and 1"),
    (["--num-envs=0"], "--num-envs 0 must be between 1 and 10,000"),
    (["--num-envs=10001"], "--num-envs 10001 must be between 1 and 10,000"),
    (["--batch-size=0"], "--batch-size 0 must be between 1 and inf"),
    (["--train-frequency=0"], "--train-frequency 0 must be between 1 and inf"),
    (["--target-network-frequency=0"], "--target-network-frequency 0 must be between 1 and inf"),
    (["--learning-starts=-1"], "--learning-starts -1 must be between 0 and 399"),
    # The first update would come after the last step, and what is saved is untrained.
    (["--learning-starts=400"], "--learning-starts 400 must be between 0 and 399"),
    (["--eval-episodes=0"], "--eval-episodes 0 must be between 1 and inf"),
    (["--threads=-1"], "--threads -1 must be between 0 and 1,024"),
    (["--checkpoint-every=-1"], "--checkpoint-every -1 must be between 0 and inf"),
    (["--eval-every=-1"], "--eval-every -1 must be between 0 and inf"),
    (["--seed=-1"], "--seed -1 must be between 0 and 2,000,000,000"),
    (["--seed=3000000000"], "--seed 3000000000 must be between 0 and 2,000,000,000"),
    (["--total-timesteps=1", "--learning-starts=0"], "--total-timesteps 1 must be between 2 and inf"),
    (["--loss=l1"], "--loss"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")  # fmt: skip
def test_a_wrong_value_is_refused(script, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    status, text = failed(script, monkeypatch, capsys, *flags_of(tiny(script, tmp_path / "runs")), *flags)
    assert status == 2
    assert message in text
    assert list(tmp_path.iterdir()) == []


def test_a_memory_larger_than_the_free_memory_is_refused(script, tmp_path, monkeypatch, capsys):
    """2^20 rows: two observations of one number and 16 bytes more, or an image of 36 x 36 and 17 bytes more."""
    mebibytes = {"dqn_cartpole_vec": 24, "dqn_atari": 1313}[script.__name__]
    flags = flags_of(tiny(script, tmp_path, buffer_size=2**20, total_timesteps=4, learning_starts=0))
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=mebibytes * 2**20 - 1))
        patch.setattr(script, "ReplayBuffer", None)  # it is found before
        status, text = failed(script, patch, capsys, *flags)
    sizes = f"storage: {mebibytes:,}.0 MiB; free on cpu: {mebibytes:,}.0 MiB"
    assert (status, text) == (2, f"error: {sizes}; lower --buffer-size\n")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=mebibytes * 2**20))
    command_line(script, monkeypatch, *flags)

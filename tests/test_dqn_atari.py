"""dqn_atari.py: its network, when updates happen, what is logged, known answers, and resumed runs."""

import dataclasses
import math
import signal
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import small_envs
import torch
from short_runs import assert_equal, command_line, failed, flags_of, load, only_run, resume, scalars, spy, spy_runs

import dqn_atari

CPU = torch.device("cpu")

# 200 turns of 2 steps; of the steps 41 to 400 each 4th calls for an update: 90.
TINY = {
    "num_envs": 2,
    "total_timesteps": 400,
    "learning_starts": 40,
    "train_frequency": 4,
    "target_network_frequency": 20,
    "tau": 1.0,
    "batch_size": 4,
    "buffer_size": 600,
    "start_e": 1.0,
    "end_e": 0.05,
    "exploration_fraction": 0.5,
    "learning_rate": 1e-3,
    "anneal_lr": True,
    "eval_episodes": 2,
    "eval_every": 0,
    "checkpoint_every": 0,
    "threads": 1,
    "cuda": False,
    "progress": False,
}


def tiny(run_dir, env="Ramp3Trunc", **changes):
    env_id = env if "-" in env else f"small_envs:{env}-v0"
    return dqn_atari.Args(**{**TINY, "env_id": env_id, "run_dir": str(run_dir), **changes})


def memories_of(monkeypatch):
    """Returns the list in which every replay memory will be that the script makes."""
    made = []
    spy(monkeypatch, dqn_atari.ReplayBuffer, "__init__", lambda self, *_: made.append(self))
    return made


def turns_of(monkeypatch):
    """Returns a list to which each turn of the training loop will add its updates (u) and target updates (c)."""
    turns = []

    def append(letter):
        turns[-1] += letter

    spy(monkeypatch, dqn_atari.ReplayBuffer, "add", lambda *_: turns.append(""))
    spy(monkeypatch, dqn_atari, "q_learning_loss", lambda *_: append("u"))
    spy(monkeypatch, dqn_atari, "update_target", lambda *_: append("c"))
    return turns


def updates_of(checkpoint):
    """Returns how many steps the optimizer has made."""
    (steps,) = {int(x["step"]) for x in checkpoint["optimizer"]["state"].values()}
    return steps


def interrupt(monkeypatch, args, turn, *flags):
    """Trains until the first environment sends this process SIGTERM in a turn; returns the run folder."""
    monkeypatch.setenv("SIGNAL_AT", f"{turn}:SIGTERM")
    with pytest.raises(SystemExit) as exit_info:
        command_line(dqn_atari, monkeypatch, *flags_of(dataclasses.replace(args, env_id="small_envs:SignalAt-v0")))
    assert exit_info.value.code == 143
    return only_run(args.run_dir)


# ----- Network -----
def new_agent(env_id, **changes):
    args = dqn_atari.Args(env_id=env_id, num_envs=1, threads=1, **changes)
    torch.manual_seed(0)
    with dqn_atari.closing(dqn_atari.make_envs(args, 1)) as envs:
        return dqn_atari.Agent(args, envs)


def test_a_network_acts_greedily_or_with_its_epsilon():
    agent = new_agent("small_envs:Ramp3Trunc-v0", end_e=0.2)
    obs = torch.zeros(4000, 1, 36, 36, dtype=torch.uint8)
    with torch.no_grad():
        best = agent(obs).argmax(-1)
        assert torch.equal(agent.act(obs, greedy=True), best)
        # Half of the random actions are the best one: 10 % of 4,000 differ, with a deviation of 19.
        assert (agent.act(obs, greedy=False) != best).sum().item() == pytest.approx(400, abs=5 * 19)


def test_pixels_are_scaled_to_1_and_left_as_they_are():
    agent = new_agent("PongNoFrameskip-v4")
    obs = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    before = obs.clone()
    with torch.no_grad():
        values = agent(obs)
        right = agent.head(agent.trunk(obs.double().div(255).float()))
    assert values.shape == (3, 6)
    assert torch.equal(obs, before)
    torch.testing.assert_close(values, right, rtol=1e-5, atol=1e-5)


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
def test_every_step_that_calls_for_an_update_gets_one(tmp_path, monkeypatch, changes, turns):
    got = turns_of(monkeypatch)
    dqn_atari.train(tiny(tmp_path, **{"learning_starts": 0, **changes}))
    assert got == turns
    checkpoint = load(only_run(tmp_path))
    assert checkpoint["counters"]["global_step"] == len(turns) * changes["num_envs"]
    assert updates_of(checkpoint) == "".join(turns).count("u")


def test_a_target_network_is_the_network_of_its_last_update(tmp_path):
    """Updates at 4, 8, ..., 40 and copies at 16 and 32: the copy of step 32 is no longer the network of step 40."""
    changes = {"learning_starts": 0, "target_network_frequency": 16, "anneal_lr": False, "start_e": 0, "end_e": 0}
    for steps in (2, 32, 40):
        dqn_atari.train(tiny(tmp_path / str(steps), total_timesteps=steps, **changes))
    untrained, first, second = (load(only_run(tmp_path / name)) for name in ("2", "32", "40"))
    assert_equal(first["target_network"], first["agent"])
    assert_equal(second["target_network"], first["agent"])
    for name, weights in first["agent"].items():
        assert not torch.equal(weights, untrained["agent"][name]), name
        assert not torch.equal(weights, second["agent"][name]), name


# ----- What a run logs -----
LOSSES = {"losses/td_loss", "losses/q_values", "losses/grad_norm"}
EVALUATIONS = {"eval/return_mean", "eval/return_std", "eval/length_mean"}


def test_a_run_logs_what_is_expected_at_its_steps(tmp_path):
    _, scores = dqn_atari.train(tiny(tmp_path, eval_every=200))
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


def test_points_of_several_environments_fall_on_the_first_step_after_each_hundred(tmp_path):
    dqn_atari.train(tiny(tmp_path, num_envs=3, total_timesteps=310, learning_starts=150))
    logged = scalars(only_run(tmp_path))
    # 3 * 34, 3 * 67, 3 * 100, and the last one of the run, 3 * 103.
    assert [step for step, _ in logged["charts/epsilon"]] == [102, 201, 300, 309]
    # There is no loss before the first update.
    assert [step for step, _ in logged["losses/td_loss"]] == [201, 300, 309]


def test_a_logged_loss_is_the_mean_over_its_updates(tmp_path, monkeypatch):
    losses, function = [], dqn_atari.q_learning_loss

    def noting(*args):
        result = function(*args)
        losses.append([result[0].item(), result[1].item()])
        return result

    monkeypatch.setattr(dqn_atari, "q_learning_loss", noting)
    dqn_atari.train(tiny(tmp_path))
    logged = scalars(only_run(tmp_path))
    # Updates at 44, ..., 100 are 15, and then 25 each hundred steps.
    parts = np.split(np.array(losses), [15, 40, 65])
    assert len(parts[3]) == 25
    for column, tag in enumerate(("losses/td_loss", "losses/q_values")):
        got = [value for _, value in logged[tag]]
        assert got == pytest.approx([part[:, column].mean() for part in parts], rel=1e-5), tag


def test_the_learning_rate_that_is_logged_is_the_one_that_is_used(tmp_path, monkeypatch):
    rates = []
    step = torch.optim.Adam.step

    def noting(self, *args, **kwargs):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", noting)
    dqn_atari.train(tiny(tmp_path / "annealed", total_timesteps=200))
    assert len(rates) == 40
    # The first update, of step 44, comes in the turn from 42 on, the last one in the turn from 198 on.
    assert (rates[0], rates[-1]) == pytest.approx((1e-3 * (1 - 42 / 200), 1e-3 * (1 - 198 / 200)))
    rates.clear()
    dqn_atari.train(tiny(tmp_path / "constant", total_timesteps=100, anneal_lr=False))
    assert set(rates) == {1e-3}


@pytest.mark.parametrize(("double", "loss"), [(False, "huber"), (True, "mse")])
def test_updates_and_evaluations_do_what_the_flags_say(tmp_path, monkeypatch, double, loss):
    asked, norms, seeds, step = set(), [], [], torch.optim.Adam.step

    def noting(self, *args, **kwargs):
        norms.append(math.hypot(*(weights.grad.norm().item() for weights in self.param_groups[0]["params"])))
        return step(self, *args, **kwargs)

    spy(monkeypatch, dqn_atari, "q_learning_loss", lambda *args: asked.add(args[3:]))
    spy(monkeypatch, dqn_atari, "evaluate", lambda agent, args, seed, *_: seeds.append(seed))
    monkeypatch.setattr(torch.optim.Adam, "step", noting)
    flags = {"gamma": 0.7, "max_grad_norm": 0.01, "total_timesteps": 200, "eval_every": 200, "seed": 5}
    dqn_atari.train(tiny(tmp_path, **flags, double=double, loss=loss))
    assert asked == {(0.7, double, loss)}
    # The games that choose best.pt are others than those at the end.
    assert seeds == [10_005, 20_005]
    # Longer gradients were scaled down, and the log has their length before.
    assert max(norms) == pytest.approx(0.01, rel=1e-3)
    assert max(value for _, value in scalars(only_run(tmp_path))["losses/grad_norm"]) > 0.1


# ----- Known answers -----
ANSWERS = {
    "num_envs": 4,
    "learning_starts": 64,
    "batch_size": 32,
    "buffer_size": 4000,
    "start_e": 1.0,
    "end_e": 1.0,
    "eval_episodes": 1,
    "loss": "mse",
    "max_grad_norm": 1000.0,
}


def q_of(agent, number):
    """Returns the values of both actions where the image is `number` everywhere."""
    with torch.no_grad():
        return agent(torch.full((1, 1, 36, 36), number, dtype=torch.uint8))[0].tolist()


def test_the_values_of_a_single_step_are_its_rewards(tmp_path):
    """Bright pays 1 for action 1, dark for action 0, and nothing follows: gamma plays no part."""
    changes = {"total_timesteps": 1200, "target_network_frequency": 20, "gamma": 0.99}
    agent, scores = dqn_atari.train(tiny(tmp_path, "RightAction", **{**ANSWERS, **changes}))
    assert scores.tolist() == [1.0]
    assert q_of(agent, 200) == pytest.approx([0, 1], abs=0.1)
    assert q_of(agent, 0) == pytest.approx([1, 0], abs=0.1)


def test_a_reward_of_1_for_ever_is_worth_1_over_1_minus_gamma_across_time_limits(tmp_path):
    """4 steps that look all the same, cut by a time limit: 1 / (1 - 0.8) = 5; 2.5 if that were an end."""
    # 40 copies, after which 0.8^40 = 0.0001 of the first error is left.
    changes = {"total_timesteps": 1664, "target_network_frequency": 40, "gamma": 0.8, "learning_rate": 3e-4}
    agent, _ = dqn_atari.train(tiny(tmp_path, "ConstantTrunc", **{**ANSWERS, **changes}))
    assert q_of(agent, 128) == pytest.approx([5, 5], abs=0.25)


# ----- Environments -----
@pytest.mark.parametrize(("first_action", "own"), [("NegativeStart", {-1, 0}), ("LateStart", {5, 6})])
def test_actions_that_do_not_start_at_0(tmp_path, monkeypatch, first_action, own):
    """The environment gets actions of its space and refuses others; the memory and the network count from 0."""
    memories, taken = memories_of(monkeypatch), set()
    spy(monkeypatch, small_envs.Ramp, "step", lambda self, action: taken.add(int(action)))
    args = tiny(tmp_path, f"Ramp{first_action}", total_timesteps=200)
    agent, scores = dqn_atari.train(args)
    assert scores.tolist() == [3.0, 3.0]
    assert taken == own
    assert set(memories[0].sample(500, CPU).actions.tolist()) == {0, 1}
    assert len(q_of(agent, 0)) == 2


def test_a_memory_never_gives_what_the_environments_did_not_make(tmp_path, monkeypatch):
    """Each batch of a run, whose memory is overwritten many times, holds transitions that were stored before."""
    stored, batches = set(), []

    def note(self, obs, next_obs, action, reward, termination):
        rows = zip(obs, next_obs, action, reward, termination, strict=True)
        stored.update((a.tobytes(), b.tobytes(), int(c), float(d), bool(e)) for a, b, c, d, e in rows)

    sample = dqn_atari.ReplayBuffer.sample

    def checking(self, *args):
        batch = sample(self, *args)
        rows = zip(*(x.numpy() for x in batch), strict=True)
        assert {(a.tobytes(), b.tobytes(), int(c), float(d), bool(e)) for a, b, c, d, e in rows} <= stored
        batches.append(1)
        return batch

    spy(monkeypatch, dqn_atari.ReplayBuffer, "add", note)
    monkeypatch.setattr(dqn_atari.ReplayBuffer, "sample", checking)
    dqn_atari.train(tiny(tmp_path, "Ramp3Term", buffer_size=40))
    assert len(batches) == 90
    # Of [k] follows [k + 1], with either action and its own end: no more and no less.
    assert len(stored) == 6


@pytest.mark.parametrize("backend", ["ale", "gymnasium"])
def test_breakout_trains(tmp_path, monkeypatch, backend):
    turns = []
    spy(monkeypatch, dqn_atari.ReplayBuffer, "add", lambda *_: turns.append(1))
    changes = {
        "backend": backend,
        "total_timesteps": 800,
        "learning_starts": 400,
        "train_frequency": 40,
        "start_e": 1,
        # Evaluated at random too, since a greedy policy that never serves would play for 27,000 steps.
        "end_e": 1,
        "eval_greedy": False,
    }
    args = tiny(tmp_path, "BreakoutNoFrameskip-v4", batch_size=32, buffer_size=500, eval_episodes=1, **changes)
    agent, _ = dqn_atari.train(args)
    assert len(turns) == 400
    assert agent.head.out_features == 4
    logged = scalars(only_run(tmp_path))
    assert all(math.isfinite(value) for tag in LOSSES for _, value in logged[tag])
    # Whole games, of more steps than a life has: not one point for each lost life.
    assert 2 <= len(logged["charts/episodic_return"]) <= 8
    assert min(value for _, value in logged["charts/episodic_length"]) > 100


@pytest.mark.parametrize(
    ("env", "stack", "shape"),
    [("RampGrey", 4, (4, 84, 84)), ("RampColour", 4, (4, 84, 84)), ("Ramp3Term", 1, (1, 36, 36))],
)
def test_own_images_are_no_stack_of_frames(tmp_path, monkeypatch, env, stack, shape):
    memories = memories_of(monkeypatch)
    dqn_atari.train(tiny(tmp_path, env, total_timesteps=60))
    assert (memories[0].stack, memories[0].obs_shape) == (stack, shape)


# ----- Reproducibility -----
def test_the_same_seed_gives_the_same_run_whatever_is_evaluated_and_saved(tmp_path):
    runs = {
        "plain": {},
        "evaluated, saved": {"eval_every": 100, "eval_episodes": 3, "checkpoint_every": 100, "save_replay": True},
        "async": {"vector": "async"},
    }
    found = {}
    for name, changes in runs.items():
        # What another part of the program drew meanwhile must not matter.
        torch.rand(3)
        dqn_atari.train(tiny(tmp_path / name, "RightAction", total_timesteps=200, **changes))
        folder = only_run(tmp_path / name)
        found[name] = (load(folder), scalars(folder))
        checkpoint, logged = found[name]
        for part in ("agent", "target_network", "optimizer"):
            assert_equal(checkpoint[part], found["plain"][0][part], f"{name}: {part}")
        for tag, points in found["plain"][1].items():
            if tag != "charts/SPS" and not tag.startswith("eval/"):
                assert logged[tag] == points, f"{name}: {tag}"
    dqn_atari.train(tiny(tmp_path / "other", "RightAction", total_timesteps=200, seed=2))
    for name, weights in load(only_run(tmp_path / "other"))["agent"].items():
        assert not torch.equal(weights, found["plain"][0]["agent"][name]), name


# ----- Resumed runs -----
def contents(state):
    """Returns a memory's state in parts that compare; of rows between, which nothing was written to, the bytes."""
    columns = {name: column.numpy().tobytes() for name, column in state["columns"].items()}
    return state["dims"], state["added"], state["position"].tolist(), columns


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "no memory"])
def test_a_resumed_run_goes_on_where_it_was(tmp_path, monkeypatch, capsys, memory):
    """The signal comes in turn 75, so at step 150, between two points of the log."""
    dqn_atari.train(tiny(tmp_path / "straight", "SignalAt"))
    straight = only_run(tmp_path / "straight")
    capsys.readouterr()
    folder = interrupt(monkeypatch, tiny(tmp_path / "cut", save_replay=memory), 75)
    assert (
        f"interrupted at step 150; go on with: {sys.executable} dqn_atari.py --resume {folder}\n"
        in capsys.readouterr().out
    )
    stopped = load(folder)
    # Updates at 44, 48, ..., 148.
    assert (stopped["counters"]["global_step"], updates_of(stopped)) == (150, 27)
    assert ("replay" in stopped) == memory
    # The log is whole up to here.
    assert [step for step, _ in scalars(folder)["charts/episodic_return"]][-2:] == [150, 150]
    assert [step for step, _ in scalars(folder)["charts/epsilon"]] == [100]

    def note(run):
        for name in ("agent", "target_network", "optimizer"):
            assert_equal(dict(run.modules[name].state_dict()), dict(stopped[name]), name)
        if memory:
            assert contents(run.modules["replay"].state_dict()) == contents(stopped["replay"])

    # What is loaded is what was saved, of the memory too.
    spy_runs(monkeypatch, dqn_atari, note)
    turns = turns_of(monkeypatch)
    resume(dqn_atari, monkeypatch, folder)
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


def test_a_memory_goes_on_only_with_its_sizes(tmp_path, monkeypatch, capsys):
    folder = interrupt(monkeypatch, tiny(tmp_path, save_replay=True), 75)
    flags = ("--resume", str(folder), "--buffer-size=604", "--total-timesteps=200")
    status, text = failed(dqn_atari, monkeypatch, capsys, *flags)
    assert status == 2
    assert "the replay memory has other sizes; --no-save-replay starts a new one" in text
    turns = turns_of(monkeypatch)
    resume(dqn_atari, monkeypatch, folder, *flags[2:], "--no-save-replay")
    # 40 steps without an update, then at 192, 196 and 200.
    assert turns == [""] * 20 + ["u", "", "u", "", "uc"]
    assert "replay" not in load(folder)


def test_the_best_model_is_stored_without_its_memory(tmp_path):
    dqn_atari.train(tiny(tmp_path, save_replay=True, total_timesteps=100))
    folder = only_run(tmp_path)
    assert load(folder)["replay"]["added"] == 100
    assert "replay" not in load(folder, "best.pt")


def test_a_run_that_was_interrupted_again_starts_to_learn_when_it_would_have(tmp_path, monkeypatch):
    """Without a memory no update until step 190; saved at 160 with its memory, the run still waits until then."""
    folder = interrupt(monkeypatch, tiny(tmp_path), 75)
    monkeypatch.setenv("SIGNAL_AT", "5:SIGTERM")
    with pytest.raises(SystemExit) as exit_info:
        resume(dqn_atari, monkeypatch, folder, "--save-replay")
    assert exit_info.value.code == 143
    assert load(folder)["counters"]["global_step"] == 160
    turns = turns_of(monkeypatch)
    resume(dqn_atari, monkeypatch, folder, "--total-timesteps=200")
    assert turns == [""] * 15 + ["u", "", "u", "", "uc"]


def test_a_run_interrupted_at_its_start_goes_on(tmp_path, monkeypatch):
    """The signal comes before the first step: the memory that is saved is empty, and no damage."""
    check_memory = dqn_atari.check_memory

    def signalling(*args):
        signal.raise_signal(signal.SIGTERM)
        return check_memory(*args)

    with monkeypatch.context() as patch:
        patch.setattr(dqn_atari, "check_memory", signalling)
        with pytest.raises(SystemExit) as exit_info:
            command_line(dqn_atari, patch, *flags_of(tiny(tmp_path, save_replay=True)))
    assert exit_info.value.code == 143
    folder = only_run(tmp_path)
    assert (load(folder)["counters"]["global_step"], load(folder)["replay"]["added"]) == (0, 0)
    resume(dqn_atari, monkeypatch, folder, "--total-timesteps=100")
    assert (load(folder)["counters"]["global_step"], updates_of(load(folder))) == (100, 15)


def test_a_finished_run_logs_nothing_and_goes_on_with_its_memory(tmp_path, monkeypatch, capsys):
    dqn_atari.train(tiny(tmp_path, save_replay=True))
    folder = only_run(tmp_path)
    before, logged = (folder / "latest.pt").read_bytes(), scalars(folder)
    of_run = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval:")]
    turns = turns_of(monkeypatch)
    resume(dqn_atari, monkeypatch, folder)
    out = capsys.readouterr().out
    assert "this run is finished" in out
    assert [line for line in out.splitlines() if line.startswith("eval:")] == of_run
    assert ((folder / "latest.pt").read_bytes(), scalars(folder), turns) == (before, logged, [])
    resume(dqn_atari, monkeypatch, folder, "--total-timesteps=420")
    assert turns == ["", "u", "", "u", "", "u", "", "u", "", "uc"]
    assert updates_of(load(folder)) == 95


def test_a_loss_that_overflows_ends_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch, capsys):
    """From the 50th step of each of two environments on, which is step 100."""
    status, text = failed(dqn_atari, monkeypatch, capsys, *flags_of(tiny(tmp_path, "HugeLater", checkpoint_every=90)))
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
    (["--max-grad-norm=0"], "--max-grad-norm 0.0 must be between 1e-12 and inf"),
    (["--num-envs=0"], "--num-envs 0 must be between 1 and 10,000"),
    (["--num-envs=10001"], "--num-envs 10001 must be between 1 and 10,000"),
    (["--buffer-size=31"], "--buffer-size 31 must be between 32 and inf"),
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
    (["--backend=envpool"], "--backend"),
    (["--env-id=CartPole-v1"], "--env-id CartPole-v1 with --env-kwargs {} cannot be used: it has Box (4,) float32 "),
    (["--env-id=Pong-v4"], "skips frames at random; use PongNoFrameskip-v4 or ALE/Pong-v5"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")  # fmt: skip
def test_a_wrong_value_is_refused(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    status, text = failed(dqn_atari, monkeypatch, capsys, *flags_of(tiny(tmp_path / "runs")), *flags)
    assert status == 2
    assert message in text
    assert list(tmp_path.iterdir()) == []


def test_a_memory_larger_than_the_free_memory_is_refused(tmp_path, monkeypatch, capsys):
    """2^20 rows: an image of 36 x 36 and 17 bytes more are 1,313 MiB."""
    need = 1313 * 2**20
    flags = flags_of(tiny(tmp_path, buffer_size=2**20, total_timesteps=4, learning_starts=0))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=need - 1))
    # Before anything else of a run is made.
    monkeypatch.setattr(dqn_atari, "Agent", None)
    status, text = failed(dqn_atari, monkeypatch, capsys, *flags)
    assert (status, text) == (2, "error: storage: 1,313.0 MiB; free on cpu: 1,313.0 MiB; lower --buffer-size\n")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=need))
    command_line(dqn_atari, monkeypatch, *flags)

"""Whole runs of train(): what they learn from, log and leave behind, and what must not change a weight."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types

import ale_py
import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest
import small_envs
import torch
from conftest import ROOT
from short_runs import (
    assert_equal,
    command_line,
    every_script,
    flags_of,
    hashes,
    load,
    only_run,
    resume,
    scalars,
    small_run,
    spy,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_atari

PER_ITERATION = {"charts/learning_rate", "charts/SPS", "losses/explained_variance"}
LOSSES = {"value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm"}
EVALUATIONS = {"eval/return_mean", "eval/return_std", "eval/length_mean"}
EPISODES = {"charts/episodic_return", "charts/episodic_length"}


def tiny(run_dir, **changes):
    """Arguments of 2 iterations of 64 steps and 4 updates; episodes of 3 steps that pay 1 each."""
    return small_run("ppo_atari", run_dir, **changes)[1]


def weights_of(agent):
    return {name: tensor.clone() for name, tensor in agent.state_dict().items()}


def first_weights(args):
    """Returns the weights with which train() starts."""
    ppo_atari.prepare(args)
    with ppo_atari.closing(ppo_atari.make_envs(args, args.num_envs)) as envs:
        return weights_of(ppo_atari.Agent(args, envs))


@functools.cache
def plain_weights():
    """Returns the weights after the tiny run, the reference of the tests that compare with it bit for bit."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return weights_of(ppo_atari.train(tiny(folder))[0])


def printed(capsys, *starts):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(starts)]


# ----- Every script -----
@every_script
def test_the_speed_is_that_of_the_steps_since_the_last_point(name, tmp_path, monkeypatch):
    """Each look at the clock finds it a second later, and each evaluation and checkpoint takes a second, too.

    Evaluations in training, which choose best.pt, have other seeds than the last one.
    """
    script, args = small_run(name, tmp_path, eval_every=40, checkpoint_every=30)
    seeds = []
    clock = types.SimpleNamespace(perf_counter=itertools.count().__next__, time_ns=time.time_ns)
    monkeypatch.setattr(script, "time", clock)
    spy(monkeypatch, script, "evaluate", lambda *given: (seeds.append(given[2]), clock.perf_counter()))
    spy(monkeypatch, script.Run, "save", lambda *_: clock.perf_counter())
    script.train(args)
    points = scalars(only_run(tmp_path))["charts/SPS"]
    assert len(points) >= 2
    assert [speed for _, speed in points] == [b - a for (a, _), (b, _) in itertools.pairwise([(0, 0), *points])]
    assert len(seeds) >= 2
    assert seeds == [10_001] * (len(seeds) - 1) + [20_001]


@every_script
def test_more_threads_than_any_machine_has_are_refused(name, tmp_path):
    script, args = small_run(name, tmp_path, threads=10**10)
    with pytest.raises(script.UsageError, match=r"--threads 10000000000 must be between 0 and 1,024"):
        args.check()


@every_script
def test_a_run_trains_goes_on_and_is_evaluated(name, tmp_path, monkeypatch, capsys):
    script, args = small_run(name, tmp_path)
    unit, total = (
        ("episodes", "total_episodes") if hasattr(args, "total_episodes") else ("global_step", "total_timesteps")
    )
    command_line(script, monkeypatch, *flags_of(args))
    folder = only_run(tmp_path)
    of_run = printed(capsys, "episode ", "eval: ")
    assert [line.split("=")[0] for line in of_run] == ["episode 0: return", "episode 1: return", "eval: mean"]
    names = sorted(path.name for path in folder.iterdir())
    assert re.fullmatch(r"args.json best.pt events.out.tfevents.\S+ latest.pt", " ".join(names))
    before = load(folder)
    assert (before["script"], before["counters"][unit]) == (name, getattr(args, total))

    # The evaluation of a checkpoint is the closing one of its run, and changes no byte.
    files = hashes(folder)
    command_line(script, monkeypatch, "--evaluate", str(folder), "--threads=1", "--no-cuda")
    assert printed(capsys, "episode ", "eval: ") == of_run
    assert hashes(folder) == files

    resume(script, monkeypatch, folder, f"--{total.replace('_', '-')}={2 * getattr(args, total)}")
    after, logged = load(folder), scalars(folder)
    assert after["counters"][unit] == 2 * getattr(args, total)
    for part in ("agent", "optimizer"):
        assert after[part].keys() == before[part].keys()
    assert any(not torch.equal(before["agent"][x], after["agent"][x]) for x in after["agent"])
    assert logged.keys() >= PER_ITERATION - {"losses/explained_variance"} | EVALUATIONS | EPISODES
    steps = [content["counters"]["global_step"] for content in (before, after)]
    for tag, points in logged.items():
        assert all(math.isfinite(value) for _, value in points), tag
        assert [step for step, _ in points] == sorted(step for step, _ in points), tag
        assert points[-1][0] <= steps[1], tag
    assert [step for step, _ in logged["eval/return_mean"]] == steps


@every_script
def test_storage_beyond_the_free_memory_is_refused(name, tmp_path, monkeypatch):
    script, args = small_run(name, tmp_path / "runs")
    monkeypatch.setattr(script.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=0))
    with pytest.raises(script.UsageError, match=r"^storage: [\d.,]+ MiB; free on cpu: 0\.0 MiB; lower --"):
        script.train(args)
    assert not (tmp_path / "runs").exists()


@every_script
def test_a_run_of_no_steps_is_refused(name, tmp_path):
    script, args = small_run(name, tmp_path)
    (total,) = {"total_timesteps", "total_episodes"} & vars(args).keys()
    with pytest.raises(script.UsageError, match=f"^--{total.replace('_', '-')} 0 must be between "):
        dataclasses.replace(args, **{total: 0}).check()


@pytest.mark.parametrize("every", [0, 10**9], ids=["only one", "last of several"])
@every_script
def test_an_evaluation_at_the_end_is_made_up_for(name, tmp_path, monkeypatch, every):
    """A run that was stopped while it was evaluated for the last time makes up for that when it is resumed."""
    script, args = small_run(name, tmp_path, eval_every=every)
    evaluate = script.evaluate

    def signalling(*args):
        signal.raise_signal(signal.SIGTERM)
        return evaluate(*args)

    monkeypatch.setattr(script, "evaluate", signalling)
    with pytest.raises(SystemExit) as exit_info:
        command_line(script, monkeypatch, *flags_of(args))
    assert exit_info.value.code == 143
    monkeypatch.setattr(script, "evaluate", evaluate)
    folder = only_run(tmp_path)
    stopped = load(folder)["counters"]
    assert (stopped["evaluated"], stopped["best_eval"]) == (0, [])
    assert not (folder / "best.pt").exists()
    # The second time it is finished, and logs nothing.
    for _ in range(2):
        resume(script, monkeypatch, folder)
        best, latest = (load(folder, f"{name}.pt")["counters"] for name in ("best", "latest"))
        assert best == latest
        for counter in ("global_step", "episodes"):
            assert latest[counter] == stopped[counter]
        assert latest["evaluated"] == latest["global_step"]
        assert [step for step, _ in scalars(folder)["eval/return_mean"]] == [stopped["global_step"]]


# ----- What a run logs -----
def test_a_run_learns_and_logs_each_iteration_at_its_step(tmp_path):
    args = tiny(tmp_path, total_timesteps=256, eval_every=64)
    before = first_weights(args)
    agent, scores = ppo_atari.train(args)

    assert scores.tolist() == [3.0, 3.0]
    for name, tensor in agent.state_dict().items():
        assert torch.isfinite(tensor).all(), name
        assert not torch.equal(tensor, before[name]), f"{name} did not change"

    logged = scalars(only_run(tmp_path))
    per_iteration = PER_ITERATION | {f"losses/{name}" for name in LOSSES}
    assert set(logged) == per_iteration | EVALUATIONS | EPISODES
    for tag in per_iteration | EVALUATIONS:
        assert [step for step, _ in logged[tag]] == [64, 128, 192, 256], tag
        assert all(math.isfinite(value) for _, value in logged[tag]), tag
    # Iteration i of 4 uses rate x (1 - (i - 1) / 4).
    expected = [2.5e-4, 1.875e-4, 1.25e-4, 0.625e-4]
    assert [value for _, value in logged["charts/learning_rate"]] == pytest.approx(expected, rel=1e-6)
    # Two actions: the entropy starts at ln 2 = 0.693, since the policy starts near uniform.
    assert logged["losses/entropy"][0][1] == pytest.approx(math.log(2), abs=0.01)
    # Each evaluation plays 2 episodes of 3 steps that pay 1.
    for tag, value in {"eval/return_mean": 3.0, "eval/return_std": 0.0, "eval/length_mean": 3.0}.items():
        assert [value for _, value in logged[tag]] == [value] * 4


def test_an_episode_is_logged_at_the_step_at_which_it_ended(tmp_path):
    ppo_atari.train(tiny(tmp_path))
    logged = scalars(only_run(tmp_path))
    # 64 vector steps: both environments end at every third, 21 times, and a vector step counts 2.
    ends = [(step, 3.0) for k in range(1, 22) for step in (6 * k, 6 * k)]
    assert logged["charts/episodic_return"] == logged["charts/episodic_length"] == ends


@pytest.mark.parametrize("name", ["ppo_atari", "a2c_atari", "ppo_cartpole", "ppo_continuous", "rpo_continuous"])
def test_the_learning_rate_stays_without_annealing(name, tmp_path):
    script, args = small_run(name, tmp_path, anneal_lr=False, learning_rate=0.001)
    script.train(args)
    rates = scalars(only_run(tmp_path))["charts/learning_rate"]
    assert rates == [(64, pytest.approx(0.001)), (128, pytest.approx(0.001))]


def test_a_logged_loss_is_the_mean_over_all_minibatches(tmp_path, monkeypatch):
    seen = {"value_loss": [], "policy_loss": []}

    def recording(name, function):
        def call(*args):
            result = function(*args)
            seen[name].append(result.item())
            return result

        return call

    for name in seen:
        monkeypatch.setattr(ppo_atari, name, recording(name, getattr(ppo_atari, name)))
    ppo_atari.train(tiny(tmp_path, learning_rate=0.003))
    logged = scalars(only_run(tmp_path))
    for name, values in seen.items():
        assert len(values) == 8
        first, second = np.mean(values[:4]), np.mean(values[4:])
        assert [value for _, value in logged[f"losses/{name}"]] == pytest.approx([first, second], rel=1e-5, abs=1e-7)
        # The mean is neither the first nor the last minibatch's value, else this test would say nothing.
        assert abs(values[3] - first) > 1e-4
        assert abs(values[0] - first) > 1e-4


@pytest.mark.parametrize(("target_kl", "minibatches", "updates"), [(None, 8, 8), (1e9, 8, 8), (1e-12, 4, 2)])
def test_target_kl_ends_an_update_early(tmp_path, monkeypatch, target_kl, minibatches, updates):
    """Of 4 minibatches an iteration the first has KL 0, and the second more than 1e-12: it is the last, and unused."""
    seen = []
    spy(monkeypatch, ppo_atari, "policy_loss", lambda *args: seen.append(args))
    # 191 // 64 = 2 whole iterations.
    ppo_atari.train(tiny(tmp_path, target_kl=target_kl, learning_rate=0.01, anneal_lr=False, total_timesteps=191))
    assert len(seen) == minibatches
    checkpoint = load(only_run(tmp_path))
    assert checkpoint["counters"]["global_step"] == 128
    # Adam counts for itself.
    assert {state["step"].item() for state in checkpoint["optimizer"]["state"].values()} == {updates}


# ----- What a run leaves behind -----
def test_a_run_folder_holds_what_belongs_to_the_run(tmp_path, monkeypatch, capsys):
    args = tiny(tmp_path / "my runs", seed=7, exp_name="two words", gamma=0.875)
    for name in ("pybullet_arm64", "mujoco"):
        (tmp_path / f"{name}-9.9.dist-info").mkdir()
        text = f"Name: {name.replace('_', '-')}\nVersion: 9.9\n"
        (tmp_path / f"{name}-9.9.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    command_line(ppo_atari, monkeypatch, *flags_of(args))
    folder = only_run(tmp_path / "my runs")
    assert re.fullmatch(r"small_envs-Ramp3Trunc-v0__two-words__7__\d{13}", folder.name)
    # Folders are quoted, for the shell.
    lines = capsys.readouterr().out.splitlines()
    assert [shlex.split(line) for line in lines[-2:]] == [
        ["run", "folder:", str(folder)],
        ["look", "at", "it:", "tensorboard", "--logdir", str(tmp_path / "my runs")],
    ]

    about = json.loads((folder / "args.json").read_text())
    assert about["args"] == dataclasses.asdict(args)
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    # With the local part that tells builds apart, as in 2.14.1+cu130.
    versions |= {package.__name__.replace("_", "-"): package.__version__ for package in (torch, gym, np, ale_py)}
    # PyBullet's fork, which takes its place on other systems, has another name.
    versions |= {"pybullet-arm64": "9.9", "mujoco": "9.9"}
    assert {**versions, **about["versions"]} == about["versions"]
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert about["git_commit"] == (git.stdout.strip() if git.returncode == 0 else None)
    assert about["device"] == "cpu"
    assert shlex.split(about["command"])[1:] == ["ppo_atari.py", *flags_of(args)]

    # The hyperparameters stand in a text summary.
    events = EventAccumulator(str(folder))
    events.Reload()
    (event,) = events.Tensors("hyperparameters/text_summary")
    rows = event.tensor_proto.string_val[0].decode().splitlines()
    assert rows[:2] == ["|param|value|", "|-|-|"]
    assert "|gamma|0.875|" in rows
    assert len(rows) == 2 + len(dataclasses.fields(ppo_atari.Args))


def test_without_evaluations_during_training_there_is_still_a_best_checkpoint(tmp_path):
    agent, _ = ppo_atari.train(tiny(tmp_path, eval_every=0))
    best = load(only_run(tmp_path), "best.pt")
    assert_equal(best["agent"], weights_of(agent))
    assert best["counters"]["best_eval"] == [3.0]
    assert scalars(only_run(tmp_path))["eval/return_mean"] == [(128, 3.0)]


@pytest.mark.parametrize(("means", "step", "best"), [((-9, -7, -8), 128, -7), ((5, 4, 5), 192, 5)])
def test_the_best_checkpoint_is_of_the_last_of_the_best_evaluations(tmp_path, monkeypatch, means, step, best):
    """At the steps 64, 128 and 192; the final evaluation has no part in it."""
    means = iter([*means, 1000])
    monkeypatch.setattr(ppo_atari, "evaluate", lambda *_: dict.fromkeys(("return", "length"), np.ones(1) * next(means)))
    ppo_atari.train(tiny(tmp_path, total_timesteps=192, eval_every=64))
    counters = [load(only_run(tmp_path), f"{name}.pt")["counters"] for name in ("best", "latest")]
    assert [(x["global_step"], x["best_eval"]) for x in counters] == [(step, [best]), (192, [best])]


@pytest.mark.parametrize(("eval_every", "steps"), [(100, [128, 192]), (10**6, [192])])
def test_evaluations_come_when_a_multiple_is_passed_and_at_the_end(tmp_path, eval_every, steps):
    ppo_atari.train(tiny(tmp_path, total_timesteps=192, eval_every=eval_every))
    assert [step for step, _ in scalars(only_run(tmp_path))["eval/return_mean"]] == steps


@pytest.mark.parametrize(("every", "steps"), [(0, [256]), (100, [128, 256])])
def test_checkpoints_come_when_a_multiple_is_passed_and_at_the_end(tmp_path, monkeypatch, every, steps):
    saved = []
    spy(monkeypatch, ppo_atari.Run, "save", lambda run, name: saved.append((name, run.counters["global_step"])))
    ppo_atari.train(tiny(tmp_path, total_timesteps=256, checkpoint_every=every))
    assert sorted({step for name, step in saved if name == "latest.pt"}) == steps


# ----- Evaluation -----
def test_evaluation_episodes_have_seeds_of_their_own(tmp_path, capsys):
    """The environment pays the seed of its reset."""
    args = tiny(tmp_path, env_id="small_envs:SeedReward-v0", seed=5, eval_every=128, eval_episodes=3)
    _, scores = ppo_atari.train(args)
    # During training seed + 10,000 + i: 10005, 10006, 10007 with the mean 10006 and the deviation sqrt(2/3).
    logged = scalars(only_run(tmp_path))
    assert logged["eval/return_mean"] == [(128, 10006.0)]
    assert logged["eval/return_std"][0][1] == pytest.approx(math.sqrt(2 / 3))
    # At the end seed + 20,000 + i.
    assert scores.tolist() == [20005.0, 20006.0, 20007.0]
    assert printed(capsys, "episode ", "eval: ") == [
        "episode 0: return=20005 length=1",
        "episode 1: return=20006 length=1",
        "episode 2: return=20007 length=1",
        "eval: mean=20006 std=0.8165 min=20005 max=20007 episodes=3 mean_length=1",
    ]


def test_at_most_32_environments_play_at_once_and_every_seed_once(tmp_path, monkeypatch):
    args = tiny(tmp_path, env_id="small_envs:SeedReward-v0", seed=5, eval_episodes=70)
    made = []
    spy(monkeypatch, ppo_atari, "make_envs", lambda args, num_envs, *_: made.append(num_envs))
    _, scores = ppo_atari.train(args)
    assert scores.tolist() == [20005.0 + i for i in range(70)]
    # One was looked at, two trained.
    assert made == [1, 2, 32, 32, 6]


def test_an_endless_evaluation_is_cut_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ppo_atari, "EVAL_MAX_STEPS", 17)
    ppo_atari.train(tiny(tmp_path, env_id="small_envs:RampEndless-v0"))
    assert printed(capsys, "episode ", "eval: ") == [
        "episode 0: return=17 length=17, at the cap",
        "episode 1: return=17 length=17, at the cap",
        "eval: mean=17 std=0 min=17 max=17 episodes=2 mean_length=17",
    ]


def test_an_episode_beyond_the_cap_did_not_meet_it(tmp_path, capsys, monkeypatch):
    """Its own time limit is a longer one."""
    monkeypatch.setattr(ppo_atari, "EVAL_MAX_STEPS", 17)
    limit = '{"max_episode_steps": 40}'
    ppo_atari.train(tiny(tmp_path, env_id="small_envs:RampEndless-v0", env_kwargs=limit, eval_episodes=1))
    assert printed(capsys, "episode ") == ["episode 0: return=40 length=40"]


def test_a_game_that_the_emulator_cuts_off_is_at_the_cap(tmp_path, capsys, monkeypatch):
    """Of 400 frames up to 30 pass in no-ops at the start, which the wrappers do not count: 92.5 to 100 steps remain."""
    monkeypatch.setattr(ppo_atari, "EVAL_MAX_STEPS", 100)
    limit = '{"max_num_frames_per_episode": 400}'
    args = tiny(tmp_path, env_id="BreakoutNoFrameskip-v4", backend="gymnasium", env_kwargs=limit, eval_episodes=6)
    with contextlib.closing(ppo_atari.make_envs(args, 1)) as envs:
        agent = ppo_atari.Agent(args, envs)
    ppo_atari.final_evaluation(agent, args, tmp_path, torch.device("cpu"))
    lines = printed(capsys, "episode ")
    lengths = [int(re.search(r" length=(\d+)", line)[1]) for line in lines]
    assert 93 <= min(lengths) < max(lengths) <= 100
    assert all(line.endswith(", at the cap") for line in lines)


def test_an_evaluation_leaves_the_random_streams_as_they_were(tmp_path):
    """This environment draws its rewards from numpy's global generator, the policy its actions from torch's."""
    args = tiny(tmp_path, env_id="small_envs:GlobalDraw-v0")
    ppo_atari.prepare(args)
    with ppo_atari.closing(ppo_atari.make_envs(args, 1)) as envs:
        agent = ppo_atari.Agent(args, envs)

    def draws():
        return [random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item(), torch.randn(1).item()]  # noqa: NPY002

    np.random.randn()  # noqa: NPY002 (leaves the second of a pair of normal numbers behind)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    expected = draws()
    random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])  # noqa: NPY002
    one = ppo_atari.evaluate(agent, args, 10_001, torch.device("cpu"))
    assert draws() == expected
    # Nor do they matter to it.
    assert_equal({name: x.tolist() for name, x in one.items()}, {
        name: x.tolist() for name, x in ppo_atari.evaluate(agent, args, 10_001, torch.device("cpu")).items()
    })  # fmt: skip


# ----- Reproducibility -----
def test_the_same_seed_gives_the_same_weights_and_scalars(tmp_path):
    changes = {"env_id": "small_envs:RightAction-v0", "eval_every": 64, "seed": 3}
    one, scores = ppo_atari.train(tiny(tmp_path / "one", **changes))
    # What another part of the program drew meanwhile must not matter.
    torch.rand(7)
    np.random.rand(7)  # noqa: NPY002
    other, other_scores = ppo_atari.train(tiny(tmp_path / "other", **changes))
    assert_equal(weights_of(one), weights_of(other))
    assert scores.tolist() == other_scores.tolist()
    logged, other_logged = (scalars(only_run(tmp_path / name)) for name in ("one", "other"))
    assert len(logged.pop("charts/SPS")) == len(other_logged.pop("charts/SPS")) == 2
    assert logged == other_logged
    third, _ = ppo_atari.train(tiny(tmp_path / "third", **changes | {"seed": 4}))
    for name, tensor in weights_of(one).items():
        assert not torch.equal(tensor, third.state_dict()[name]), name


@pytest.mark.parametrize(
    "changes",
    [
        {"eval_every": 64, "eval_episodes": 5, "eval_greedy": True, "checkpoint_every": 64, "progress": True},
        {"capture_video": True, "vector": "async", "eval_every": 64},
        {"backend": "gymnasium"},
    ],
    ids=str,
)
def test_what_changes_no_weight(tmp_path, changes):
    agent, _ = ppo_atari.train(tiny(tmp_path, **changes))
    assert_equal(weights_of(agent), plain_weights())


def test_evaluations_step_in_this_process(tmp_path, monkeypatch):
    """Of the environments in processes the first is a trial before the run, the others train."""
    numbers = []
    monkeypatch.chdir(tmp_path)
    spy(monkeypatch, ppo_atari, "AsyncVectorEnv", lambda thunks, **_: numbers.append(len(thunks)))
    args = tiny(tmp_path, env_id="small_envs:RightAction-v0", vector="async", eval_every=64, eval_episodes=5)
    ppo_atari.train(args)
    assert numbers == [1, args.num_envs]


def test_evaluations_do_not_disturb_environments_that_draw_from_numpy(tmp_path):
    """This environment takes its rewards from numpy's global generator."""
    one, _ = ppo_atari.train(tiny(tmp_path / "one", env_id="small_envs:GlobalDraw-v0"))
    other, _ = ppo_atari.train(tiny(tmp_path / "other", env_id="small_envs:GlobalDraw-v0", eval_every=64))
    assert_equal(weights_of(one), weights_of(other))


def eager_bar(monkeypatch):
    """Lets the bar be drawn at each step, not only now and then."""
    bar = ppo_atari.tqdm
    monkeypatch.setattr(ppo_atari, "tqdm", lambda **style: bar(**style | {"mininterval": 0, "delay": 0}))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such terminals")
@pytest.mark.parametrize("size", [(24, 80), (0, 0)])
def test_a_terminal_shows_a_bar_also_where_it_has_no_columns(tmp_path, monkeypatch, size):
    import fcntl
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    eager_bar(monkeypatch)
    standard_error = os.dup(2)
    os.dup2(slave, 2)
    try:
        with os.fdopen(slave, "w") as terminal, monkeypatch.context() as shown_there:
            shown_there.setattr(sys, "stderr", terminal)
            agent, _ = ppo_atari.train(tiny(tmp_path, progress=True))
    finally:
        os.dup2(standard_error, 2)
        os.close(standard_error)
    shown = b""
    with contextlib.suppress(OSError):  # at the end
        while chunk := os.read(master, 65_536):
            shown += chunk
    os.close(master)
    assert b"128/128 [" in shown
    # The latest mean return.
    assert b"return 3.0" in shown
    assert shown.endswith(b"\r\n")
    assert_equal(weights_of(agent), plain_weights())


def test_without_a_terminal_there_are_lines(tmp_path, monkeypatch, capsys):
    eager_bar(monkeypatch)
    ppo_atari.train(tiny(tmp_path, progress=True))
    assert re.search(r"^\r? 50%\|\| 64/128 \[.* step/s, return 3.0\]$", capsys.readouterr().err, re.MULTILINE)


# As where spawn is the default and the script itself is the main module.
SPAWN_SCRIPT = """
import multiprocessing, runpy, sys

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_spawn_start_method_gives_the_same_weights(tmp_path):
    prelude = f"import sys; sys.argv[0] = {str(ROOT / 'ppo_atari.py')!r}\n"
    one = {"num_envs": 1, "num_steps": 64}
    flags = flags_of(tiny(tmp_path / "runs", vector="async", **one))
    path = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", prelude + SPAWN_SCRIPT, *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    latest = load(only_run(tmp_path / "runs"))
    assert latest["args"]["vector"] == "async"
    agent, _ = ppo_atari.train(tiny(tmp_path / "sync", **one))
    assert_equal(latest["agent"], weights_of(agent))


# ----- Environments -----
@pytest.mark.parametrize("first_action", ["NegativeStart", "LateStart"])
def test_actions_that_do_not_start_at_0_train(tmp_path, first_action):
    """These environments refuse an action outside of their space, -1..0 and 5..6."""
    _, scores = ppo_atari.train(tiny(tmp_path, env_id=f"small_envs:Ramp{first_action}-v0", total_timesteps=512))
    assert scores.tolist() == [3.0, 3.0]
    assert load(only_run(tmp_path))["agent"]["actor.weight"].shape == (2, 512)


@pytest.mark.parametrize("env_id", ["small_envs:RampColour-v0", "small_envs:RampGrey-v0"])
def test_images_of_other_shapes_are_resized_and_stacked(tmp_path, env_id):
    agent, scores = ppo_atari.train(tiny(tmp_path, env_id=env_id, num_steps=8, total_timesteps=32))
    assert scores.tolist() == [3.0, 3.0]
    # A stack of 4 goes into the first convolution; 84 x 84 leaves 64 channels of 7 x 7.
    assert agent.state_dict()["trunk.0.0.weight"].shape == (32, 4, 8, 8)
    assert agent.state_dict()["trunk.1.weight"].shape == (512, 3136)


@pytest.mark.parametrize("backend", ["ale", "gymnasium"])
def test_pong_trains(tmp_path, backend, monkeypatch):
    """Without evaluations, which would play whole games."""
    monkeypatch.setattr(ppo_atari, "evaluate", lambda *_: {"return": np.zeros(1), "length": np.zeros(1)})
    args = tiny(tmp_path, env_id="PongNoFrameskip-v4", backend=backend, num_steps=8, total_timesteps=32)
    before = first_weights(args)
    agent, _ = ppo_atari.train(args)
    assert agent.actor.out_features == 6
    assert not torch.equal(agent.state_dict()["actor.weight"], before["actor.weight"])
    logged = scalars(only_run(tmp_path))
    for name in LOSSES:
        assert [step for step, _ in logged[f"losses/{name}"]] == [16, 32], name
        assert all(math.isfinite(value) for _, value in logged[f"losses/{name}"]), name


# ----- Videos -----
class Shade(small_envs.Ramp):
    """After k steps of 5 the picture is as bright as 50 * k."""

    def __init__(self, render_mode=None):
        super().__init__(length=5, render_mode=render_mode)

    def render(self):
        return np.full((64, 64, 3), 50 * self.step_count, np.uint8)


gym.register("Shade-v0", entry_point=Shade, disable_env_checker=True)


# The reader of imageio leaves its pipes to ffmpeg to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_the_filmed_episodes_are_the_evaluated_ones(tmp_path, monkeypatch, capsys):
    """Of 5 episodes the first 3, whose seeds are seed + 20,000 + i; each is played once."""
    ppo_atari.train(tiny(tmp_path, env_id="Shade-v0", eval_episodes=5))
    folder = only_run(tmp_path)
    closing = printed(capsys, "episode ", "eval: ")
    assert not (folder / "videos").exists()
    played = []
    spy(monkeypatch, ppo_atari, "play", lambda agent, args, seeds, device, film: played.append((seeds, film)))
    # Evaluations that choose best.pt are not filmed.
    flags = ("--capture-video", "--total-timesteps=192", "--eval-every=64")
    resume(ppo_atari, monkeypatch, folder, *flags)
    videos = folder / "videos"
    assert played == [(range(10_001, 10_006), None), (range(20_001, 20_004), videos), (range(20_004, 20_006), None)]
    assert sorted(path.name for path in videos.iterdir()) == [f"seed-{seed}.mp4" for seed in (20001, 20002, 20003)]
    out = capsys.readouterr().out
    # It says so before it starts to play.
    assert f"videos: {videos}" in out.split("episode 0")[0]
    assert [line for line in out.splitlines() if line.startswith(("episode ", "eval: "))] == closing
    frames = np.stack(imageio.mimread(videos / "seed-20002.mp4", memtest=False))
    # What is seen before each of the 5 steps, but for the compression.
    assert frames.shape == (5, 64, 64, 3)
    assert np.abs(frames.mean((1, 2, 3)) - [0, 50, 100, 150, 200]).max() < 8


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_video_of_an_atari_game_shows_the_game(tmp_path, monkeypatch):
    """90 steps of Pong, less those that it waited at its start; the emulator draws itself."""
    spec = gym.spec("PongNoFrameskip-v4")
    registered = {"entry_point": spec.entry_point, "kwargs": spec.kwargs, "max_episode_steps": 360}
    monkeypatch.setitem(gym.registry, "PongShort-v4", gym.envs.registration.EnvSpec("PongShort-v4", **registered))
    args = tiny(tmp_path, env_id="PongShort-v4", backend="gymnasium")
    with ppo_atari.closing(ppo_atari.make_envs(args, 1)) as envs:
        agent = ppo_atari.Agent(args, envs)
    evaluation = ppo_atari.evaluate(agent, args, 20_001, torch.device("cpu"), tmp_path)
    for seed, length in zip((20001, 20002), evaluation["length"], strict=True):
        frames = np.stack(imageio.mimread(tmp_path / f"seed-{seed}.mp4", memtest=False))
        # One frame before each of the agent's steps, in colour; the first two of an episode press buttons.
        assert 80 < length <= 90
        assert frames.shape == (length - 2, 210, 160, 3)
        assert frames.max() > 100
        moves = np.abs(np.diff(frames.astype(int), axis=0)).max(axis=(1, 2, 3))
        # The ball and the paddles move: more than the noise of the compression.
        assert (moves > 50).sum() > 20


# ----- What makes it faster -----
@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))), reason="torch.compile needs a C++ compiler on a CPU"
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # met inside torch, when its compiler is imported
def test_a_compiled_network_learns_as_the_eager_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    for name, changes in (("eager", {}), ("compiled", {"compile": True})):
        ppo_atari.train(tiny(tmp_path / name, total_timesteps=192, **changes))
    eager, compiled = (scalars(only_run(tmp_path / name)) for name in ("eager", "compiled"))
    for name in LOSSES:
        # The losses of 3 iterations; the absolute part is for those near 0, such as the first KL.
        values = [[value for _, value in logged[f"losses/{name}"]] for logged in (compiled, eager)]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-6), name


def test_bfloat16_convolutions_learn_nearly_the_same(tmp_path):
    for name, changes in (("float32", {}), ("bfloat16", {"amp": True})):
        agent, _ = ppo_atari.train(tiny(tmp_path / name, **changes))
    # Weights and optimizer stay in float32: only the convolutions' arithmetic is rounded, to 8 bits.
    assert {tensor.dtype for tensor in agent.state_dict().values()} == {torch.float32}
    full, rounded = (scalars(only_run(tmp_path / name)) for name in ("float32", "bfloat16"))
    for tag in ("losses/value_loss", "losses/entropy", "losses/grad_norm"):
        values = [value for _, value in rounded[tag]]
        assert values == pytest.approx([value for _, value in full[tag]], rel=0.03), tag
        assert values != [value for _, value in full[tag]], tag


@pytest.mark.parametrize(
    ("capabilities", "faster"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, True),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": True, "amx_bf16": False}, True),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": False}, False),  # measured: 0.8 of the speed
        ({"cpu_name": "AMD EPYC", "avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "aarch64"}, False),
    ],
)
def test_the_start_says_where_bfloat16_would_be_faster(tmp_path, monkeypatch, capsys, capabilities, faster):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    for given in (False, True):
        ppo_atari.train(tiny(tmp_path / str(given), amp=given))
        assert ("hint: --amp is faster here\n" in capsys.readouterr().out) == (faster and not given)

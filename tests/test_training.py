"""Whole runs of train(): what they learn from, log and leave behind, and what must not change a weight."""

import dataclasses
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ale_py
import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from conftest import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_atari

# 64 samples an iteration in 2 minibatches, twice over: 4 updates an iteration; 2 iterations.
TINY = {
    "env_id": "small_envs:Ramp3Trunc-v0",
    "num_envs": 2,
    "num_steps": 32,
    "num_minibatches": 2,
    "update_epochs": 2,
    "total_timesteps": 128,
    "eval_episodes": 2,
    "eval_every": 0,
    "checkpoint_every": 0,
    "threads": 1,
    "cuda": False,
    "progress": False,
}
LOSSES = {
    "losses/value_loss",
    "losses/policy_loss",
    "losses/entropy",
    "losses/old_approx_kl",
    "losses/approx_kl",
    "losses/clipfrac",
    "losses/explained_variance",
    "losses/grad_norm",
}


def tiny(run_dir, **changes):
    return ppo_atari.Args(**{**TINY, "run_dir": str(run_dir), **changes})


def only_run(run_dir):
    (folder,) = Path(run_dir).iterdir()
    return folder


def scalars(folder):
    """Returns {tag: [(step, value), ...]} of all event files in a run folder."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def weights_of(agent):
    return {name: tensor.clone() for name, tensor in agent.state_dict().items()}


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def first_agent(args):
    """Returns the agent as train() starts with it."""
    device = ppo_atari.prepare(args)
    with ppo_atari.closing_envs(ppo_atari.make_envs(args, args.num_envs)) as envs:
        return ppo_atari.Agent(args, envs).to(device)


@functools.cache
def plain_weights():
    """Returns the weights after the tiny run, the reference of the tests that compare with it bit for bit."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return weights_of(ppo_atari.train(tiny(folder))[0])


# ----- What a run logs -----
def test_a_run_learns_and_logs_each_iteration_at_its_step(tmp_path):
    args = tiny(tmp_path, total_timesteps=256, eval_every=64)
    before = weights_of(first_agent(args))
    agent, scores = ppo_atari.train(args)

    assert scores.tolist() == [3.0, 3.0]
    for name, tensor in agent.state_dict().items():
        assert torch.isfinite(tensor).all(), name
        assert not torch.equal(tensor, before[name]), f"{name} did not change"

    logged = scalars(only_run(tmp_path))
    per_iteration = LOSSES | {"charts/learning_rate", "charts/SPS"}
    evaluations = {"eval/return_mean", "eval/return_std", "eval/length_mean"}
    assert set(logged) == per_iteration | evaluations | {"charts/episodic_return", "charts/episodic_length"}
    for tag in per_iteration | evaluations:
        assert [step for step, _ in logged[tag]] == [64, 128, 192, 256], tag
        assert all(math.isfinite(value) for _, value in logged[tag]), tag
    # Iteration i of 4 uses rate x (1 - (i - 1) / 4).
    expected = [2.5e-4, 1.875e-4, 1.25e-4, 0.625e-4]
    assert [value for _, value in logged["charts/learning_rate"]] == pytest.approx(expected, rel=1e-6)
    # Two actions: the entropy starts at ln 2 = 0.693, since the policy starts near uniform.
    assert logged["losses/entropy"][0][1] == pytest.approx(math.log(2), abs=0.01)
    # Each evaluation plays 2 episodes of 3 steps that pay 1.
    assert [value for _, value in logged["eval/return_mean"]] == [3.0] * 4
    assert [value for _, value in logged["eval/return_std"]] == [0.0] * 4
    assert [value for _, value in logged["eval/length_mean"]] == [3.0] * 4


def test_an_episode_is_logged_at_the_step_at_which_it_ended(tmp_path):
    ppo_atari.train(tiny(tmp_path))
    logged = scalars(only_run(tmp_path))
    # 64 vector steps: both environments end at every third, 21 times, and a vector step counts 2.
    steps = [step for k in range(1, 22) for step in (6 * k, 6 * k)]
    assert logged["charts/episodic_return"] == [(step, 3.0) for step in steps]
    assert logged["charts/episodic_length"] == [(step, 3.0) for step in steps]


def test_the_learning_rate_stays_without_annealing(tmp_path):
    ppo_atari.train(tiny(tmp_path, anneal_lr=False, learning_rate=0.001))
    rates = scalars(only_run(tmp_path))["charts/learning_rate"]
    assert [step for step, _ in rates] == [64, 128]
    assert [rate for _, rate in rates] == pytest.approx([0.001, 0.001], rel=1e-6)


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


def test_only_whole_iterations_are_run(tmp_path):
    # 191 // 64 = 2 iterations, so 128 steps and 8 updates.
    ppo_atari.train(tiny(tmp_path, total_timesteps=191))
    checkpoint = ppo_atari.load_checkpoint(str(only_run(tmp_path)))
    assert checkpoint["counters"]["global_step"] == 128
    assert checkpoint["optimizer"]["state"][0]["step"] == 8
    assert [step for step, _ in scalars(only_run(tmp_path))["losses/value_loss"]] == [64, 128]


@pytest.mark.parametrize(("target_kl", "minibatches", "updates"), [(None, 8, 8), (1e9, 8, 8), (1e-12, 4, 2)])
def test_target_kl_ends_an_update_early(tmp_path, monkeypatch, target_kl, minibatches, updates):
    """Of 4 minibatches an iteration the first has KL 0, and the second more than 1e-12: it is the last, and unused."""
    seen = []
    policy_loss = ppo_atari.policy_loss
    monkeypatch.setattr(ppo_atari, "policy_loss", lambda *args: seen.append(args) or policy_loss(*args))
    ppo_atari.train(tiny(tmp_path, target_kl=target_kl, learning_rate=0.01, anneal_lr=False))
    assert len(seen) == minibatches
    checkpoint = ppo_atari.load_checkpoint(str(only_run(tmp_path)))
    assert checkpoint["counters"]["global_step"] == 128
    # Adam counts for itself.
    assert {state["step"].item() for state in checkpoint["optimizer"]["state"].values()} == {updates}


# ----- What a run leaves behind -----
def test_a_run_folder_holds_what_belongs_to_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ppo_atari.py", "--exp-name", "two words"])
    args = tiny(tmp_path, seed=7, exp_name="two words")
    ppo_atari.train(args)
    folder = only_run(tmp_path)
    assert re.fullmatch(r"small_envs-Ramp3Trunc-v0__two words__7__\d{13}", folder.name)
    names = sorted(path.name for path in folder.iterdir())
    assert names[0] == "args.json"
    assert names[1] == "best.pt"
    assert names[2].startswith("events.out.tfevents.")
    assert names[3:] == ["latest.pt"]

    content = json.loads((folder / "args.json").read_text())
    assert content["args"] == dataclasses.asdict(args)
    assert content["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert content["versions"]["torch"] == torch.__version__
    assert content["versions"]["gymnasium"] == gym.__version__
    assert content["versions"]["numpy"] == np.__version__
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert content["git_commit"] == (git.stdout.strip() if git.returncode == 0 else None)
    assert content["device"].startswith("cpu")
    assert content["command"].endswith("ppo_atari.py --exp-name 'two words'")
    assert content["versions"]["ale_py"] == ale_py.__version__
    assert content["global_step"] == 0

    for name in ("latest.pt", "best.pt"):
        checkpoint = torch.load(folder / name, weights_only=True)
        assert checkpoint["script"] == "ppo_atari"
        assert checkpoint["args"]["seed"] == 7
        assert checkpoint["counters"]["global_step"] == 128


def test_the_hyperparameters_stand_in_a_text_summary(tmp_path):
    ppo_atari.train(tiny(tmp_path, gamma=0.875))
    events = EventAccumulator(str(only_run(tmp_path)))
    events.Reload()
    assert events.Tags()["tensors"] == ["hyperparameters/text_summary"]
    (event,) = events.Tensors("hyperparameters/text_summary")
    rows = event.tensor_proto.string_val[0].decode().splitlines()
    assert rows[:2] == ["|param|value|", "|-|-|"]
    assert "|gamma|0.875|" in rows
    assert len(rows) == 2 + len(dataclasses.fields(ppo_atari.Args))


def test_without_evaluations_during_training_there_is_still_a_best_checkpoint(tmp_path):
    agent, _ = ppo_atari.train(tiny(tmp_path, eval_every=0))
    best = ppo_atari.load_checkpoint(str(only_run(tmp_path) / "best.pt"))
    assert_same_weights(best["agent"], weights_of(agent))
    assert best["counters"]["best_eval"] == [3.0]
    assert scalars(only_run(tmp_path))["eval/return_mean"] == [(128, 3.0)]


def test_a_tie_keeps_the_newer_best_checkpoint(tmp_path):
    # All evaluations give 3: best.pt is of the last, at step 192.
    ppo_atari.train(tiny(tmp_path, total_timesteps=192, eval_every=64))
    assert torch.load(only_run(tmp_path) / "best.pt", weights_only=True)["counters"]["global_step"] == 192


def test_a_worse_evaluation_leaves_the_best_checkpoint(tmp_path, monkeypatch):
    means = iter([5.0, 9.0, 7.0, 1.0])
    monkeypatch.setattr(
        ppo_atari, "evaluate", lambda *_: {"return": np.array([next(means)]), "length": np.array([3.0])}
    )
    ppo_atari.train(tiny(tmp_path, total_timesteps=192, eval_every=64))
    best = torch.load(only_run(tmp_path) / "best.pt", weights_only=True)
    assert (best["counters"]["global_step"], best["counters"]["best_eval"]) == (128, [9.0])
    latest = torch.load(only_run(tmp_path) / "latest.pt", weights_only=True)
    assert (latest["counters"]["global_step"], latest["counters"]["best_eval"]) == (192, [9.0])


@pytest.mark.parametrize(("eval_every", "steps"), [(64, [64, 128, 192]), (100, [128, 192]), (10**6, [192])])
def test_evaluations_come_when_a_multiple_is_passed_and_at_the_end(tmp_path, eval_every, steps):
    ppo_atari.train(tiny(tmp_path, total_timesteps=192, eval_every=eval_every))
    assert [step for step, _ in scalars(only_run(tmp_path))["eval/return_mean"]] == steps


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
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("episode ")] == [
        "episode 0: return=20005 length=1",
        "episode 1: return=20006 length=1",
        "episode 2: return=20007 length=1",
    ]
    (line,) = [line for line in lines if line.startswith("eval: ")]
    pairs = dict(pair.split("=") for pair in line.removeprefix("eval: ").split())
    assert list(pairs) == ["mean", "std", "min", "max", "episodes", "mean_length"]
    assert [float(value) for value in pairs.values()] == pytest.approx([20006, 0.8165, 20005, 20007, 3, 1], rel=1e-6)


def test_an_endless_evaluation_is_cut_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ppo_atari, "EVAL_MAX_STEPS", 17)
    args = tiny(tmp_path, env_id="small_envs:RampEndless-v0")
    _, scores = ppo_atari.train(args)
    assert scores.tolist() == [17.0, 17.0]
    assert scalars(only_run(tmp_path))["eval/length_mean"] == [(128, 17.0)]
    out = capsys.readouterr().out
    assert out.count("return=17 length=17, cut at the cap of 17 steps") == 2
    assert "eval: mean=17 " in out


def test_the_evaluation_of_a_checkpoint_repeats_the_closing_line_of_its_run(tmp_path, capsys, monkeypatch):
    # Untrained enough to be unsure: sampled actions decide, and they are seeded.
    ppo_atari.train(tiny(tmp_path, env_id="small_envs:RightAction-v0", eval_episodes=9))
    of_run = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("eval:", "episode "))]
    monkeypatch.setattr(sys, "argv", ["ppo_atari.py", "--evaluate", str(only_run(tmp_path)), "--threads", "1"])
    ppo_atari.main()
    of_checkpoint = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("eval:", "episode "))]
    assert len(of_run) == 10
    assert of_checkpoint == of_run


# ----- Reproducibility -----
def test_the_same_seed_gives_the_same_weights_and_scalars(tmp_path):
    changes = {"env_id": "small_envs:RightAction-v0", "eval_every": 64, "seed": 3}
    one, scores = ppo_atari.train(tiny(tmp_path / "one", **changes))
    # What another part of the program drew meanwhile must not matter.
    torch.rand(7)
    np.random.rand(7)  # noqa: NPY002
    other, other_scores = ppo_atari.train(tiny(tmp_path / "other", **changes))
    assert_same_weights(weights_of(one), weights_of(other))
    assert scores.tolist() == other_scores.tolist()
    logged, other_logged = (scalars(only_run(tmp_path / name)) for name in ("one", "other"))
    assert len(logged.pop("charts/SPS")) == len(other_logged.pop("charts/SPS")) == 2
    assert logged == other_logged


def test_different_seeds_give_different_runs(tmp_path):
    one, other = (ppo_atari.train(tiny(tmp_path / str(seed), seed=seed))[0] for seed in (1, 2))
    for name, tensor in weights_of(one).items():
        assert not torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize(
    "changes",
    [
        {"eval_every": 64},
        {"checkpoint_every": 64},
        {"eval_every": 64, "eval_episodes": 5, "eval_greedy": True},
        {"capture_video": True},
        {"progress": True},
        {"vector": "async"},
        {"vector": "async", "eval_every": 64},
        {"backend": "gymnasium"},
    ],
    ids=str,
)
def test_what_changes_no_weight(tmp_path, changes):
    agent, _ = ppo_atari.train(tiny(tmp_path, **changes))
    assert_same_weights(weights_of(agent), plain_weights())


def test_evaluations_do_not_disturb_environments_that_draw_from_numpy(tmp_path):
    """This environment takes its rewards from numpy's global generator."""
    one, _ = ppo_atari.train(tiny(tmp_path / "one", env_id="small_envs:GlobalDraw-v0"))
    other, _ = ppo_atari.train(tiny(tmp_path / "other", env_id="small_envs:GlobalDraw-v0", eval_every=64))
    assert_same_weights(weights_of(one), weights_of(other))


def test_the_bar_changes_no_weight(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((100, 30)))
    agent, _ = ppo_atari.train(tiny(tmp_path, progress=True))
    assert_same_weights(weights_of(agent), plain_weights())
    # The bar is there: steps done of all, and the latest mean return.
    bar = capsys.readouterr().err
    assert "128/128" in bar
    assert "return 3.0" in bar


def test_training_leaves_the_handlers_of_signals_as_they_were(tmp_path):
    import signal

    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    ppo_atari.train(tiny(tmp_path, total_timesteps=64))
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before


# The main guard matters: a spawned process imports this file once more.
SPAWN_DRIVER = """
import multiprocessing
import ppo_atari

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    ppo_atari.main()
"""
# As where spawn is the default and the script itself is the main module.
SPAWN_SCRIPT = """
import multiprocessing, runpy, sys

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("how", ["imported", "script"])
def test_the_spawn_start_method_gives_the_same_weights(tmp_path, how):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items() if not isinstance(value, bool)]
    flags += ["--no-cuda", "--no-progress", "--vector=async", f"--run-dir={tmp_path / 'runs'}"]
    if how == "imported":
        (tmp_path / "driver.py").write_text(SPAWN_DRIVER)
        command = [sys.executable, str(tmp_path / "driver.py"), *flags]
    else:
        prelude = f"import sys; sys.argv[0] = {str(ROOT / 'ppo_atari.py')!r}\n"
        command = [sys.executable, "-c", prelude + SPAWN_SCRIPT, *flags]
    path = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    latest = ppo_atari.load_checkpoint(str(only_run(tmp_path / "runs")))
    assert latest["args"]["vector"] == "async"
    assert_same_weights(latest["agent"], plain_weights())


# ----- Environments -----
@pytest.mark.parametrize("first_action", ["NegativeStart", "LateStart"])
def test_actions_that_do_not_start_at_0_train(tmp_path, first_action):
    """These environments refuse an action outside of their space, -1..0 and 5..6."""
    _, scores = ppo_atari.train(tiny(tmp_path, env_id=f"small_envs:Ramp{first_action}-v0", total_timesteps=512))
    assert scores.tolist() == [3.0, 3.0]
    assert torch.load(only_run(tmp_path) / "latest.pt", weights_only=True)["agent"]["actor.weight"].shape == (2, 512)


@pytest.mark.parametrize("env_id", ["small_envs:RampColour-v0", "small_envs:RampGrey-v0"])
def test_images_of_other_shapes_are_resized_and_stacked(tmp_path, env_id):
    agent, scores = ppo_atari.train(tiny(tmp_path, env_id=env_id, num_steps=8, total_timesteps=32))
    assert scores.tolist() == [3.0, 3.0]
    # A stack of 4 goes into the first convolution; 84 x 84 leaves 64 channels of 7 x 7.
    assert agent.state_dict()["trunk.0.0.weight"].shape == (32, 4, 8, 8)
    assert agent.state_dict()["trunk.1.weight"].shape == (512, 3136)


@pytest.mark.parametrize("backend", ["ale", "gymnasium"])
def test_pong_trains(tmp_path, backend):
    args = tiny(tmp_path, env_id="PongNoFrameskip-v4", backend=backend, num_steps=8, total_timesteps=32)
    before = weights_of(first_agent(args))
    agent, scores = ppo_atari.train(args)
    assert agent.actor.out_features == 6
    assert not torch.equal(agent.state_dict()["actor.weight"], before["actor.weight"])
    logged = scalars(only_run(tmp_path))
    for tag in LOSSES - {"losses/explained_variance"}:
        assert [step for step, _ in logged[tag]] == [16, 32], tag
        assert all(math.isfinite(value) for _, value in logged[tag]), tag
    # Who has not learned loses nearly every ball of a whole game.
    assert all(-21 <= score <= -15 for score in scores)


# The reader of imageio leaves its pipes to ffmpeg to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_video_of_an_atari_game_shows_the_game(tmp_path, capsys):
    args = tiny(tmp_path, env_id="PongNoFrameskip-v4", num_steps=4, total_timesteps=8, capture_video=True)
    ppo_atari.train(args)
    out = capsys.readouterr().out
    lengths = [int(length) for length in re.findall(r"episode \d: .*length=(\d+)", out)]
    videos = sorted((only_run(tmp_path) / "videos").iterdir())
    # The seeds of the closing evaluation, seed + 20,000 + i.
    assert [path.name for path in videos] == ["seed-20001.mp4", "seed-20002.mp4"]
    assert f"videos: {only_run(tmp_path) / 'videos'}, of the first episodes" in out
    for path, length in zip(videos, lengths, strict=True):
        assert path.stat().st_size > 5000
        frames = np.stack(imageio.mimread(path, memtest=False))
        # In colour, one frame before each step of the episode but the two that press buttons at its start.
        assert frames.shape == (length - 2, 210, 160, 3)
        assert frames.max() > 100
        moves = np.abs(np.diff(frames.astype(int), axis=0)).max(axis=(1, 2, 3))
        # The ball and the paddles move: more than the noise of the compression.
        assert (moves > 50).sum() > 20
    assert not list(only_run(tmp_path).glob("**/*.tmp*"))


def test_video_where_the_environment_cannot_draw_is_refused_before_training(tmp_path):
    """After hours of training it would be too late to say so."""
    args = tiny(tmp_path, env_id="small_envs:RightAction-v0", capture_video=True)
    with pytest.raises(ppo_atari.UsageError, match="--capture-video"):
        ppo_atari.train(args)
    assert list(tmp_path.iterdir()) == []


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
    for tag in LOSSES - {"losses/explained_variance"}:
        # The losses of 3 iterations; the absolute part is for those near 0, such as the first KL.
        assert [value for _, value in compiled[tag]] == pytest.approx(
            [value for _, value in eager[tag]], rel=1e-4, abs=1e-6
        ), tag


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

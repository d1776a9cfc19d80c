"""Checkpoints, resumed runs, and every way in which a run can be cut off."""

import contextlib
import dataclasses
import errno
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import small_envs
import torch
from conftest import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_atari

posix = pytest.mark.skipif(os.name == "nt", reason="Windows ends a process at once instead of sending SIGTERM")

# 64 samples an iteration in 2 minibatches, twice over: 4 updates an iteration.
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


def tiny(run_dir, **changes):
    return ppo_atari.Args(**{**TINY, "run_dir": str(run_dir), **changes})


def flags_of(args):
    """Returns the command line that gives these arguments."""
    flags = []
    for name, value in dataclasses.asdict(args).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags.append(f"--{flag}={value}")
    return flags


def only_run(run_dir):
    (folder,) = Path(run_dir).iterdir()
    return folder


def scalars(folder):
    """Returns {tag: [(step, value), ...]} of all event files in a run folder, purged as TensorBoard purges."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def load(path):
    return torch.load(path, weights_only=True)


def hashes(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("**/*"))
        if path.is_file()
    }


def assert_equal(one, other, where=""):
    """Compares nested dicts, lists and tensors bit for bit."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}.{i}")
    else:
        assert one == other, where


def resume(monkeypatch, path, *flags):
    """Runs the command line with --resume in this process, on a clock that is a minute ahead.

    TensorBoard orders event files by the second in their names, and a real start takes longer than one.
    """
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 60)
    command_line(monkeypatch, "--resume", str(path), "--threads", "1", "--no-cuda", *flags)


def command_line(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["ppo_atari.py", *flags])
    ppo_atari.main()


def failed(capsys, monkeypatch, *flags):
    """Runs the command line, which must fail; returns exit status, and its single line on standard error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        command_line(monkeypatch, *flags)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return exit_info.value.code, lines[0]


def interrupt(monkeypatch, args, at, signal_name="SIGTERM"):
    """Trains until the environment itself sends this process a signal, at its step `at`; returns the run folder."""
    monkeypatch.setenv("SIGNAL_AT", f"{at}:{signal_name}")
    with pytest.raises(ppo_atari.Interrupted) as exit_info:
        ppo_atari.train(dataclasses.replace(args, env_id="small_envs:SignalAt-v0"))
    assert exit_info.value.code == 128 + getattr(signal, signal_name)
    return only_run(args.run_dir)


# ----- Runs in processes of their own -----
class Process:
    """The command line in a process of its own; every wait has a deadline that only a hung run meets."""

    def __init__(self, command, cwd, **env):
        path = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
        self.deadline = time.monotonic() + 120
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=os.name != "nt",
        )

    def __enter__(self):
        self.watchdog = threading.Timer(120, self.process.kill)
        self.watchdog.start()
        return self

    def __exit__(self, *_):
        self.watchdog.cancel()
        for process in self.environments():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def environments(self):
        """Returns the processes of the environments; multiprocessing's tracker of shared memory is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
        return []

    def wait_for_line(self, line):
        for got in self.process.stdout:
            if got.rstrip("\n") == line:
                return
        raise AssertionError(f"ended without the line {line!r}: {self.process.stderr.read()}")

    def wait_for_file(self, run_dir, pattern):
        while time.monotonic() < self.deadline:
            found = list(run_dir.glob(f"*/{pattern}")) if run_dir.is_dir() else []
            if found:
                return found[0]
            assert self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.02)
        raise AssertionError(f"no file {pattern} appeared")

    def end(self):
        """Waits for the end; returns status, standard output and standard error."""
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def start(args, cwd, **env):
    return Process([sys.executable, str(ROOT / "ppo_atari.py"), *flags_of(args)], cwd, **env)


# ----- Train, stop, go on -----
@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGINT"])
def test_training_that_was_stopped_and_resumed_equals_training_in_one_go(tmp_path, monkeypatch, capsys, signal_name):
    """4 iterations of 64 steps; the signal comes in the third, at vector step 80 of 2 x 32 + 16."""
    args = tiny(tmp_path / "whole", total_timesteps=256)
    ppo_atari.train(args)
    whole = only_run(tmp_path / "whole")

    folder = interrupt(monkeypatch, dataclasses.replace(args, run_dir=str(tmp_path / "cut")), 80, signal_name)
    out = capsys.readouterr().out
    assert f"interrupted at step 128; go on with: python ppo_atari.py --resume {folder}\n" in out
    stopped = load(folder / "latest.pt")
    assert (stopped["counters"]["iteration"], stopped["counters"]["global_step"]) == (2, 128)
    # Both environments end at each third of 64 vector steps: 42 episodes.
    assert (stopped["counters"]["updates"], stopped["counters"]["episodes"]) == (8, 42)
    # The rollout under way is dropped, from the log too.
    assert [step for step, _ in scalars(folder)["losses/value_loss"]] == [64, 128]
    assert scalars(folder)["charts/episodic_return"][-1] == (126, 3.0)

    resume(monkeypatch, folder)
    resumed, straight = load(folder / "latest.pt"), load(whole / "latest.pt")
    for name in ("iteration", "global_step", "updates"):
        assert resumed["counters"][name] == straight["counters"][name], name
    assert (resumed["counters"]["iteration"], resumed["counters"]["updates"]) == (4, 16)
    steps = [{state["step"].item() for state in x["optimizer"]["state"].values()} for x in (resumed, straight)]
    assert steps == [{16}, {16}]

    assert len(list(folder.glob("events.*"))) == 2
    logged, logged_straight = scalars(folder), scalars(whole)
    assert logged["charts/learning_rate"] == logged_straight["charts/learning_rate"]
    # What came before the signal is the same run; the later rollouts start at new episodes.
    assert logged["losses/value_loss"][:2] == logged_straight["losses/value_loss"][:2]
    assert logged.keys() == logged_straight.keys()
    for tag in logged.keys() - {"charts/episodic_return", "charts/episodic_length"}:
        assert [step for step, _ in logged[tag]] == [step for step, _ in logged_straight[tag]], tag
    # New episodes begin at step 128: each third vector step from there ends two, 21 times.
    expected = [6 * k for k in range(1, 22)] + [128 + 6 * k for k in range(1, 22)]
    assert [step for step, _ in logged["charts/episodic_return"]] == [step for step in expected for _ in range(2)]


def test_what_is_loaded_is_what_was_saved(tmp_path, monkeypatch):
    """A resumed run that is stopped before its first update writes what it has loaded."""
    agent, _ = ppo_atari.train(tiny(tmp_path))
    folder = only_run(tmp_path)
    saved = load(folder / "latest.pt")
    monkeypatch.setenv("SIGNAL_AT", "1:SIGTERM")
    with pytest.raises(SystemExit) as exit_info:
        resume(monkeypatch, folder, "--total-timesteps", "256", "--env-id", "small_envs:SignalAt-v0")
    assert exit_info.value.code == 143
    loaded = load(folder / "latest.pt")
    for name in ("agent", "optimizer", "counters"):
        assert_equal(loaded[name], saved[name], name)
    assert loaded["args"]["total_timesteps"] == 256

    # The same network, so the same behaviour.
    fresh = ppo_atari.Agent((1, 36, 36), 2)
    fresh.load_state_dict(loaded["agent"])
    obs = torch.arange(4, dtype=torch.uint8).reshape(4, 1, 1, 1).expand(4, 1, 36, 36)
    with torch.no_grad():
        for one, other in zip(fresh(obs), agent(obs), strict=True):
            assert torch.equal(one, other)


def test_the_random_streams_go_on_where_they_were(tmp_path):
    import random

    def draws():
        return [random.random(), np.random.rand(), np.random.randn(), torch.rand(1).item(), torch.randn(1).item()]  # noqa: NPY002

    args = tiny(tmp_path)
    ppo_atari.prepare(args)
    np.random.randn()  # noqa: NPY002 (leaves the second of a pair of normal numbers behind)
    agent = ppo_atari.Agent((1, 36, 36), 2)
    ppo_atari.save_checkpoint(tmp_path / "latest.pt", args, {"global_step": 5}, {"agent": agent})
    expected = draws()
    draws()
    other, counters = ppo_atari.Agent((1, 36, 36), 2), {"global_step": 0}
    checkpoint = ppo_atari.load_checkpoint(str(tmp_path))
    ppo_atari.restore(checkpoint, str(tmp_path), counters, agent=other)
    assert draws() == expected
    assert counters == {"global_step": 5}
    assert_equal(dict(other.state_dict()), dict(agent.state_dict()))


@pytest.mark.parametrize("name", ["", "latest.pt", "best.pt"])
def test_a_run_is_resumed_from_its_folder_or_from_a_file(tmp_path, monkeypatch, name):
    ppo_atari.train(tiny(tmp_path))
    folder = only_run(tmp_path)
    resume(monkeypatch, folder / name, "--total-timesteps", "192")
    assert only_run(tmp_path) == folder
    assert load(folder / "latest.pt")["counters"]["global_step"] == 192


def test_a_finished_run_says_so_and_is_evaluated(tmp_path, monkeypatch, capsys):
    ppo_atari.train(tiny(tmp_path))
    folder = only_run(tmp_path)
    before = hashes(folder)
    of_run = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval:")]
    resume(monkeypatch, folder)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("this run is finished, at step 128; a larger --total-timesteps")
    assert [line for line in lines if line.startswith("eval:")] == of_run
    assert len(of_run) == 1
    assert hashes(folder) == before


def test_a_finished_run_goes_on_with_more_steps(tmp_path, monkeypatch):
    ppo_atari.train(tiny(tmp_path))
    folder = only_run(tmp_path)
    resume(monkeypatch, folder, "--total-timesteps", "256")
    checkpoint = load(folder / "latest.pt")
    assert (checkpoint["counters"]["iteration"], checkpoint["counters"]["updates"]) == (4, 16)
    logged = scalars(folder)
    # Half of 2 iterations' schedule, then the third and fourth of 4: 1, 1/2, then 1/2, 1/4.
    rates = [value for _, value in logged["charts/learning_rate"]]
    assert rates == pytest.approx([2.5e-4, 1.25e-4, 1.25e-4, 0.625e-4], rel=1e-6)
    assert [step for step, _ in logged["losses/entropy"]] == [64, 128, 192, 256]
    assert [step for step, _ in logged["eval/return_mean"]] == [128, 256]


def test_steps_after_the_checkpoint_of_a_killed_run_are_purged_and_done_again(tmp_path, monkeypatch):
    """As after a power cut: the log is at step 256, the checkpoint at 128."""
    ppo_atari.train(tiny(tmp_path, total_timesteps=128))
    folder = only_run(tmp_path)
    old = (folder / "latest.pt").read_bytes()
    resume(monkeypatch, folder, "--total-timesteps", "256")
    (folder / "latest.pt").write_bytes(old)
    resume(monkeypatch, folder, "--total-timesteps", "320")
    logged = scalars(folder)
    assert [step for step, _ in logged["losses/value_loss"]] == [64, 128, 192, 256, 320]
    steps = [step for step, _ in logged["charts/episodic_return"]]
    assert steps == sorted(steps)
    # 21 ends of two episodes in the first 64 vector steps, and 32 of them in the 96 after.
    assert len(steps) == 2 * (21 + 32)
    assert [step for step, _ in logged["eval/return_mean"]] == [128, 320]


def test_flags_override_stored_arguments(tmp_path):
    args = tiny(tmp_path, seed=9, gamma=0.5, capture_video=True, num_minibatches=4, anneal_lr=False)
    ppo_atari.train(args)
    folder = str(only_run(tmp_path))
    for flag in ("--resume", "--evaluate"):
        got = ppo_atari.parse_args([flag, folder, "--gamma", "0.25", "--anneal-lr"])
        assert (got.gamma, got.anneal_lr) == (0.25, True)
        assert (got.seed, got.num_minibatches, got.num_steps, got.env_id) == (9, 4, 32, args.env_id)
        # These belong to a start of the script, not to the run.
        default = ppo_atari.Args()
        for name in ("run_dir", "cuda", "threads", "progress", "track", "capture_video"):
            assert getattr(got, name) == getattr(default, name), name
        assert (got.resume, got.evaluate) == ((folder, None) if flag == "--resume" else (None, folder))


def test_stored_arguments_are_checked_as_they_are_and_not_over_the_defaults(tmp_path):
    """Over the script's own 8 x 128 steps, --num-minibatches 3 of a run with 96 samples would be refused."""
    ppo_atari.train(tiny(tmp_path, num_steps=48, num_minibatches=3, total_timesteps=96))
    assert ppo_atari.parse_args(["--resume", str(only_run(tmp_path))]).num_minibatches == 3


@pytest.mark.parametrize("flag", ["--num-envs", "--num-steps"])
def test_another_batch_size_cannot_resume(tmp_path, monkeypatch, capsys, flag):
    ppo_atari.train(tiny(tmp_path))
    folder = only_run(tmp_path)
    before = hashes(folder)
    status, line = failed(capsys, monkeypatch, "--resume", str(folder), flag, "16", "--total-timesteps", "4096")
    assert status == 2
    assert "--num-envs" in line
    assert "--num-steps" in line
    assert hashes(folder) == before


def test_another_number_of_environments_with_the_same_batch_resumes(tmp_path, monkeypatch):
    ppo_atari.train(tiny(tmp_path))
    folder = only_run(tmp_path)
    resume(monkeypatch, folder, "--num-envs", "4", "--num-steps", "16", "--total-timesteps", "192")
    assert load(folder / "latest.pt")["counters"]["global_step"] == 192


def test_a_damaged_args_json_does_not_stop_a_resume(tmp_path, monkeypatch):
    """The disk was full, or the machine went down, when it was written."""
    ppo_atari.train(tiny(tmp_path))
    folder = only_run(tmp_path)
    (folder / "args.json").write_text("")
    resume(monkeypatch, folder, "--total-timesteps", "192")
    assert load(folder / "latest.pt")["counters"]["global_step"] == 192


def test_every_start_of_a_run_is_kept(tmp_path, monkeypatch):
    import json

    ppo_atari.train(tiny(tmp_path))
    folder = only_run(tmp_path)
    resume(monkeypatch, folder, "--total-timesteps", "192")
    content = json.loads((folder / "args.json").read_text())
    assert [start["global_step"] for start in content["starts"]] == [0, 128]
    assert content["args"]["total_timesteps"] == 192
    assert "--total-timesteps 192" in content["starts"][1]["command"]


def test_an_interrupted_evaluation_is_made_up_for(tmp_path, monkeypatch):
    """The signal comes in the evaluation at step 64: its point must not be missing in the resumed run."""
    # 32 steps of training, then the second step of the evaluation's own environment.
    args = tiny(tmp_path, eval_every=64)
    count_over_instances(monkeypatch, small_envs.SignalAt)
    folder = interrupt(monkeypatch, args, 2 * 32 + 2)
    assert load(folder / "latest.pt")["counters"]["iteration"] == 1
    assert "eval/return_mean" not in scalars(folder)
    resume(monkeypatch, folder)
    assert [step for step, _ in scalars(folder)["eval/return_mean"]] == [64, 128]


def count_over_instances(monkeypatch, env_class):
    """Lets all instances of an environment share their count of steps."""
    shared = {"count": 0}
    count = property(lambda self: shared["count"], lambda self, value: shared.update(count=value))
    monkeypatch.setattr(env_class, "all_steps", count, raising=False)


# ----- Signals from outside -----
@posix
@pytest.mark.parametrize(("vector", "signum", "to_all"), [
    ("sync", signal.SIGTERM, False),
    ("sync", signal.SIGINT, False),
    ("async", signal.SIGTERM, False),
    ("async", signal.SIGINT, True),
    ("async", signal.SIGTERM, True),
])  # fmt: skip
def test_a_signal_ends_a_run_in_order(tmp_path, vector, signum, to_all):
    """To all: as the terminal sends Ctrl-C, and as a batch system ends a job, to the environments too."""
    args = tiny(tmp_path / "runs", vector=vector, total_timesteps=10**8, checkpoint_every=64)
    with start(args, tmp_path) as run:
        run.wait_for_file(tmp_path / "runs", "latest.pt")
        environments = run.environments()
        assert len(environments) == (2 if vector == "async" else 0)
        if to_all:
            os.killpg(run.process.pid, signum)
        else:
            run.process.send_signal(signum)
        status, out, err = run.end()
        assert status == 128 + signum
        assert "Traceback" not in err
        assert err.strip() == "stopping; a second signal ends at once"
        _, alive = psutil.wait_procs(environments, timeout=60)
        assert alive == []

    folder = only_run(tmp_path / "runs")
    counters = load(folder / "latest.pt")["counters"]
    # A whole iteration: 64 steps and 4 updates each.
    assert counters["iteration"] >= 1
    assert counters["global_step"] == 64 * counters["iteration"]
    assert counters["updates"] == 4 * counters["iteration"]
    assert f"interrupted at step {counters['global_step']:,}; go on with: python ppo_atari.py --resume " in out
    assert out.rstrip().endswith(str(folder))
    assert not list(folder.glob("*.tmp*"))
    # The log ends where the checkpoint does.
    assert scalars(folder)["losses/value_loss"][-1][0] == counters["global_step"]


@posix
def test_a_second_signal_ends_at_once(tmp_path):
    """The environment hangs after the first signal, so the run cannot end in order."""
    args = tiny(tmp_path / "runs", env_id="small_envs:SignalAt-v0")
    with start(args, tmp_path, SIGNAL_AT="40:SIGTERM:block") as run:
        run.wait_for_line("blocked")
        run.process.send_signal(signal.SIGTERM)
        status, _, err = run.end()
    assert status == 143
    assert "Traceback" not in err
    assert not (only_run(tmp_path / "runs") / "latest.pt").exists()


CHILD_DRIVER = """
import multiprocessing, sys
import ppo_atari

if __name__ == "__main__":
    sys.argv[0] = "ppo_atari.py"
    child = multiprocessing.get_context("spawn").Process(target=ppo_atari.main)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@posix
@pytest.mark.parametrize("vector", ["sync", "async"])
def test_training_in_a_child_process_ends_in_order_too(tmp_path, vector):
    """As a sweep over seeds starts it: what is meant for the processes of environments must not hit this one."""
    (tmp_path / "driver.py").write_text(CHILD_DRIVER)
    args = tiny(tmp_path / "runs", vector=vector, total_timesteps=10**8, checkpoint_every=64)
    with Process([sys.executable, str(tmp_path / "driver.py"), *flags_of(args)], tmp_path) as run:
        run.wait_for_file(tmp_path / "runs", "latest.pt")
        (training,) = run.environments()
        training.send_signal(signal.SIGTERM)
        status, out, err = run.end()
    assert status == 143
    assert "Traceback" not in err
    counters = load(only_run(tmp_path / "runs") / "latest.pt")["counters"]
    assert f"interrupted at step {counters['global_step']:,}; go on with: " in out


# Makes a function of the os module say a line and block, once there is a checkpoint.
BLOCKING_DRIVER = """
import os, pathlib, sys, threading
import ppo_atari

name, run_dir = sys.argv[1:3]
real = getattr(os, name)

def block(*args):
    if any(pathlib.Path(run_dir).glob("*/latest.pt")):
        print("blocked", flush=True)
        threading.Event().wait()
    return real(*args)

if __name__ == "__main__":
    setattr(os, name, block)
    sys.argv = ["ppo_atari.py", *sys.argv[3:]]
    ppo_atari.main()
"""


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_kill_while_a_checkpoint_is_written_leaves_the_old_one(tmp_path, monkeypatch, where):
    args = tiny(tmp_path / "runs", checkpoint_every=64, total_timesteps=256)
    (tmp_path / "driver.py").write_text(BLOCKING_DRIVER)
    command = [sys.executable, str(tmp_path / "driver.py"), where, args.run_dir, *flags_of(args)]
    with Process(command, tmp_path) as run:
        run.wait_for_line("blocked")
        folder = only_run(tmp_path / "runs")
        old = (folder / "latest.pt").read_bytes()
        assert len(list(folder.glob("latest.pt.tmp*"))) == 1
        run.process.kill()
        status, _, _ = run.end()
    assert status != 0

    # The second checkpoint, of step 128, was under way.
    assert (folder / "latest.pt").read_bytes() == old
    assert load(folder / "latest.pt")["counters"]["global_step"] == 64
    assert len(list(folder.glob("*.tmp*"))) == 1
    resume(monkeypatch, folder)
    assert not list(folder.glob("*.tmp*"))
    assert load(folder / "latest.pt")["counters"]["global_step"] == 256
    # The iteration to step 128 was logged by both starts, and counts once.
    assert [step for step, _ in scalars(folder)["losses/value_loss"]] == [64, 128, 192, 256]


# ----- Failures of a run -----
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch, capsys):
    ppo_atari.train(tiny(tmp_path))
    folder = only_run(tmp_path)
    old = (folder / "latest.pt").read_bytes()

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    flags = ("--resume", str(folder), "--total-timesteps", "256", "--threads", "1", "--no-cuda")
    status, line = failed(capsys, monkeypatch, *flags)
    assert status == 1
    assert os.strerror(errno.ENOSPC) in line
    assert (folder / "latest.pt").read_bytes() == old
    assert not list(folder.glob("*.tmp*"))


LIMIT_DRIVER = """
import resource, sys
import ppo_atari

if __name__ == "__main__":
    limit = int(sys.argv.pop(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.argv[0] = "ppo_atari.py"
    ppo_atari.main()
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit on the size of a file")
@pytest.mark.parametrize("limit", [600_000, 6_000], ids=["checkpoint", "log"])
def test_a_file_that_cannot_be_written_whole_leaves_the_old_checkpoint(tmp_path, monkeypatch, limit):
    """No file may grow beyond the limit, so the write itself fails half way, as on a full disk.

    A checkpoint has 1.3 MB, and the log, which a thread of TensorBoard's writes, some kB of each iteration.
    """
    ppo_atari.train(tiny(tmp_path / "runs"))
    folder = only_run(tmp_path / "runs")
    old = (folder / "latest.pt").read_bytes()
    assert len(old) > 1_000_000
    (tmp_path / "driver.py").write_text(LIMIT_DRIVER)
    flags = ["--resume", str(folder), "--total-timesteps", "6400", "--checkpoint-every", "1280", "--threads", "1"]
    with Process([sys.executable, str(tmp_path / "driver.py"), str(limit), *flags, "--no-cuda"], tmp_path) as run:
        status, _, err = run.end()
    assert (status, err) == (1, f"error: [Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}\n")
    assert (folder / "latest.pt").read_bytes() == old
    assert not list(folder.glob("*.tmp*"))
    # With space again it goes on, and half a record in the log of the failed start does no harm.
    resume(monkeypatch, folder, "--total-timesteps", "256")
    assert [step for step, _ in scalars(folder)["losses/value_loss"]] == [64, 128, 192, 256]


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path, monkeypatch, capsys):
    """This environment pays nan from its 50th step on: in the second iteration, of steps 33 to 64."""
    args = tiny(tmp_path, env_id="small_envs:NanLater-v0", checkpoint_every=64, total_timesteps=256)
    status, line = failed(capsys, monkeypatch, *flags_of(args))
    assert status == 1
    assert "a loss is not finite at step 128" in line
    checkpoint = load(only_run(tmp_path) / "latest.pt")
    assert checkpoint["counters"]["global_step"] == 64
    assert all(tensor.isfinite().all() for tensor in checkpoint["agent"].values())
    assert [step for step, _ in scalars(only_run(tmp_path))["losses/value_loss"]] == [64]


def test_weights_that_overflow_end_the_run(tmp_path, monkeypatch, capsys):
    """One huge step, after a loss that was finite: the network answers nan from then on."""
    changes = {"learning_rate": 1e30, "num_minibatches": 1, "update_epochs": 1, "checkpoint_every": 64}
    status, line = failed(capsys, monkeypatch, *flags_of(tiny(tmp_path, **changes)))
    assert status == 1
    assert "not finite" in line
    # Weights that answer nan are no checkpoint to go on from.
    assert not (only_run(tmp_path) / "latest.pt").exists()


@posix
def test_a_dead_environment_process_ends_the_run(tmp_path):
    args = tiny(tmp_path / "runs", vector="async", total_timesteps=10**8, checkpoint_every=64)
    with start(args, tmp_path) as run:
        latest = run.wait_for_file(tmp_path / "runs", "latest.pt")
        environments = run.environments()
        assert len(environments) == 2
        environments[1].kill()
        status, _, err = run.end()
        assert (status, err) == (1, "error: an environment process died, or what reads this output did\n")
        _, alive = psutil.wait_procs(environments, timeout=60)
        assert alive == []
    counters = load(latest)["counters"]
    assert counters["global_step"] == 64 * counters["iteration"] > 0
    assert not list(latest.parent.glob("*.tmp*"))


# ----- Checkpoints that do not fit -----
class Harmful:
    """Unpickling it would make the file `path`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path, monkeypatch, capsys, flag, kind):
    path, victim = tmp_path / "latest.pt", tmp_path / "made-by-the-checkpoint"
    content = {"script": "ppo_atari", "format_version": 1, "args": Harmful(str(victim))}
    if kind == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    status, line = failed(capsys, monkeypatch, flag, str(tmp_path))
    assert status == 2
    assert f"error: {path}: not a checkpoint" in line
    assert not victim.exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run, which tests must leave as it is."""
    run_dir = tmp_path_factory.mktemp("finished")
    ppo_atari.train(tiny(run_dir))
    return only_run(run_dir)


def cut(content):
    return content[: len(content) // 2]


@pytest.mark.parametrize("damage", [
    cut,
    lambda content: content[:-1],
    lambda content: content[:10],
    lambda content: b"",
    lambda content: b"\n",
    lambda content: b"this is no checkpoint\n",
    lambda content: bytes(1000),
    lambda content: content[:200] + bytes(200_000) + content[200_200:],
    lambda content: pickle.dumps({"script": "ppo_atari"}),
], ids=["half", "last byte", "10 bytes", "empty", "newline", "text", "zeros", "hole", "pickle"])  # fmt: skip
def test_a_damaged_checkpoint_is_refused(finished, tmp_path, monkeypatch, capsys, damage):
    path = tmp_path / "damaged.pt"
    path.write_bytes(damage((finished / "latest.pt").read_bytes()))
    status, line = failed(capsys, monkeypatch, "--resume", str(path), "--total-timesteps", "256")
    assert status == 2
    assert line.startswith(f"error: {path}: ")
    assert [entry.name for entry in tmp_path.iterdir()] == ["damaged.pt"]


@pytest.mark.parametrize(("change", "message"), [
    ({"script": "ppo_cartpole"}, "this checkpoint is of ppo_cartpole.py, not of ppo_atari.py"),
    ({"format_version": 2}, "format version 2, this script reads 1"),
    ({"format_version": None}, "format version None, this script reads 1"),
])  # fmt: skip
@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_a_foreign_checkpoint_is_refused(finished, tmp_path, monkeypatch, capsys, change, message, flag):
    torch.save({**load(finished / "latest.pt"), **change}, tmp_path / "latest.pt")
    status, line = failed(capsys, monkeypatch, flag, str(tmp_path))
    assert (status, line) == (2, f"error: {tmp_path / 'latest.pt'}: {message}")


@pytest.mark.parametrize(
    "content", [[1, 2], torch.zeros(3), {"weights": torch.zeros(3)}], ids=["list", "tensor", "dict"]
)
def test_a_file_of_another_program_is_refused(tmp_path, monkeypatch, capsys, content):
    torch.save(content, tmp_path / "other.pt")
    status, line = failed(capsys, monkeypatch, "--evaluate", str(tmp_path / "other.pt"))
    assert (status, line) == (2, f"error: {tmp_path / 'other.pt'}: this is no checkpoint of these scripts")


@pytest.mark.parametrize("missing", ["args", "agent", "counters"])
def test_a_checkpoint_that_lacks_a_part_is_refused(finished, tmp_path, monkeypatch, capsys, missing):
    content = load(finished / "latest.pt")
    del content[missing]
    torch.save(content, tmp_path / "latest.pt")
    status, line = failed(capsys, monkeypatch, "--resume", str(tmp_path), "--total-timesteps", "256")
    assert status == 2
    assert missing in line


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_other_shapes_are_refused_and_the_first_tensor_is_named(finished, tmp_path, monkeypatch, capsys, flag):
    content = load(finished / "latest.pt")
    content["agent"]["trunk.1.weight"] = torch.zeros(512, 65)
    content["agent"]["critic.weight"] = torch.zeros(1, 3)
    torch.save(content, tmp_path / "latest.pt")
    flags = (flag, str(tmp_path), "--total-timesteps", "256", "--threads", "1", "--no-cuda")
    status, line = failed(capsys, monkeypatch, *flags)
    assert status == 2
    # 36 x 36 images leave 64 channels of 1 x 1 after the convolutions.
    assert "the tensor trunk.1.weight has the shape (512, 65), these arguments want (512, 64)" in line
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest.pt"]


def test_another_action_space_is_refused(finished, monkeypatch, capsys):
    """6 actions of Pong, where the checkpoint has 2; its images have other sizes too, which come first."""
    before = hashes(finished)
    flags = ("--evaluate", str(finished), "--env-id", "PongNoFrameskip-v4", "--threads", "1", "--no-cuda")
    status, line = failed(capsys, monkeypatch, *flags)
    assert status == 2
    assert "the tensor trunk.0.0.weight has the shape (32, 1, 8, 8), these arguments want (32, 4, 8, 8)" in line
    assert hashes(finished) == before


# ----- Evaluation and agent files -----
def test_evaluating_a_run_changes_no_byte_of_it(finished, monkeypatch, capsys):
    before = hashes(finished)
    assert set(before) >= {"args.json", "best.pt", "latest.pt"}
    command_line(monkeypatch, "--evaluate", str(finished), "--eval-episodes", "3", "--threads", "1", "--no-cuda")
    assert "eval: mean=3 std=0 min=3 max=3 episodes=3 mean_length=3" in capsys.readouterr().out.splitlines()
    assert hashes(finished) == before


def test_an_agent_file_is_evaluated_but_not_resumed(finished, tmp_path, monkeypatch, capsys):
    content = load(finished / "latest.pt")
    agent_file = {name: content[name] for name in ("script", "format_version", "args", "counters")}
    agent_file["agent"] = {name: tensor.half() for name, tensor in content["agent"].items()}
    path = tmp_path / "agent.pt"
    torch.save(agent_file, path)
    monkeypatch.chdir(tmp_path)
    before = hashes(tmp_path)

    command_line(monkeypatch, "--evaluate", str(path), "--threads", "1", "--no-cuda")
    assert "eval: mean=3 std=0 min=3 max=3 episodes=2 mean_length=3" in capsys.readouterr().out.splitlines()
    flags = ("--resume", str(path), "--total-timesteps", "256", "--threads", "1", "--no-cuda")
    status, line = failed(capsys, monkeypatch, *flags)
    assert status == 2
    assert f"{path}: an agent file has no optimizer: it can be evaluated, not resumed" in line
    assert hashes(tmp_path) == before


# ----- Run folders -----
def test_two_runs_of_one_second_get_two_folders(tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    for _ in range(3):
        ppo_atari.train(tiny(tmp_path, total_timesteps=64))
    folders = sorted(tmp_path.iterdir())
    first = f"small_envs-Ramp3Trunc-v0__ppo_atari__1__{int(now)}"
    assert [folder.name for folder in folders] == [first, f"{first}-2", f"{first}-3"]
    for folder in folders:
        assert len(list(folder.glob("events.*"))) == 1
        assert scalars(folder)["losses/entropy"][0][0] == 64

"""Checkpoints, resumed runs, and every way in which a run can be cut off."""

import contextlib
import dataclasses
import errno
import json
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import small_envs
import torch
from conftest import ROOT
from short_runs import assert_equal, flags_of, hashes, load, only_run, scalars, small_run, spy
from short_runs import command_line as command_line_of
from short_runs import failed as failed_of
from short_runs import resume as resume_of

import ppo_atari as script

posix = pytest.mark.skipif(os.name == "nt", reason="Windows ends a process at once instead of sending SIGTERM")
command_line, failed, resume = (partial(call, script) for call in (command_line_of, failed_of, resume_of))
SHORT = ("--threads=1", "--no-cuda", "--no-progress")


def tiny(run_dir, **changes):
    """Arguments of 2 iterations of 64 steps and 4 updates; episodes of 3 steps that pay 1 each."""
    return small_run("ppo_atari", run_dir, **changes)[1]


def updates_of(checkpoint):
    """Returns how many steps the optimizer has made."""
    (steps,) = {int(state["step"]) for state in checkpoint["optimizer"]["state"].values()}
    return steps


@pytest.fixture(autouse=True)
def signals_are_heard():
    """A runner in the background may have its signals ignored, and what it starts inherits that."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for signum in before:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def interrupt(monkeypatch, args, at, signal_name="SIGTERM"):
    """Trains until the environment itself sends this process a signal, at its step `at`; returns the run folder."""
    monkeypatch.setenv("SIGNAL_AT", f"{at}:{signal_name}")
    with pytest.raises(SystemExit) as exit_info:
        command_line(monkeypatch, *flags_of(dataclasses.replace(args, env_id="small_envs:SignalAt-v0")))
    assert exit_info.value.code == 128 + getattr(signal, signal_name)
    return only_run(args.run_dir)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run, which tests must leave as it is."""
    script.train(tiny(tmp_path_factory.mktemp("finished")))
    return only_run(tmp_path_factory.getbasetemp() / "finished0")


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of that folder."""
    return Path(shutil.copytree(finished, tmp_path / finished.name))


# ----- What a checkpoint holds -----
def test_a_checkpoint_holds_tensors_and_plain_values_only(finished):
    """No generator's state among them; torch reads it with the defaults of `load`, which run no code."""
    for name in ("latest.pt", "best.pt"):
        content = torch.load(finished / name)
        assert list(content) == ["script", "format_version", "args", "counters", "agent", "optimizer"]
        assert (content["script"], content["format_version"]) == ("ppo_atari", 2)
        assert content["counters"] == {"global_step": 128, "episodes": 0, "evaluated": 128, "best_eval": [3.0]}
        assert content["args"].keys() == vars(script.Args()).keys()
        unpacked = [content]
        for value in unpacked:
            if isinstance(value, dict):
                unpacked += [*value, *value.values()]
            elif isinstance(value, list | tuple):
                unpacked += value
            else:
                assert type(value) in (int, float, str, bool, type(None), torch.Tensor), value


# ----- Train, stop, go on -----
def test_training_that_was_stopped_and_resumed_is_as_long_as_training_in_one_go(tmp_path, monkeypatch, capsys):
    """4 iterations of 64 steps; the signal comes in the third, at vector step 80 of 2 x 32 + 16."""
    args = tiny(tmp_path / "whole", total_timesteps=256)
    script.train(args)
    whole = only_run(tmp_path / "whole")
    capsys.readouterr()

    folder = interrupt(monkeypatch, dataclasses.replace(args, run_dir=str(tmp_path / "cut")), 80)
    out = capsys.readouterr().out
    assert out.endswith(f"interrupted at step 128; go on with: {sys.executable} ppo_atari.py --resume {folder}\n")
    stopped = load(folder)
    assert (stopped["counters"]["global_step"], updates_of(stopped)) == (128, 8)
    assert [step for step, _ in scalars(folder)["losses/value_loss"]] == [64, 128]

    resume(monkeypatch, folder)
    assert "\ngoing on, at step 128\n" in capsys.readouterr().out.split("episode 0")[0]
    resumed, straight = load(folder), load(whole)
    assert resumed["counters"] == straight["counters"]
    assert (resumed["counters"]["global_step"], updates_of(resumed), updates_of(straight)) == (256, 16, 16)

    assert len(list(folder.glob("events.*"))) == 2
    logged, logged_straight = scalars(folder), scalars(whole)
    assert logged["charts/learning_rate"] == logged_straight["charts/learning_rate"]
    # What came before the signal is the same run; the later rollouts start at new episodes.
    assert logged["losses/value_loss"][:2] == logged_straight["losses/value_loss"][:2]
    assert logged.keys() == logged_straight.keys()
    for tag in logged.keys() - {"charts/episodic_return", "charts/episodic_length"}:
        assert [step for step, _ in logged[tag]] == [step for step, _ in logged_straight[tag]], tag
    # Two end at each third vector step, 21 times from step 0 and from 128; those of the dropped rollout are purged.
    expected = [6 * k for k in range(1, 22)] + [128 + 6 * k for k in range(1, 22)]
    assert [step for step, _ in logged["charts/episodic_return"]] == [step for step in expected for _ in range(2)]


@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGHUP"])
def test_ctrl_c_and_a_closed_terminal_leave_a_checkpoint(tmp_path, monkeypatch, capfd, signal_name):
    folder = interrupt(monkeypatch, tiny(tmp_path), 40, signal_name)
    assert load(folder)["counters"]["global_step"] == 64
    assert capfd.readouterr().err == "\nstopping; a second signal ends at once\n"


@pytest.mark.parametrize("moment", ["tyro.cli", "prepare", "make_envs", "evaluate"])
def test_a_signal_at_any_moment_ends_a_run_in_order(tmp_path, monkeypatch, moment):
    """Ctrl-C while arguments are read, environments are made, or the run is evaluated; 130 and no traceback."""
    owner, name = (script.tyro, "cli") if moment == "tyro.cli" else (script, moment)
    # Once: a second one would end this process at once.
    spy(monkeypatch, owner, name, lambda *_: script.signals or signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as exit_info:
        command_line(monkeypatch, *flags_of(tiny(tmp_path, eval_every=64)))
    assert exit_info.value.code == 130
    assert load(only_run(tmp_path))["counters"]["global_step"] == (64 if moment == "evaluate" else 0)


def test_a_signal_ends_the_evaluation_of_a_checkpoint(finished, monkeypatch):
    monkeypatch.setenv("SIGNAL_AT", "2:SIGINT")
    before = hashes(finished)
    with pytest.raises(SystemExit) as exit_info:
        command_line(monkeypatch, "--evaluate", str(finished), "--env-id=small_envs:SignalAt-v0", *SHORT)
    assert exit_info.value.code == 130
    assert hashes(finished) == before


def test_a_signal_that_was_ignored_before_the_start_stays_ignored(tmp_path, monkeypatch):
    """As nohup has it, and a shell that starts a command in the background."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setenv("SIGNAL_AT", "40:SIGHUP")
    command_line(monkeypatch, *flags_of(tiny(tmp_path, env_id="small_envs:SignalAt-v0")))
    assert load(only_run(tmp_path))["counters"]["global_step"] == 128


def test_what_is_loaded_is_what_was_saved(copied, monkeypatch):
    """A resumed run that is stopped before its first update writes what it has loaded."""
    saved = load(copied)
    monkeypatch.setenv("SIGNAL_AT", "1:SIGTERM")
    with pytest.raises(SystemExit):
        resume(monkeypatch, copied, "--total-timesteps=256", "--env-id=small_envs:SignalAt-v0")
    loaded = load(copied)
    for name in ("agent", "optimizer", "counters"):
        assert_equal(loaded[name], saved[name], name)
    assert loaded["args"]["total_timesteps"] == 256


def test_two_resumptions_of_one_checkpoint_are_equal(tmp_path, monkeypatch):
    """They seed environments and generators from seed and step, whatever the generators were; the policy is sampled."""
    script.train(tiny(tmp_path / "one", env_id="small_envs:RightAction-v0"))
    folders = [only_run(tmp_path / "one"), tmp_path / "other"]
    shutil.copytree(*folders)
    for folder in folders:
        torch.rand(3), np.random.rand(3)  # noqa: NPY002
        resume(monkeypatch, folder, "--total-timesteps=256")
    contents, logs = [load(folder) for folder in folders], [scalars(folder) for folder in folders]
    for part in ("agent", "optimizer", "counters"):
        assert_equal(*(content[part] for content in contents), part)
    assert contents[0]["counters"]["global_step"] == 256
    for log in logs:
        log.pop("charts/SPS")
    assert logs[0] == logs[1]


def test_a_resumed_run_starts_episodes_of_its_own(tmp_path, monkeypatch):
    """An episode of this environment pays the seed of its reset: the first ones have those of the training."""
    script.train(tiny(tmp_path, env_id="small_envs:SeedReward-v0", seed=7))
    folder = only_run(tmp_path)
    resume(monkeypatch, folder, "--total-timesteps=192")
    returns = scalars(folder)["charts/episodic_return"]
    firsts = [[value for step, value in returns if step == first] for first in (2, 130)]
    for got, step in zip(firsts, (0, 128), strict=True):
        seed = int(np.random.SeedSequence([7, step]).generate_state(1)[0]) % 2**30
        # The log holds 24 bits of a number.
        assert got == [float(np.float32(seed)), float(np.float32(seed + 1))]
    assert firsts[0] != firsts[1]


@pytest.mark.parametrize("name", ["latest.pt", "best.pt"])
def test_a_run_is_resumed_from_a_file_too(copied, monkeypatch, name):
    resume(monkeypatch, copied / name, "--total-timesteps=192")
    assert only_run(copied.parent) == copied
    assert load(copied)["counters"]["global_step"] == 192


def test_a_finished_run_says_so_and_is_evaluated(tmp_path, monkeypatch, capsys):
    script.train(tiny(tmp_path))
    folder = only_run(tmp_path)
    models, logged = [(folder / f"{name}.pt").read_bytes() for name in ("latest", "best")], scalars(folder)
    of_run = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval:")]
    resume(monkeypatch, folder)
    lines = capsys.readouterr().out.splitlines()
    assert "this run is finished, at step 128" in lines
    assert [line for line in lines if line.startswith("eval:")] == of_run
    assert [(folder / f"{name}.pt").read_bytes() for name in ("latest", "best")] == models
    assert scalars(folder) == logged


def test_a_finished_run_goes_on_with_more_steps(copied, monkeypatch):
    resume(monkeypatch, copied, "--total-timesteps=256")
    assert (load(copied)["counters"]["global_step"], updates_of(load(copied))) == (256, 16)
    logged = scalars(copied)
    # Half of 2 iterations' schedule, then the third and fourth of 4: 1, 1/2, then 1/2, 1/4.
    rates = [value for _, value in logged["charts/learning_rate"]]
    assert rates == pytest.approx([2.5e-4, 1.25e-4, 1.25e-4, 0.625e-4], rel=1e-6)
    assert [step for step, _ in logged["losses/entropy"]] == [64, 128, 192, 256]
    assert [step for step, _ in logged["eval/return_mean"]] == [128, 256]
    # The start is told anew.
    about = json.loads((copied / "args.json").read_text())
    assert about["args"]["total_timesteps"] == 256
    assert "--total-timesteps=256" in about["command"]


def test_steps_after_the_checkpoint_of_a_killed_run_are_purged_and_done_again(copied, monkeypatch):
    """As after a power cut: the log is at step 256, the checkpoint at 128."""
    old = (copied / "latest.pt").read_bytes()
    resume(monkeypatch, copied, "--total-timesteps=256")
    (copied / "latest.pt").write_bytes(old)
    resume(monkeypatch, copied, "--total-timesteps=320")
    logged = scalars(copied)
    assert [step for step, _ in logged["losses/value_loss"]] == [64, 128, 192, 256, 320]
    # Two end at each third vector step: 21 times in the first 64, and 32 times in the 96 after.
    ends = [6 * k for k in range(1, 22)] + [128 + 6 * k for k in range(1, 33)]
    assert logged["charts/episodic_return"] == [(step, 3.0) for step in ends for _ in range(2)]
    assert [step for step, _ in logged["eval/return_mean"]] == [128, 320]


def arguments_of(monkeypatch, *flags):
    """Returns the arguments with which the command line trains or evaluates."""
    seen = []
    for name in ("train", "evaluate_checkpoint"):
        monkeypatch.setattr(script, name, seen.append)
    command_line(monkeypatch, *flags)
    (args,) = seen
    return args


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_flags_override_stored_arguments(tmp_path, monkeypatch, flag):
    args = tiny(tmp_path, seed=9, gamma=0.5, capture_video=True, num_minibatches=4, anneal_lr=False)
    script.train(args)
    folder = str(only_run(tmp_path))
    got = arguments_of(monkeypatch, flag, folder, "--gamma=0.25", "--anneal-lr")
    assert (got.gamma, got.anneal_lr) == (0.25, True)
    assert (got.seed, got.num_minibatches, got.num_steps, got.env_id) == (9, 4, 32, args.env_id)
    # These belong to a start of the script, not to the run.
    for name in ("run_dir", "cuda", "threads", "progress", "track", "capture_video"):
        assert getattr(got, name) == getattr(script.Args(), name), name
    assert (got.resume, got.evaluate) == ((folder, None) if flag == "--resume" else (None, folder))


def test_a_run_keeps_its_seed(copied, monkeypatch, capsys):
    """Else args.json would tell of a seed that no run had, and compare_runs.py count it."""
    before = hashes(copied)
    status, line = failed(monkeypatch, capsys, "--resume", str(copied), "--seed=7", *SHORT)
    assert (status, line) == (2, "error: --seed 7: a run keeps its own\n")
    assert hashes(copied) == before
    assert arguments_of(monkeypatch, "--evaluate", str(copied), "--seed=7").seed == 7


def test_stored_arguments_are_checked_as_they_are_and_not_over_the_defaults(tmp_path, monkeypatch):
    """Over the script's own 8 x 128 steps, 3 minibatches of a run with 96 samples would be refused."""
    script.train(tiny(tmp_path, num_steps=48, num_minibatches=3, total_timesteps=96))
    assert arguments_of(monkeypatch, "--resume", str(only_run(tmp_path))).num_minibatches == 3


@pytest.mark.parametrize("flag", ["--num-envs=16", "--num-steps=16"])
def test_another_batch_size_cannot_resume(copied, monkeypatch, capsys, flag):
    before = hashes(copied)
    status, line = failed(monkeypatch, capsys, "--resume", str(copied), flag, "--total-timesteps=4096", *SHORT)
    assert status == 2
    assert "--num-envs" in line
    assert "--num-steps" in line
    assert hashes(copied) == before


def test_another_number_of_environments_with_the_same_batch_resumes(copied, monkeypatch):
    resume(monkeypatch, copied, "--num-envs=4", "--num-steps=16", "--total-timesteps=192")
    assert load(copied)["counters"]["global_step"] == 192


def test_an_interrupted_evaluation_is_made_up_for(tmp_path, monkeypatch):
    """The signal comes in the evaluation at step 128, and there would be no other before 256."""
    # 64 vector steps of training, then the second step of the evaluation's own environment.
    shared = {"count": 0}
    count = property(lambda self: shared["count"], lambda self, value: shared.update(count=value))
    # Both of the run's environments count.
    monkeypatch.setattr(small_envs.SignalAt, "all_steps", count, raising=False)
    folder = interrupt(monkeypatch, tiny(tmp_path, eval_every=128, total_timesteps=256), 2 * 64 + 2)
    assert load(folder)["counters"]["global_step"] == 128
    assert "eval/return_mean" not in scalars(folder)
    resume(monkeypatch, folder)
    # After the next rollout.
    assert [step for step, _ in scalars(folder)["eval/return_mean"]] == [192, 256]


# ----- In a process of its own -----
class Process:
    """A command in a process of its own, with a session of its own; every wait ends after two minutes."""

    def __init__(self, command, cwd, **env):
        path = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
        env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **env}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        self.process = subprocess.Popen(command, cwd=cwd, env=env, **pipes)

    def __enter__(self):
        self.watchdog = threading.Timer(120, self.process.kill)
        self.watchdog.start()
        return self

    def __exit__(self, *_):
        self.watchdog.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def environments(self):
        """Returns the processes that it has started; multiprocessing's tracker of shared memory is none."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]

    def wait_for_line(self, line):
        for got in self.process.stdout:
            if got.rstrip("\n") == line:
                return
        raise AssertionError(f"ended without the line {line!r}: {self.process.stderr.read()}")

    def wait_for_file(self, run_dir, pattern):
        while self.process.poll() is None:
            for found in run_dir.glob(f"*/{pattern}"):
                return found
            time.sleep(0.02)
        raise AssertionError(f"ended without a file {pattern}: {self.process.stderr.read()}")

    def end(self):
        """Waits for the end; returns status, standard output and standard error."""
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def start(args, cwd, **env):
    return Process([sys.executable, str(ROOT / "ppo_atari.py"), *flags_of(args)], cwd, **env)


def test_weights_that_are_not_finite_are_not_saved(tmp_path, monkeypatch, capsys):
    """They are spoilt as the run is interrupted in its second iteration, after a checkpoint."""
    monkeypatch.setenv("SIGNAL_AT", "40:SIGTERM")
    spoil = lambda run, *_: run.modules["agent"].critic.weight.data.fill_(torch.nan)  # noqa: E731
    spy(monkeypatch, script.Run, "__exit__", spoil)
    args = tiny(tmp_path, env_id="small_envs:SignalAt-v0", checkpoint_every=64)
    status, line = failed(monkeypatch, capsys, *flags_of(args))
    assert (status, line.splitlines()[-1]) == (1, "error: a weight is not finite at step 64: lower the rate")
    assert all(weights.isfinite().all() for weights in load(only_run(tmp_path))["agent"].values())


@posix
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_and_its_environments_in_order(tmp_path, monkeypatch, capsys, signum):
    """As the terminal sends Ctrl-C, and as a batch system ends a job, to the environments too."""
    args = tiny("my runs", vector="async", total_timesteps=10**8, checkpoint_every=64)
    with start(args, tmp_path) as run:
        run.wait_for_file(tmp_path / "my runs", "latest.pt")
        environments = run.environments()
        assert len(environments) == 2
        os.killpg(run.process.pid, signum)
        status, out, err = run.end()
        assert status == 128 + signum
        assert err.strip() == "stopping; a second signal ends at once"
        _, alive = psutil.wait_procs(environments, timeout=60)
        assert alive == []

    folder = only_run(tmp_path / "my runs")
    checkpoint = load(folder)
    # A whole iteration: 64 steps and 4 updates each.
    step = checkpoint["counters"]["global_step"]
    assert step == 16 * updates_of(checkpoint) > 0
    assert not list(folder.glob("*.tmp*"))
    # The log of losses ends where the checkpoint does.
    assert scalars(folder)["losses/value_loss"][-1][0] == step
    last = out.splitlines()[-1]
    assert last.startswith(f"interrupted at step {step:,}; go on with: ")
    if signum == signal.SIGINT:
        # It works as it stands, in the same folder, here with what makes it end at once.
        python, path, *flags = shlex.split(last.split("go on with: ")[1])
        assert (python, path) == (sys.executable, str(ROOT / "ppo_atari.py"))
        monkeypatch.chdir(tmp_path)
        command_line(monkeypatch, *flags, f"--total-timesteps={step}", *SHORT)
        out, err = capsys.readouterr()
        assert err == ""
        assert f"this run is finished, at step {step:,}" in out.splitlines()
        assert shlex.split(out.splitlines()[-1]) == ["look", "at", "it:", "tensorboard", "--logdir", "my runs"]


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
import importlib, multiprocessing, sys

def train():
    importlib.import_module("ppo_atari").main()

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=train)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@posix
def test_training_in_a_child_process_ends_in_order_too(tmp_path):
    """As a sweep over seeds starts it: what is meant for the processes of environments must not hit this one."""
    (tmp_path / "driver.py").write_text(CHILD_DRIVER)
    args = tiny(tmp_path / "runs", total_timesteps=10**8, checkpoint_every=64)
    with Process([sys.executable, str(tmp_path / "driver.py"), *flags_of(args)], tmp_path) as run:
        run.wait_for_file(tmp_path / "runs", "latest.pt")
        (training,) = run.environments()
        training.send_signal(signal.SIGTERM)
        status, out, err = run.end()
    assert (status, err.strip()) == (143, "stopping; a second signal ends at once")
    assert f"interrupted at step {load(only_run(tmp_path / 'runs'))['counters']['global_step']:,}; go on" in out


# ----- Failures of a run -----
@pytest.mark.parametrize("moment", ["half", "fsync", "replace"])
def test_a_kill_while_a_checkpoint_is_written_leaves_the_old_one(tmp_path, monkeypatch, moment):
    """The folder is copied at that moment of the second checkpoint, at step 128: so a kill would leave it."""
    cut = tmp_path / "cut" / "run"

    def copy(*_):
        if not cut.exists() and list(tmp_path.glob("whole/*/latest.pt")):
            shutil.copytree(only_run(tmp_path / "whole"), cut)

    def save_half(content, file):
        torch_save(content, file)
        written = file.tell()
        file.seek(written // 2)
        file.truncate()
        copy()
        file.seek(0)
        torch_save(content, file)

    torch_save = torch.save
    if moment == "half":
        monkeypatch.setattr(torch, "save", save_half)
    else:
        spy(monkeypatch, os, moment, copy)
    script.train(tiny(tmp_path / "whole", checkpoint_every=64, total_timesteps=256))
    assert load(cut)["counters"]["global_step"] == 64
    assert [path.name for path in cut.glob("*.tmp")] == ["latest.pt.tmp"]
    monkeypatch.setattr(torch, "save", torch_save)
    (cut / "notes.tmp").write_text("a user's own")
    resume(monkeypatch, cut)
    assert [path.name for path in cut.glob("*.tmp*")] == ["notes.tmp"]
    assert load(cut)["counters"]["global_step"] == 256
    # The iteration to step 128 was logged by both starts, and counts once.
    assert [step for step, _ in scalars(cut)["losses/value_loss"]] == [64, 128, 192, 256]


def test_a_run_folder_that_cannot_be_written_to_is_refused(copied, monkeypatch, capsys):
    """A folder in the way keeps out even the superuser."""
    (copied / "args.json").unlink()
    (copied / "args.json").mkdir()
    before = hashes(copied)
    status, line = failed(monkeypatch, capsys, "--resume", str(copied), "--total-timesteps=256", *SHORT)
    assert (status, line) == (
        2,
        f"error: --run-dir {script.Args().run_dir}: [Errno {errno.EISDIR}] {os.strerror(errno.EISDIR)}: "
        f"'{copied}/args.json'\n",
    )
    assert hashes(copied) == before


def test_the_next_start_removes_what_a_killed_run_left(copied, monkeypatch):
    (copied / "best.pt.tmp").write_bytes(b"half")
    resume(monkeypatch, copied)  # it is finished, so nothing is saved again
    assert not (copied / "best.pt.tmp").exists()


def test_a_full_disk_leaves_the_old_checkpoint(copied, monkeypatch, capsys):
    old = (copied / "latest.pt").read_bytes()

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        status, line = failed(full, capsys, "--resume", str(copied), "--total-timesteps=256", *SHORT)
    assert (status, line) == (1, f"error: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}\n")
    assert (copied / "latest.pt").read_bytes() == old
    resume(monkeypatch, copied, "--total-timesteps=256")
    assert not list(copied.glob("*.tmp*"))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit on the size of a file")
@pytest.mark.parametrize(("limit", "every", "message"), [
    (600_000, 192, "latest.pt.tmp cannot be written: "),
    (6_000, 1280, f"error: [Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}"),
], ids=["checkpoint", "log"])  # fmt: skip
def test_a_file_that_cannot_be_written_whole_leaves_the_old_checkpoint(
    copied, monkeypatch, capsys, limit, every, message
):
    """No file may grow beyond the limit, so the write itself fails half way, as on a full disk.

    A checkpoint has 4 MB, and the log, which a thread of TensorBoard's writes, some kB of each iteration.
    """
    import resource

    old = (copied / "latest.pt").read_bytes()
    assert len(old) > 1_000_000
    flags = ("--resume", str(copied), "--total-timesteps=6400", f"--checkpoint-every={every}", *SHORT)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        status, line = failed(monkeypatch, capsys, *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert status == 1
    assert message in line
    assert (copied / "latest.pt").read_bytes() == old
    # With space again it goes on, and half a record in the log of the failed start does no harm.
    resume(monkeypatch, copied, "--total-timesteps=256")
    assert [step for step, _ in scalars(copied)["losses/value_loss"]] == [64, 128, 192, 256]


@pytest.mark.parametrize(("env", "message"), [
    ("NanLater", "NanLater-v0 is not finite in a step"),
    ("HugeLater", "losses/value_loss is not finite at step 128: lower --learning-rate"),
])  # fmt: skip
def test_numbers_that_are_not_finite_end_the_run(tmp_path, monkeypatch, capsys, env, message):
    """What these pay from their 50th step on is in the second iteration, of steps 33 to 64 of each."""
    args = tiny(tmp_path, env_id=f"small_envs:{env}-v0", checkpoint_every=64, total_timesteps=256)
    status, line = failed(monkeypatch, capsys, *flags_of(args))
    assert status == 1
    assert message in line
    assert load(only_run(tmp_path))["counters"]["global_step"] == 64


@posix
def test_a_dead_environment_process_ends_the_run(tmp_path, monkeypatch, capsys):
    """Each kills itself at its 40th step, in the second iteration."""
    monkeypatch.setenv("SIGNAL_AT", "40:SIGKILL")
    args = tiny(tmp_path, env_id="small_envs:SignalAt-v0", vector="async", checkpoint_every=64)
    status, line = failed(monkeypatch, capsys, *flags_of(args))
    assert (status, line) == (1, "error: a pipe broke: has an environment died?\n")
    _, alive = psutil.wait_procs(psutil.Process().children(), timeout=60)
    assert alive == []
    assert load(only_run(tmp_path))["counters"]["global_step"] == 64
    assert not list(only_run(tmp_path).glob("*.tmp*"))


# ----- Checkpoints that do not fit -----
class Harmful:
    """Unpickling it would make the file `path`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def refused(monkeypatch, capsys, path, *flags, flag="--resume"):
    """Goes on with a file, or evaluates it, which is refused; returns the reason. Nothing else is written."""
    before = hashes(path.parent)
    status, line = failed(monkeypatch, capsys, flag, str(path), "--total-timesteps=256", *SHORT, *flags)
    assert status == 2
    assert hashes(path.parent) == before
    assert line.startswith(f"error: {path}: no checkpoint that fits: ")
    return line.removeprefix(f"error: {path}: no checkpoint that fits: ").rstrip("\n")


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
@pytest.mark.parametrize("write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path, monkeypatch, capsys, flag, write):
    victim = tmp_path / "made-by-the-checkpoint"
    write({"script": "ppo_atari", "format_version": 2, "args": Harmful(str(victim))}, tmp_path / "latest.pt")
    assert refused(monkeypatch, capsys, tmp_path / "latest.pt", flag=flag)
    assert not victim.exists()


def test_weights_alone_are_no_checkpoint(finished, tmp_path, monkeypatch, capsys):
    """As CleanRL saves them."""
    torch.save(load(finished)["agent"], tmp_path / "model.pt")
    assert refused(monkeypatch, capsys, tmp_path / "model.pt") == "it was made by None.py, format None"


@pytest.mark.parametrize("damage", [
    lambda content: content[: len(content) // 2],
    lambda content: content[:-1],
    lambda content: content[:10],
    lambda content: b"",
    lambda content: b"this is no checkpoint\n",
    lambda content: bytes(1000),
    lambda content: content[:200] + bytes(200_000) + content[200_200:],
], ids=["half", "last byte", "10 bytes", "empty", "text", "zeros", "hole"])  # fmt: skip
def test_a_damaged_checkpoint_is_refused(finished, tmp_path, monkeypatch, capsys, damage):
    (tmp_path / "damaged.pt").write_bytes(damage((finished / "latest.pt").read_bytes()))
    assert refused(monkeypatch, capsys, tmp_path / "damaged.pt")


def test_a_flipped_byte_is_refused_or_does_no_harm(finished, tmp_path):
    """50 places all over the file, and 50 of its end, which says where everything is."""
    path, whole, content = tmp_path / "flipped.pt", (finished / "latest.pt").read_bytes(), load(finished)
    places = [*range(77, len(whole), len(whole) // 50), *range(len(whole) - 5_000, len(whole), 100)]
    refusals, harmed = 0, []
    for i in places:
        path.write_bytes(whole[:i] + bytes([whole[i] ^ (1 if i % 2 else 255)]) + whole[i + 1 :])
        try:
            assert_equal(script.load_checkpoint(str(path)), content | {"folder": tmp_path}, f"byte {i}")
        except script.UsageError:
            refusals += 1
        except AssertionError:
            harmed.append(i)
    # Dates, and zeros that fill up to a multiple of 64 bytes, say nothing.
    assert refusals > 50
    assert harmed == []


def change(**parts):
    """Returns a function that puts these parts in place of a checkpoint's own."""
    return lambda content: content.update(parts)


def change_in(part, **values):
    return lambda content: content[part].update(values)


def change_moments(moments):
    return lambda content: content["optimizer"]["state"][0].update(exp_avg=moments)


BOTH, RESUME = ("--resume", "--evaluate"), ("--resume",)


@pytest.mark.parametrize(("spoil", "message", "flags"), [
    (change(script="ppo_cartpole"), "it was made by ppo_cartpole.py, format 2", BOTH),
    (change(format_version=1), "it was made by ppo_atari.py, format 1", BOTH),
    (change(format_version=None), "it was made by ppo_atari.py, format None", BOTH),
    (change(args=[1, 2]), "", BOTH),
    (lambda content: content.pop("args"), "args", BOTH),
    (lambda content: content.pop("agent"), "agent", BOTH),
    (change_in("agent", **{"trunk.1.weight": torch.zeros(512, 65)}), "size mismatch for trunk.1.weight", BOTH),
    (change_in("agent", **{"actor.weight": [1, 2]}), "", BOTH),
    (lambda content: content["agent"].pop("actor.bias"), "actor.bias", BOTH),
    (lambda content: content["agent"]["critic.bias"].fill_(torch.nan), "a weight is not finite", BOTH),
    (lambda content: content.pop("counters"), "counters", BOTH),
    (change(counters=[1]), "", BOTH),
    (change(counters={}), "its counters are not whole", BOTH),
    (change_in("args", gamma="high"), "its gamma is of another type", BOTH),
    (change_in("args", num_envs=[1, 2]), "its num_envs is of another type", BOTH),
    (change_in("args", eval_episodes=None), "its eval_episodes is of another type", BOTH),
    (change_moments(torch.zeros(3, 3)), "optimizer has other shapes", RESUME),
    (change_moments(torch.tensor(0.0)), "optimizer has other shapes", RESUME),
    (change_moments(0.0), "", RESUME),
    (lambda content: content["optimizer"].pop("param_groups"), "param_groups", RESUME),
    (change(optimizer={"state": {}, "param_groups": []}), "param", RESUME),
    (change(optimizer=[]), "", RESUME),
])  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_refused(finished, tmp_path, monkeypatch, capsys, spoil, message, flags):
    content = load(finished)
    spoil(content)
    torch.save(content, tmp_path / "latest.pt")
    for flag in flags:
        assert message in refused(monkeypatch, capsys, tmp_path / "latest.pt", flag=flag)


@pytest.mark.parametrize("content", [[1, 2], {"weights": torch.zeros(3)}], ids=["list", "weights"])
def test_a_file_of_another_program_is_refused(tmp_path, monkeypatch, capsys, content):
    torch.save(content, tmp_path / "other.pt")
    refused(monkeypatch, capsys, tmp_path / "other.pt", flag="--evaluate")


def test_a_stored_number_out_of_range_is_refused_before_environments_are_made(finished, tmp_path, monkeypatch, capsys):
    content = load(finished)
    content["args"]["num_envs"] = 10_000_000
    torch.save(content, tmp_path / "latest.pt")
    monkeypatch.setattr(script, "make_envs", lambda *_: pytest.fail("an environment was made"))
    for flag, path in (("--evaluate", tmp_path / "latest.pt"), ("--resume", tmp_path)):
        # The batch of a run that goes on is looked at first, unless it fits.
        rest = ["--num-steps=32"] if flag == "--evaluate" else []
        status, line = failed(monkeypatch, capsys, flag, str(path), "--total-timesteps=320000000", *SHORT, *rest)
        assert (status, line) == (2, "error: --num-envs 10000000 must be between 1 and 10,000\n")


def test_whole_numbers_stand_for_others(finished, tmp_path, monkeypatch):
    """As they come where a user's own program calls `train` with Args(gamma=1)."""
    content = load(finished)
    content["args"]["gamma"] = 1
    torch.save(content, tmp_path / "latest.pt")
    assert arguments_of(monkeypatch, "--resume", str(tmp_path)).gamma == 1


def test_another_environment_is_refused(copied, monkeypatch, capsys):
    """A stack of 4 images, where the checkpoint has single ones."""
    flags = ("--env-id=small_envs:RampColour-v0",)
    assert "size mismatch for trunk.0.0.weight" in refused(monkeypatch, capsys, copied / "latest.pt", *flags)


def test_renamed_arguments_are_named_and_left_out(finished, tmp_path, monkeypatch, capsys):
    """A user has renamed --clip-coef in the file: the old one is dropped, the new one has its default."""
    content = load(finished)
    content["args"]["clip_range"] = content["args"].pop("clip_coef") + 0.5
    torch.save(content, tmp_path / "latest.pt")
    assert arguments_of(monkeypatch, "--resume", str(tmp_path)).clip_coef == 0.1
    err = capsys.readouterr().err
    assert err == f"{tmp_path}: left out clip_range=0.6: this script has no such argument\n"


def test_a_run_goes_on_where_an_argument_of_its_batch_was_renamed(finished, tmp_path, monkeypatch, capsys):
    content = load(finished)
    content["args"]["horizon"] = steps = content["args"].pop("num_steps")
    torch.save(content, tmp_path / "latest.pt")
    command_line(monkeypatch, "--resume", str(tmp_path), f"--num-steps={steps}", *SHORT)
    assert "this run is finished, at step 128" in capsys.readouterr().out.splitlines()


# ----- Evaluation and agent files -----
def test_an_agent_file_is_evaluated_but_not_resumed(finished, tmp_path, monkeypatch, capsys):
    content = load(finished)
    del content["optimizer"]
    content["agent"] = {name: tensor.half() for name, tensor in content["agent"].items()}
    path = tmp_path / "agent.pt"
    torch.save(content, path)
    command_line(monkeypatch, "--evaluate", str(path), *SHORT)
    assert "eval: mean=3 std=0 min=3 max=3 episodes=2 mean_length=3" in capsys.readouterr().out.splitlines()
    reason = refused(monkeypatch, capsys, path)
    assert reason == "it has no optimizer: an agent file can be evaluated, not resumed"


# ----- Run folders -----
def test_two_runs_of_one_second_get_two_folders(tmp_path, monkeypatch, capsys):
    for milliseconds in (0, 1):
        moment = 1_700_000_000 * 10**9 + milliseconds * 10**6
        monkeypatch.setattr(time, "time_ns", lambda moment=moment: moment)
        script.train(tiny(tmp_path, total_timesteps=64))
    name = "small_envs-Ramp3Trunc-v0__ppo_atari__1__170000000000"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}0", f"{name}1"]
    # Nor do two of one moment share one.
    before = hashes(tmp_path)
    status, line = failed(monkeypatch, capsys, *flags_of(tiny(tmp_path, total_timesteps=64)))
    assert status == 2
    assert line.startswith(f"error: --run-dir {tmp_path}: [Errno ")
    assert f"{name}1" in line
    assert hashes(tmp_path) == before
    for folder in tmp_path.iterdir():
        assert [step for step, _ in scalars(folder)["losses/entropy"]] == [64]

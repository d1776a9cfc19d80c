"""What tests of several scripts need to train for an instant, and to look at what such a run leaves behind."""

import dataclasses
import hashlib
import importlib
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from sync_copies import SCRIPTS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

START = {"eval_episodes": 2, "eval_every": 0, "checkpoint_every": 0, "threads": 1, "cuda": False, "progress": False}
PPO = {"num_envs": 2, "num_steps": 32, "num_minibatches": 2, "update_epochs": 2, "total_timesteps": 128}
"""64 samples an iteration in 2 minibatches, twice over: 4 updates an iteration; 2 iterations"""
DQN = {"num_envs": 2, "learning_starts": 20, "batch_size": 4, "buffer_size": 100, "target_network_frequency": 20}
DQN |= {"total_timesteps": 100}
IMAGES, VECTORS = {"env_id": "small_envs:Ramp3Trunc-v0"}, {"env_id": "small_envs:VectorRamp3Trunc-v0"}
SMALL = {
    "ppo_atari": PPO | IMAGES,
    "a2c_atari": {"num_envs": 2, "num_steps": 32, "total_timesteps": 128} | IMAGES,
    "dqn_atari": DQN | IMAGES,
    "ppo_cartpole": PPO | VECTORS,
    "ppo_continuous": PPO | {"env_id": "small_envs:Line3Trunc-v0"},
    "rpo_continuous": PPO | {"env_id": "small_envs:Line3Trunc-v0"},
    "dqn_cartpole_vec": DQN | VECTORS,
    "dqn_cartpole_pixels": DQN | IMAGES,
    "dqn_balancing_plate": DQN,
    # Episodes of one length leave nothing to learn with the baseline.
    "reinforce_bullet_cartpole": VECTORS
    | {"num_envs": 2, "episodes_per_update": 2, "total_episodes": 8, "baseline": False},
}
"""arguments with which a script trains for an instant"""
every_script = pytest.mark.parametrize("name", [Path(script).stem for script in SCRIPTS])


def small_run(name, run_dir, **changes):
    """Returns a script, and arguments with which it trains for an instant."""
    script = importlib.import_module(name)
    return script, script.Args(**{**START, **SMALL[name], "run_dir": str(run_dir), **changes})


def flags_of(args):
    """Returns the command line that gives these arguments."""
    flags = []
    for name, value in dataclasses.asdict(args).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, tuple):
            flags += [flag, *map(str, value)]
        elif value is not None:
            flags.append(f"{flag}={value}")
    return flags


def only_run(run_dir):
    (folder,) = Path(run_dir).iterdir()
    return folder


def load(folder, name="latest.pt"):
    return torch.load(folder / name, weights_only=True)


def scalars(folder):
    """Returns {tag: [(step, value), ...]} of all event files in a run folder, purged as TensorBoard purges."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def hashes(folder):
    """Returns a hash of each file by its path below the folder."""
    files = sorted(path for path in folder.glob("**/*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def assert_equal(one, other, where=""):
    """Compares nested dicts, lists and tensors bit for bit."""
    if isinstance(one, torch.Tensor):
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


def spy(monkeypatch, owner, name, note):
    """Lets `note(*arguments)` see each call of a function, or of a method, which does what it always did."""
    function = getattr(owner, name)

    def noting(*args, **kwargs):
        note(*args, **kwargs)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, noting)


def spy_runs(monkeypatch, script, note):
    """Lets `note(run)` see each run of a script as it is made."""
    init = script.Run.__init__

    def noting(run, *args, **modules):
        init(run, *args, **modules)
        note(run)

    monkeypatch.setattr(script.Run, "__init__", noting)


def command_line(script, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *flags])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    # A process ends with main; this one goes on.
    signums = [x for x in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", None)) if x]
    handlers = {signum: signal.getsignal(signum) for signum in signums}
    try:
        script.main()
    finally:
        getattr(script, "signals", []).clear()  # compare_runs.py has none
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def failed(script, monkeypatch, capsys, *flags):
    """Runs the command line, which must fail; returns exit status and what it says on standard error, as one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        command_line(script, monkeypatch, *flags)
    text = capsys.readouterr().err
    assert "Traceback" not in text
    if not text.startswith("error: "):
        # What the class of arguments checks comes in the parser's box.
        assert "--help" in text
        return exit_info.value.code, re.sub(r"[│|\s]+", " ", text)
    assert text.count("\n") == 1, text
    return exit_info.value.code, text


def resume(script, monkeypatch, path, *flags):
    """Goes on with a run, on a clock that is a minute ahead.

    TensorBoard orders event files by the second in their names, and a real start takes longer than one.
    """
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 60)
    command_line(script, monkeypatch, "--resume", str(path), "--threads=1", "--no-cuda", "--no-progress", *flags)

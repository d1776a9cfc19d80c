"""What tests of the DQN scripts share: short runs whose steps, updates and ends can be counted by hand."""

import dataclasses

import pytest
from short_runs import command_line, flags_of, only_run, spy

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


def small_id(script, name):
    """Returns the id of an environment of small_envs.py as the script takes it, of images or of vectors."""
    return f"small_envs:{'' if script.__name__ == 'dqn_atari' else 'Vector'}{name}-v0"


def tiny(script, run_dir, env="Ramp3Trunc", **changes):
    own = {} if script.__name__ == "dqn_atari" else {"hidden_sizes": (8,)}
    env_id = env if "-" in env else small_id(script, env)
    return script.Args(**{**TINY, **own, "env_id": env_id, "run_dir": str(run_dir), **changes})


def memories_of(script, monkeypatch):
    """Returns the list in which every replay memory will be that the script makes."""
    made = []
    spy(monkeypatch, script.ReplayBuffer, "__init__", lambda self, *_: made.append(self))
    return made


def turns_of(script, monkeypatch):
    """Returns a list to which each turn of the training loop will add its updates (u) and target updates (c)."""
    turns = []

    def append(letter):
        turns[-1] += letter

    spy(monkeypatch, script.ReplayBuffer, "add", lambda *_: turns.append(""))
    spy(monkeypatch, script, "q_learning_loss", lambda *_: append("u"))
    spy(monkeypatch, script, "update_target", lambda *_: append("c"))
    return turns


def updates_of(checkpoint):
    """Returns how many steps the optimizer has made."""
    (steps,) = {int(x["step"]) for x in checkpoint["optimizer"]["state"].values()}
    return steps


def interrupt(script, monkeypatch, args, turn):
    """Trains until the first environment sends this process SIGTERM in a turn; returns the run folder."""
    monkeypatch.setenv("SIGNAL_AT", f"{turn}:SIGTERM")
    with pytest.raises(SystemExit) as exit_info:
        command_line(script, monkeypatch, *flags_of(dataclasses.replace(args, env_id=small_id(script, "SignalAt"))))
    assert exit_info.value.code == 143
    return only_run(args.run_dir)

"""dqn_cartpole_vec.py and dqn_atari.py: targets, schedules, when updates happen, what is logged, and resumed runs."""

import contextlib
import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import small_envs
import torch
from conftest import ROOT
from gymnasium.vector import SyncVectorEnv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import dqn_atari
import dqn_cartpole_vec

both = pytest.mark.parametrize("script", [dqn_cartpole_vec, dqn_atari], ids=lambda script: script.__name__)
posix = pytest.mark.skipif(os.name == "nt", reason="Windows ends a process at once instead of sending SIGTERM")
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


def small_id(script, name):
    """Returns the id of a small environment; for vectors the one that shows a number instead of an image."""
    return f"small_envs:{'Vector' if script is dqn_cartpole_vec else ''}{name}-v0"


def tiny(script, run_dir, env="Ramp3Trunc", **changes):
    own = {"hidden_sizes": (8,)} if script is dqn_cartpole_vec else {}
    env_id = env if "-" in env else small_id(script, env)
    return script.Args(**{**TINY, **own, "env_id": env_id, "run_dir": str(run_dir), **changes})


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


def load(folder):
    return torch.load(folder / "latest.pt", weights_only=True)


def scalars(folder):
    """Returns {tag: [(step, value), ...]} of all event files in a run folder, purged as TensorBoard purges."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


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


def memories_of(monkeypatch, script):
    """Returns the list in which every replay memory will be that the script makes."""
    made = []
    spy(monkeypatch, script.ReplayBuffer, "__init__", lambda self, *_: made.append(self))
    return made


def turns_of(monkeypatch, script):
    """Returns a list to which each turn of the training loop will add its updates (u) and target updates (c)."""
    turns = []

    def append(letter):
        turns[-1] += letter

    spy(monkeypatch, script.ReplayBuffer, "add", lambda *_: turns.append(""))
    spy(monkeypatch, script, "q_learning_loss", lambda *_: append("u"))
    spy(monkeypatch, script, "update_target", lambda *_: append("c"))
    return turns


def command_line(script, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *flags])
    monkeypatch.setattr(sys, "path", list(sys.path))
    script.main()


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


def interrupt(script, monkeypatch, args, turn):
    """Trains until the first environment sends this process SIGTERM in a turn; returns the run folder."""
    monkeypatch.setenv("SIGNAL_AT", f"{turn}:SIGTERM")
    with pytest.raises(script.Interrupted) as exit_info:
        script.train(dataclasses.replace(args, env_id=small_id(script, "SignalAt")))
    assert exit_info.value.code == 143
    return only_run(args.run_dir)


# ----- Targets and losses -----
NEXT_TARGET_Q = [[10.0, 3.0], [10.0, 3.0], [3.0, 10.0], [-4.0, -2.0]]
NEXT_Q = [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [5.0, 1.0]]


@both
@pytest.mark.parametrize(
    ("next_q", "targets"),
    [
        # The largest of the target network: 1 + 0.99 * 10 = 10.9; nothing after a termination; 0 + 9.9; 2 - 1.98.
        (None, [10.9, 1.0, 9.9, 0.02]),
        # Action 1, 1, 1, 0 is picked by the other network: 1 + 2.97; a termination; 0 + 9.9; 2 - 3.96.
        (NEXT_Q, [3.97, 1.0, 9.9, -1.96]),
    ],
    ids=["plain", "double"],
)
def test_targets(script, next_q, targets):
    rewards, terminations = torch.tensor([1.0, 1.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    next_q = next_q if next_q is None else torch.tensor(next_q)
    got = script.td_targets(rewards, terminations, torch.tensor(NEXT_TARGET_Q), next_q, 0.99)
    torch.testing.assert_close(got, torch.tensor(targets))


@both
def test_targets_of_shapes_that_would_broadcast_are_refused(script):
    with pytest.raises(AssertionError, match="want"):
        script.td_targets(torch.zeros(4, 1), torch.zeros(4), torch.zeros(4, 2), None, 0.9)


def linear(weight, bias):
    network = nn.Linear(1, 2)
    with torch.no_grad():
        network.weight.copy_(torch.tensor(weight).unsqueeze(-1))
        network.bias.copy_(torch.tensor(bias))
    return network


def two_transitions(script):
    return script.Batch(
        obs=torch.tensor([[1.0], [2.0]]),
        next_obs=torch.tensor([[2.0], [3.0]]),
        actions=torch.tensor([0, 1]),
        rewards=torch.tensor([1.0, -1.0]),
        terminations=torch.tensor([0.0, 1.0]),
    )


@both
@pytest.mark.parametrize(
    ("double", "loss", "value", "gradient"),
    [
        # Q(1) = [1, 0.5], Q(2) = [2, 1.5]: the actions 0 and 1 are worth 1 and 1.5, on average 1.25.
        # Target network at 2: [2, 4]; so 1 + 0.5 * 4 = 3, and -1 after the termination. Errors -2 and 2.5.
        # Half of the gradient 2 * error / 2 goes to each weight times its observation: -2 * 1 and 2.5 * 2.
        (False, "mse", (4 + 6.25) / 2, [-2.0, 5.0]),
        # Half of 1.5 and of 2; the gradients of single errors are cut to -1 and 1.
        (False, "huber", (1.5 + 2.0) / 2, [-0.5, 1.0]),
        # The learning network picks action 0 at 2: 1 + 0.5 * 2 = 2. Errors -1 and 2.5.
        (True, "mse", (1 + 6.25) / 2, [-1.0, 5.0]),
        (True, "huber", (0.5 + 2.0) / 2, [-0.5, 1.0]),
    ],
)
def test_the_loss_of_linear_networks(script, double, loss, value, gradient):
    q_network, target_network = linear([1.0, 1.0], [0.0, -0.5]), linear([1.0, 1.0], [0.0, 2.0])
    got, mean_q = script.q_learning_loss(q_network, target_network, two_transitions(script), 0.5, double, loss)
    assert got.item() == pytest.approx(value)
    assert mean_q.item() == pytest.approx(1.25)
    assert not mean_q.requires_grad
    got.backward()
    assert q_network.weight.grad.flatten().tolist() == pytest.approx(gradient)
    assert target_network.weight.grad is None
    assert target_network.bias.grad is None


@both
@pytest.mark.parametrize("double", [False, True])
def test_no_gradient_flows_through_the_targets(script, double):
    """With one network for both the targets move with it, but are taken as constants."""
    network = linear([1.0, 1.0], [0.0, -0.5])
    loss, _ = script.q_learning_loss(network, network, two_transitions(script), 0.5, double, "mse")
    loss.backward()
    # Targets 1 + 0.5 * 2 = 2 and -1, errors -1 and 2.5. Through the first target 0.5 * 2 * 1 would be added.
    assert network.weight.grad.flatten().tolist() == pytest.approx([-1.0, 5.0])
    assert network.bias.grad.tolist() == pytest.approx([-1.0, 2.5])


@both
def test_a_target_network_follows_by_a_share_or_becomes_a_copy(script):
    q_network, target_network = linear([1.0, -3.0], [0.1, 7e-5]), linear([2.0, 5.0], [0.3, 1e6])
    before = deepcopy(q_network.state_dict())
    script.update_target(q_network, target_network, 0.25)
    assert target_network.weight.flatten().tolist() == pytest.approx([1.75, 3.0])
    assert target_network.bias.tolist() == pytest.approx([0.25, 750_000.0])
    script.update_target(q_network, target_network, 1.0)
    assert_equal(dict(target_network.state_dict()), dict(q_network.state_dict()))
    assert_equal(dict(q_network.state_dict()), dict(before))
    # A copy and not the same.
    assert q_network.weight.data_ptr() != target_network.weight.data_ptr()


# ----- Exploration -----
@both
@pytest.mark.parametrize(
    ("start", "end", "duration", "t", "value"),
    [
        (1.0, 0.05, 250_000, 0, 1.0),
        (1.0, 0.05, 250_000, 125_000, 0.525),
        (1.0, 0.05, 250_000, 250_000, 0.05),
        (1.0, 0.05, 250_000, 499_999, 0.05),
        (1.0, 0.05, 0, 0, 0.05),
        (1.0, 0.05, 0.0, 7, 0.05),
        # Upwards, and of a length that is no whole number.
        (0.0, 1.0, 2.5, 1, 0.4),
        (0.0, 1.0, 2.5, 3, 1.0),
    ],
)
def test_a_schedule_goes_straight_from_start_to_end_and_stays(script, start, end, duration, t, value):
    assert script.linear_schedule(start, end, duration, t) == pytest.approx(value)


@both
def test_each_environment_explores_for_itself(script):
    """10,000 environments, epsilon 0.5 and 5 actions, of which 3 is best: it is taken by 0.5 + 0.5 / 5 = 60 %."""
    torch.manual_seed(0)
    q_values = torch.tensor([0.0, 1.0, 2.0, 9.0, -1.0]).expand(10_000, 5)
    counts = torch.bincount(script.epsilon_greedy(q_values, 0.5), minlength=5)
    # 6,000 with a deviation of 49; the other four have 1,000 each, with a deviation of 30.
    assert counts[3].item() == pytest.approx(6000, abs=5 * 49)
    assert counts[[0, 1, 2, 4]].tolist() == pytest.approx([1000] * 4, abs=5 * 30)


@both
def test_epsilon_0_is_greedy_and_1_is_uniform(script):
    torch.manual_seed(0)
    q_values = torch.randn(10_000, 4)
    assert torch.equal(script.epsilon_greedy(q_values, 0.0), q_values.argmax(-1))
    actions = script.epsilon_greedy(q_values, 1.0)
    assert torch.bincount(actions, minlength=4).tolist() == pytest.approx([2500] * 4, abs=5 * 44)
    # Whatever the values say: a quarter agrees by chance.
    assert (actions == q_values.argmax(-1)).sum().item() == pytest.approx(2500, abs=5 * 44)


@both
def test_a_network_acts_greedily_or_with_its_epsilon(script):
    torch.manual_seed(0)
    if script is dqn_atari:
        network, obs = script.QNetwork((1, 36, 36), 2, epsilon=0.2), torch.zeros(4000, 1, 36, 36, dtype=torch.uint8)
    else:
        network, obs = script.QNetwork(3, 2, (4,), epsilon=0.2), torch.zeros(4000, 3)
    with torch.no_grad():
        best = network(obs).argmax(-1)
        assert torch.equal(network.act(obs, greedy=True), best)
        # Half of the random actions are the best one: 10 % of 4,000 differ, with a deviation of 19.
        assert (network.act(obs, greedy=False) != best).sum().item() == pytest.approx(400, abs=5 * 19)


def test_pixels_are_scaled_to_1_and_left_as_they_are():
    torch.manual_seed(0)
    network = dqn_atari.QNetwork((4, 84, 84), 6)
    obs = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    before = obs.clone()
    with torch.no_grad():
        values = network(obs)
        right = network.head(network.trunk(obs.double().div(255).float()))
    assert values.shape == (3, 6)
    assert torch.equal(obs, before)
    torch.testing.assert_close(values, right, rtol=1e-5, atol=1e-5)


def test_hidden_layers_are_those_asked_for():
    network = dqn_cartpole_vec.QNetwork(3, 2, (5, 7))
    assert [tuple(x.shape) for x in network.parameters()] == [(5, 3), (5,), (7, 5), (7,), (2, 7), (2,)]
    linear_network = dqn_cartpole_vec.QNetwork(3, 2, ())
    assert [tuple(x.shape) for x in linear_network.parameters()] == [(2, 3), (2,)]
    # Numbers of other types are taken as float32.
    torch.testing.assert_close(network(torch.ones(1, 3, dtype=torch.float64)), network(torch.ones(1, 3)))


# ----- When updates happen -----
@both
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
    got = turns_of(monkeypatch, script)
    script.train(tiny(script, tmp_path, **{"learning_starts": 0, **changes}))
    assert got == turns
    checkpoint = load(only_run(tmp_path))
    assert checkpoint["counters"]["global_step"] == len(turns) * changes["num_envs"]
    assert checkpoint["counters"]["updates"] == "".join(turns).count("u")
    assert {x["step"].item() for x in checkpoint["optimizer"]["state"].values()} == {"".join(turns).count("u")}


@pytest.mark.parametrize(
    ("num_envs", "total", "starts", "global_step", "updates", "copies"),
    [
        # 4 steps at a time meet multiples of 10 only each fifth turn: `step % 10 == 0` would give 250 updates.
        (4, 5000, 0, 5000, 500, 10),
        # 1666 turns of 3 end at 4,998; a modulo would give 166 updates.
        (3, 5000, 0, 4998, 499, 9),
        (4, 3000, 1000, 3000, 200, 4),
        (32, 3000, 0, 2976, 297, 5),
    ],
)
def test_long_runs_have_exactly_the_updates_of_their_steps(
    tmp_path, monkeypatch, num_envs, total, starts, global_step, updates, copies
):
    copied = []
    spy(monkeypatch, dqn_cartpole_vec, "update_target", lambda *_: copied.append(1))
    changes = {"train_frequency": 10, "target_network_frequency": 500, "batch_size": 2, "learning_starts": starts}
    dqn_cartpole_vec.train(tiny(dqn_cartpole_vec, tmp_path, num_envs=num_envs, total_timesteps=total, **changes))
    counters = load(only_run(tmp_path))["counters"]
    assert (counters["global_step"], counters["updates"], len(copied)) == (global_step, updates, copies)


@both
def test_a_target_network_is_the_network_of_its_last_update(script, tmp_path):
    """Updates at 4, 8, ..., 40 and copies at 16 and 32: the copy of step 32 is no longer the network of step 40."""
    changes = {"learning_starts": 0, "target_network_frequency": 16}
    script.train(tiny(script, tmp_path / "32", total_timesteps=32, anneal_lr=False, start_e=0, end_e=0, **changes))
    script.train(tiny(script, tmp_path / "40", total_timesteps=40, anneal_lr=False, start_e=0, end_e=0, **changes))
    first, second = (load(only_run(tmp_path / name)) for name in ("32", "40"))
    assert_equal(first["target_network"], first["agent"])
    assert_equal(second["target_network"], first["agent"])
    for name, weights in second["agent"].items():
        assert not torch.equal(weights, second["target_network"][name]), name


# ----- What a run logs -----
LOSSES = {"losses/td_loss", "losses/q_values", "losses/grad_norm"}
EVALUATIONS = {"eval/return_mean", "eval/return_std", "eval/length_mean"}


@both
def test_a_run_logs_what_is_expected_at_its_steps(script, tmp_path):
    _, scores = script.train(tiny(script, tmp_path, eval_every=200))
    assert scores == [3.0, 3.0]
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
    assert load(only_run(tmp_path))["counters"]["episodes"] == 132


@both
def test_points_of_several_environments_fall_on_the_first_step_after_each_hundred(script, tmp_path):
    script.train(tiny(script, tmp_path, num_envs=3, total_timesteps=310, learning_starts=150))
    logged = scalars(only_run(tmp_path))
    # 3 * 34, 3 * 67, 3 * 100, and the last one of the run, 3 * 103.
    assert [step for step, _ in logged["charts/epsilon"]] == [102, 201, 300, 309]
    # There is no loss before the first update.
    assert [step for step, _ in logged["losses/td_loss"]] == [201, 300, 309]


@both
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


@both
def test_the_learning_rate_that_is_logged_is_the_one_that_is_used(script, tmp_path, monkeypatch):
    rates = []
    step = torch.optim.Adam.step

    def noting(self, *args, **kwargs):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", noting)
    script.train(tiny(script, tmp_path / "annealed"))
    assert len(rates) == 90
    # The first update, of step 44, comes in the turn from 42 on, the last one in the turn from 398 on.
    assert (rates[0], rates[-1]) == pytest.approx((1e-3 * (1 - 42 / 400), 1e-3 * (1 - 398 / 400)))
    rates.clear()
    script.train(tiny(script, tmp_path / "constant", anneal_lr=False))
    assert set(rates) == {1e-3}


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


def q_of(agent, script, number):
    """Returns the values of both actions where the vector is [number], or the image is `number` everywhere."""
    with torch.no_grad():
        if script is dqn_atari:
            return agent(torch.full((1, 1, 36, 36), number, dtype=torch.uint8))[0].tolist()
        return agent(torch.tensor([[float(number)]]))[0].tolist()


@both
@pytest.mark.parametrize("double", [False, True])
def test_the_values_of_a_single_step_are_its_rewards(script, tmp_path, double):
    """Bright pays 1 for action 1, dark for action 0, and nothing follows: gamma plays no part."""
    own = {"hidden_sizes": (32,), "learning_rate": 1e-2} if script is dqn_cartpole_vec else {"learning_rate": 1e-3}
    bright = 200 if script is dqn_atari else 1
    changes = {"total_timesteps": 1200, "target_network_frequency": 20, "gamma": 0.99, "double": double}
    agent, scores = script.train(tiny(script, tmp_path, "RightAction", **{**ANSWERS, **own, **changes}))
    assert scores == [1.0]
    assert q_of(agent, script, bright) == pytest.approx([0, 1], abs=0.1)
    assert q_of(agent, script, 0) == pytest.approx([1, 0], abs=0.1)


def value_of_a_constant_reward(script, tmp_path, double=False):
    """Trains with gamma 0.8 on 4 steps that pay 1 and look all the same, cut by a time limit; returns both values."""
    own = (
        {"hidden_sizes": (), "learning_rate": 2e-2, "anneal_lr": False}
        if script is dqn_cartpole_vec
        else {"learning_rate": 3e-4}
    )
    # 40 copies, after which 0.8^40 = 0.0001 of the first error is left.
    changes = {"total_timesteps": 1664, "target_network_frequency": 40, "gamma": 0.8, "double": double}
    agent, _ = script.train(tiny(script, tmp_path, "ConstantTrunc", **{**ANSWERS, **own, **changes}))
    return q_of(agent, script, 128 if script is dqn_atari else 1)


@both
@pytest.mark.parametrize("double", [False, True])
def test_a_reward_of_1_for_ever_is_worth_1_over_1_minus_gamma_across_time_limits(script, tmp_path, double):
    assert value_of_a_constant_reward(script, tmp_path, double) == pytest.approx([5, 5], abs=0.25)


@both
def test_a_time_limit_that_is_stored_as_an_end_gives_another_value(script, tmp_path, monkeypatch):
    """Then only 3 of 4 steps have a future, and Q = 1 + 0.8 * 3/4 * Q is 2.5."""
    step = SyncVectorEnv.step

    def ending(self, action):
        obs, reward, termination, truncation, infos = step(self, action)
        return obs, reward, termination | truncation, truncation, infos

    monkeypatch.setattr(SyncVectorEnv, "step", ending)
    assert value_of_a_constant_reward(script, tmp_path) == pytest.approx([2.5, 2.5], abs=0.35)


# ----- Environments -----
@both
@pytest.mark.parametrize(("first_action", "own"), [("NegativeStart", {-1, 0}), ("LateStart", {5, 6})])
def test_actions_that_do_not_start_at_0(script, tmp_path, monkeypatch, first_action, own):
    """The environment gets actions of its space and refuses others; the memory and the network count from 0."""
    memories, taken = memories_of(monkeypatch, script), set()
    spy(monkeypatch, small_envs.Ramp, "step", lambda self, action: taken.add(int(action)))
    args = tiny(script, tmp_path, f"Ramp{first_action}", total_timesteps=500)
    agent, scores = script.train(args)
    assert scores == [3.0, 3.0]
    assert taken == own
    assert set(memories[0].sample(500, CPU).actions.tolist()) == {0, 1}
    assert len(q_of(agent, script, 0)) == 2


@both
def test_a_memory_never_gives_what_the_environments_did_not_make(script, tmp_path, monkeypatch):
    """Each batch of a run, whose memory is overwritten many times, holds transitions that were stored before."""
    stored, batches = set(), []

    def note(self, obs, next_obs, action, reward, termination):
        rows = zip(obs, next_obs, action, reward, termination, strict=True)
        stored.update((a.tobytes(), b.tobytes(), int(c), float(d), bool(e)) for a, b, c, d, e in rows)

    sample = script.ReplayBuffer.sample

    def checking(self, *args):
        batch = sample(self, *args)
        rows = zip(*(x.numpy() for x in batch), strict=True)
        assert {(a.tobytes(), b.tobytes(), int(c), float(d), bool(e)) for a, b, c, d, e in rows} <= stored
        batches.append(1)
        return batch

    spy(monkeypatch, script.ReplayBuffer, "add", note)
    monkeypatch.setattr(script.ReplayBuffer, "sample", checking)
    script.train(tiny(script, tmp_path, "Ramp3Term", buffer_size=40))
    assert len(batches) == 90
    # Of [k] follows [k + 1], with either action and its own end: no more and no less.
    assert len(stored) == 6


@pytest.mark.parametrize("backend", ["ale", "gymnasium"])
def test_breakout_trains(tmp_path, monkeypatch, backend):
    """Stacks that are sampled are stacks that the environment gave, over lost lives and the ends of games."""
    monkeypatch.setattr(dqn_atari, "EVAL_MAX_STEPS", 20)
    stored, batches, turns = set(), [], []

    def note(self, obs, next_obs, action, reward, termination):
        turns.append(1)
        stored.update((a.tobytes(), b.tobytes()) for a, b in zip(obs, next_obs, strict=True))

    sample = dqn_atari.ReplayBuffer.sample

    def checking(self, *args):
        batch = sample(self, *args)
        assert {(a.tobytes(), b.tobytes()) for a, b in zip(batch.obs.numpy(), batch.next_obs.numpy(), strict=True)} <= (
            stored
        )
        batches.append(len(batch.obs))
        return batch

    spy(monkeypatch, dqn_atari.ReplayBuffer, "add", note)
    monkeypatch.setattr(dqn_atari.ReplayBuffer, "sample", checking)
    changes = {
        "backend": backend,
        "total_timesteps": 800,
        "learning_starts": 400,
        "train_frequency": 40,
        "start_e": 1,
        "end_e": 1,
    }
    args = tiny(dqn_atari, tmp_path, "BreakoutNoFrameskip-v4", batch_size=32, buffer_size=500, **changes)
    agent, _ = dqn_atari.train(args)
    assert (len(turns), batches) == (400, [32] * 10)
    assert agent.head.out_features == 4
    logged = scalars(only_run(tmp_path))
    assert all(math.isfinite(value) for tag in LOSSES for _, value in logged[tag])
    # Whole games, of more steps than a life has: not one point for each lost life.
    assert 2 <= len(logged["charts/episodic_return"]) <= 8
    assert min(value for _, value in logged["charts/episodic_length"]) > 100


@pytest.mark.parametrize(
    ("max_episode_steps", "length"),
    [
        # The limit that is registered, a shorter one, a longer one, and none.
        (None, 7),
        (5, 5),
        (9, 9),
        (0, 30),
    ],
)
def test_the_time_limit_is_the_registered_one_or_that_of_the_flag(tmp_path, monkeypatch, max_episode_steps, length):
    monkeypatch.setattr(dqn_cartpole_vec, "EVAL_MAX_STEPS", 30)
    memories = memories_of(monkeypatch, dqn_cartpole_vec)
    args = tiny(dqn_cartpole_vec, tmp_path, "RampLimit7", total_timesteps=100, max_episode_steps=max_episode_steps)
    _, scores = dqn_cartpole_vec.train(args)
    assert scores == [length, length]
    logged = scalars(only_run(tmp_path))
    assert logged["eval/length_mean"] == [(100, length)]
    # 50 turns of training: no end at all without a limit.
    ends = [] if max_episode_steps == 0 else [2 * length * k for k in range(1, 50 // length + 1) for _ in range(2)]
    assert logged.get("charts/episodic_length", []) == [(step, length) for step in ends]
    # A time limit is no end of the task.
    assert memories[0].sample(1000, CPU).terminations.max() == 0


def test_cartpole_is_cut_off_at_exactly_the_limit(tmp_path):
    """Always pushing to one side a pole falls after 8 to 11 steps."""
    for limit, lengths in ((5, {5}), (0, {8, 9, 10, 11})):
        args = tiny(dqn_cartpole_vec, tmp_path, "CartPole-v1", max_episode_steps=limit)
        with dqn_cartpole_vec.closing_envs(dqn_cartpole_vec.make_envs(args, 1, training=False)) as envs:
            agent = dqn_cartpole_vec.make_agent(args, envs, CPU)
            for parameter in agent.parameters():
                nn.init.zeros_(parameter)
            with dqn_cartpole_vec.StopSignal() as stop:
                evaluation = dqn_cartpole_vec.evaluate(agent, envs, 10, 1, True, CPU, stop)
        assert set(evaluation.lengths) <= lengths
        assert evaluation.scores == evaluation.lengths


# ----- Reproducibility -----
@both
def test_the_same_seed_gives_the_same_run_whatever_is_evaluated_and_saved(script, tmp_path, monkeypatch):
    runs = {
        "plain": {},
        "again": {},
        "evaluated": {"eval_every": 100, "eval_episodes": 3},
        "saved": {"checkpoint_every": 100, "save_replay": True},
        "bar": {"progress": True},
        "async": {"vector": "async"},
    }
    found = {}
    for name, changes in runs.items():
        if name == "bar":
            monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        # What another part of the program drew meanwhile must not matter.
        torch.rand(3)
        np.random.rand(3)  # noqa: NPY002
        script.train(tiny(script, tmp_path / name, "RightAction", **changes))
        folder = only_run(tmp_path / name)
        found[name] = (load(folder), scalars(folder))
        checkpoint, logged = found[name]
        for part in ("agent", "target_network", "optimizer"):
            assert_equal(checkpoint[part], found["plain"][0][part], f"{name}: {part}")
        for tag, points in found["plain"][1].items():
            if tag != "charts/SPS" and not tag.startswith("eval/"):
                assert logged[tag] == points, f"{name}: {tag}"
    script.train(tiny(script, tmp_path / "other", "RightAction", seed=2))
    for name, weights in load(only_run(tmp_path / "other"))["agent"].items():
        assert not torch.equal(weights, found["plain"][0]["agent"][name]), name


@both
def test_evaluations_do_not_disturb_environments_that_draw_from_numpy(script, tmp_path):
    for name, changes in (("one", {}), ("other", {"eval_every": 100})):
        script.train(tiny(script, tmp_path / name, "GlobalDraw", **changes))
    one, other = (load(only_run(tmp_path / name)) for name in ("one", "other"))
    assert_equal(one["agent"], other["agent"])


# The main guard matters: a spawned process imports this file once more.
SPAWN_DRIVER = """
import multiprocessing
import dqn_cartpole_vec

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    dqn_cartpole_vec.main()
"""


def child(tmp_path, text, *flags, **variables):
    """Starts a program in a process of its own."""
    (tmp_path / "driver.py").write_text(text)
    path = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    return subprocess.Popen(
        [sys.executable, str(tmp_path / "driver.py"), *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def ended_in_time(process):
    """Kills a process that hangs, and one that a failed test leaves behind."""
    watchdog = threading.Timer(300, process.kill)
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def test_the_spawn_start_method_gives_the_same_weights(tmp_path):
    args = tiny(dqn_cartpole_vec, tmp_path / "spawned", vector="async")
    with ended_in_time(child(tmp_path, SPAWN_DRIVER, *flags_of(args))) as process:
        _, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    dqn_cartpole_vec.train(tiny(dqn_cartpole_vec, tmp_path / "plain"))
    spawned, plain = (load(only_run(tmp_path / name)) for name in ("spawned", "plain"))
    assert spawned["args"]["vector"] == "async"
    assert_equal(spawned["agent"], plain["agent"])


# ----- Resumed runs -----
def bytes_of(replay):
    """Returns what a memory holds, byte for byte; rows in between that were never written may hold anything."""
    return {name: column[: replay.filled].numpy().tobytes() for name, column in replay.columns.items()}


def loaded_by(monkeypatch, script):
    """Returns a dict that will hold what a resumed run starts with: counters, modules, bytes of the memory."""
    loaded, modules_of_run, load_replay = {}, {}, script.load_replay

    def note(checkpoint, path, counters, **modules):
        modules_of_run.update(modules)
        loaded.update(counters=dict(checkpoint["counters"]))

    def noting(path, replay, global_step):
        answer = load_replay(path, replay, global_step)
        loaded.update({name: deepcopy(module.state_dict()) for name, module in modules_of_run.items()})
        loaded.update(columns=bytes_of(replay))
        return answer

    spy(monkeypatch, script, "restore", note)
    monkeypatch.setattr(script, "load_replay", noting)
    return loaded


@both
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "no memory"])
def test_a_resumed_run_goes_on_where_it_was(script, tmp_path, monkeypatch, capsys, memory):
    """The signal comes in turn 75, so at step 150, between two points of the log."""
    script.train(tiny(script, tmp_path / "straight", "SignalAt"))
    straight = only_run(tmp_path / "straight")
    memories = memories_of(monkeypatch, script)
    capsys.readouterr()
    folder = interrupt(script, monkeypatch, tiny(script, tmp_path / "cut", save_replay=memory), 75)
    assert f"interrupted at step 150; go on with: python {script.__name__}.py --resume {folder}\n" in (
        capsys.readouterr().out
    )
    stopped = load(folder)
    # Updates at 44, 48, ..., 148; each of both environments has ended 25 episodes.
    counted = {name: stopped["counters"][name] for name in ("global_step", "updates", "episodes")}
    assert counted == {"global_step": 150, "updates": 27, "episodes": 50}
    assert (folder / "replay.bin").exists() == memory
    assert not list(folder.glob("*.tmp*"))
    kept = bytes_of(memories[0])
    # The log is whole up to here: no episode is missing that ended after the last point.
    assert [step for step, _ in scalars(folder)["charts/episodic_return"]][-2:] == [150, 150]
    assert [step for step, _ in scalars(folder)["charts/epsilon"]] == [100]

    loaded = loaded_by(monkeypatch, script)
    turns = turns_of(monkeypatch, script)
    resume(script, monkeypatch, folder)
    # What is loaded is what was saved, of the memory too.
    for name in ("agent", "target_network", "optimizer", "counters"):
        assert_equal(dict(loaded[name]), stopped[name], name)
    if memory:
        assert loaded["columns"] == kept
        assert min(map(len, kept.values())) >= 75
        assert "replay memory: 150 transitions\n" in capsys.readouterr().out
        # At once: the first turn reaches step 152.
        assert turns[:2] == ["u", ""]
    else:
        assert "replay memory: a new one, since there is none\n" in capsys.readouterr().out
        # Not before 40 steps more: up to step 190, after 20 turns, there is none.
        assert turns[:20] == [""] * 20
        assert turns[20] == "u"
    resumed = load(folder)
    updates = 90 if memory else 27 + 53
    assert resumed["counters"]["global_step"] == load(straight)["counters"]["global_step"] == 400
    assert resumed["counters"]["updates"] == updates
    assert load(straight)["counters"]["updates"] == 90
    assert {x["step"].item() for x in resumed["optimizer"]["state"].values()} == {updates}
    logged, logged_straight = scalars(folder), scalars(straight)
    for tag in ("charts/epsilon", "charts/learning_rate"):
        assert logged[tag] == logged_straight[tag], tag
    assert [step for step, _ in logged["losses/td_loss"]] == [100, 200, 300, 400]
    # The same run up to the signal.
    assert logged["losses/td_loss"][0] == logged_straight["losses/td_loss"][0]
    # New episodes begin at step 150, and none is logged twice or missing.
    ends = [6 * k for k in range(1, 26)] + [150 + 6 * k for k in range(1, 42)]
    for tag in ("charts/episodic_return", "charts/episodic_length"):
        assert logged[tag] == [(step, 3.0) for step in ends for _ in range(2)], tag
    # Only what --save-replay writes lies beside the checkpoint, and it is of the same step.
    assert (folder / "replay.bin").exists() == memory
    if memory:
        assert script.load_replay(folder / "replay.bin", memories[-1], 400)


@both
@pytest.mark.parametrize(("spoil", "why"), [
    (lambda path: path.write_bytes(path.read_bytes().replace(b'"global_step": 150', b'"global_step": 148')),
     "it is of step 148, the checkpoint of step 150"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "it is damaged ("),
    (lambda path: path.write_bytes(b"garbage"), "it is damaged ("),
    (None, "it was made with other sizes"),
], ids=["step", "cut", "garbage", "sizes"])  # fmt: skip
def test_a_memory_that_does_not_fit_is_ignored(script, tmp_path, monkeypatch, capsys, spoil, why):
    folder = interrupt(script, monkeypatch, tiny(script, tmp_path, save_replay=True), 75)
    flags = []
    if spoil:
        spoil(folder / "replay.bin")
    else:
        flags = ["--buffer-size=604"]
    turns = turns_of(monkeypatch, script)
    capsys.readouterr()
    resume(script, monkeypatch, folder, "--total-timesteps=200", *flags)
    assert f"replay memory: a new one, since {why}" in capsys.readouterr().out
    # 40 steps without an update, then at 192, 196 and 200.
    assert turns == [""] * 20 + ["u", "", "u", "", "uc"]


@both
def test_a_run_that_was_interrupted_again_starts_to_learn_when_it_would_have(script, tmp_path, monkeypatch):
    """Without a memory no update until step 190; saved at 160 with its memory, the run still waits until then."""
    folder = interrupt(script, monkeypatch, tiny(script, tmp_path), 75)
    monkeypatch.setenv("SIGNAL_AT", "5:SIGTERM")
    with pytest.raises(SystemExit) as exit_info:
        resume(script, monkeypatch, folder, "--save-replay")
    assert exit_info.value.code == 143
    assert load(folder)["counters"]["global_step"] == 160
    turns = turns_of(monkeypatch, script)
    resume(script, monkeypatch, folder, "--total-timesteps=200")
    assert turns == [""] * 15 + ["u", "", "u", "", "uc"]


@both
def test_a_run_interrupted_at_its_start_goes_on(script, tmp_path, monkeypatch, capsys):
    """The signal comes before the first step: the memory that is saved is empty, and no damage."""
    args = tiny(script, tmp_path, save_replay=True)
    make_run_folder = script.make_run_folder

    def signalling(args):
        signal.raise_signal(signal.SIGTERM)
        return make_run_folder(args)

    monkeypatch.setattr(script, "make_run_folder", signalling)
    with pytest.raises(script.Interrupted):
        script.train(args)
    monkeypatch.undo()
    folder = only_run(tmp_path)
    assert load(folder)["counters"]["global_step"] == 0
    capsys.readouterr()
    resume(script, monkeypatch, folder)
    assert "replay memory: 0 transitions\n" in capsys.readouterr().out
    counters = load(folder)["counters"]
    assert (counters["global_step"], counters["updates"]) == (400, 90)


@both
def test_a_finished_run_says_so_and_logs_nothing(script, tmp_path, monkeypatch, capsys):
    script.train(tiny(script, tmp_path, save_replay=True))
    folder = only_run(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    of_run = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval:")]
    resume(script, monkeypatch, folder)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("this run is finished, at step 400; a larger --total-timesteps")
    assert [line for line in lines if line.startswith("eval:")] == of_run
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@both
def test_a_finished_run_goes_on_with_its_memory(script, tmp_path, monkeypatch):
    script.train(tiny(script, tmp_path, save_replay=True))
    folder = only_run(tmp_path)
    turns = turns_of(monkeypatch, script)
    resume(script, monkeypatch, folder, "--total-timesteps=420")
    assert turns == ["", "u", "", "u", "", "u", "", "u", "", "uc"]
    assert load(folder)["counters"]["updates"] == 95


@both
def test_other_shapes_are_refused(script, tmp_path, monkeypatch, capsys):
    script.train(tiny(script, tmp_path))
    folder = str(only_run(tmp_path))
    if script is dqn_atari:
        other, tensor = ["--env-id=BreakoutNoFrameskip-v4"], "trunk.0.0.weight has the shape (32, 1, 8, 8)"
    else:
        other, tensor = ["--hidden-sizes", "9"], "layers.0.weight has the shape (8, 1), these arguments want (9, 1)"
    for flag in ("--resume", "--evaluate"):
        flags = (flag, folder, "--total-timesteps=800", "--threads=1", "--no-cuda", *other)
        status, text = failed(script, monkeypatch, capsys, *flags)
        assert status == 2
        assert f"{folder}: the tensor {tensor}" in text


@both
def test_an_agent_file_is_evaluated_as_its_run_but_not_resumed(script, tmp_path, monkeypatch, capsys):
    script.train(tiny(script, tmp_path / "run", eval_greedy=False))
    of_run = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("eval:", "episode "))]
    content = load(only_run(tmp_path / "run"))
    path = tmp_path / "agent.pt"
    torch.save({name: content[name] for name in ("script", "format_version", "args", "counters", "agent")}, path)
    command_line(script, monkeypatch, "--evaluate", str(path), "--threads=1", "--no-cuda")
    assert [x for x in capsys.readouterr().out.splitlines() if x.startswith(("eval:", "episode "))] == of_run
    flags = ("--resume", str(path), "--total-timesteps=800", "--threads=1", "--no-cuda")
    status, text = failed(script, monkeypatch, capsys, *flags)
    assert status == 2
    assert re.search("an agent file has no .*: it can be evaluated, not resumed", text)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["agent.pt", "run"]


# ----- Runs that are cut off -----
@posix
@both
def test_sigterm_leaves_a_memory_that_fits_its_checkpoint(script, tmp_path, monkeypatch, capsys):
    command = [sys.executable, str(ROOT / f"{script.__name__}.py")]
    args = tiny(script, tmp_path / "runs", total_timesteps=10**6, checkpoint_every=100, save_replay=True)
    process = subprocess.Popen(
        [*command, *flags_of(args)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with ended_in_time(process):
        while not list(tmp_path.glob("runs/*/replay.bin")):
            assert process.poll() is None, process.stderr.read()
            threading.Event().wait(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
    assert process.returncode == 143
    assert err.strip() == "stopping; a second signal ends at once"
    folder = only_run(tmp_path / "runs")
    step = load(folder)["counters"]["global_step"]
    assert f"interrupted at step {step:,}; go on with: " in out
    assert not list(folder.glob("*.tmp*"))
    turns = turns_of(monkeypatch, script)
    resume(script, monkeypatch, folder, f"--total-timesteps={step + 4}")
    assert "replay memory: a new one" not in capsys.readouterr().out
    # Of 4 steps one calls for an update.
    assert "".join(turns).count("u") == 1


# Says a line and blocks before the second memory takes the place of the first one.
BLOCKING_DRIVER = """
import os, pathlib, threading
import dqn_cartpole_vec

real = os.replace

def block(source, target):
    if pathlib.Path(target).name == "replay.bin" and pathlib.Path(target).exists():
        print("blocked", flush=True)
        threading.Event().wait()
    return real(source, target)

if __name__ == "__main__":
    os.replace = block
    dqn_cartpole_vec.main()
"""


def test_a_kill_while_a_memory_is_written_leaves_a_whole_checkpoint(tmp_path, monkeypatch, capsys):
    args = tiny(dqn_cartpole_vec, tmp_path / "runs", checkpoint_every=100, save_replay=True)
    with ended_in_time(child(tmp_path, BLOCKING_DRIVER, *flags_of(args))) as process:
        assert "blocked\n" in process.stdout
        process.kill()
        process.communicate()
    folder = only_run(tmp_path / "runs")
    # The checkpoint of step 200 is there, and the memory of step 100 whole.
    assert load(folder)["counters"]["global_step"] == 200
    assert (folder / "replay.bin").read_bytes().startswith(b'{"global_step": 100, ')
    assert len(list(folder.glob("replay.bin.tmp*"))) == 1
    resume(dqn_cartpole_vec, monkeypatch, folder)
    why = "since it is of step 100, the checkpoint of step 200"
    assert f"replay memory: a new one, {why}\n" in capsys.readouterr().out
    assert not list(folder.glob("*.tmp*"))
    # 40 updates up to step 200, and 40 of the steps 241 to 400.
    assert load(folder)["counters"]["updates"] == 40 + 40
    assert [step for step, _ in scalars(folder)["charts/epsilon"]] == [100, 200, 300, 400]


@both
def test_a_number_that_is_none_ends_the_run_and_keeps_the_checkpoint(script, tmp_path, monkeypatch, capsys):
    """This environment pays nan from its 50th step on, which is a turn of 2."""
    args = tiny(script, tmp_path, "NanLater", checkpoint_every=60)
    status, text = failed(script, monkeypatch, capsys, *flags_of(args))
    assert (status, text) == (1, "error: environment 0 gave reward = nan at step 100\n")
    checkpoint = load(only_run(tmp_path))
    assert checkpoint["counters"]["global_step"] == 60
    assert all(weights.isfinite().all() for weights in checkpoint["agent"].values())


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("RampNanObs", "environment 0 gave observation[0] = nan at step 100"),
        # The 17th episode ends with the 51st turn, and the next one begins.
        ("RampNanReset", "environment 0 gave observation[0] = nan at step 102"),
    ],
)
def test_observations_that_are_no_numbers_end_the_run(tmp_path, monkeypatch, capsys, env, message):
    args = tiny(dqn_cartpole_vec, tmp_path, env)
    status, text = failed(dqn_cartpole_vec, monkeypatch, capsys, *flags_of(args))
    assert (status, text) == (1, f"error: {message}\n")


@both
@pytest.mark.parametrize("turn", [0, 30])
def test_weights_that_overflow_are_never_saved(script, tmp_path, monkeypatch, turn):
    """One huge step in turn 22 spoils the weights; a signal before the next point of the log changes nothing."""
    args = tiny(script, tmp_path, "SignalAt", learning_rate=3e38, checkpoint_every=30)
    if turn:
        monkeypatch.setenv("SIGNAL_AT", f"{turn}:SIGTERM")
        args = dataclasses.replace(args, checkpoint_every=40)
    with pytest.raises(SystemExit) as exit_info:
        command_line(script, monkeypatch, *flags_of(args))
    assert exit_info.value.code in (1, 143)
    checkpoint = load(only_run(tmp_path))
    assert all(weights.isfinite().all() for weights in checkpoint["agent"].values())
    assert checkpoint["counters"]["global_step"] == (40 if turn else 30)


# ----- What a wrong use gets -----
def small_flags(script, tmp_path):
    return [flag for flag in flags_of(tiny(script, tmp_path / "runs")) if not flag.startswith("--exp-name")]


@both
@pytest.mark.parametrize(("flags", "message"), [
    (["--gamma=1.5"], "--gamma 1.5 must be a finite number at least 0 and at most 1"),
    (["--gamma=nan"], "--gamma nan must be a finite number at least 0 and at most 1"),
    (["--tau=0"], "--tau 0.0 must be a finite number above 0 and at most 1"),
    (["--tau=1.01"], "--tau 1.01 must be a finite number"),
    (["--start-e=1.1"], "--start-e 1.1 must be a finite number at least 0 and at most 1"),
    (["--end-e=-0.1"], "--end-e -0.1 must be a finite number at least 0 and at most 1"),
    (["--exploration-fraction=2"], "--exploration-fraction 2.0 must be a finite number at least 0 and at most 1"),
    (["--learning-rate=0"], "--learning-rate 0.0 must be a finite number above 0"),
    (["--learning-rate=inf"], "--learning-rate inf must be a finite number above 0"),
    (["--max-grad-norm=0"], "--max-grad-norm 0.0 must be a finite number above 0"),
    (["--num-envs=0"], "--num-envs 0 must be a finite number at least 1"),
    (["--buffer-size=0"], "--buffer-size 0 must be a finite number at least 1"),
    (["--batch-size=0"], "--batch-size 0 must be a finite number at least 1"),
    (["--train-frequency=0"], "--train-frequency 0 must be a finite number at least 1"),
    (["--target-network-frequency=0"], "--target-network-frequency 0 must be a finite number at least 1"),
    (["--learning-starts=-1"], "--learning-starts -1 must be a finite number at least 0"),
    (["--eval-episodes=0"], "--eval-episodes 0 must be a finite number at least 1"),
    (["--threads=-1"], "--threads -1 must be a finite number at least 0"),
    (["--checkpoint-every=-1"], "--checkpoint-every -1 must be a finite number at least 0"),
    (["--eval-every=-1"], "--eval-every -1 must be a finite number at least 0"),
    (["--seed=-1"], "--seed -1 must be a finite number at least 0 and at most 2,000,000,000"),
    (["--seed=3000000000"], "--seed 3000000000 must be a finite number at least 0 and at most 2,000,000,000"),
    (["--total-timesteps=1", "--learning-starts=0"], "--total-timesteps 1 must be at least num_envs = 2, one step of "),
    (["--loss=l1"], "--loss"),
    (["--vector=threads"], "--vector"),
    (["--num-envs=1.5"], "--num-envs"),
    (["--no-such-flag=3"], "--no-such-flag"),
    (["--cuda", "False"], "False"),
    (["--evaluate=nothing.pt"], "error: nothing.pt: there is no checkpoint file here, 'nothing.pt' is missing"),
    (["--resume=x", "--evaluate=y"], "error: --resume and --evaluate exclude each other"),
    (["--env-id=Pong"], "there is no environment of this id; the nearest: ALE/Pong-v5, "),
    (["--env-id=Foo-v0"], "--env-id Foo-v0: there is no environment of this id"),
    (["--env-id=nomodule:X-v0"], "--env-id nomodule:X-v0: there is no module 'nomodule' on the import path"),
    (["--env-id=Pendulum-v1"], "this script wants Discrete actions, not Box("),
    (["--env-id=Pendulum-v1"], "for a Box use ppo_continuous.py"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")  # fmt: skip
def test_a_wrong_value_is_refused(script, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    status, text = failed(script, monkeypatch, capsys, *small_flags(script, tmp_path), *flags)
    assert status == 2
    assert message in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("script", "flags", "message"), [
    (dqn_cartpole_vec, ["--buffer-size=1"], "--buffer-size 1 must be at least num_envs = 2"),
    (dqn_cartpole_vec, ["--hidden-sizes", "8", "0"], "--hidden-sizes 8 0 must be 1 or more each"),
    (dqn_cartpole_vec, ["--max-episode-steps=-1"], "--max-episode-steps -1 must be a finite number at least 0"),
    (dqn_cartpole_vec, ["--env-id=CartPole"], "there is no environment of this id; the nearest: CartPole-v"),
    (dqn_cartpole_vec, ["--env-id=small_envs:Ramp3Term-v0"], "wants a vector, not Box(0, 255, (1, 36, 36), uint8); for "
     "images use dqn_atari.py"),
    (dqn_cartpole_vec, ["--env-id=ALE/Pong-v5"], "for images use dqn_atari.py"),
    (dqn_cartpole_vec, ["--env-id=FrozenLake-v1"], "wants a vector, not Discrete(16); gymnasium.wrappers.FlattenObs"),
    (dqn_atari, ["--buffer-size=31"], "--buffer-size 31 must be at least 16 * num_envs = 32"),
    (dqn_atari, ["--backend=envpool"], "--backend"),
    (dqn_atari, ["--env-id=CartPole-v1"], "this script wants images, uint8 of 2 or 3 axes, not Box("),
    (dqn_atari, ["--env-id=CartPole-v1"], "for vectors use dqn_cartpole_vec.py"),
    (dqn_atari, ["--env-id=FrozenLake-v1"], "this script wants images, uint8 of 2 or 3 axes, not Discrete(16)"),
    (dqn_atari, ["--env-id=Pong-v4"], "skips a random number of frames; use PongNoFrameskip-v4 or ALE/Pong-v5"),
    (dqn_atari, ["--env-id=small_envs:RampSmall-v0"], "images (4, 20, 20) are too small, 36 x 36 is the least"),
    (dqn_atari, ["--env-id=small_envs:RightAction-v0", "--capture-video"], "small_envs:RightAction-v0 takes no render"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else getattr(x, "__name__", ""))  # fmt: skip
def test_a_wrong_use_of_one_script_is_refused(script, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    status, text = failed(script, monkeypatch, capsys, *small_flags(script, tmp_path), *flags)
    assert status == 2
    assert message in text
    assert list(tmp_path.iterdir()) == []


@both
def test_a_memory_larger_than_the_free_memory_is_refused(script, tmp_path, monkeypatch, capsys):
    """2^20 rows: two observations of one number and 16 bytes are 24 MiB, an image of 36 x 36 and 18 more 1,314 MiB."""
    need = 24 * 2**20 if script is dqn_cartpole_vec else 1314 * 2**20
    flags = [*small_flags(script, tmp_path), "--buffer-size=1048576", "--total-timesteps=4", "--learning-starts=0"]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=need - 1))
    status, text = failed(script, monkeypatch, capsys, *flags)
    gib = f"{need / 2**30:.2f}"
    assert (status, text) == (2, f"error: the storage takes {gib} GiB, more than the {gib} GiB that are free on cpu\n")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=need))
    command_line(script, monkeypatch, *flags)


@both
def test_a_run_that_would_never_learn_is_refused(script, tmp_path, monkeypatch, capsys):
    """The first update would come after the last step, and what is saved is untrained."""
    flags = [*small_flags(script, tmp_path), "--learning-starts=400"]
    status, text = failed(script, monkeypatch, capsys, *flags)
    assert status == 2
    assert "--learning-starts 400" in text
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_is_found_by_its_module(tmp_path, monkeypatch):
    """A user's module beside their own files, with an observation of another type."""
    (tmp_path / "my_ladder.py").write_text(
        "import gymnasium\nimport small_envs\n"
        "gymnasium.register('Mine-v0', lambda: gymnasium.wrappers.FlattenObservation(small_envs.Ramp(shape=(2, 2))))\n"
    )
    monkeypatch.chdir(tmp_path)
    flags = [*small_flags(dqn_cartpole_vec, tmp_path), "--env-id=my_ladder:Mine-v0", "--total-timesteps=100"]
    command_line(dqn_cartpole_vec, monkeypatch, *flags)
    folder = only_run(tmp_path / "runs")
    assert folder.name.startswith("my_ladder-Mine-v0__dqn_cartpole_vec__1__")
    assert load(folder)["agent"]["layers.0.weight"].shape == (8, 4)

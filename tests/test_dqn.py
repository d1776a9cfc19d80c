"""dqn_cartpole_vec.py, and the training that dqn_balancing_plate.py shares: targets, updates, logs, resumed runs."""

import dataclasses
import inspect
import math
import signal
import sys
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from short_runs import assert_equal, command_line, failed, flags_of, load, only_run, resume, scalars, spy, spy_runs
from torch import nn

import dqn_atari
import dqn_balancing_plate
import dqn_cartpole_vec as script

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
    "hidden_sizes": (8,),
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


def tiny(run_dir, env="Ramp3Trunc", script=script, **changes):
    env_id = env if "-" in env else f"small_envs:Vector{env}-v0"
    return script.Args(**{**TINY, "env_id": env_id, "run_dir": str(run_dir), **changes})


def memories_of(monkeypatch, script=script):
    """Returns the list in which every replay memory will be that the script makes."""
    made = []
    spy(monkeypatch, script.ReplayBuffer, "__init__", lambda self, *_: made.append(self))
    return made


def turns_of(monkeypatch, script=script):
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


def interrupt(monkeypatch, args, turn, *flags):
    """Trains until the first environment sends this process SIGTERM in a turn; returns the run folder."""
    monkeypatch.setenv("SIGNAL_AT", f"{turn}:SIGTERM")
    with pytest.raises(SystemExit) as exit_info:
        command_line(script, monkeypatch, *flags_of(dataclasses.replace(args, env_id="small_envs:VectorSignalAt-v0")))
    assert exit_info.value.code == 143
    return only_run(args.run_dir)


# ----- Targets and losses -----
NEXT_TARGET_Q = [[10.0, 3.0], [10.0, 3.0], [3.0, 10.0], [-4.0, -2.0]]
NEXT_Q = [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [5.0, 1.0]]


@pytest.mark.parametrize(
    ("next_q", "epsilon", "targets"),
    [
        # The largest of the target network: 1 + 0.99 * 10 = 10.9; nothing after a termination; 0 + 9.9; 2 - 1.98.
        (NEXT_TARGET_Q, 0.0, [10.9, 1.0, 9.9, 0.02]),
        # Action 1, 1, 1, 0 is picked by the other network: 1 + 2.97; a termination; 0 + 9.9; 2 - 3.96.
        (NEXT_Q, 0.0, [3.97, 1.0, 9.9, -1.96]),
        # 0.6 of the largest and 0.4 of the mean, 6.5 and -3: 0.6 * 10 + 0.4 * 6.5 = 8.6, and 0.6 * -2 - 1.2 = -2.4.
        (NEXT_TARGET_Q, 0.4, [1 + 0.99 * 8.6, 1.0, 0.99 * 8.6, 2 - 0.99 * 2.4]),
        # 0.6 * 3 + 2.6 = 4.4, 8.6 as above, and 0.6 * -4 - 1.2 = -3.6.
        (NEXT_Q, 0.4, [1 + 0.99 * 4.4, 1.0, 0.99 * 8.6, 2 - 0.99 * 3.6]),
    ],
    ids=["plain", "double", "plain epsilon-greedy", "double epsilon-greedy"],
)
def test_targets(next_q, epsilon, targets):
    rewards, terminations = torch.tensor([1.0, 1.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    got = script.td_targets(rewards, terminations, torch.tensor(next_q), torch.tensor(NEXT_TARGET_Q), 0.99, epsilon)
    torch.testing.assert_close(got, torch.tensor(targets))


def linear(weight, bias):
    network = nn.Linear(1, 2)
    with torch.no_grad():
        network.weight.copy_(torch.tensor(weight).unsqueeze(-1))
        network.bias.copy_(torch.tensor(bias))
    return network


def two_transitions():
    return script.Batch(
        obs=torch.tensor([[1.0], [2.0]]),
        next_obs=torch.tensor([[2.0], [3.0]]),
        actions=torch.tensor([0, 1]),
        rewards=torch.tensor([1.0, -1.0]),
        terminations=torch.tensor([0.0, 1.0]),
    )


@pytest.mark.parametrize(
    ("epsilon", "double", "loss", "value", "gradient"),
    [
        # Q(1) = [1, 0.5], Q(2) = [2, 1.5]: the actions 0 and 1 are worth 1 and 1.5, on average 1.25.
        # Target network at 2: [2, 4]; so 1 + 0.5 * 4 = 3, and -1 after the termination. Errors -2 and 2.5.
        # Half of the gradient 2 * error / 2 goes to each weight times its observation: -2 * 1 and 2.5 * 2.
        (0, False, "mse", (4 + 6.25) / 2, [-2.0, 5.0]),
        # Half of 1.5 and of 2; the gradients of single errors are cut to -1 and 1.
        (0, False, "huber", (1.5 + 2.0) / 2, [-0.5, 1.0]),
        # The learning network picks action 0 at 2: 1 + 0.5 * 2 = 2. Errors -1 and 2.5.
        (0, True, "mse", (1 + 6.25) / 2, [-1.0, 5.0]),
        (0, True, "huber", (0.5 + 2.0) / 2, [-0.5, 1.0]),
        # Half of what follows is the mean, 3: 1 + 0.5 * 3.5 = 2.75 and 1 + 0.5 * 2.5 = 2.25. Errors -1.75 and -1.25.
        (0.5, False, "mse", (1.75**2 + 6.25) / 2, [-1.75, 5.0]),
        (0.5, True, "mse", (1.25**2 + 6.25) / 2, [-1.25, 5.0]),
    ],
)
def test_the_loss_of_linear_networks(epsilon, double, loss, value, gradient):
    q_network, target_network = linear([1.0, 1.0], [0.0, -0.5]), linear([1.0, 1.0], [0.0, 2.0])
    got, mean_q = script.q_learning_loss(q_network, target_network, two_transitions(), 0.5, epsilon, double, loss)
    assert got.item() == pytest.approx(value)
    assert mean_q.item() == pytest.approx(1.25)
    assert not mean_q.requires_grad
    got.backward()
    assert q_network.weight.grad.flatten().tolist() == pytest.approx(gradient)
    assert target_network.weight.grad is None
    assert target_network.bias.grad is None
    if not epsilon:  # the text of its own that scripts for images have
        got, mean_q = dqn_atari.q_learning_loss(q_network, target_network, two_transitions(), 0.5, double, loss)
        assert (got.item(), mean_q.item()) == (pytest.approx(value), pytest.approx(1.25))


def test_double_dqn_picks_the_next_action_by_what_the_action_led_to():
    """At 1 the learning network values the actions 2 and 1, at 3, to which that led, 2 and 3: it picks action 1.

    The target network has 10 and 4 everywhere: 1 + 0.5 * 4 = 3, an error of 1. Action 0 would give 6, an error of 4.
    """
    columns = {"obs": [[1.0]], "next_obs": [[3.0]], "actions": [0], "rewards": [1.0], "terminations": [0.0]}
    batch = script.Batch(**{name: torch.tensor(x) for name, x in columns.items()})
    q_network, target_network = linear([0.0, 1.0], [2.0, 0.0]), linear([0.0, 0.0], [10.0, 4.0])
    for double, error in ((True, 1), (False, 4)):
        loss, _ = script.q_learning_loss(q_network, target_network, batch, 0.5, 0, double, "mse")
        assert loss.item() == pytest.approx(error**2)


@pytest.mark.parametrize("double", [False, True])
def test_no_gradient_flows_through_the_targets(double):
    """With one network for both the targets move with it, but are taken as constants."""
    network = linear([1.0, 1.0], [0.0, -0.5])
    loss, _ = script.q_learning_loss(network, network, two_transitions(), 0.5, 0, double, "mse")
    loss.backward()
    # Targets 1 + 0.5 * 2 = 2 and -1, errors -1 and 2.5. Through the first target 0.5 * 2 * 1 would be added.
    assert network.weight.grad.flatten().tolist() == pytest.approx([-1.0, 5.0])
    assert network.bias.grad.tolist() == pytest.approx([-1.0, 2.5])


def test_a_target_network_follows_by_a_share_or_becomes_a_copy():
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
@pytest.mark.parametrize(
    ("start", "end", "fraction", "epsilons"),
    [
        (1.0, 0.05, 0.5, [1.0, 0.81, 0.62, 0.43, 0.24, 0.05, 0.05, 0.05, 0.05, 0.05]),
        (1.0, 0.05, 0.0, [0.05] * 10),
        # Upwards, and over a time that is no whole number of turns.
        (0.0, 1.0, 0.25, [0.0, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_epsilon_goes_straight_from_start_to_end_and_stays(tmp_path, monkeypatch, start, end, fraction, epsilons):
    """10 turns of 2 steps, of which each takes the epsilon of the step that it starts from."""
    used = []
    spy(monkeypatch, script, "epsilon_greedy", lambda _, epsilon: used.append(epsilon))
    changes = {"start_e": start, "end_e": end, "exploration_fraction": fraction, "learning_starts": 0}
    script.train(tiny(tmp_path, script=script, total_timesteps=20, **changes))
    # Greedy evaluations follow.
    assert used[:10] == pytest.approx(epsilons)


def test_each_environment_explores_for_itself():
    """10,000 environments, epsilon 0.5 and 5 actions, of which 3 is best: it is taken by 0.5 + 0.5 / 5 = 60 %."""
    torch.manual_seed(0)
    q_values = torch.tensor([0.0, 1.0, 2.0, 9.0, -1.0]).expand(10_000, 5)
    counts = torch.bincount(script.epsilon_greedy(q_values, 0.5), minlength=5)
    # 6,000 with a deviation of 49; the other four have 1,000 each, with a deviation of 30.
    assert counts[3].item() == pytest.approx(6000, abs=5 * 49)
    assert counts[[0, 1, 2, 4]].tolist() == pytest.approx([1000] * 4, abs=5 * 30)


def test_epsilon_0_is_greedy_and_1_is_uniform():
    torch.manual_seed(0)
    q_values = torch.randn(10_000, 4)
    assert torch.equal(script.epsilon_greedy(q_values, 0.0), q_values.argmax(-1))
    actions = script.epsilon_greedy(q_values, 1.0)
    assert torch.bincount(actions, minlength=4).tolist() == pytest.approx([2500] * 4, abs=5 * 44)
    # Whatever the values say: a quarter agrees by chance.
    assert (actions == q_values.argmax(-1)).sum().item() == pytest.approx(2500, abs=5 * 44)


def new_agent(env_id, **changes):
    args = script.Args(env_id=env_id, **changes)
    torch.manual_seed(0)
    with script.closing(script.make_envs(args, 1)) as envs:
        return script.Agent(args, envs)


def test_a_network_acts_greedily_or_with_its_epsilon():
    agent, obs = new_agent("CartPole-v1", hidden_sizes=(4,), end_e=0.2), torch.zeros(4000, 4)
    with torch.no_grad():
        best = agent(obs).argmax(-1)
        assert torch.equal(agent.act(obs, greedy=True), best)
        # Half of the random actions are the best one: 10 % of 4,000 differ, with a deviation of 19.
        assert (agent.act(obs, greedy=False) != best).sum().item() == pytest.approx(400, abs=5 * 19)


def test_hidden_layers_are_those_asked_for():
    agent = new_agent("Acrobot-v1", hidden_sizes=(5, 7))
    assert [tuple(x.shape) for x in agent.parameters()] == [(5, 6), (5,), (7, 5), (7,), (3, 7), (3,)]
    assert [tuple(x.shape) for x in new_agent("Acrobot-v1", hidden_sizes=()).parameters()] == [(3, 6), (3,)]
    # Numbers of other types are taken as float32.
    torch.testing.assert_close(agent(torch.ones(1, 6, dtype=torch.float64)), agent(torch.ones(1, 6)))


def test_the_story_of_both_scripts_is_the_same():
    """So what is tested on one of them holds for the other, but for what makes an agent of the plate the best one."""
    for name in ("train", "make_envs", "Agent"):
        one, other = (inspect.getsource(getattr(x, name)) for x in (script, dqn_balancing_plate))
        ranked = "evaluation = {}\n                    run.keep_best(evaluation, quality(evaluation))"
        evaluate = "evaluate(agent, args, args.seed + 10_000, device)"
        other = other.replace(ranked.format(evaluate), f"run.keep_best({evaluate})")
        assert one == other.replace("run.keep_best(evaluation, quality(evaluation))", "run.keep_best(evaluation)"), name
    assert inspect.getsource(script.Args.check) == inspect.getsource(dqn_balancing_plate.Args.check)


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
    got = turns_of(monkeypatch, script)
    script.train(tiny(tmp_path, script=script, **{"learning_starts": 0, **changes}))
    assert got == turns
    checkpoint = load(only_run(tmp_path))
    assert checkpoint["counters"]["global_step"] == len(turns) * changes["num_envs"]
    assert updates_of(checkpoint) == "".join(turns).count("u")


@pytest.mark.parametrize(
    ("num_envs", "total", "starts", "global_step", "updates", "copies"),
    [
        # 4 steps at a time meet multiples of 10 only each fifth turn: `step % 10 == 0` would give 20 updates.
        (4, 400, 0, 400, 40, 4),
        # 133 turns of 3 end at 399; a modulo would give 13 updates.
        (3, 400, 0, 399, 39, 3),
        (4, 300, 100, 300, 20, 2),
        (32, 600, 0, 576, 57, 5),
    ],
)
def test_long_runs_have_exactly_the_updates_of_their_steps(
    tmp_path, monkeypatch, num_envs, total, starts, global_step, updates, copies
):
    copied = []
    spy(monkeypatch, script, "update_target", lambda *_: copied.append(1))
    changes = {"train_frequency": 10, "target_network_frequency": 100, "batch_size": 2, "learning_starts": starts}
    script.train(tiny(tmp_path, num_envs=num_envs, total_timesteps=total, **changes))
    checkpoint = load(only_run(tmp_path))
    got = checkpoint["counters"]["global_step"], updates_of(checkpoint), len(copied)
    assert got == (global_step, updates, copies)


def test_a_target_network_is_the_network_of_its_last_update(tmp_path):
    """Updates at 4, 8, ..., 40 and copies at 16 and 32: the copy of step 32 is no longer the network of step 40."""
    changes = {"learning_starts": 0, "target_network_frequency": 16, "anneal_lr": False, "start_e": 0, "end_e": 0}
    for steps in (2, 32, 40):
        script.train(tiny(tmp_path / str(steps), script=script, total_timesteps=steps, **changes))
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
    _, scores = script.train(tiny(tmp_path, eval_every=200))
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
    script.train(tiny(tmp_path, num_envs=3, total_timesteps=310, learning_starts=150))
    logged = scalars(only_run(tmp_path))
    # 3 * 34, 3 * 67, 3 * 100, and the last one of the run, 3 * 103.
    assert [step for step, _ in logged["charts/epsilon"]] == [102, 201, 300, 309]
    # There is no loss before the first update.
    assert [step for step, _ in logged["losses/td_loss"]] == [201, 300, 309]


def test_a_logged_loss_is_the_mean_over_its_updates(tmp_path, monkeypatch):
    losses, function = [], script.q_learning_loss

    def noting(*args):
        result = function(*args)
        losses.append([result[0].item(), result[1].item()])
        return result

    monkeypatch.setattr(script, "q_learning_loss", noting)
    script.train(tiny(tmp_path))
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
    script.train(tiny(tmp_path / "annealed", total_timesteps=200))
    assert len(rates) == 40
    # The first update, of step 44, comes in the turn from 42 on, the last one in the turn from 198 on.
    assert (rates[0], rates[-1]) == pytest.approx((1e-3 * (1 - 42 / 200), 1e-3 * (1 - 198 / 200)))
    rates.clear()
    script.train(tiny(tmp_path / "constant", total_timesteps=100, anneal_lr=False))
    assert set(rates) == {1e-3}


@pytest.mark.parametrize(("double", "loss"), [(False, "huber"), (True, "mse")])
def test_updates_and_evaluations_do_what_the_flags_say(tmp_path, monkeypatch, double, loss):
    asked, taus, norms, seeds, step = set(), set(), [], [], torch.optim.Adam.step

    def noting(self, *args, **kwargs):
        norms.append(math.hypot(*(weights.grad.norm().item() for weights in self.param_groups[0]["params"])))
        return step(self, *args, **kwargs)

    spy(monkeypatch, script, "q_learning_loss", lambda *args: asked.add(args[3:]))
    spy(monkeypatch, script, "update_target", lambda *args: taus.add(args[2]))
    spy(monkeypatch, script, "evaluate", lambda agent, args, seed, *_: seeds.append(seed))
    monkeypatch.setattr(torch.optim.Adam, "step", noting)
    flags = {"gamma": 0.7, "target_e": 0.25, "tau": 0.3, "total_timesteps": 200, "eval_every": 200, "seed": 5}
    script.train(tiny(tmp_path, **flags, double=double, loss=loss))
    assert (asked, taus) == ({(0.7, 0.25, double, loss)}, {0.3})
    # The games that choose best.pt are others than those at the end.
    assert seeds == [10_005, 20_005]
    # The log has the gradients' length, and they are not scaled.
    logged = [value for _, value in scalars(only_run(tmp_path))["losses/grad_norm"]]
    assert logged[-1] == pytest.approx(np.mean(norms[-25:]), rel=1e-5)


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
}


def q_of(agent, number):
    """Returns the values of both actions where the vector is [number]."""
    with torch.no_grad():
        return agent(torch.tensor([[float(number)]]))[0].tolist()


def test_the_values_of_a_single_step_are_its_rewards(tmp_path):
    """Of [1] action 1 pays 1, of [0] action 0 does, and nothing follows: gamma plays no part."""
    own = {"hidden_sizes": (32,), "learning_rate": 1e-2}
    changes = {"total_timesteps": 1200, "target_network_frequency": 20, "gamma": 0.99}
    agent, scores = script.train(tiny(tmp_path, "RightAction", **{**ANSWERS, **own, **changes}))
    assert scores.tolist() == [1.0]
    assert q_of(agent, 1) == pytest.approx([0, 1], abs=0.1)
    assert q_of(agent, 0) == pytest.approx([1, 0], abs=0.1)


def test_a_reward_of_1_for_ever_is_worth_1_over_1_minus_gamma_across_time_limits(tmp_path):
    """4 steps that look all the same, cut by a time limit: 1 / (1 - 0.8) = 5; 2.5 if that were an end."""
    own = {"hidden_sizes": (), "learning_rate": 2e-2, "anneal_lr": False}
    # 40 copies, after which 0.8^40 = 0.0001 of the first error is left.
    changes = {"total_timesteps": 1664, "target_network_frequency": 40, "gamma": 0.8}
    agent, _ = script.train(tiny(tmp_path, "ConstantTrunc", script=script, **{**ANSWERS, **own, **changes}))
    assert q_of(agent, 1) == pytest.approx([5, 5], abs=0.25)


@pytest.mark.parametrize(("end", "last_value"), [("Trunc", 10.9), ("Term", 1.0)])
def test_the_target_of_a_last_step_is_10_9_where_time_ran_out_and_1_where_the_task_ended(
    tmp_path, monkeypatch, end, last_value
):
    """Where the observation is [k] and all values are 10, a step that pays 1 is worth 1 + 0.99 * 10, or 1 at an end."""
    memories = memories_of(monkeypatch, script)
    changes = {"total_timesteps": 14, "learning_starts": 13, "train_frequency": 100}
    script.train(tiny(tmp_path, f"Ramp3{end}", script=script, **changes))
    batch = memories[0].sample(500, CPU)
    tens = torch.full((500, 2), 10.0)
    targets = script.td_targets(batch.rewards, batch.terminations, tens, tens, 0.99, 0)
    found = {(int(a), int(b), round(c, 4)) for a, b, c in zip(batch.obs, batch.next_obs, targets.tolist(), strict=True)}
    assert found == {(0, 1, 10.9), (1, 2, 10.9), (2, 3, last_value)}


# ----- Environments -----
def test_a_memory_never_gives_what_the_environments_did_not_make(tmp_path, monkeypatch):
    """Each batch of a run, whose memory is overwritten many times: of [k] follows [k + 1], and [3] ends the task."""
    batches, sample = [], script.ReplayBuffer.sample

    def checking(self, *args):
        batch = sample(self, *args)
        batches.append(set(zip(*(x.flatten().tolist() for x in batch), strict=True)))
        return batch

    monkeypatch.setattr(script.ReplayBuffer, "sample", checking)
    script.train(tiny(tmp_path, "Ramp3Term", script=script, buffer_size=40, num_envs=3, batch_size=64))
    # Of the steps 41 to 399 each 4th.
    assert len(batches) == 89
    assert set().union(*batches) == {(k, k + 1, action, 1, k == 2) for k in range(3) for action in range(2)}


@pytest.mark.parametrize(
    ("max_episode_steps", "length"),
    [
        # The limit that is registered, a shorter one, a longer one, and none but that of evaluations.
        (None, 7),
        (5, 5),
        (9, 9),
        (0, 30),
    ],
)
def test_the_time_limit_is_the_registered_one_or_that_of_the_flag(tmp_path, monkeypatch, max_episode_steps, length):
    monkeypatch.setattr(script, "EVAL_MAX_STEPS", 30)
    memories = memories_of(monkeypatch)
    args = tiny(tmp_path, "RampLimit7", total_timesteps=100, max_episode_steps=max_episode_steps)
    _, scores = script.train(args)
    assert scores.tolist() == [length, length]
    logged = scalars(only_run(tmp_path))
    assert logged["eval/length_mean"] == [(100, length)]
    # 50 turns of training.
    ends = [2 * length * k for k in range(1, 50 // length + 1) for _ in range(2)]
    assert logged["charts/episodic_length"] == [(step, length) for step in ends]
    # A time limit is no end of the task.
    assert memories[0].sample(1000, CPU).terminations.max() == 0


def test_cartpole_is_cut_off_at_exactly_the_limit(tmp_path):
    """Always pushing to one side a pole falls after 8 to 11 steps."""
    for limit, lengths in ((5, {5}), (0, {8, 9, 10, 11})):
        args = tiny(tmp_path, "CartPole-v1", max_episode_steps=limit, eval_episodes=10)
        agent = new_agent("CartPole-v1")
        for parameter in agent.parameters():
            nn.init.zeros_(parameter)
        evaluation = script.evaluate(agent, args, 1, CPU)
        assert set(evaluation["length"]) <= lengths
        assert evaluation["return"].tolist() == evaluation["length"].tolist()


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
        np.random.rand(3)  # noqa: NPY002
        script.train(tiny(tmp_path / name, "RightAction", total_timesteps=200, **changes))
        folder = only_run(tmp_path / name)
        found[name] = (load(folder), scalars(folder))
        checkpoint, logged = found[name]
        for part in ("agent", "target_network", "optimizer"):
            assert_equal(checkpoint[part], found["plain"][0][part], f"{name}: {part}")
        for tag, points in found["plain"][1].items():
            if tag != "charts/SPS" and not tag.startswith("eval/"):
                assert logged[tag] == points, f"{name}: {tag}"
    script.train(tiny(tmp_path / "other", "RightAction", total_timesteps=200, seed=2))
    for name, weights in load(only_run(tmp_path / "other"))["agent"].items():
        assert not torch.equal(weights, found["plain"][0]["agent"][name]), name


def test_evaluations_do_not_disturb_environments_that_draw_from_numpy(tmp_path):
    for name, changes in (("one", {}), ("other", {"eval_every": 100})):
        script.train(tiny(tmp_path / name, "GlobalDraw", **changes))
    one, other = (load(only_run(tmp_path / name)) for name in ("one", "other"))
    assert_equal(one["agent"], other["agent"])


# ----- Resumed runs -----
def contents(state):
    """Returns a memory's state in parts that compare."""
    return state["capacity"], state["added"], [column.tolist() for column in state["columns"]]


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "no memory"])
def test_a_resumed_run_goes_on_where_it_was(tmp_path, monkeypatch, capsys, memory):
    """The signal comes in turn 75, so at step 150, between two points of the log."""
    script.train(tiny(tmp_path / "straight", "SignalAt"))
    straight = only_run(tmp_path / "straight")
    capsys.readouterr()
    folder = interrupt(monkeypatch, tiny(tmp_path / "cut", save_replay=memory), 75)
    go_on = f"interrupted at step 150; go on with: {sys.executable} dqn_cartpole_vec.py --resume {folder}\n"
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
    turns = turns_of(monkeypatch)
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


def test_a_memory_goes_on_only_with_its_sizes(tmp_path, monkeypatch, capsys):
    folder = interrupt(monkeypatch, tiny(tmp_path, save_replay=True), 75)
    flags = ("--resume", str(folder), "--buffer-size=604", "--total-timesteps=200")
    status, text = failed(script, monkeypatch, capsys, *flags)
    assert status == 2
    assert "the replay memory has other sizes; --no-save-replay starts a new one" in text
    turns = turns_of(monkeypatch)
    resume(script, monkeypatch, folder, *flags[2:], "--no-save-replay")
    # 40 steps without an update, then at 192, 196 and 200.
    assert turns == [""] * 20 + ["u", "", "u", "", "uc"]
    assert "replay" not in load(folder)


def test_the_best_model_is_stored_without_its_memory(tmp_path):
    script.train(tiny(tmp_path, save_replay=True, total_timesteps=100))
    folder = only_run(tmp_path)
    assert load(folder)["replay"]["added"] == 100
    assert "replay" not in load(folder, "best.pt")


def test_a_run_that_was_interrupted_again_starts_to_learn_when_it_would_have(tmp_path, monkeypatch):
    """Without a memory no update until step 190; saved at 160 with its memory, the run still waits until then."""
    folder = interrupt(monkeypatch, tiny(tmp_path), 75)
    monkeypatch.setenv("SIGNAL_AT", "5:SIGTERM")
    with pytest.raises(SystemExit) as exit_info:
        resume(script, monkeypatch, folder, "--save-replay")
    assert exit_info.value.code == 143
    assert load(folder)["counters"]["global_step"] == 160
    turns = turns_of(monkeypatch)
    resume(script, monkeypatch, folder, "--total-timesteps=200")
    assert turns == [""] * 15 + ["u", "", "u", "", "uc"]


def test_a_run_interrupted_at_its_start_goes_on(tmp_path, monkeypatch):
    """The signal comes before the first step: the memory that is saved is empty, and no damage."""
    with monkeypatch.context() as patch:
        spy_runs(patch, script, lambda _: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit) as exit_info:
            command_line(script, patch, *flags_of(tiny(tmp_path, save_replay=True)))
    assert exit_info.value.code == 143
    folder = only_run(tmp_path)
    assert (load(folder)["counters"]["global_step"], load(folder)["replay"]["added"]) == (0, 0)
    resume(script, monkeypatch, folder, "--total-timesteps=100")
    assert (load(folder)["counters"]["global_step"], updates_of(load(folder))) == (100, 15)


def test_a_finished_run_logs_nothing_and_goes_on_with_its_memory(tmp_path, monkeypatch, capsys):
    script.train(tiny(tmp_path, save_replay=True))
    folder = only_run(tmp_path)
    before, logged = (folder / "latest.pt").read_bytes(), scalars(folder)
    of_run = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval:")]
    turns = turns_of(monkeypatch)
    resume(script, monkeypatch, folder)
    out = capsys.readouterr().out
    assert "this run is finished" in out
    assert [line for line in out.splitlines() if line.startswith("eval:")] == of_run
    assert ((folder / "latest.pt").read_bytes(), scalars(folder), turns) == (before, logged, [])
    resume(script, monkeypatch, folder, "--total-timesteps=420")
    assert turns == ["", "u", "", "u", "", "u", "", "u", "", "uc"]
    assert updates_of(load(folder)) == 95


def test_a_loss_that_overflows_ends_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch, capsys):
    """From the 50th step of each of two environments on, which is step 100."""
    status, text = failed(script, monkeypatch, capsys, *flags_of(tiny(tmp_path, "HugeLater", checkpoint_every=90)))
    assert (status, text) == (1, "error: losses/td_loss is not finite at step 180: lower --learning-rate\n")
    assert load(only_run(tmp_path))["counters"]["global_step"] == 90


@pytest.mark.parametrize("env", ["NanLater", "RampNanObs", "RampNanReset"])
def test_a_number_that_is_none_ends_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch, capsys, env):
    """These environments give nan from their 50th step on, which is a turn of 2, or in the reset that follows."""
    status, text = failed(script, monkeypatch, capsys, *flags_of(tiny(tmp_path, env, checkpoint_every=60)))
    assert status == 1
    assert "finite" in text
    checkpoint = load(only_run(tmp_path))
    # What a reset gives is told only by the loss, once it is drawn from the memory.
    assert checkpoint["counters"]["global_step"] in ((60, 120) if env == "RampNanReset" else (60,))
    assert all(weights.isfinite().all() for weights in checkpoint["agent"].values())


# ----- What a wrong use gets -----
@pytest.mark.parametrize(("flags", "message"), [
    (["--gamma=1.5"], "--gamma 1.5 must be between 0 and 1"),
    (["--gamma=nan"], "--gamma nan must be between 0 and 1"),
    (["--tau=0"], "--tau 0.0 must be between 1e-12 and 1"),
    (["--tau=1.01"], "--tau 1.01 must be between 1e-12 and 1"),
    (["--start-e=1.1"], "--start-e 1.1 must be between 0 and 1"),
    (["--end-e=-0.1"], "--end-e -0.1 must be between 0 and 1"),
    (["--target-e=1.5"], "--target-e 1.5 must be between 0 and 1"),
    (["--exploration-fraction=2"], "--exploration-fraction 2.0 must be between 0 and 1"),
    (["--learning-rate=0"], "--learning-rate 0.0 must be between 1e-12 and 1"),
    (["--learning-rate=1.1"], "--learning-rate 1.1 must be between 1e-12 and 1"),
    (["--num-envs=0"], "--num-envs 0 must be between 1 and 10,000"),
    (["--num-envs=10001"], "--num-envs 10001 must be between 1 and 10,000"),
    (["--buffer-size=1"], "--buffer-size 1 must be between 2 and inf"),
    (["--hidden-sizes", "8", "0"], "--hidden-sizes 0 must be between 1 and 10,000"),
    (["--hidden-sizes", "1000000", "1000000"], "--hidden-sizes 1000000 must be between 1 and 10,000"),
    (["--max-episode-steps=-1"], "--max-episode-steps -1 must be between 0 and inf"),
    # The limits that depend on others replace none of those that do not.
    (["--num-envs=1", "--batch-size=0"], "--batch-size 0 must be between 1 and inf"),
    (["--total-timesteps=2", "--learning-starts=0", "--gamma=2"], "--gamma 2.0 must be between 0 and 1"),
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
    (["--vector=threads"], "--vector"),
    (["--env-id=CartPole"], "gymnasium has no 'CartPole'; the nearest ids: CartPole-v"),
    (["--env-id=Pendulum-v1"], "has Box (3,) float32 and Box (1,) float32; ppo_cartpole.py takes"),
    (["--env-id=small_envs:Ramp3Term-v0"], "has Box (1, 36, 36) uint8 and Discrete () int64; ppo_cartpole.py"),
    (["--env-id=FrozenLake-v1"], "has Discrete () int64 and Discrete () int64; ppo_cartpole.py"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")  # fmt: skip
def test_a_wrong_value_is_refused(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    status, text = failed(script, monkeypatch, capsys, *flags_of(tiny(tmp_path / "runs")), *flags)
    assert status == 2
    assert message in text
    assert list(tmp_path.iterdir()) == []


def test_a_memory_larger_than_the_free_memory_is_refused(tmp_path, monkeypatch, capsys):
    """2^20 rows: two observations of one number and 16 bytes more are 24 MiB."""
    need = 24 * 2**20
    flags = flags_of(tiny(tmp_path, buffer_size=2**20, total_timesteps=4, learning_starts=0))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=need - 1))
    status, text = failed(script, monkeypatch, capsys, *flags)
    assert (status, text) == (2, "error: storage: 24.0 MiB; free on cpu: 24.0 MiB; lower --buffer-size\n")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=need))
    command_line(script, monkeypatch, *flags)


def test_an_environment_that_is_found_by_its_module(tmp_path, monkeypatch):
    """A user's module beside their own files, with an observation of another type."""
    (tmp_path / "my_ladder.py").write_text(
        "import gymnasium\nimport small_envs\n"
        "gymnasium.register('Mine-v0', lambda: gymnasium.wrappers.FlattenObservation(small_envs.Ramp(shape=(2, 2))))\n"
    )
    monkeypatch.chdir(tmp_path)
    command_line(script, monkeypatch, *flags_of(tiny(tmp_path / "runs", "my_ladder:Mine-v0", total_timesteps=100)))
    folder = only_run(tmp_path / "runs")
    assert folder.name.startswith("my_ladder-Mine-v0__dqn_cartpole_vec__1__")
    assert load(folder)["agent"]["layers.0.weight"].shape == (8, 4)

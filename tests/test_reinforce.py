"""reinforce_bullet_cartpole.py: returns, gradients, which episodes count, what is logged, and resumed runs.

Shared text, as checkpoints, evaluations and the checks of environments, is tested on ppo_atari.py.
"""

import itertools
import math
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import psutil
import pytest
import small_envs
import torch
from short_runs import assert_equal, command_line, failed, flags_of, load, only_run, resume, scalars, small_run, spy
from torch import nn

import reinforce_bullet_cartpole as script

# 10 updates of 4 episodes, played in 2 environments. Where these are alike, a baseline would leave nothing to learn.
TINY = {"num_envs": 2, "total_episodes": 40, "episodes_per_update": 4, "gamma": 0.5, "hidden_sizes": (8,)}
TINY |= {"baseline": False}


def tiny(run_dir, env="VectorRamp3Term", **changes):
    env_id = env if "-" in env else f"small_envs:{env}-v0"
    return small_run("reinforce_bullet_cartpole", run_dir, **{**TINY, "env_id": env_id, **changes})[1]


def updates_of(folder):
    """Returns how many steps the optimizer has made."""
    steps = {int(state["step"]) for state in load(folder)["optimizer"]["state"].values()} or {0}
    return steps.pop()


class Lengths(gym.Env):
    """The observation is [k] after k steps, and each step pays 1.

    Args:
        lengths: of the episodes, in turn; 0 for 1 or 10 at random.
        truncated: which episodes end by a time limit, in turn.
    """

    def __init__(self, lengths=(0,), truncated=(False,)):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.lengths, self.truncated = itertools.cycle(lengths), itertools.cycle(truncated)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = next(self.lengths) or int(self.np_random.choice([1, 10]))
        self.limited, self.count = next(self.truncated), 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        self.count += 1
        ended = self.left == 0
        return np.full(1, self.count, np.float32), 1.0, ended and not self.limited, ended and self.limited, {}


class TwoSteps(gym.Env):
    """The observation is [1, 0] and then [0, 1]; FIRST of the first action is paid at once, the rest at the end."""

    FIRST, LATER, SECOND = (1.0, 0.0, -1.0), (0.0, 3.0, 1.0), (2.0, -1.0, 0.5)

    def __init__(self):
        self.observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.first = None
        return np.array([1, 0], np.float32), {}

    def step(self, action):
        if self.first is None:
            self.first = action
            return np.array([0, 1], np.float32), self.FIRST[action], False, False, {}
        return np.array([1, 1], np.float32), self.LATER[self.first] + self.SECOND[action], True, False, {}


class Unequal(gym.vector.SyncVectorEnv):
    """Each environment after the first has episodes of 10 steps, whatever the factories say."""

    def __init__(self, env_fns, **kwargs):
        super().__init__(env_fns, **kwargs)
        for env in self.envs[1:]:
            env.unwrapped.lengths = itertools.cycle([10])


for name, entry_point, options in (
    ("OneStep", Lengths, {"lengths": (1,)}),
    ("OneOrTen", Lengths, {}),
    ("EveryFourthCut", Lengths, {"lengths": (3, 2, 2, 3), "truncated": (False, False, True, False)}),
    ("TwoSteps", TwoSteps, {}),
):
    gym.register(f"{name}-v0", entry_point=entry_point, kwargs=options, disable_env_checker=True)


def learned_from(monkeypatch):
    """Returns the list to which each update adds the lengths of the episodes that it learns from."""
    lengths, updates = [], []

    def note(logprobs, weights, num_episodes):
        assert num_episodes == len(lengths)
        assert len(logprobs) == len(weights) == sum(lengths)
        updates.append(lengths.copy())
        lengths.clear()

    spy(monkeypatch, script, "discounted_returns", lambda rewards, gamma: lengths.append(len(rewards)))
    spy(monkeypatch, script, "reinforce_loss", note)
    return updates


def watch_steps(monkeypatch, frozen=False):
    """Returns the list to which each step of Adam adds (rate, gradients); frozen, the weights stay as they are."""
    seen, step = [], torch.optim.Adam.step

    def watched(self, *args, **kwargs):
        (group,) = self.param_groups
        seen.append((group["lr"], [p.grad.clone() for p in group["params"]]))
        return None if frozen else step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    return seen


def with_weights(monkeypatch, **weights):
    """Lets each new agent start with these weights."""
    init = script.Agent.__init__

    def started(self, *args):
        init(self, *args)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.tensor(weights[name.replace(".", "_")]))

    monkeypatch.setattr(script.Agent, "__init__", started)


def agent_for(obs_dim, num_actions, **args):
    spaces = {"single_observation_space": np.zeros(obs_dim), "single_action_space": SimpleNamespace(n=num_actions)}
    return script.Agent(script.Args(**args), SimpleNamespace(**spaces))


# ----- Returns and losses -----
@pytest.mark.parametrize(
    ("rewards", "gamma", "returns"),
    [
        ([1.0, 1.0, 1.0], 0.99, [2.9701, 1.99, 1.0]),
        ([1.0, -2.0, 4.0], 0.5, [1.0, 0.0, 4.0]),
        ([1.0, 2.0, 3.0], 1.0, [6.0, 5.0, 3.0]),
        ([1.0, 2.0, 3.0], 0.0, [1.0, 2.0, 3.0]),
        ([7.0], 0.9, [7.0]),
        # 1 / (1 - 0.9) is 10, less what comes after 200 steps.
        ([1.0] * 200, 0.9, [10 * (1 - 0.9**k) for k in range(200, 0, -1)]),
    ],
)
def test_returns(rewards, gamma, returns):
    before = rewards.copy()
    got = script.discounted_returns(rewards, gamma)
    torch.testing.assert_close(got, torch.tensor(returns))
    assert rewards == before


@pytest.mark.parametrize(
    ("returns", "weights"),
    [
        ([[3.0, 2.0, 1.0], [1.0]], [[2.0, 2.0, 1.0], [-2.0]]),
        # Of three, less the mean of two: (1 + 1) / 2 at first, (4 + 1) / 2 of the others, 0 where they have ended.
        ([[4.0], [1.0, 1.0], [1.0]], [[3.0], [-1.5, 1.0], [-1.5]]),
        ([[5.0, 2.0]], [[5.0, 2.0]]),
    ],
)
def test_the_baseline_is_the_mean_of_the_other_episodes_at_the_same_step(returns, weights):
    got = script.less_baseline([torch.tensor(x) for x in returns])
    assert [x.tolist() for x in got] == weights


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_episodes_that_all_reach_the_limit_teach_nothing(count):
    cut = script.discounted_returns([1.0] * 200, 0.99)
    got = torch.cat(script.less_baseline([cut] * count))
    assert script.normalised(got).tolist() == [0.0] * 200 * count


def test_normalised_returns_have_mean_0_and_deviation_1():
    # 2, 4 and 9: mean 5, variance (9 + 1 + 16) / 3.
    deviation = (26 / 3) ** 0.5
    x = torch.tensor([2.0, 4.0, 9.0])
    got = script.normalised(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor([-3.0, -1.0, 4.0]) / deviation)
    assert x.tolist() == [2.0, 4.0, 9.0]
    got = script.normalised(script.discounted_returns([1.0] * 3, 0.99))
    # In all digits, by the same formulas: mean 1.98670, deviation 0.80433.
    torch.testing.assert_close(got, torch.tensor([1.22263, 0.00410, -1.22673]), rtol=1e-4, atol=1e-5)
    # Returns far from 0 as well, and far apart.
    for scale, offset in ((1e-3, 0.0), (1.0, 1e4), (1e6, 0.0)):
        got = script.normalised(scale * torch.arange(100.0) + offset)
        assert got.mean().item() == pytest.approx(0, abs=1e-5)
        assert got.std(correction=0).item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 13, 15, 64, 501])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 333.3333, -1e4 / 7, 3e6 / 7])
def test_equal_returns_become_0(count, value):
    """In float32 the mean of six times 333.3333 is another number, and what is left would become 1."""
    assert script.normalised(torch.full((count,), value)).abs().max().item() < 1e-6


def test_the_loss_is_a_sum_over_steps_and_a_mean_over_episodes():
    logprobs = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    weights = torch.tensor([3.0, 1.0, -2.0], requires_grad=True)
    # 3 * -0.5 - 1 * 1 - 2 * -2 = 1.5, and half of it, negated.
    loss = script.reinforce_loss(logprobs, weights, 2)
    assert loss.item() == pytest.approx(-0.75)
    loss.backward()
    assert logprobs.grad.tolist() == [-1.5, -0.5, 1.0]
    assert weights.grad is None
    with pytest.raises(AssertionError, match="want"):
        script.reinforce_loss(torch.zeros(3, 1), torch.zeros(3), 1)


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        # Returns of rewards 1, 1 with gamma 0.5.
        ({}, [1.5, 1.0]),
        # Their mean is 1.25, the deviation 0.25.
        ({"norm_returns": True}, [1.0, -1.0]),
        # There is no other episode to compare with.
        ({"baseline": True}, [1.5, 1.0]),
    ],
)
def test_the_gradient_of_a_two_step_episode(tmp_path, monkeypatch, changes, weights):
    """A whole run of one episode with a linear policy: logits (0.3 x + 0.1, -0.2 x) of the observations 0 and 1."""
    actions = []
    spy(monkeypatch, small_envs.Ramp, "step", lambda self, action: actions.append(int(action)))
    start = {"actor_0_weight": [[0.3], [-0.2]], "actor_0_bias": [0.1, 0.0]}
    with_weights(monkeypatch, **start)
    steps = watch_steps(monkeypatch)
    own = {"num_envs": 1, "episodes_per_update": 1, "total_episodes": 1, "hidden_sizes": (), "norm_returns": False}
    script.train(tiny(tmp_path, "VectorRamp2Trunc", **{**own, **changes}))
    ((_, gradients),) = steps

    weight_gradient, bias_gradient = np.zeros(2), np.zeros(2)
    for x, action, weight in zip((0, 1), actions, weights, strict=False):
        odds = np.exp([0.3 * x + 0.1, -0.2 * x])
        # d log pi(a) / d logit k is 1 where k is a, less pi(k).
        of_logits = (np.arange(2) == action) - odds / odds.sum()
        bias_gradient -= weight * of_logits
        weight_gradient -= weight * of_logits * x
    assert gradients[0].flatten().tolist() == pytest.approx(weight_gradient.tolist(), rel=1e-4)
    assert gradients[1].tolist() == pytest.approx(bias_gradient.tolist(), rel=1e-4)
    length = (weight_gradient**2).sum() + (bias_gradient**2).sum()
    logged = scalars(only_run(tmp_path))
    assert logged["losses/grad_norm"] == [(2, pytest.approx(length**0.5, rel=1e-4))]


@pytest.mark.parametrize("baseline", [False, True])
def test_the_gradient_is_the_analytic_one_up_to_the_sampling_error(tmp_path, monkeypatch, baseline):
    """3,000 episodes of one policy: each part of the mean gradient is within 4 of its standard errors."""
    odds, gamma, episodes = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]]), 0.8, 3000
    # The logits of the first step stand in the first column, those of the second one in the other, the bias is 0.
    weights = {"actor_0_weight": np.log(odds).T.tolist(), "actor_0_bias": [0.0] * 3}
    with_weights(monkeypatch, **weights)
    steps = watch_steps(monkeypatch, frozen=True)
    own = {"num_envs": 5, "episodes_per_update": 300, "total_episodes": episodes, "hidden_sizes": ()}
    args = tiny(tmp_path, "TwoSteps-v0", gamma=gamma, norm_returns=False, baseline=baseline, **own)
    script.train(args)
    assert len(steps) == 10
    got = -torch.stack([gradients[0] for _, gradients in steps]).mean(0).numpy()

    # The gradient of the discounted return: pi(k) * (what action k brings - the mean of that); the second step's
    # reward counts gamma for the first action, and 1 for the second action itself.
    brings = np.array([np.add(TwoSteps.FIRST, gamma * np.array(TwoSteps.LATER)), TwoSteps.SECOND])
    analytic = (odds * (brings - (odds * brings).sum(1, keepdims=True))).T

    # The deviation of one episode's gradient, over its nine courses. The baseline is close to the mean returns, with
    # what is paid on the average: 1.1 for the first action and 0.5 for the second one at the end, 0.3 at once.
    values = [0.3 + gamma * 1.6, 1.6] if baseline else [0.0, 0.0]
    mean, square = np.zeros((3, 2)), np.zeros((3, 2))
    for first, second in itertools.product(range(3), range(3)):
        at_end = TwoSteps.LATER[first] + TwoSteps.SECOND[second]
        returns = (TwoSteps.FIRST[first] + gamma * at_end, at_end)
        of_logits = (np.eye(3)[[first, second]] - odds) * (np.array(returns) - values)[:, None]
        chance = odds[0, first] * odds[1, second]
        mean += chance * of_logits.T
        square += chance * of_logits.T**2
    np.testing.assert_allclose(mean, analytic, atol=1e-12)
    error = np.sqrt((square - mean**2) / episodes)
    # Small enough: without gamma 0.48 would stand in the place of 0.366.
    assert analytic.flatten().tolist() == pytest.approx([-0.09, 0.3, 0.366, -0.3, -0.276, 0.0])
    assert error.max() < 0.025
    assert (np.abs(got - analytic) <= 4 * error).all(), (got, analytic, error)


def test_the_policy_has_the_layers_that_were_asked_for():
    agent = agent_for(3, 2, hidden_sizes=(5, 7))
    assert [tuple(x.shape) for x in agent.parameters()] == [(5, 3), (5,), (7, 5), (7,), (2, 7), (2,)]
    assert [tuple(x.shape) for x in agent_for(3, 2, hidden_sizes=()).parameters()] == [(2, 3), (2,)]
    # Numbers of other types are taken as float32.
    double = agent.policy(torch.ones(1, 3, dtype=torch.float64)).logits
    torch.testing.assert_close(double, agent.policy(torch.ones(1, 3)).logits)


def test_actions_are_the_most_probable_ones_or_sampled():
    torch.manual_seed(0)
    agent = agent_for(1, 3, hidden_sizes=())
    with torch.no_grad():
        agent.actor[0].weight.zero_()
        agent.actor[0].bias.copy_(torch.tensor([0.2, 0.5, 0.3]).log())
        obs = torch.zeros(10_000, 1)
        assert torch.bincount(agent.act(obs, greedy=True), minlength=3).tolist() == [0, 10_000, 0]
        counts = torch.bincount(agent.act(obs, greedy=False), minlength=3)
    # Deviations 40, 50 and 46.
    assert counts.tolist() == pytest.approx([2000, 5000, 3000], abs=5 * 46)


# ----- Which episodes count -----
@pytest.mark.parametrize(
    ("changes", "updates"),
    [
        # One environment's episodes take 1 step, the other's 10: while the long one lasts, all others are short.
        ({"episodes_per_update": 2, "total_episodes": 4}, [[1, 10]] * 2),
        ({"episodes_per_update": 4, "total_episodes": 4}, [[1, 1, 1, 10]]),
        # No multiple of the environments; the last update has one episode left to play.
        ({"episodes_per_update": 3, "total_episodes": 7}, [[1, 1, 10], [1, 1, 10], [1]]),
        # And two.
        ({"episodes_per_update": 3, "total_episodes": 8}, [[1, 1, 10], [1, 1, 10], [1, 10]]),
        # 12 that are started one after the other: the long one ends with the 10th, and then there are two more.
        ({"episodes_per_update": 13, "total_episodes": 13}, [[*[1] * 10, 10, 10, 1]]),
        ({"num_envs": 1, "episodes_per_update": 2, "total_episodes": 3}, [[1, 1], [1]]),
    ],
)
def test_every_episode_that_was_started_counts_once(tmp_path, monkeypatch, changes, updates):
    monkeypatch.setattr(script, "SyncVectorEnv", Unequal)
    got = learned_from(monkeypatch)
    script.train(tiny(tmp_path, "OneStep-v0", **changes))
    if len(updates[0]) == 13:
        # Within one update the order is that of their ends; started were 11 short ones and 2 long ones, or 12 and 1.
        assert [sorted(update) for update in got] == [[1] * 11 + [10] * 2]
        updates = got
    assert got == updates
    folder = only_run(tmp_path)
    counters = load(folder)["counters"]
    counted = counters["global_step"], counters["episodes"], updates_of(folder)
    assert counted == (sum(map(sum, updates)), changes["total_episodes"], len(updates))
    logged = scalars(folder)
    # One point for each episode, in the order of their ends.
    assert [value for _, value in logged["charts/episodic_length"]] == list(itertools.chain(*updates))
    assert [value for _, value in logged["charts/episodic_return"]] == list(itertools.chain(*updates))
    ends = np.cumsum([sum(update) for update in updates]).tolist()
    for tag in ("losses/policy_loss", "charts/learning_rate", "charts/truncated_fraction"):
        assert [step for step, _ in logged[tag]] == ends, tag


def test_short_episodes_are_not_preferred(tmp_path, monkeypatch):
    """Half of the episodes take 1 step and half 10; those that end first would be short ones more often."""
    updates = learned_from(monkeypatch)
    script.train(tiny(tmp_path, "OneOrTen-v0", num_envs=3, episodes_per_update=4, total_episodes=400))
    lengths = list(itertools.chain(*updates))
    assert len(lengths) == 400
    # 200 with a deviation of 10.
    assert lengths.count(10) == pytest.approx(200, abs=4 * 10)
    assert load(only_run(tmp_path))["counters"]["global_step"] == sum(lengths)


def test_episodes_are_logged_at_the_step_of_their_end(tmp_path, monkeypatch):
    """Both environments step twice; then the first is at its third episode while the other one is at its first."""
    monkeypatch.setattr(script, "SyncVectorEnv", Unequal)
    script.train(tiny(tmp_path, "OneStep-v0", episodes_per_update=4, total_episodes=8))
    # Steps 2, 4, 6 are both environments'; then the long episode goes on alone, to step 13.
    points = [(step + 13 * i, length) for i in range(2) for step, length in ((2, 1), (4, 1), (6, 1), (13, 10))]
    assert scalars(only_run(tmp_path))["charts/episodic_length"] == points


def test_what_was_done_is_what_is_learned_from(tmp_path, monkeypatch):
    """Observations, actions and rewards of an update are those of the environments, step by step."""
    done, learned = {}, []

    def note_step(self, action):
        done.setdefault(id(self), []).append((float(self.step_count), int(action)))

    spy(monkeypatch, small_envs.Ramp, "step", note_step)
    policy_of = script.Agent.policy

    def noting(self, obs):
        policy = policy_of(self, obs)
        log_prob = policy.log_prob
        policy.log_prob = lambda actions: (
            learned.append(list(zip(obs.flatten().tolist(), actions.tolist(), strict=True))),
            log_prob(actions),
        )[1]
        return policy

    monkeypatch.setattr(script.Agent, "policy", noting)
    script.train(tiny(tmp_path))
    assert len(learned) == 10
    # Each update plays two episodes of three steps in each environment, and all end at once.
    one, other = (steps for steps in done.values() if len(steps) == 60)
    for i, update in enumerate(learned):
        halves = (steps[6 * i : 6 * i + 6] for steps in (one, other))
        (a, b), (c, d) = ((half[:3], half[3:]) for half in halves)
        assert update in ([*a, *c, *b, *d], [*c, *a, *d, *b])


# ----- Truncated episodes -----
@pytest.mark.parametrize(
    ("env", "fraction"), [("VectorRamp3Term", 0.0), ("VectorRamp3Trunc", 1.0), ("VectorRamp3Both", 0.0)]
)
def test_the_share_of_truncated_episodes_is_logged(tmp_path, env, fraction):
    """Where both flags are set the episode was terminated."""
    script.train(tiny(tmp_path, env))
    points = scalars(only_run(tmp_path))["charts/truncated_fraction"]
    assert points == [(12 * k, fraction) for k in range(1, 11)]


def test_truncated_episodes_are_left_out_and_no_others(tmp_path, monkeypatch):
    """The third episode after each reset is cut; of each environment the first two are played, then the next two..."""
    updates = learned_from(monkeypatch)
    own = {"num_envs": 1, "episodes_per_update": 3, "total_episodes": 12}
    runs = {}
    for skip in (False, True):
        script.train(tiny(tmp_path / str(skip), "EveryFourthCut-v0", skip_truncated=skip, **own))
        runs[skip] = (updates.copy(), scalars(only_run(tmp_path / str(skip))))
        updates.clear()
    # Each update resets once more than it plays: the cycle of four begins anew with each.
    assert runs[False][0] == [[3, 2, 2]] * 4
    assert runs[True][0] == [[3, 2]] * 4
    for _, logged in runs.values():
        # They are counted and logged all the same.
        third = pytest.approx(1 / 3)
        assert logged["charts/truncated_fraction"] == [(7 * k, third) for k in range(1, 5)]
        assert [value for _, value in logged["charts/episodic_length"]] == [3, 2, 2] * 4


@pytest.mark.parametrize("env", ["VectorRamp3Trunc", "VectorRamp3Both"])
def test_where_all_are_cut_nothing_is_learned(tmp_path, monkeypatch, env):
    """An episode with both flags set was terminated, so that it is learned from."""
    starts, init = [], script.Agent.__init__

    def noting(self, *args):
        init(self, *args)
        starts.append({name: weights.clone() for name, weights in self.state_dict().items()})

    monkeypatch.setattr(script.Agent, "__init__", noting)
    script.train(tiny(tmp_path, env, skip_truncated=True))
    folder = only_run(tmp_path)
    checkpoint, logged = load(folder), scalars(folder)
    if env == "VectorRamp3Both":
        assert updates_of(folder) == len(logged["losses/policy_loss"]) == 10
        assert not torch.equal(checkpoint["agent"]["actor.0.weight"], starts[0]["actor.0.weight"])
        return
    assert_equal(dict(checkpoint["agent"]), starts[0])
    counters = checkpoint["counters"]
    assert (counters["global_step"], counters["episodes"], updates_of(folder)) == (120, 40, 0)
    assert not [tag for tag in logged if tag.startswith("losses/")]
    assert len(logged["charts/episodic_return"]) == 40


@pytest.mark.parametrize(("max_episode_steps", "length"), [(None, 7), (5, 5), (9, 9)])
def test_the_time_limit_is_the_registered_one_or_that_of_the_flag(tmp_path, max_episode_steps, length):
    args = tiny(tmp_path, "VectorRampLimit7", max_episode_steps=max_episode_steps)
    _, scores = script.train(args)
    assert scores.tolist() == [length, length]
    logged = scalars(only_run(tmp_path))
    assert [value for _, value in logged["charts/episodic_length"]] == [length] * 40
    assert {value for _, value in logged["charts/truncated_fraction"]} == {1.0}


@pytest.mark.parametrize(("env", "flag"), [("VectorRampEndless", None), ("VectorRampLimit7", 0)])
def test_an_episode_without_an_end_is_cut_off_and_a_line_says_so(tmp_path, monkeypatch, capsys, env, flag):
    monkeypatch.setattr(script, "EVAL_MAX_STEPS", 30)
    args = tiny(tmp_path, env, max_episode_steps=flag, total_episodes=4)
    script.train(args)
    assert capsys.readouterr().out.count("an episode without an end was cut off after 30 steps\n") == 4
    logged = scalars(only_run(tmp_path))
    assert [value for _, value in logged["charts/episodic_length"]] == [30.0] * 4
    assert logged["charts/truncated_fraction"] == [(120, 1.0)]
    # An end of its own in that step is none of the limit's.
    script.train(tiny(tmp_path / "end", "VectorRamp3Both", max_episode_steps=0, total_episodes=4))
    assert "was cut off after" not in capsys.readouterr().out


# ----- Schedule and log -----
@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        # By the episodes that were played before: at the start, in the middle (5 of 10), and before the last one.
        ({"episodes_per_update": 1, "num_envs": 1}, [1e-2 - 9e-4 * k for k in range(10)]),
        ({"episodes_per_update": 4}, [1e-2, 6.4e-3, 2.8e-3]),
        ({"episodes_per_update": 5, "learning_rate_final": 0.0}, [1e-2, 5e-3]),
        ({"episodes_per_update": 5, "learning_rate_final": 2e-2}, [1e-2, 1.5e-2]),
    ],
)
def test_the_learning_rate_falls_with_the_episodes(tmp_path, monkeypatch, changes, rates):
    steps = watch_steps(monkeypatch)
    script.train(tiny(tmp_path, total_episodes=10, **changes))
    assert [rate for rate, _ in steps] == pytest.approx(rates)
    logged = scalars(only_run(tmp_path))["charts/learning_rate"]
    assert [value for _, value in logged] == pytest.approx(rates)


def test_what_is_logged(tmp_path):
    agent, scores = script.train(tiny(tmp_path, eval_every=60))
    assert scores.tolist() == [3.0, 3.0]
    logged = scalars(only_run(tmp_path))
    losses = {f"losses/{name}" for name in ("policy_loss", "entropy", "grad_norm")}
    charts = {f"charts/{name}" for name in ("learning_rate", "truncated_fraction", "SPS")}
    episodes = {"charts/episodic_return", "charts/episodic_length"}
    evaluations = {"eval/return_mean", "eval/return_std", "eval/length_mean"}
    assert logged.keys() == losses | charts | episodes | evaluations
    for tag in losses | charts:
        assert [step for step, _ in logged[tag]] == list(range(12, 132, 12)), tag
        assert all(math.isfinite(value) for _, value in logged[tag]), tag
    for tag in episodes:
        assert logged[tag] == [(step, 3.0) for step in range(6, 126, 6) for _ in range(2)], tag
    assert logged["eval/return_mean"] == logged["eval/length_mean"] == [(60, 3.0), (120, 3.0)]
    assert logged["eval/return_std"] == [(60, 0.0), (120, 0.0)]
    # The entropy of two actions that are nearly as probable at first.
    assert 0.5 < logged["losses/entropy"][0][1] <= math.log(2)
    assert isinstance(agent, nn.Module)


@pytest.mark.parametrize("greedy", [True, False])
def test_evaluations_take_the_most_probable_actions_or_sample(tmp_path, monkeypatch, greedy):
    """The first action is a little more probable than the others: 1 + 0 + 2, and anything where it is sampled."""
    with_weights(monkeypatch, actor_0_weight=[[0.1] * 2, [0.0] * 2, [0.0] * 2], actor_0_bias=[0.0] * 3)
    watch_steps(monkeypatch, frozen=True)
    _, scores = script.train(tiny(tmp_path, "TwoSteps-v0", hidden_sizes=(), eval_greedy=greedy, eval_episodes=40))
    outcomes = {a + b + c for a, b in zip(TwoSteps.FIRST, TwoSteps.LATER, strict=True) for c in TwoSteps.SECOND}
    assert set(scores) == ({3.0} if greedy else outcomes)


# ----- Reproducibility -----
def test_the_same_seed_gives_the_same_run_whatever_is_evaluated_and_saved(tmp_path):
    runs = {
        "plain": {},
        "again": {},
        "evaluated": {"eval_every": 12, "eval_episodes": 3, "eval_greedy": False},
        "saved": {"checkpoint_every": 12, "progress": True},
        "async": {"vector": "async"},
    }
    plain = None
    for name, changes in runs.items():
        # What another part of the program drew meanwhile must not matter.
        torch.rand(3)
        np.random.rand(3)  # noqa: NPY002
        script.train(tiny(tmp_path / name, "VectorRightAction", baseline=True, **changes))
        folder = only_run(tmp_path / name)
        checkpoint, logged = load(folder), scalars(folder)
        plain = plain or (checkpoint, logged)
        for part in ("agent", "optimizer"):
            assert_equal(dict(checkpoint[part]), dict(plain[0][part]), f"{name}: {part}")
        for tag, points in plain[1].items():
            if tag != "charts/SPS" and not tag.startswith("eval/"):
                assert logged[tag] == points, f"{name}: {tag}"
    script.train(tiny(tmp_path / "other", "VectorRightAction", baseline=True, seed=2))
    for name, weights in load(only_run(tmp_path / "other"))["agent"].items():
        assert not torch.equal(weights, plain[0]["agent"][name]), name


# ----- Resumed runs -----
def test_a_resumed_run_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    """An update takes 6 turns. The signal comes in turn 35, after 5 of them and 3 of the next 4 episodes' 6 turns."""
    script.train(tiny(tmp_path / "straight", "VectorSignalAt"))
    monkeypatch.setenv("SIGNAL_AT", "35:SIGTERM")
    with pytest.raises(SystemExit) as exit_info:
        command_line(script, monkeypatch, *flags_of(tiny(tmp_path / "cut", "VectorSignalAt")))
    assert exit_info.value.code == 143
    folder, straight = only_run(tmp_path / "cut"), only_run(tmp_path / "straight")
    command = f"interrupted at step 60; go on with: {sys.executable} reinforce_bullet_cartpole.py --resume {folder}\n"
    assert command in capsys.readouterr().out
    # The update that was under way is dropped, with the episodes that had ended.
    counters = load(folder)["counters"]
    assert (counters["global_step"], counters["episodes"], updates_of(folder)) == (60, 20, 5)
    resume(script, monkeypatch, folder)
    assert "going on, at step 60\n" in capsys.readouterr().out
    resumed, whole = load(folder)["counters"], load(straight)["counters"]
    assert [resumed[name] for name in ("global_step", "episodes")] == [120, 40]
    assert [whole[name] for name in ("global_step", "episodes")] == [120, 40]
    assert updates_of(folder) == updates_of(straight) == 10
    logged, logged_straight = scalars(folder), scalars(straight)
    for tag in ("learning_rate", "episodic_return", "episodic_length", "truncated_fraction"):
        assert logged[f"charts/{tag}"] == logged_straight[f"charts/{tag}"], tag
    # The same run up to the signal.
    assert logged["losses/policy_loss"][:5] == logged_straight["losses/policy_loss"][:5]
    assert [step for step, _ in logged["losses/policy_loss"]] == list(range(12, 132, 12))


def test_weights_are_loaded_bit_for_bit(tmp_path, monkeypatch):
    """A run that has one update left, whose weights Adam would change, but every episode is cut and left out."""
    script.train(tiny(tmp_path, "VectorRamp3Trunc"))
    folder = only_run(tmp_path)
    before = load(folder)
    resume(script, monkeypatch, folder, "--total-episodes=44", "--skip-truncated")
    after = load(folder)
    assert (before["counters"]["episodes"], after["counters"]["episodes"]) == (40, 44)
    assert updates_of(folder) == 10
    assert_equal(dict(after["agent"]), dict(before["agent"]))
    assert_equal(after["optimizer"]["state"], before["optimizer"]["state"])
    # 40 of 44 episodes: 1e-2 - 9e-3 * 40 / 44.
    assert after["optimizer"]["param_groups"][0]["lr"] == pytest.approx(1e-2 - 9e-3 * 40 / 44)


def test_a_finished_run_says_so_and_is_evaluated(tmp_path, monkeypatch, capsys):
    script.train(tiny(tmp_path))
    folder = only_run(tmp_path)
    before, logged = load(folder), scalars(folder)
    of_run = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval:")]
    assert of_run == ["eval: mean=3 std=0 min=3 max=3 episodes=2 mean_length=3"]
    resume(script, monkeypatch, folder)
    lines = capsys.readouterr().out.splitlines()
    assert "this run is finished, at step 120" in lines
    assert [line for line in lines if line.startswith("eval:")] == of_run
    assert_equal(load(folder), before)
    assert scalars(folder) == logged


def test_other_shapes_are_refused(tmp_path, monkeypatch, capsys):
    script.train(tiny(tmp_path, total_episodes=4))
    folder = str(only_run(tmp_path))
    changes = ("--hidden-sizes", "9", "--total-episodes=8")
    for flag in ("--evaluate", "--resume"):
        status, text = failed(script, monkeypatch, capsys, flag, folder, "--threads=1", "--no-cuda", *changes)
        assert (status, f"error: {folder}: no checkpoint that fits: " in text) == (2, True)


# ----- What ends a run -----
def test_a_number_that_is_none_ends_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch, capsys):
    """From the 50th step of each of both environments on, which is step 100."""
    args = tiny(tmp_path, "VectorNanLater", checkpoint_every=60)
    status, text = failed(script, monkeypatch, capsys, *flags_of(args))
    assert (status, "is not finite" in text) == (1, True)
    checkpoint = load(only_run(tmp_path))
    assert checkpoint["counters"]["global_step"] == 60
    assert all(weights.isfinite().all() for weights in checkpoint["agent"].values())


def test_a_loss_that_overflows_ends_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch, capsys):
    """From the 50th step of each of both environments on, step 100; the gradient's norm overflows."""
    args = tiny(tmp_path, "VectorHugeLater", checkpoint_every=60, norm_returns=False)
    status, text = failed(script, monkeypatch, capsys, *flags_of(args))
    assert status == 1
    assert "error: losses/grad_norm is not finite at step 1" in text
    checkpoint = load(only_run(tmp_path))
    assert checkpoint["counters"]["global_step"] == 60
    assert all(weights.isfinite().all() for weights in checkpoint["agent"].values())


@pytest.mark.parametrize("changes", [
    {"num_envs": 8, "episodes_per_update": 4, "total_episodes": 6},
    {"num_envs": 2, "episodes_per_update": 4, "total_episodes": 2},
    {"num_envs": 6, "episodes_per_update": 1, "total_episodes": 3},
])  # fmt: skip
def test_no_more_episodes_are_played_than_were_asked_for(tmp_path, changes):
    """Where there are more environments than episodes to play, some wait; episodes have 3 steps."""
    script.train(tiny(tmp_path, **changes))
    counters = load(only_run(tmp_path))["counters"]
    assert (counters["episodes"], counters["global_step"]) == (changes["total_episodes"], 3 * changes["total_episodes"])


def test_an_evaluation_writes_each_checkpoint_once(tmp_path, monkeypatch):
    """4 episodes of 3 steps an update; both periods are met at each of the 2 updates."""
    saved = []
    spy(monkeypatch, script.Run, "save", lambda run, name: saved.append((run.counters["global_step"], name)))
    script.train(tiny(tmp_path, total_episodes=8, eval_every=12, checkpoint_every=12))
    assert saved == [(12, "best.pt"), (12, "latest.pt"), (24, "best.pt"), (24, "latest.pt")]


@pytest.mark.parametrize(("flags", "message"), [
    (["--gamma=nan"], "--gamma nan must be between 0 and 1"),
    (["--learning-rate=0"], "--learning-rate 0.0 must be between 1e-12 and 1"),
    (["--learning-rate=1.1"], "--learning-rate 1.1 must be between 1e-12 and 1"),
    (["--learning-rate-final=-1"], "--learning-rate-final -1.0 must be between 0 and 1"),
    (["--num-envs=0"], "--num-envs 0 must be between 1 and 10,000"),
    (["--episodes-per-update=0"], "--episodes-per-update 0 must be between 1 and inf"),
    (["--total-episodes=0"], "--total-episodes 0 must be between 1 and inf"),
    (["--max-episode-steps=-1"], "--max-episode-steps -1 must be between 0 and inf"),
    (["--hidden-sizes", "8", "0"], "--hidden-sizes 0 must be between 1 and 10,000"),
    (["--total-timesteps=3"], "--total-timesteps"),
    (["--env-id=BulletCartPole"], "gymnasium has no 'BulletCartPole'; the nearest ids: BulletCartPole-v0"),
    (["--env-id=Pendulum-v1"], "cannot be used: it has Box (3,) float32 and Box (1,) float32; ppo_cartpole.py takes"),
    (["--env-id=small_envs:Ramp3Term-v0"], "Box (1, 36, 36) uint8 and Discrete () int64; ppo_cartpole.py takes"),
    (["--env-id=TwoSteps-v0", "--capture-video"], "--env-id TwoSteps-v0 with --env-kwargs {} cannot be used: "),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")  # fmt: skip
def test_a_wrong_value_is_refused(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    status, text = failed(script, monkeypatch, capsys, *flags_of(tiny(tmp_path / "runs")), *flags)
    assert status == 2
    assert message in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("max_episode_steps", "steps"),
    [
        # The registered limit, that of the flag, and where there is none the cap of evaluations.
        (None, 7),
        (1024, 1024),
        (0, 27_000),
    ],
)
def test_episodes_larger_than_the_free_memory_are_refused(tmp_path, monkeypatch, capsys, max_episode_steps, steps):
    """4 bytes of the observation and 300 of python's objects for each step of 2^20 episodes."""
    need = 2**20 * steps * 304
    own = {"episodes_per_update": 2**20, "total_episodes": 2**20, "max_episode_steps": max_episode_steps}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=need - 1))
    flags = flags_of(tiny(tmp_path / "runs", "VectorRampLimit7", **own))
    status, text = failed(script, monkeypatch, capsys, *flags)
    mib = f"{need / 2**20:,.1f} MiB"
    assert (status, text) == (2, f"error: storage: {mib}; free on cpu: {mib}; lower --episodes-per-update\n")
    assert list(tmp_path.iterdir()) == []


# ----- Learning -----
@pytest.mark.parametrize("changes", [{"baseline": True}, {}, {"norm_returns": False}], ids=str)
def test_the_right_action_is_learned(tmp_path, changes):
    """One action in two is right: 0.5 by chance, 1 when learned."""
    own = {"num_envs": 8, "episodes_per_update": 16, "total_episodes": 16 * 40, "eval_episodes": 50}
    rates = {"learning_rate": 3e-2, "learning_rate_final": 3e-3, "hidden_sizes": (16,)}
    _, scores = script.train(tiny(tmp_path, "VectorRightAction", eval_greedy=False, **own, **rates, **changes))
    assert len(scores) == 50
    assert scores.mean() >= 0.9


@pytest.mark.parametrize("seed", [1, 2])
def test_cartpole_is_learned(tmp_path, seed):
    """Random actions last about 22 steps; after 120 episodes seeds 1 to 8 last 106 to 200, the limit."""
    own = {"num_envs": 1, "max_episode_steps": 200, "total_episodes": 120, "hidden_sizes": (64,), "gamma": 0.99}
    own |= {"baseline": True}
    rates = {"learning_rate": 2e-2, "learning_rate_final": 2e-3}
    _, scores = script.train(tiny(tmp_path, "CartPole-v1", seed=seed, eval_episodes=20, **own, **rates))
    assert len(scores) == 20
    assert scores.mean() >= 80

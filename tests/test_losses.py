"""Losses, statistics and minibatches, in every script that has them, against hand-worked values and float64 numpy."""

import importlib
import math

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical

import ppo_atari

SCRIPTS = [importlib.import_module(path.stem) for path in sorted(ROOT.glob("*.py")) if path.name != "compare_runs.py"]
CPU = torch.device("cpu")


def scripts_with(name):
    found = [script for script in SCRIPTS if hasattr(script, name)]
    assert ppo_atari in found
    return pytest.mark.parametrize("script", found, ids=lambda script: script.__name__)


def random_cases(test):
    given_seed_and_size = given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 30), clip_coef=st.floats(0.01, 0.9))
    return settings(max_examples=50, deadline=None, database=None, derandomize=True)(given_seed_and_size(test))


def float64(*lists):
    return [torch.tensor(x, dtype=torch.float64) for x in lists]


# Policy loss


@scripts_with("policy_loss")
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # The loss is max(-A * r, -A * clip(r, 0.8, 1.2)); its gradient by log r is -A * r, or 0 where the clip holds.
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.2, 0.0),  # good and already much more probable: no further push
        (0.5, 1.0, -0.5, -0.5),  # good but much less probable: pushed back up
        (1.5, -1.0, 1.5, 1.5),  # bad but much more probable: pushed back down
        (0.5, -1.0, 0.8, 0.0),  # bad and already much less probable: no further push
    ],
)
def test_policy_loss_of_one_sample(script, ratio, advantage, loss, gradient):
    new_logprobs, logprobs, advantages = float64([math.log(ratio) - 1.3], [-1.3], [advantage])
    new_logprobs.requires_grad_()
    result = script.policy_loss(new_logprobs, logprobs, advantages, 0.2)
    result.backward()
    assert result.shape == ()
    assert result.item() == pytest.approx(loss)
    assert new_logprobs.grad.item() == pytest.approx(gradient)


@scripts_with("policy_loss")
def test_policy_loss_is_the_mean_over_samples(script):
    # (-1.2 - 0.5 + 1.5 + 0.8) / 4 = 0.15, each from the table above.
    new_logprobs = [math.log(ratio) for ratio in (1.5, 0.5, 1.5, 0.5)]
    loss = script.policy_loss(*float64(new_logprobs, [0, 0, 0, 0], [1, 1, -1, -1]), 0.2)
    assert loss.item() == pytest.approx(0.15)


@scripts_with("policy_loss")
@random_cases
def test_policy_loss_equals_equation_7(script, seed, size, clip_coef):
    rng = np.random.default_rng(seed)
    new_logprobs, logprobs, advantages = rng.normal(-1, 0.5, size), rng.normal(-1, 0.5, size), rng.normal(0, 2, size)
    ratio = np.exp(new_logprobs) / np.exp(logprobs)
    # The paper maximises min(r * A, clip(r) * A).
    objective = np.minimum(ratio * advantages, np.clip(ratio, 1 - clip_coef, 1 + clip_coef) * advantages)
    loss = script.policy_loss(*float64(new_logprobs, logprobs, advantages), clip_coef)
    assert loss.item() == pytest.approx(-objective.mean(), rel=1e-9, abs=1e-12)


# Value loss


@scripts_with("value_loss")
@pytest.mark.parametrize(
    ("new_value", "old_value", "target", "clip_coef", "loss", "gradient"),
    [
        # Clipped to 0.2: max((1 - 2)^2, (0.2 - 2)^2) = max(1, 3.24). The clipped value wins and has no gradient.
        (1.0, 0.0, 2.0, 0.2, 1.62, 0.0),
        # Without clipping half of 1; the gradient is new - target.
        (1.0, 0.0, 2.0, None, 0.5, -1.0),
        # Moved past the target: max((1 - 0.5)^2, (0.2 - 0.5)^2) = max(0.25, 0.09). The unclipped value wins.
        (1.0, 0.0, 0.5, 0.2, 0.125, 0.5),
        # Downwards likewise: clipped to 2.8, max((1 - 2.5)^2, (2.8 - 2.5)^2) = 2.25.
        (1.0, 3.0, 2.5, 0.2, 1.125, -1.5),
        # Within the clip both are the same.
        (0.1, 0.0, 2.0, 0.2, 1.805, -1.9),
    ],
)
def test_value_loss_of_one_sample(script, new_value, old_value, target, clip_coef, loss, gradient):
    new_values, values, returns = float64([new_value], [old_value], [target])
    new_values.requires_grad_()
    result = script.value_loss(new_values, values, returns, clip_coef)
    result.backward()
    assert result.shape == ()
    assert result.item() == pytest.approx(loss)
    assert new_values.grad.item() == pytest.approx(gradient)


@scripts_with("value_loss")
def test_value_loss_takes_the_worse_error_of_each_sample_then_the_mean(script):
    # Half of max(1, 3.24) and half of max(0.25, 0.09), from the table above: (1.62 + 0.125) / 2 = 0.8725.
    # The worse of the two means would be max(1.25, 3.33) / 4 = 0.8325.
    values = float64([1, 1], [0, 0], [2, 0.5])
    assert script.value_loss(*values, 0.2).item() == pytest.approx(0.8725)
    assert script.value_loss(*values, None).item() == pytest.approx((1 + 0.25) / 4)


@scripts_with("value_loss")
@random_cases
def test_value_loss_equals_its_definition(script, seed, size, clip_coef):
    new_values, values, returns = np.random.default_rng(seed).normal(0, 1, (3, size))
    clipped = np.clip(new_values, values - clip_coef, values + clip_coef)
    expected = np.mean(np.maximum((new_values - returns) ** 2, (clipped - returns) ** 2)) / 2
    tensors = float64(new_values, values, returns)
    assert script.value_loss(*tensors, clip_coef).item() == pytest.approx(expected, rel=1e-9)
    assert script.value_loss(*tensors, None).item() == pytest.approx(np.mean((new_values - returns) ** 2) / 2)


# How far the policy moved


@scripts_with("policy_change")
def test_an_unchanged_policy_has_not_moved(script):
    logprobs = torch.tensor([-0.1, -1.0, -5.0])
    assert [x.item() for x in script.policy_change(logprobs, logprobs, 0.1)] == [0, 0, 0]


@scripts_with("policy_change")
def test_policy_change_of_a_doubled_probability(script):
    # -ln 2; (2 - 1) - ln 2; the ratio 2 is outside 0.9 to 1.1.
    change = script.policy_change(*float64([math.log(2) - 1], [-1]), 0.1)
    assert [x.item() for x in change] == pytest.approx([-math.log(2), 1 - math.log(2), 1])


@scripts_with("policy_change")
def test_policy_change_counts_ratios_on_both_sides_of_the_clip(script):
    # Of the ratios 0.7, 0.85, 1, 1.15, 1.3 two are more than 0.2 away from 1.
    new_logprobs = [math.log(ratio) for ratio in (0.7, 0.85, 1, 1.15, 1.3)]
    assert script.policy_change(*float64(new_logprobs, [0] * 5), 0.2)[2].item() == pytest.approx(2 / 5)


@scripts_with("policy_change")
def test_policy_change_estimates_the_divergence_of_the_new_policy_from_the_old(script):
    # Old (1/4, 3/4), new (1/2, 1/2); the samples 0, 1, 1, 1 have the old frequencies exactly, so both estimates are
    # exact: KL(old || new) = 1/4 ln(1/2) + 3/4 ln(3/2) = 0.130812. The other way round it would be 0.143841.
    old, new = np.log([0.25, 0.75]), np.log([0.5, 0.5])
    samples = [0, 1, 1, 1]
    old_approx_kl, approx_kl, _ = script.policy_change(*float64(new[samples], old[samples]), 0.1)
    assert old_approx_kl.item() == pytest.approx(0.130812, abs=1e-6)
    assert approx_kl.item() == pytest.approx(0.130812, abs=1e-6)


@scripts_with("policy_change")
@random_cases
def test_policy_change_equals_its_definition(script, seed, size, clip_coef):
    new_logprobs, logprobs = np.random.default_rng(seed).normal(-1, 0.5, (2, size))
    ratio = np.exp(new_logprobs - logprobs)
    expected = [-np.log(ratio).mean(), (ratio - 1 - np.log(ratio)).mean(), (np.abs(ratio - 1) > clip_coef).mean()]
    change = [x.item() for x in script.policy_change(*float64(new_logprobs, logprobs), clip_coef)]
    assert change == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert change[1] >= 0


# Explained variance


@scripts_with("explained_variance")
@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1),
        ([5, 5, 5, 5], [1, 2, 3, 4], 0),
        # Off by a constant is no variance.
        ([11, 12, 13, 14], [1, 2, 3, 4], 1),
        # The errors are twice the returns: 1 - 4.
        ([-1, -2, -3, -4], [1, 2, 3, 4], -3),
        # Half of each return is explained: 1 - 1/4.
        ([0.5, 1, 1.5, 2], [1, 2, 3, 4], 0.75),
    ],
)
def test_explained_variance(script, values, returns, expected):
    assert script.explained_variance(*float64(values, returns)) == pytest.approx(expected)
    # (T, N) as in the training loop is one set of samples too, not N of them.
    rectangles = [x.reshape(2, 2) for x in float64(values, returns)]
    assert script.explained_variance(*rectangles) == pytest.approx(expected)


@scripts_with("explained_variance")
def test_explained_variance_of_constant_returns_is_undefined(script):
    assert math.isnan(script.explained_variance(*float64([1, 2], [3, 3])))


# Minibatches


@scripts_with("minibatch_indices")
def test_each_pass_visits_each_sample_once_and_in_another_order(script):
    torch.manual_seed(0)
    minibatches = [x.tolist() for x in script.minibatch_indices(64, 16, 3, CPU)]
    assert [len(x) for x in minibatches] == [16] * 12
    passes = [[i for minibatch in minibatches[k : k + 4] for i in minibatch] for k in (0, 4, 8)]
    for order in passes:
        assert sorted(order) == list(range(64))
        assert order != list(range(64))
    assert passes[0] != passes[1] != passes[2] != passes[0]
    # Samples are mixed, not whole minibatches: no two hold the same samples.
    assert len({frozenset(x) for x in minibatches}) == 12


@scripts_with("minibatch_indices")
def test_minibatches_come_from_torchs_seed(script):
    def draw(seed):
        torch.manual_seed(seed)
        return [x.tolist() for x in script.minibatch_indices(32, 8, 2, CPU)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


# Events every so many steps


@scripts_with("crossed")
@pytest.mark.parametrize(
    ("every", "num_envs", "steps", "times"),
    [
        # 4 steps at a time meet multiples of 10 at each second one only: `step % 10 == 0` would be true 250 times.
        (10, 4, 5000, 500),
        # 3 at a time up to 4,998: 10, ..., 4,990 are 499 multiples.
        (10, 3, 4998, 499),
        (1, 1, 7, 7),
        # At most once a step, however many multiples lie in it.
        (10, 25, 100, 4),
        (100, 1, 99, 0),
        (100, 1, 100, 1),
        (0, 4, 100, 0),
    ],
)
def test_crossed_meets_every_multiple_once(script, every, num_envs, steps, times):
    hits = [script.crossed(every, step - num_envs, step) for step in range(num_envs, steps + 1, num_envs)]
    assert sum(hits) == times


# The policy


@pytest.fixture(scope="module")
def breakout():
    """An agent with a policy far from uniform, and (16, 8, 4, 84, 84) observations of eight games, random actions."""
    args = ppo_atari.Args(env_id="BreakoutNoFrameskip-v4", threads=1)
    torch.manual_seed(0)
    with ppo_atari.closing_envs(ppo_atari.make_envs(args, 8, training=True)) as envs:
        agent = ppo_atari.make_agent(args, envs, CPU)
        with torch.no_grad():
            agent.actor.weight.mul_(100)
        rng = np.random.default_rng(0)
        envs.reset(seed=0)
        obs = [torch.from_numpy(envs.step(rng.integers(0, 4, 8))[0].copy()) for _ in range(16)]
    return agent, torch.stack(obs)


@pytest.mark.parametrize("num_actions", [2, 4, 18])
def test_a_new_policy_is_nearly_uniform(breakout, num_actions):
    torch.manual_seed(1)
    agent = ppo_atari.Agent((4, 84, 84), num_actions)
    with torch.no_grad():
        logits, values = agent(breakout[1].flatten(0, 1))
    assert logits.shape == (128, num_actions)
    assert values.shape == (128,)
    entropy = Categorical(logits=logits).entropy()
    assert entropy.max().item() <= math.log(num_actions) + 1e-6
    assert entropy.min().item() > math.log(num_actions) - 1e-3


def test_pixels_are_scaled_to_1_and_left_as_they_are(breakout):
    agent, obs = breakout
    before = obs[0].clone()
    with torch.no_grad():
        _, values = agent(obs[0])
        hidden = agent.trunk((obs[0].double() / 255).float())
    assert torch.equal(obs[0], before)
    assert obs.max() > 1
    torch.testing.assert_close(values, agent.critic(hidden).squeeze(-1), rtol=1e-5, atol=1e-5)


def test_the_first_minibatch_of_an_update_meets_the_policy_that_acted(breakout):
    # The rollout asks for 8 observations at a time, the update for 32 shuffled ones: equal but for rounding.
    agent, obs = breakout
    torch.manual_seed(2)
    with torch.no_grad():
        policies = [Categorical(logits=agent(row)[0]) for row in obs]
    actions = torch.stack([policy.sample() for policy in policies])
    logprobs = torch.stack([policy.log_prob(action) for policy, action in zip(policies, actions, strict=True)])
    assert len(actions.unique()) == 4
    b_obs, b_actions, b_logprobs = obs.flatten(0, 1), actions.flatten(), logprobs.flatten()
    for mb_inds in ppo_atari.minibatch_indices(128, 32, 1, CPU):
        new_logprobs = Categorical(logits=agent(b_obs[mb_inds])[0]).log_prob(b_actions[mb_inds])
        ratio = (new_logprobs - b_logprobs[mb_inds]).exp()
        assert (ratio - 1).abs().max().item() < 1e-5
        old_approx_kl, approx_kl, clip_frac = ppo_atari.policy_change(new_logprobs, b_logprobs[mb_inds], 0.1)
        assert abs(old_approx_kl.item()) < 1e-6
        assert abs(approx_kl.item()) < 1e-6
        assert clip_frac.item() == 0


@scripts_with("reset_seed")
def test_runs_of_neighbouring_seeds_share_no_environment_seed(script):
    """Environment i gets the seed of the first one + i; from 1 to 5 themselves, 15 of 16 would be shared."""
    seeds = [script.reset_seed(seed, 0) + i for seed in range(1, 6) for i in range(64)]
    assert len(set(seeds)) == 5 * 64
    assert script.reset_seed(1, 0) == script.reset_seed(1, 0) != script.reset_seed(1, 4096)

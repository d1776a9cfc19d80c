"""Generalised advantage estimation, against tables worked out by hand and other code; its inputs are those of `train`.

Its text is the same in every script that has it.
"""

import importlib
import types

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.buffers import RolloutBuffer
from torch import nn
from torch.distributions import Categorical

import ppo_atari


def gae(rewards, values, next_value, dones, gamma=0.99, gae_lambda=0.95):
    """One environment as lists, or several as (T, N) arrays; float64, so that hand-worked values need no slack."""
    arrays = [np.array(x, dtype=np.float64) for x in (rewards, values, next_value, dones)]
    rewards, values, next_value, dones = (torch.from_numpy(x if arrays[0].ndim == 2 else x[..., None]) for x in arrays)
    advantages = ppo_atari.compute_gae(rewards, values, next_value, dones, gamma, gae_lambda)
    assert advantages.shape == rewards.shape
    return advantages.squeeze(1).numpy()


@pytest.mark.parametrize(
    ("rewards", "values", "next_value", "dones", "gae_lambda", "advantages"),
    [
        # Two steps of reward 1, then a time limit, V = 10 everywhere: the last reward holds 0.99 * 10 more. What comes
        # behind the limit is another episode's. Both deltas: 1 + 9.9 - 10 = 0.9. A0 = 0.9 + 0.99 * 0.95 * 0.9.
        ([1, 10.9], [10, 10], 77, [0, 1], 0.95, [1.74645, 0.9]),
        # The same with a termination: A1 = 1 - 10 = -9, A0 = 0.9 + 0.9405 * -9.
        ([1, 1], [10, 10], 77, [0, 1], 0.95, [-7.5645, -9]),
        # And without an end: the value behind the rollout is bootstrapped from.
        ([1, 1], [10, 10], 10, [0, 0], 0.95, [1.74645, 0.9]),
        # The step at t=1 ends, and the next episode's first value is 100: 1 - 5 = -4, one slot late would be 95.
        # t=0: 1 + 0.99 * 5 - 5 = 0.95. t=2: 1 + 0.99 * 5 - 100 = -94.05.
        ([1, 1, 1], [5, 5, 100], 5, [0, 1, 0], 0, [0.95, -4.0, -94.05]),
    ],
)
def test_a_table(rewards, values, next_value, dones, gae_lambda, advantages):
    result = gae(rewards, values, next_value, dones, gae_lambda=gae_lambda)
    np.testing.assert_allclose(result, advantages, rtol=1e-12)


@pytest.mark.parametrize(
    ("gae_lambda", "advantages"),
    [
        # 1 + 0.5 * 4 - 2 = 1;  2 + 0.5 * 8 - 4 = 2;  3 + 0.5 * 16 - 8 = 3.
        (0, [1, 2, 3]),
        # Returns: 3 + 0.5 * 16 = 11;  2 + 0.5 * 11 = 7.5;  1 + 0.5 * 7.5 = 4.75. Values 2, 4, 8 off.
        (1, [2.75, 3.5, 3]),
    ],
)
def test_lambda_goes_from_one_step_to_monte_carlo(gae_lambda, advantages):
    np.testing.assert_allclose(gae([1, 2, 3], [2, 4, 8], 16, [0, 0, 0], 0.5, gae_lambda), advantages)


def test_nothing_flows_back_over_an_end():
    # The steps after the end pay 1000; with lambda 1 they would show in every earlier advantage. Values are 0.
    # t=1: 1. t=0: 1 + 0.5 * 1. t=3: 1000, t=2: 1000 + 0.5 * 1000.
    np.testing.assert_allclose(gae([1, 1, 1000, 1000], [0] * 4, 0, [0, 1, 0, 0], 0.5, 1), [1.5, 1, 1500, 1000])


def test_environments_do_not_mix():
    # Columns: the time limit, the termination, and no end, as worked out above.
    advantages = gae([[1, 1, 1], [10.9, 1, 1]], np.full((2, 3), 10.0), [77, 77, 10], [[0, 0, 0], [1, 1, 0]])
    np.testing.assert_allclose(advantages, [[1.74645, -7.5645, 1.74645], [0.9, -9, 0.9]], rtol=1e-12)


@pytest.mark.parametrize("gae_lambda", [0, 0.5, 0.95, 1])
def test_a_reward_of_1_for_ever_is_worth_1_over_1_minus_gamma_across_time_limits(gae_lambda):
    # With the exact value 1 / (1 - 0.99) = 100 everywhere there is nothing to correct: 1 + 0.99 * 100 - 100 = 0.
    dones = np.zeros((50, 2))
    dones[[9, 19, 29], 0] = dones[[4, 49], 1] = 1
    advantages = gae(1 + 99 * dones, np.full((50, 2), 100.0), [100, 100], dones, gae_lambda=gae_lambda)
    np.testing.assert_allclose(advantages, np.zeros((50, 2)), atol=1e-9)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_steps=st.integers(1, 12),
    num_envs=st.integers(1, 3),
    gamma=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
)
def test_equals_the_sum_of_its_definition_and_stable_baselines3(seed, num_steps, num_envs, gamma, gae_lambda):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(0, 3, (2, num_steps, num_envs))
    last_value = rng.normal(0, 3, num_envs)
    dones = rng.random((num_steps, num_envs)) < rng.choice([0.0, 0.2, 0.6])
    # A[t] = sum over k of (gamma lambda)^k * delta[t + k], up to and with the step that ends the episode.
    next_values = np.where(dones, 0, np.concatenate([values[1:], last_value[None]]))
    expected = np.zeros((num_steps, num_envs))
    for n in range(num_envs):
        for start in range(num_steps):
            for t in range(start, num_steps):
                delta = rewards[t, n] + gamma * next_values[t, n] - values[t, n]
                expected[start, n] += (gamma * gae_lambda) ** (t - start) * delta
                if dones[t, n]:
                    break
    # As stable-baselines3 has it, beside step t is whether the observation that it started from was a first one.
    spaces = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
    buffer = RolloutBuffer(num_steps, *spaces, "cpu", gae_lambda=gae_lambda, gamma=gamma, n_envs=num_envs)
    zeros = np.zeros((num_envs, 1))
    for t in range(num_steps):
        starts = dones[t - 1] if t else np.ones(num_envs)
        buffer.add(zeros, zeros, rewards[t], starts, torch.as_tensor(values[t]), torch.zeros(num_envs))
    buffer.compute_returns_and_advantage(torch.as_tensor(last_value), dones[-1])

    tensors = [torch.as_tensor(x.astype(np.float64)) for x in (rewards, values, last_value, dones)]
    before = [x.clone() for x in tensors]
    advantages = ppo_atari.compute_gae(*tensors, gamma, gae_lambda).numpy()
    np.testing.assert_allclose(advantages, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(advantages, buffer.advantages, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True)), "an input was changed"


# What `train` gives it: the value of what a time limit cut off is in the reward


def trained(script, tmp_path, monkeypatch, env_id, num_envs, num_steps, **changes):
    """Returns rewards, values, dones and advantages of the only rollout, as lists of the environments' lists."""
    seen = types.SimpleNamespace()
    real = script.compute_gae

    def spy(rewards, values, next_value, dones, *rest):
        seen.advantages = real(rewards, values, next_value, dones, *rest)
        seen.inputs = [x.T.tolist() for x in (rewards, values, dones, seen.advantages)]
        return seen.advantages

    monkeypatch.setattr(script, "compute_gae", spy)
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "total_timesteps": num_envs * num_steps}
    short = {"num_minibatches": 1, "update_epochs": 1, "eval_every": 0, "eval_episodes": 1}
    quiet = {"threads": 1, "cuda": False, "progress": False, "run_dir": str(tmp_path)}
    script.train(script.Args(env_id=f"small_envs:{env_id}-v0", **sizes, **short, **quiet, **changes))
    return seen.inputs


@pytest.mark.parametrize(
    ("end", "last_reward", "advantages"),
    [
        ("Trunc", 10.9, [1.74645, 0.9]),
        ("Term", 1, [-7.5645, -9]),
        # Both at once is a termination: the target is the reward alone, 1.
        ("Both", 1, [-7.5645, -9]),
    ],
)
@pytest.mark.parametrize(
    ("name", "family"),
    [("ppo_atari", "Ramp3"), ("ppo_cartpole", "VectorRamp3"), ("ppo_continuous", "Line2"), ("rpo_continuous", "Line2")],
)
def test_a_constant_critic(tmp_path, monkeypatch, name, family, end, last_reward, advantages):
    """V = 10 everywhere, each step pays 1; the table is the first one above."""
    script = importlib.import_module(name)
    real = script.Agent.__init__

    def constant(self, *args, **kwargs):
        real(self, *args, **kwargs)
        last = [x for x in self.critic.modules() if isinstance(x, nn.Linear)][-1]
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, 10)

    monkeypatch.setattr(script.Agent, "__init__", constant)
    changes = {"norm_reward": False, "gamma": 0.99} if family == "Line2" else {}
    length = int(family[-1])
    found = trained(script, tmp_path, monkeypatch, f"{family}{end}", 1, length, **changes)
    assert found[0][0] == pytest.approx([1] * (length - 1) + [last_reward])
    assert found[1:3] == [[[10] * length], [[0] * (length - 1) + [1]]]
    assert found[3][0][-2:] == pytest.approx(advantages)


class PixelCritic(nn.Module):
    """V(obs) is the value of the newest image's pixels; the policy is uniform and learns nothing."""

    def __init__(self, args, envs):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))

    def forward(self, obs):
        values = obs[:, -1].float().mean((1, 2))
        return Categorical(logits=torch.zeros(len(obs), 2) + 0 * self.nothing), values + 0 * self.nothing

    def act(self, obs, greedy):
        return torch.zeros(len(obs), dtype=torch.int64)


@pytest.mark.parametrize(
    ("env_id", "rewards", "values", "dones", "advantages"),
    [
        # The images go 0, 1, 2, and the third step leads to 3, which is never acted on; then a new episode's 0.
        # Advantages 1 + 0.5 * V' - V; the last one's V' is that of the image behind the rollout, 1.
        ("Ramp3Trunc", [1, 1, 1 + 0.5 * 3, 1], [0, 1, 2, 0], [0, 0, 1, 0], [1.5, 1, 0.5, 1.5]),
        # A time limit at the very last step of the rollout: 1 + 0.5 * 2 - 1 = 1.
        ("Ramp2Trunc", [1, 2, 1, 2], [0, 1, 0, 1], [0, 1, 0, 1], [1.5, 1, 1.5, 1]),
        # A termination: 1 - 2 = -1.
        ("Ramp3Term", [1, 1, 1, 1], [0, 1, 2, 0], [0, 0, 1, 0], [1.5, 1, -1, 1.5]),
        ("Ramp3Both", [1, 1, 1, 1], [0, 1, 2, 0], [0, 0, 1, 0], [1.5, 1, -1, 1.5]),
    ],
)
def test_the_value_is_that_of_the_image_that_was_cut_off(
    tmp_path, monkeypatch, env_id, rewards, values, dones, advantages
):
    monkeypatch.setattr(ppo_atari, "Agent", PixelCritic)
    changes = {"gamma": 0.5, "gae_lambda": 0.0, "vector": "async" if env_id == "Ramp3Trunc" else "sync"}
    found = trained(ppo_atari, tmp_path, monkeypatch, env_id, 2, 4, **changes)
    assert found == [[x, x] for x in (rewards, values, dones, advantages)]

"""Generalised advantage estimation, in every script that has it, against tables worked out by hand and other code."""

import importlib
import types

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.buffers import RolloutBuffer
from torch import nn

import ppo_atari

SCRIPTS = [importlib.import_module(path.stem) for path in sorted(ROOT.glob("*.py")) if path.name != "compare_runs.py"]
WITH_GAE = [script for script in SCRIPTS if hasattr(script, "compute_gae")]
assert ppo_atari in WITH_GAE
every_script = pytest.mark.parametrize("script", WITH_GAE, ids=lambda script: script.__name__)


def gae(script, rewards, values, next_values, terminations, dones, gamma=0.99, gae_lambda=0.95):
    """One environment as lists, or several as (T, N) arrays; float64, so that hand-worked values need no slack."""
    tensors = [
        torch.as_tensor(np.array(x), dtype=torch.float64) for x in (rewards, values, next_values, terminations, dones)
    ]
    tensors = [x.unsqueeze(1) if x.ndim == 1 else x for x in tensors]
    advantages = script.compute_gae(*tensors, gamma, gae_lambda)
    assert advantages.shape == tensors[0].shape
    return advantages.squeeze(1).numpy()


@every_script
def test_a_time_limit_keeps_the_value_of_the_final_observation(script):
    # Two steps of reward 1, then a time limit; the critic says 10 everywhere.
    # Both deltas: 1 + 0.99 * 10 - 10 = 0.9. A1 = 0.9, A0 = 0.9 + 0.99 * 0.95 * 0.9 = 1.74645.
    advantages = gae(script, [1, 1], [10, 10], [10, 10], [0, 0], [0, 1])
    np.testing.assert_allclose(advantages, [1.74645, 0.9], rtol=1e-12)
    np.testing.assert_allclose(advantages + 10, [11.74645, 10.9], rtol=1e-12)


@every_script
def test_a_termination_leaves_only_the_reward(script):
    # The same with a termination: A1 = 1 - 10 = -9, A0 = 0.9 + 0.9405 * -9 = -7.5645.
    np.testing.assert_allclose(gae(script, [1, 1], [10, 10], [10, 10], [0, 1], [0, 1]), [-7.5645, -9], rtol=1e-12)


@every_script
def test_the_ended_step_is_the_one_that_loses_its_future(script):
    # Three steps, the one at t=1 terminates, so what follows is a new episode whose first value is 100.
    # One slot late would give 1 + 0.99 * 100 - 5 = 95 at t=1. Right: 1 + 0 - 5 = -4.
    # t=0: 1 + 0.99 * 5 - 5 = 0.95. t=2: 1 + 0.99 * 5 - 100 = -94.05.
    advantages = gae(script, [1, 1, 1], [5, 5, 100], [5, 100, 5], [0, 1, 0], [0, 1, 0], gae_lambda=0)
    np.testing.assert_allclose(advantages, [0.95, -4.0, -94.05], rtol=1e-12)


@every_script
def test_a_termination_at_the_time_limit_is_a_termination(script):
    # Both flags: the target of the last step is its reward, 1, not 1 + 0.99 * 10 = 10.9.
    (advantage,) = gae(script, [1], [10], [10], [1], [1])
    assert advantage + 10 == pytest.approx(1)


@every_script
def test_lambda_0_is_one_step_temporal_difference(script):
    # 1 + 0.5 * 4 - 2 = 1;  2 + 0.5 * 8 - 4 = 2;  3 + 0.5 * 16 - 8 = 3.
    advantages = gae(script, [1, 2, 3], [2, 4, 8], [4, 8, 16], [0, 0, 0], [0, 0, 0], gamma=0.5, gae_lambda=0)
    np.testing.assert_allclose(advantages, [1, 2, 3])


@every_script
def test_lambda_1_is_monte_carlo_with_the_last_value_behind_it(script):
    # Returns: 3 + 0.5 * 16 = 11;  2 + 0.5 * 11 = 7.5;  1 + 0.5 * 7.5 = 4.75. Values 2, 4, 8 off.
    advantages = gae(script, [1, 2, 3], [2, 4, 8], [4, 8, 16], [0, 0, 0], [0, 0, 0], gamma=0.5, gae_lambda=1)
    np.testing.assert_allclose(advantages, [2.75, 3.5, 3])


@every_script
@pytest.mark.parametrize("terminated", [0, 1])
def test_nothing_flows_back_over_an_end(script, terminated):
    # The steps after the end pay 1000; with lambda 1 they would show in every earlier advantage.
    # Values 0 but V(final) = 8. t=1: 1, and for a time limit + 0.5 * 8. t=0: 1 + 0.5 * A1.
    # t=3: 1000, t=2: 1000 + 0.5 * 1000.
    at_end = 1 if terminated else 5
    advantages = gae(
        script,
        rewards=[1, 1, 1000, 1000],
        values=[0, 0, 0, 0],
        next_values=[0, 8, 0, 0],
        terminations=[0, terminated, 0, 0],
        dones=[0, 1, 0, 0],
        gamma=0.5,
        gae_lambda=1,
    )
    np.testing.assert_allclose(advantages, [1 + 0.5 * at_end, at_end, 1500, 1000])


@every_script
def test_environments_do_not_mix(script):
    # Columns: the time limit, the termination, and no end; the first two as worked out above.
    # The third: A1 = 0.9, A0 = 1.74645 too, as the value behind a time limit is the value there.
    ends = np.array([[0, 0, 0], [0, 1, 0]])
    dones = np.array([[0, 0, 0], [1, 1, 0]])
    ten = np.full((2, 3), 10.0)
    advantages = gae(script, np.ones((2, 3)), ten, ten, ends, dones)
    np.testing.assert_allclose(advantages, [[1.74645, -7.5645, 1.74645], [0.9, -9, 0.9]], rtol=1e-12)


def random_rollout(seed, num_steps, num_envs):
    """Rewards, values, V(obs after the last step), V(final obs), terminations, truncations; both may be set."""
    rng = np.random.default_rng(seed)
    rewards, values, final_values = rng.normal(0, 3, (3, num_steps, num_envs))
    terminations, truncations = rng.random((2, num_steps, num_envs)) < rng.choice([0.0, 0.2, 0.6], (2, 1, 1))
    return rewards, values, rng.normal(0, 3, num_envs), final_values, terminations, truncations


def values_of_next(values, last_value, final_values, dones):
    return np.where(dones, final_values, np.concatenate([values[1:], last_value[None]]))


@every_script
@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_steps=st.integers(1, 12),
    num_envs=st.integers(1, 3),
    gamma=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
)
def test_equals_the_sum_of_its_definition(script, seed, num_steps, num_envs, gamma, gae_lambda):
    rewards, values, last_value, final_values, terminations, truncations = random_rollout(seed, num_steps, num_envs)
    dones = terminations | truncations
    next_values = values_of_next(values, last_value, final_values, dones)
    # A[t] = sum over k of (gamma lambda)^k * delta[t + k], up to and with the step that ends the episode.
    expected = np.zeros((num_steps, num_envs))
    for n in range(num_envs):
        for start in range(num_steps):
            for t in range(start, num_steps):
                future = 0 if terminations[t, n] else gamma * next_values[t, n]
                delta = rewards[t, n] + future - values[t, n]
                expected[start, n] += (gamma * gae_lambda) ** (t - start) * delta
                if dones[t, n]:
                    break
    tensors = [torch.as_tensor(x.astype(np.float64)) for x in (rewards, values, next_values, terminations, dones)]
    before = [x.clone() for x in tensors]
    advantages = script.compute_gae(*tensors, gamma, gae_lambda)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True)), "an input was changed"


@every_script
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), num_steps=st.integers(1, 20), num_envs=st.integers(1, 4))
def test_equals_stable_baselines3(script, seed, num_steps, num_envs):
    gamma, gae_lambda = 0.97, 0.9
    rewards, values, last_value, final_values, terminations, truncations = random_rollout(seed, num_steps, num_envs)
    dones = terminations | truncations

    # As its collect_rollouts does it: gamma * V(final) goes into the reward where an episode was truncated only, and
    # what is stored beside step t is whether the observation it started from was the first of an episode.
    buffer = RolloutBuffer(
        num_steps,
        gym.spaces.Box(-1, 1, (1,)),
        gym.spaces.Discrete(2),
        device="cpu",
        gae_lambda=gae_lambda,
        gamma=gamma,
        n_envs=num_envs,
    )
    episode_starts = np.ones(num_envs)
    for t in range(num_steps):
        reward = rewards[t] + gamma * final_values[t] * (truncations[t] & ~terminations[t])
        value = torch.as_tensor(values[t], dtype=torch.float32)
        zeros = np.zeros((num_envs, 1))
        buffer.add(zeros, zeros, reward, episode_starts, value, torch.zeros(num_envs))
        episode_starts = dones[t]
    buffer.compute_returns_and_advantage(torch.as_tensor(last_value, dtype=torch.float32), dones[-1])

    next_values = values_of_next(values, last_value, final_values, dones)
    tensors = [torch.as_tensor(x.astype(np.float32)) for x in (rewards, values, next_values, terminations, dones)]
    advantages = script.compute_gae(*tensors, gamma, gae_lambda)
    np.testing.assert_allclose(advantages.numpy(), buffer.advantages, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose((advantages + tensors[1]).numpy(), buffer.returns, rtol=1e-4, atol=1e-4)


@every_script
@pytest.mark.parametrize("gae_lambda", [0, 0.5, 0.95, 1])
def test_a_reward_of_1_for_ever_is_worth_1_over_1_minus_gamma_across_time_limits(script, gae_lambda):
    # With the exact value 1 / (1 - 0.99) = 100 everywhere there is nothing to correct: 1 + 0.99 * 100 - 100 = 0.
    hundred, dones = np.full((50, 2), 100.0), np.zeros((50, 2))
    dones[[9, 19, 29], 0] = 1
    dones[[4, 49], 1] = 1
    advantages = gae(script, np.ones((50, 2)), hundred, hundred, np.zeros((50, 2)), dones, gae_lambda=gae_lambda)
    np.testing.assert_allclose(advantages, np.zeros((50, 2)), atol=1e-9)
    # A time limit that is taken for the end of the task shows as 1 - 100 = -99 at that very step.
    mistaken = gae(script, np.ones((50, 2)), hundred, hundred, dones, dones, gae_lambda=gae_lambda)
    np.testing.assert_allclose(mistaken[dones == 1], -99)


@every_script
def test_shapes_that_differ_are_refused(script):
    # (2, 1) and (2,) would broadcast to (2, 2) without a word.
    column, flat = torch.zeros(2, 1), torch.zeros(2)
    with pytest.raises(AssertionError, match=r"want \(T, N\)"):
        script.compute_gae(column, flat, column, column, column, 0.99, 0.95)


class PixelCritic(nn.Module):
    """V(obs) is the value of the newest image's pixels; the policy is uniform and learns nothing."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))

    def forward(self, obs):
        values = obs[:, -1].float().mean((1, 2))
        return torch.zeros(len(obs), 2) + 0 * self.nothing, values + 0 * self.nothing

    def act(self, obs, greedy):
        return torch.zeros(len(obs), dtype=torch.int64)


@pytest.mark.parametrize(
    ("env_id", "values", "next_values", "terminations", "dones", "advantages"),
    [
        # The images go 0, 1, 2, and the third step leads to 3, which is never acted on; then a new episode's 0.
        # Advantages 1 + 0.5 * V' - V, at the end 1 + 0.5 * 3 - 2 = 0.5.
        ("Ramp3Trunc", [0, 1, 2, 0], [1, 2, 3, 1], [0, 0, 0, 0], [0, 0, 1, 0], [1.5, 1, 0.5, 1.5]),
        # A time limit at the very last step of the rollout: 1 + 0.5 * 2 - 1 = 1.
        ("Ramp2Trunc", [0, 1, 0, 1], [1, 2, 1, 2], [0, 0, 0, 0], [0, 1, 0, 1], [1.5, 1, 1.5, 1]),
        # At a termination V' is multiplied by 0, so any will do: 1 - 2 = -1.
        ("Ramp3Term", [0, 1, 2, 0], [1, 2, None, 1], [0, 0, 1, 0], [0, 0, 1, 0], [1.5, 1, -1, 1.5]),
        ("Ramp3Both", [0, 1, 2, 0], [1, 2, None, 1], [0, 0, 1, 0], [0, 0, 1, 0], [1.5, 1, -1, 1.5]),
    ],
)
def test_training_estimates_from_what_each_step_led_to(
    tmp_path, monkeypatch, env_id, values, next_values, terminations, dones, advantages
):
    seen = types.SimpleNamespace()

    def spy(rewards, values, next_values, terminations, dones, gamma, gae_lambda):
        seen.inputs = [x.clone() for x in (rewards, values, next_values, terminations, dones)]
        seen.advantages = real(rewards, values, next_values, terminations, dones, gamma, gae_lambda)
        return seen.advantages

    real = ppo_atari.compute_gae
    monkeypatch.setattr(ppo_atari, "compute_gae", spy)
    monkeypatch.setattr(ppo_atari, "make_agent", lambda args, envs, device: PixelCritic())
    args = ppo_atari.Args(
        env_id=f"small_envs:{env_id}-v0",
        num_envs=2,
        num_steps=4,
        num_minibatches=1,
        update_epochs=1,
        total_timesteps=8,
        gamma=0.5,
        gae_lambda=0.0,
        eval_every=0,
        eval_episodes=1,
        threads=1,
        cuda=False,
        run_dir=str(tmp_path),
    )
    ppo_atari.train(args)
    for n in range(2):
        got = [x[:, n].tolist() for x in seen.inputs]
        assert got[0] == [1, 1, 1, 1]
        assert got[1] == values
        assert [None if want is None else got[2][t] for t, want in enumerate(next_values)] == next_values
        assert got[3] == terminations
        assert got[4] == dones
        assert seen.advantages[:, n].tolist() == advantages

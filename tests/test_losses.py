"""Losses against hand-worked values and float64 numpy, and what `train` makes of them."""

import importlib
import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from short_runs import only_run, scalars, small_run

import ppo_atari


def random_cases(test):
    given_seed_and_size = given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 30), clip_coef=st.floats(0.01, 0.9))
    return settings(max_examples=50, deadline=None, database=None, derandomize=True)(given_seed_and_size(test))


def float64(*lists):
    return [torch.tensor(x, dtype=torch.float64) for x in lists]


# Policy loss


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
def test_policy_loss_of_one_sample(ratio, advantage, loss, gradient):
    new_logprobs, logprobs, advantages = float64([math.log(ratio) - 1.3], [-1.3], [advantage])
    new_logprobs.requires_grad_()
    result = ppo_atari.policy_loss((new_logprobs - logprobs).exp(), advantages, 0.2)
    result.backward()
    assert result.shape == ()
    assert result.item() == pytest.approx(loss)
    assert new_logprobs.grad.item() == pytest.approx(gradient)


def test_policy_loss_is_the_mean_over_samples():
    # (-1.2 - 0.5 + 1.5 + 0.8) / 4 = 0.15, each from the table above.
    loss = ppo_atari.policy_loss(*float64([1.5, 0.5, 1.5, 0.5], [1, 1, -1, -1]), 0.2)
    assert loss.item() == pytest.approx(0.15)


@random_cases
def test_policy_loss_equals_equation_7(seed, size, clip_coef):
    rng = np.random.default_rng(seed)
    ratio, advantages = np.exp(rng.normal(0, 0.7, size)), rng.normal(0, 2, size)
    # The paper maximises min(r * A, clip(r) * A).
    objective = np.minimum(ratio * advantages, np.clip(ratio, 1 - clip_coef, 1 + clip_coef) * advantages)
    loss = ppo_atari.policy_loss(*float64(ratio, advantages), clip_coef)
    assert loss.item() == pytest.approx(-objective.mean(), rel=1e-9, abs=1e-12)


# Value loss


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
def test_value_loss_of_one_sample(new_value, old_value, target, clip_coef, loss, gradient):
    new_values, values, returns = float64([new_value], [old_value], [target])
    new_values.requires_grad_()
    result = ppo_atari.value_loss(new_values, values, returns, clip_coef)
    result.backward()
    assert result.shape == ()
    assert result.item() == pytest.approx(loss)
    assert new_values.grad.item() == pytest.approx(gradient)


def test_value_loss_takes_the_worse_error_of_each_sample_then_the_mean():
    # Half of max(1, 3.24) and half of max(0.25, 0.09), from the table above: (1.62 + 0.125) / 2 = 0.8725.
    # The worse of the two means would be max(1.25, 3.33) / 4 = 0.8325.
    values = float64([1, 1], [0, 0], [2, 0.5])
    assert ppo_atari.value_loss(*values, 0.2).item() == pytest.approx(0.8725)
    assert ppo_atari.value_loss(*values, None).item() == pytest.approx((1 + 0.25) / 4)


@random_cases
def test_value_loss_equals_its_definition(seed, size, clip_coef):
    new_values, values, returns = np.random.default_rng(seed).normal(0, 1, (3, size))
    clipped = np.clip(new_values, values - clip_coef, values + clip_coef)
    expected = np.mean(np.maximum((new_values - returns) ** 2, (clipped - returns) ** 2)) / 2
    tensors = float64(new_values, values, returns)
    assert ppo_atari.value_loss(*tensors, clip_coef).item() == pytest.approx(expected, rel=1e-9)
    assert ppo_atari.value_loss(*tensors, None).item() == pytest.approx(np.mean((new_values - returns) ** 2) / 2)


# Events every so many steps


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
def test_crossed_meets_every_multiple_once(every, num_envs, steps, times):
    hits = [ppo_atari.crossed(every, step - num_envs, step) for step in range(num_envs, steps + 1, num_envs)]
    assert sum(hits) == times


# What `train` makes of them


def recorded(monkeypatch, name):
    """Returns a list that gets the arguments of each call, tensors as numpy arrays."""
    calls, real = [], getattr(ppo_atari, name)

    def spy(*args):
        calls.append([x.detach().double().numpy() if isinstance(x, torch.Tensor) else x for x in args])
        return real(*args)

    monkeypatch.setattr(ppo_atari, name, spy)
    return calls


def tiny(tmp_path, **changes):
    sizes = {"num_envs": 4, "num_steps": 16, "num_minibatches": 4, "update_epochs": 2, "total_timesteps": 128}
    short = {"env_id": "small_envs:GlobalDraw-v0", "eval_every": 0, "eval_episodes": 1, "learning_rate": 0.01}
    quiet = {"threads": 1, "cuda": False, "progress": False, "run_dir": str(tmp_path)}
    return ppo_atari.Args(**sizes | short | quiet | changes)


@pytest.mark.parametrize(("norm_adv", "clip_vloss"), [(True, True), (False, False)])
def test_minibatches_get_what_belongs_to_them(tmp_path, monkeypatch, norm_adv, clip_vloss):
    """The environment draws its rewards, so that a return names its sample."""
    gae, policy, value = (recorded(monkeypatch, name) for name in ("compute_gae", "policy_loss", "value_loss"))
    spied, advantages = ppo_atari.compute_gae, []
    monkeypatch.setattr(ppo_atari, "compute_gae", lambda *args: advantages.append(spied(*args)) or advantages[-1])
    ppo_atari.train(tiny(tmp_path, norm_adv=norm_adv, clip_vloss=clip_vloss, clip_coef=0.1))
    assert (len(gae), len(policy), len(value)) == (2, 16, 16)
    logged = scalars(only_run(tmp_path))
    clipped = 0
    for iteration in range(2):
        old_values = gae[iteration][1].ravel()
        raw = advantages[iteration].flatten()
        returns = (raw + torch.from_numpy(old_values).float()).double().numpy()
        raw = raw.double().numpy()
        assert len(set(returns)) == 64
        calls = slice(8 * iteration, 8 * iteration + 8)
        orders = []
        for (ratio, mb_advantages, clip_coef), (_, mb_values, mb_returns, v_clip) in zip(
            policy[calls], value[calls], strict=True
        ):
            inds = [int(np.flatnonzero(returns == x)[0]) for x in mb_returns]
            orders.append(inds)
            np.testing.assert_array_equal(mb_values, old_values[inds])
            expected = raw[inds]
            if norm_adv:
                # Of this minibatch alone; those of the whole batch would be another mean and deviation.
                expected = (expected - expected.mean()) / expected.std(ddof=1)
            np.testing.assert_allclose(mb_advantages, expected, rtol=1e-4, atol=1e-5)
            assert (clip_coef, v_clip) == (0.1, 0.1 if clip_vloss else None)
            clipped += (abs(ratio - 1) > 0.1).sum()
        # Each pass visits each sample once, in another order; samples are mixed, not whole minibatches.
        for half in (orders[:4], orders[4:]):
            assert [len(x) for x in half] == [16] * 4
            assert sorted(i for x in half for i in x) == list(range(64))
        assert len({frozenset(x) for x in orders}) == 8
        # The first minibatch meets the policy that acted.
        np.testing.assert_allclose(policy[8 * iteration][0], 1, atol=1e-5)
        # What is logged is the mean over all minibatches; approx_kl is that of old || new, estimated in two ways.
        ratios = np.array([ratio for ratio, *_ in policy[calls]])
        expected = {
            "old_approx_kl": -np.log(ratios).mean(),
            "approx_kl": (ratios - 1 - np.log(ratios)).mean(),
            "clipfrac": (abs(ratios - 1) > 0.1).mean(),
            "explained_variance": 1 - (returns - old_values).var() / returns.var(),
        }
        for name, number in expected.items():
            assert logged[f"losses/{name}"][iteration][1] == pytest.approx(number, rel=1e-3, abs=1e-6), name
    assert clipped > 0
    # Two actions that are about as probable.
    assert logged["losses/entropy"][0][1] == pytest.approx(math.log(2), abs=0.1)


@pytest.mark.parametrize("name", ["a2c_atari", "ppo_cartpole", "ppo_continuous", "rpo_continuous"])
def test_the_explained_variance_is_that_of_the_returns(name, tmp_path, monkeypatch):
    """1 less the share of the returns' variance that the values left, by what the rollout held."""
    script, args = small_run(name, tmp_path)
    real, right = script.compute_gae, []

    def noting(rewards, values, *rest):
        advantages = real(rewards, values, *rest)
        right.append(1 - (advantages.var() / (advantages + values).var()).item())
        return advantages

    monkeypatch.setattr(script, "compute_gae", noting)
    script.train(args)
    logged = scalars(only_run(tmp_path))["losses/explained_variance"]
    assert logged == [(64, pytest.approx(right[0], rel=1e-3)), (128, pytest.approx(right[1], rel=1e-3))]


def test_the_entropy_bonus_makes_a_policy_more_random(tmp_path, monkeypatch):
    """Every action pays the same; a bias of 2 gives one of the two 88 %, an entropy of 0.365; ln 2 is 0.693."""
    real = ppo_atari.Agent.__init__

    def biased(self, *args):
        real(self, *args)
        torch.nn.init.constant_(self.actor.bias[:1], 2.0)

    monkeypatch.setattr(ppo_atari.Agent, "__init__", biased)
    changes = {"env_id": "small_envs:ConstantTrunc-v0", "ent_coef": 1.0, "total_timesteps": 640, "learning_rate": 1e-3}
    ppo_atari.train(tiny(tmp_path, **changes))
    entropies = [value for _, value in scalars(only_run(tmp_path))["losses/entropy"]]
    assert entropies[0] < 0.55
    assert entropies[-1] > 0.65


# The policy


def new_agent(num_actions):
    obs_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    spaces = SimpleNamespace(single_observation_space=obs_space, single_action_space=gym.spaces.Discrete(num_actions))
    torch.manual_seed(1)
    return ppo_atari.Agent(ppo_atari.Args(), spaces)


@pytest.mark.parametrize("name", ["ppo_atari", "a2c_atari", "ppo_atari_ray"])
def test_networks_start_orthogonal_with_the_gains_of_ppo(name):
    obs_space, action_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(4)
    spaces = SimpleNamespace(single_observation_space=obs_space, single_action_space=action_space)
    module = importlib.import_module(name)
    agent = module.Agent(module.Args(), spaces)
    layers = [layer for layer in agent.modules() if hasattr(layer, "bias")]
    for layer, std in zip(layers, (*[2**0.5] * 4, 0.01, 1.0), strict=True):
        sizes = torch.linalg.svdvals(layer.weight.flatten(1))
        assert sizes.tolist() == pytest.approx([std] * len(sizes), rel=1e-4)
        assert not layer.bias.any()


@pytest.fixture(scope="module")
def breakout():
    """(128, 4, 84, 84) observations of two games, random actions."""
    args = ppo_atari.Args(env_id="BreakoutNoFrameskip-v4", threads=1)
    with ppo_atari.closing(ppo_atari.make_envs(args, 2)) as envs:
        rng = np.random.default_rng(0)
        envs.reset(seed=0)
        return torch.cat([torch.from_numpy(envs.step(rng.integers(0, 4, 2))[0].copy()) for _ in range(64)])


@pytest.mark.parametrize("num_actions", [2, 4, 18])
@torch.no_grad()
def test_a_new_policy_is_nearly_uniform(breakout, num_actions):
    policy, values = new_agent(num_actions)(breakout)
    assert policy.logits.shape == (128, num_actions)
    assert values.shape == (128,)
    assert policy.entropy().max().item() <= math.log(num_actions) + 1e-6
    assert policy.entropy().min().item() > math.log(num_actions) - 1e-3


@torch.no_grad()
def test_pixels_are_scaled_to_1_and_left_as_they_are(breakout):
    agent, before = new_agent(4), breakout.clone()
    _, values = agent(breakout)
    hidden = agent.trunk((breakout.double() / 255).float())
    assert torch.equal(breakout, before)
    assert breakout.max() > 1
    torch.testing.assert_close(values, agent.critic(hidden).squeeze(-1), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_actions_are_the_most_probable_ones_or_sampled(breakout):
    agent = new_agent(4)
    agent.actor.bias.copy_(torch.tensor([0, 2.0, 1.0, 0]))
    assert agent.act(breakout, greedy=True).tolist() == [1] * 128
    sampled = agent.act(breakout, greedy=False)
    # e^2 / (1 + e^2 + e + 1) = 0.61 of 128, +- 4 deviations of 5.5.
    assert 56 < (sampled == 1).sum().item() < 100
    assert len(sampled.unique()) == 4


def test_runs_of_neighbouring_seeds_share_no_environment_seed(tmp_path):
    """Environment i gets the seed of the first one + i; from 1 to 5 themselves, 15 of 16 would be shared."""

    def env_seed(seed):
        run = ppo_atari.Run(tiny(tmp_path, seed=seed), "global_step", 128, agent=new_agent(2))
        run.__exit__(None)
        return run.env_seed

    seeds = [env_seed(seed) for seed in range(1, 6)]
    assert len({seed + i for seed in seeds for i in range(64)}) == 5 * 64
    assert env_seed(1) == seeds[0]

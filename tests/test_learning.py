"""Environments whose right answers are known: does training find them?"""

import pytest
import torch

import ppo_atari

COMMON = {
    "num_envs": 4,
    "num_steps": 16,
    "num_minibatches": 2,
    "update_epochs": 4,
    "anneal_lr": False,
    "eval_every": 0,
    "checkpoint_every": 0,
    "threads": 1,
    "cuda": False,
    "progress": False,
}


@pytest.mark.parametrize("seed", [1, 2])
def test_the_right_action_is_learned(tmp_path, seed):
    """One action in two is right: 0.5 by chance, 1 when learned."""
    args = ppo_atari.Args(
        **COMMON,
        env_id="small_envs:RightAction-v0",
        seed=seed,
        run_dir=str(tmp_path),
        total_timesteps=64 * 30,
        learning_rate=1e-3,
        eval_episodes=100,
    )
    device = ppo_atari.prepare(args)
    with ppo_atari.closing(ppo_atari.make_envs(args, 4)) as envs:
        untrained = ppo_atari.Agent(args, envs)
    # 100 fair coins: 0.5 with a deviation of 0.05.
    assert 0.3 < ppo_atari.evaluate(untrained, args, 0, device)["return"].mean() < 0.7

    _, scores = ppo_atari.train(args)
    assert scores.shape == (100,)
    assert scores.mean() >= 0.95


@pytest.mark.parametrize(("end", "value", "tolerance"), [("Trunc", 10.0, 0.5), ("Term", 2.304, 0.3)])
def test_the_value_of_a_constant_reward_under_a_time_limit(tmp_path, end, value, tolerance):
    """A reward of 1 for ever is worth 1 / (1 - 0.9) = 10, and a limit of 4 steps does not change that.

    Where the 4th step is a termination, the critic, which cannot see the step count, learns V with an average error of
    0 over the starts k = 1..4 steps before the end. With c = 0.9 * 0.95 = 0.855 an error is the sum of c^j (1 + 0.9 V -
    V) over j < k, less c^(k-1) 0.9 V for the last step, which has no bootstrap. The sums of c^j over j < 1, 2, 3, 4 are
    1, 1.855, 2.586 and 3.211, together 8.652: (1 - 0.1 V) * 8.652 = 3.211 * 0.9 V, so V = 8.652 / 3.755 = 2.304.
    """
    args = ppo_atari.Args(
        **COMMON,
        env_id=f"small_envs:Constant{end}-v0",
        run_dir=str(tmp_path),
        total_timesteps=64 * 40,
        learning_rate=1e-3,
        gamma=0.9,
        gae_lambda=0.95,
        clip_vloss=False,
        ent_coef=0.0,
        max_grad_norm=10.0,
        eval_episodes=1,
    )
    agent, _ = ppo_atari.train(args)
    with torch.no_grad():
        _, got = agent(torch.full((1, 1, 36, 36), 128, dtype=torch.uint8))
    assert got.item() == pytest.approx(value, abs=tolerance)

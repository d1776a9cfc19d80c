"""a2c_atari.py: its update is PPO's with one pass, and stable-baselines3's."""

import numpy as np
import pytest
import torch
from short_runs import only_run, scalars, small_run, spy
from stable_baselines3 import A2C
from stable_baselines3.common.logger import Logger
from torch.distributions import Categorical

import a2c_atari
import ppo_atari


def adam(parameters, lr, **_):
    return torch.optim.Adam(parameters, lr=lr, eps=1e-5)


def in_order(count, device):
    """In place of torch.randperm, which would draw from the stream that actions are drawn from."""
    return torch.arange(count, device=device)


def test_one_step_of_one_environment_is_a_batch(tmp_path):
    """The explained variance of one number is 1 - 0 / 0: none is logged."""
    _, args = small_run("a2c_atari", tmp_path, num_envs=1, num_steps=1, total_timesteps=3)
    a2c_atari.train(args)
    logged = scalars(only_run(tmp_path))
    assert [step for step, _ in logged["losses/value_loss"]] == [1, 2, 3]
    assert "losses/explained_variance" not in logged


@pytest.mark.parametrize("end", ["Trunc", "Term", "Both"])
def test_three_updates_are_those_of_ppo_with_one_pass_over_the_whole_batch(tmp_path, monkeypatch, end):
    monkeypatch.setattr(torch.optim, "RMSprop", adam)
    monkeypatch.setattr(torch, "randperm", in_order)
    # Episodes of 3 steps: in the middle of each rollout one ends.
    shared = {"num_envs": 2, "num_steps": 5, "total_timesteps": 30, "gae_lambda": 0.9, "learning_rate": 1e-3}
    shared |= {"env_id": f"small_envs:Ramp3{end}-v0", "ent_coef": 0.02, "max_grad_norm": 0.1, "gamma": 0.95}
    _, args = small_run("a2c_atari", tmp_path / "a2c", **shared, vf_coef=0.3)
    agent, _ = a2c_atari.train(args)
    # PPO's value loss is half the squared error.
    once = {"num_minibatches": 1, "update_epochs": 1, "norm_adv": False, "clip_vloss": False, "clip_coef": 1e9}
    _, args = small_run("ppo_atari", tmp_path / "ppo", **shared, **once, vf_coef=0.6)
    right, _ = ppo_atari.train(args)
    start = ppo_atari.Agent(args, ppo_atari.make_envs(args, 1)).state_dict()
    for name, weights in right.state_dict().items():
        torch.testing.assert_close(agent.state_dict()[name], weights, rtol=0, atol=1e-6)
        assert (weights - start[name]).abs().max() > 1e-3


def test_one_update_is_that_of_stable_baselines3(tmp_path, monkeypatch):
    seen, agents = [], []

    class Recorded(a2c_atari.Agent):
        """Keeps its weights at the start, and what it sees."""

        def __init__(self, args, envs):
            super().__init__(args, envs)
            agents.append({name: weights.clone() for name, weights in self.state_dict().items()})

        def forward(self, obs):
            seen.append(obs.clone())
            return super().forward(obs)

    monkeypatch.setattr(a2c_atari, "Agent", Recorded)
    monkeypatch.setattr(a2c_atari, "evaluate", lambda *_: dict.fromkeys(("return", "length"), np.zeros(1)))
    rollouts, actions = [], []
    spy(monkeypatch, a2c_atari, "compute_gae", lambda *args: rollouts.append(args))
    spy(monkeypatch, Categorical, "log_prob", lambda _, taken: actions.append(taken.unflatten(0, (5, 2))))
    flags = {"env_id": "PongNoFrameskip-v4", "num_steps": 5, "total_timesteps": 10, "eval_episodes": 1}
    _, args = small_run("a2c_atari", tmp_path, **flags, gae_lambda=0.9, learning_rate=1.0)
    agent, _ = a2c_atari.train(args)
    ((rewards, values, next_value, dones, *_),) = rollouts
    (obs,) = [x.unflatten(0, (5, 2)) for x in seen if len(x) == 10]

    env = a2c_atari.make_env(args)
    numbers = {
        "gamma": 0.99,
        "gae_lambda": 0.9,
        "ent_coef": 0.01,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
        "device": "cpu",
    }
    model = A2C("CnnPolicy", env, 1.0, 5, **numbers)
    model.rollout_buffer.n_envs = 2
    model.rollout_buffer.reset()
    names = {"trunk.0.": "features_extractor.cnn.", "trunk.1": "features_extractor.linear.0"}
    names |= {"actor": "action_net", "critic": "value_net"}

    def theirs(name):
        for ours, their in names.items():
            name = name.replace(ours, their) if name.startswith(ours) else name
        return name

    model.policy.load_state_dict({theirs(name): x for name, x in agents[0].items()}, strict=False)
    starts = torch.cat([torch.ones(1, 2), dones[:-1]])
    for t in range(5):
        transition = (x[t].numpy() for x in (obs, actions[0], rewards, starts))
        model.rollout_buffer.add(*transition, values[t], torch.zeros(2))  # the update uses no log-probabilities
    model.rollout_buffer.compute_returns_and_advantage(next_value, dones[-1].numpy())
    model.set_logger(Logger(None, []))
    model.train()
    right = model.policy.state_dict()
    for name, weights in agent.state_dict().items():
        moved = (weights - agents[0][name]).abs().max().item()
        assert moved > 1e-6
        torch.testing.assert_close(weights, right[theirs(name)], rtol=0, atol=1e-3 * moved)

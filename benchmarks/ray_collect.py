"""Collects episodes with an own PyTorch policy on plain Ray actors.

Run:  RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32) python benchmarks/ray_collect.py
      (Ray runs whatever it is sent; on a cluster give ray.init its address, and Ray the cluster's token.)
"""

import gymnasium as gym
import numpy as np
import ray
import torch
from ray.util import ActorPool
from torch import Tensor, nn


@ray.remote(num_cpus=1)
class Collector:
    """An environment and a copy of the policy, in a process on some node."""

    def __init__(self, env_id: str, policy: nn.Module) -> None:
        torch.set_num_threads(1)
        self.env, self.policy = gym.make(env_id), policy

    @torch.inference_mode()
    def episode(self, weights: dict[str, Tensor], seed: int) -> dict[str, np.ndarray]:
        """Plays an episode with these weights; returns T + 1 observations, T actions and T rewards."""
        self.policy.load_state_dict(weights)
        rng, done = torch.Generator().manual_seed(seed), False
        observations, actions, rewards = [self.env.reset(seed=seed)[0]], [], []
        while not done:
            logits = self.policy(torch.as_tensor(observations[-1]).float())
            actions.append(torch.multinomial(logits.softmax(-1), 1, generator=rng).item())
            obs, reward, terminated, truncated, _ = self.env.step(actions[-1])
            observations.append(obs)
            rewards.append(reward)
            done = terminated or truncated
        return {"obs": np.stack(observations), "actions": np.array(actions), "rewards": np.array(rewards, np.float32)}


def collect(pool: ActorPool, policy: nn.Module, seeds: range) -> list[dict[str, np.ndarray]]:
    """Returns an episode for each seed, in order; the next one goes to the actor that is free first."""
    weights = ray.put(policy.state_dict())  # once, for all actors
    return list(pool.map(lambda collector, seed: collector.episode.remote(weights, seed), seeds))


if __name__ == "__main__":
    ray.init("local", num_cpus=2, include_dashboard=False)
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    pool = ActorPool([Collector.remote("CartPole-v1", policy) for _ in range(2)])
    lengths = [len(episode["actions"]) for episode in collect(pool, policy, range(20))]
    print(f"{len(lengths)} episodes, {np.mean(lengths):.1f} steps in the mean")

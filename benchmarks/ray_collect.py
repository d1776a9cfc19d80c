"""Collects episodes with an own PyTorch policy on plain Ray actors; rllib.md tells how to run it safely."""

import gymnasium as gym
import numpy as np
import ray
import torch
from ray.util import ActorPool


@ray.remote(num_cpus=1)
class Collector:
    """An environment in a process on some node, where torch has one thread."""

    def __init__(self, env_id: str) -> None:
        self.env = gym.make(env_id)

    @torch.inference_mode()
    def episode(self, policy: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
        """Returns an episode of T steps: "obs" (T, O), "actions" (T,), "rewards" (T,) and "next_obs" (T, O)."""
        rng, steps, ends = torch.Generator().manual_seed(seed), [], [False]
        obs, _ = self.env.reset(seed=seed)
        while not any(ends):
            action = torch.multinomial(policy(torch.as_tensor(obs).float()).softmax(-1), 1, generator=rng).item()
            next_obs, reward, *ends, _ = self.env.step(action)
            steps.append((obs, action, reward, next_obs))
            obs = next_obs
        columns = map(np.array, zip(*steps, strict=True))
        return dict(zip(("obs", "actions", "rewards", "next_obs"), columns, strict=True))


def collect(pool: ActorPool, policy: torch.nn.Module, seeds: range) -> list[dict[str, np.ndarray]]:
    """Returns an episode for each seed, in order; the next one goes to the actor that is free first."""
    sent = ray.put(policy)  # once, for all actors
    return list(pool.map(lambda collector, seed: collector.episode.remote(sent, seed), seeds))


if __name__ == "__main__":
    ray.init("local", num_cpus=2, include_dashboard=False)
    episodes = collect(ActorPool([Collector.remote("CartPole-v1") for _ in range(2)]), torch.nn.Linear(4, 2), range(20))
    print("mean length", np.mean([len(episode["actions"]) for episode in episodes]))

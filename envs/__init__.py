"""Registers the PyBullet environments: `import envs`, then `gymnasium.make`, or `gymnasium.make("envs:Id-v0")` at once.

PyBullet itself is imported when the first environment is made.
"""

import gymnasium as gym

# The time limit is gymnasium's TimeLimit wrapper: it truncates, the environments themselves only terminate.
gym.register(
    "BulletCartPole-v0",
    entry_point="envs.bullet_cartpole:BulletCartPole",
    max_episode_steps=500,
    reward_threshold=475.0,
)
gym.register(
    "BalancingPlate-v0",
    entry_point="envs.balancing_plate:BalancingPlate",
    max_episode_steps=500,
    reward_threshold=450.0,
)

"""Registers tasks of dm_control with vectors as observations, where shimmy's own ids have Dicts.

Needs: pip install "mujoco<3.6" "dm_control==1.0.37" "shimmy==2.0.1", which are no part of requirements.txt.
Run:   python ppo_continuous.py --env-id benchmarks.dm_control_ids:PendulumSwingup-v0, in the project's folder.
"""

from typing import Any

import gymnasium as gym

TASKS = {"PendulumSwingup-v0": "pendulum-swingup", "WalkerWalk-v0": "walker-walk", "ReacherEasy-v0": "reacher-easy"}


def make(task: str, **options: Any) -> gym.Env:  # noqa: ANN401
    """Returns a task of dm_control whose observations are one float64 vector; its episodes are 1,000 steps long."""
    import shimmy  # noqa: F401 (registers dm_control's ids)

    return gym.wrappers.FlattenObservation(gym.make(f"dm_control/{task}-v0", **options))


for name, task in TASKS.items():
    gym.register(name, make, kwargs={"task": task})

"""A pole on a cart that is pushed left or right, simulated by PyBullet."""

import functools
import math
import numbers
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import EzPickle

GRAVITY = 9.81  # m/s^2
DECISION_TIME = 1 / 20  # s
MAX_DECISIONS = 500  # the time limit with which the environment is registered
RAIL_END = 15.0  # m from the middle, where the slider of the URDF stops
MAX_SPEED = 100.0  # m/s and rad/s, to which Bullet cuts all speeds
SLIDER, HINGE = 0, 1  # the joints, in the order of the URDF

PRESETS = {
    "default": {
        "force": 10.0,
        "start_range": 0.05,
        "start_velocity_range": 0.05,
        "x_limit": 10.0,
        "angle_limit": 0.2095,
        "substeps": 12,
        "damping": 0.0,
        "slider_motor": False,
        "reward_kind": "alive",
    },
    "original": {
        "force": 50.0,
        "start_range": 0.05,
        "start_velocity_range": 0.0,
        "x_limit": 10.0,
        "angle_limit": 0.2095,
        "substeps": 1,
        "damping": 0.04,
        "slider_motor": True,
        "reward_kind": "zero_at_end",
    },
}


class BulletCartPole(gym.Env[np.ndarray, np.int64], EzPickle):
    """Balance a pole on a cart by pushing the cart.

    ## Description

    A cart of 1 kg slides without friction along a rail, the x axis. On it a pole of 0.1 kg and 1 m turns without
    friction about a hinge. It is the task of Barto, Sutton and Anderson (1983), as gymnasium's CartPole-v1 is, but
    computed by a physics engine, on a longer rail and with longer decisions: 1/20 s instead of 1/50 s.

    With M = 1 kg, m = 0.1 kg, l = 0.5 m from the hinge to the pole's centre, I = m/12 (1^2 + 0.05^2) kg m^2,
    g = 9.81 m/s^2, position x, angle a and force F:

        (M + m) x'' + m l cos(a) a'' - m l sin(a) a'^2 = F
        (I + m l^2) a'' + m l cos(a) x'' = m g l sin(a)

    ## Action Space

    `Discrete(2)`:

    | action | meaning                           |
    |--------|-----------------------------------|
    | 0      | push with `force` to -x for 1/20 s |
    | 1      | push with `force` to +x for 1/20 s |

    ## Observation Space

    `Box` of 4 float32:

    | index | meaning                                          | unit  | min            | max           |
    |-------|--------------------------------------------------|-------|----------------|---------------|
    | 0     | position of the cart                             | m     | -(x_limit + 5) | x_limit + 5   |
    | 1     | speed of the cart                                | m/s   | -100           | 100           |
    | 2     | angle of the pole, 0 upright, positive towards +x | rad   | -pi            | pi            |
    | 3     | angular speed of the pole                        | rad/s | -100           | 100           |

    ## Rewards

    `reward_kind="alive"`: 1 for every decision, the last one included, so that the return is the length.
    `"zero_at_end"`: the same, but 0 for the decision that ends the episode, be it by a fall or as its 500th.

    ## Starting State

    Position and angle are uniform within +-start_range, then both speeds within +-start_velocity_range.

    ## Episode End

    Termination: the cart is further than `x_limit` from the middle, or the pole further than `angle_limit` from
    upright. Truncation: after 500 decisions, by the wrapper that `gymnasium.make` adds; `step` itself never truncates.

    ## Arguments

    All by keyword. What is not given comes from the preset: "default", or "original", the values of the hobbyist's
    experiment from which the task comes. In that the motor with which PyBullet holds every joint was left on at the
    slider, where it eats 20 N of the 50 N; one coarse step per decision and Bullet's damping distort the motion.

    | argument               | default   | original      | meaning                                             |
    |------------------------|-----------|---------------|-----------------------------------------------------|
    | `force`                | 10        | 50            | N, above 0, at most 100                             |
    | `start_range`          | 0.05      | 0.05          | m and rad, 0 to 0.2, below `angle_limit`            |
    | `start_velocity_range` | 0.05      | 0             | m/s and rad/s, 0 to 1                               |
    | `x_limit`              | 10        | 10            | m, above 0, at most 12                              |
    | `angle_limit`          | 0.2095    | 0.2095        | rad, above 0, at most 1.5                           |
    | `substeps`             | 12        | 1             | physics steps of a decision, 1 to 100               |
    | `damping`              | 0         | 0.04          | Bullet's linear and angular damping, 0 to 1         |
    | `slider_motor`         | False     | True          | leave PyBullet's motor on the slider on             |
    | `reward_kind`          | "alive"   | "zero_at_end" | see Rewards                                         |
    | `render_mode`          | None      | None          | "rgb_array": `render` gives pictures; "human": a window |
    | `width`, `height`      | 480, 320  | 480, 320      | of a picture or window, 16 to 4096                  |

    ## Version History

    * v0: first version
    """

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 20}

    def __init__(
        self,
        *,
        preset: str = "default",
        force: float | None = None,
        start_range: float | None = None,
        start_velocity_range: float | None = None,
        x_limit: float | None = None,
        angle_limit: float | None = None,
        substeps: int | None = None,
        damping: float | None = None,
        slider_motor: bool | None = None,
        reward_kind: str | None = None,
        render_mode: str | None = None,
        width: int = 480,
        height: int = 320,
    ) -> None:
        given = {
            "force": force,
            "start_range": start_range,
            "start_velocity_range": start_velocity_range,
            "x_limit": x_limit,
            "angle_limit": angle_limit,
            "substeps": substeps,
            "damping": damping,
            "slider_motor": slider_motor,
            "reward_kind": reward_kind,
        }
        EzPickle.__init__(self, preset=preset, render_mode=render_mode, width=width, height=height, **given)
        check_choice("preset", preset, PRESETS)
        settings = PRESETS[preset] | {name: value for name, value in given.items() if value is not None}
        check_number("force", settings["force"], above=0, most=100)
        check_number("x_limit", settings["x_limit"], above=0, most=12)
        check_number("angle_limit", settings["angle_limit"], above=0, most=1.5)
        check_number("start_range", settings["start_range"], least=0, most=0.2)
        if settings["start_range"] >= settings["angle_limit"]:
            rule = f"below angle_limit={settings['angle_limit']!r}, or episodes would start at their end"
            raise ValueError(f"start_range={settings['start_range']!r} must be {rule}")
        check_number("start_velocity_range", settings["start_velocity_range"], least=0, most=1)
        check_number("substeps", settings["substeps"], least=1, most=100, whole=True)
        check_number("damping", settings["damping"], least=0, most=1)
        check_choice("slider_motor", settings["slider_motor"], (False, True))
        check_choice("reward_kind", settings["reward_kind"], ("alive", "zero_at_end"))
        check_choice("render_mode", render_mode, (None, "human", "rgb_array"))
        check_number("width", width, least=16, most=4096, whole=True)
        check_number("height", height, least=16, most=4096, whole=True)

        self.force, self.x_limit, self.angle_limit = settings["force"], settings["x_limit"], settings["angle_limit"]
        self.start_range, self.start_velocity_range = settings["start_range"], settings["start_velocity_range"]
        self.reward_kind = settings["reward_kind"]
        self.render_mode, self.width, self.height = render_mode, width, height
        high = np.array([self.x_limit + 5, MAX_SPEED, np.pi, MAX_SPEED], dtype=np.float32)
        self.observation_space = gym.spaces.Box(-high, high)
        self.action_space = gym.spaces.Discrete(2)
        # Decisions since the reset; None before the first.
        self.decisions: int | None = None

        self.bullet = Bullet(human=render_mode == "human")
        self._build(settings["substeps"], settings["damping"], settings["slider_motor"])

"""Environments whose right values can be worked out by hand; their images are 36 x 36, the least that NatureCNN takes.

`small_envs:Ramp3Term-v0` and so on work as --env-id wherever the folder of this file is on the import path.
"""

import os
import signal
import threading

import gymnasium as gym
import numpy as np


class Ramp(gym.Env):
    """After k steps the image is k everywhere; each step pays 1; ends after `length` steps.

    Args:
        length: steps of an episode.
        end: "term" by termination, "trunc" by a time limit, "both" at once.
        shape: of the image.
        first_action: Discrete(2, start=first_action); an action outside is an error.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, length=3, end="term", shape=(1, 36, 36), first_action=0, render_mode=None):
        self.length, self.end, self.render_mode = length, end, render_mode
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.action_space = gym.spaces.Discrete(2, start=first_action)

    def _image(self):
        return np.full(self.observation_space.shape, self.step_count, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_count = 0
        return self._image(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action} is not in {self.action_space}"
        self.step_count += 1
        ended = self.step_count >= self.length
        return self._image(), 1.0, ended and self.end != "trunc", ended and self.end != "term", {}

    def render(self):
        return np.full((36, 36, 3), 40 * (self.step_count + 1) % 256, np.uint8)


class RightAction(gym.Env):
    """One step long: the image is bright or dark, and the action that names which one pays 1, the other 0."""

    def __init__(self):
        self.observation_space = gym.spaces.Box(0, 255, (1, 36, 36), np.uint8)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bright = int(self.np_random.integers(2))
        return np.full((1, 36, 36), 200 * self.bright, np.uint8), {}

    def step(self, action):
        return np.zeros((1, 36, 36), np.uint8), float(action == self.bright), True, False, {}


for name, options in {
    "Ramp2Trunc": {"length": 2, "end": "trunc"},
    "Ramp3Term": {"length": 3, "end": "term"},
    "Ramp3Trunc": {"length": 3, "end": "trunc"},
    "Ramp3Both": {"length": 3, "end": "both"},
    "RampNegativeStart": {"length": 3, "first_action": -1},
    "RampLateStart": {"length": 3, "first_action": 5},
    "RampEndless": {"length": 10**9},
    "RampColour": {"length": 3, "shape": (50, 60, 3)},
    "RampGrey": {"length": 3, "shape": (50, 60)},
    "RampSmall": {"length": 3, "shape": (4, 20, 20)},
}.items():
    gym.register(f"{name}-v0", entry_point="small_envs:Ramp", kwargs=options, disable_env_checker=True)
gym.register("RightAction-v0", entry_point=RightAction, disable_env_checker=True)


class Constant(gym.Env):
    """The image is always the same and each step pays 1; ends after `length` steps, which the image does not tell."""

    def __init__(self, length=4, end="trunc"):
        self.length, self.end = length, end
        self.observation_space = gym.spaces.Box(0, 255, (1, 36, 36), np.uint8)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_count = 0
        return np.full((1, 36, 36), 128, np.uint8), {}

    def step(self, action):
        self.step_count += 1
        ended = self.step_count >= self.length
        return np.full((1, 36, 36), 128, np.uint8), 1.0, ended and self.end == "term", ended and self.end == "trunc", {}


class SeedReward(gym.Env):
    """One step long, and pays the seed of the reset: -1 where there was none."""

    def __init__(self):
        self.observation_space = gym.spaces.Box(0, 255, (1, 36, 36), np.uint8)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = -1 if seed is None else seed
        return np.zeros((1, 36, 36), np.uint8), {}

    def step(self, action):
        return np.zeros((1, 36, 36), np.uint8), float(self.seed), True, False, {}


class GlobalDraw(Ramp):
    """Draws its rewards from the global generator of numpy, as users' environments may."""

    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(np.random.rand()), terminated, truncated, info  # noqa: NPY002


class NanLater(Ramp):
    """Pays 1, and from its 50th step on nan."""

    later = float("nan")

    def reset(self, *, seed=None, options=None):
        self.all_steps = getattr(self, "all_steps", 0)
        return super().reset(seed=seed)

    def step(self, action):
        self.all_steps += 1
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward if self.all_steps < 50 else self.later, terminated, truncated, info


class HugeLater(NanLater):
    """Pays 1, and from its 50th step on so much that a squared error overflows."""

    later = 1e30


class SignalAt(Ramp):
    """Sends the own process a signal at one of its steps: with SIGNAL_AT=80:SIGTERM at the 80th, over all episodes.

    Once in a process. With SIGNAL_AT=80:SIGTERM:block that step never returns, and says so on standard output.
    """

    def reset(self, *, seed=None, options=None):
        self.all_steps = getattr(self, "all_steps", 0)
        return super().reset(seed=seed)

    def step(self, action):
        self.all_steps += 1
        at, signal_name, *block = os.environ.get("SIGNAL_AT", "0:none").split(":")
        if self.all_steps == int(at):
            del os.environ["SIGNAL_AT"]
            signal.raise_signal(getattr(signal, signal_name))
            if block:
                print("blocked", flush=True)
                threading.Event().wait()
        return super().step(action)


class Vector(gym.Env):
    """Observations are 24 numbers with different bounds, which numpy writes on several lines."""

    def __init__(self):
        high = np.arange(1, 25, dtype=np.float32) / 7
        self.observation_space = gym.spaces.Box(-high, high)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.low, {}

    def step(self, action):
        return self.observation_space.low, 0.0, False, False, {}


for name, entry_point, options in (
    ("ConstantTrunc", Constant, {"end": "trunc"}),
    ("ConstantTerm", Constant, {"end": "term"}),
    ("SeedReward", SeedReward, {}),
    ("GlobalDraw", GlobalDraw, {}),
    ("NanLater", NanLater, {}),
    ("HugeLater", HugeLater, {}),
    ("SignalAt", SignalAt, {"end": "trunc"}),
    ("Vector", Vector, {}),
):
    gym.register(f"{name}-v0", entry_point=entry_point, kwargs=options, disable_env_checker=True)
gym.register(
    "RampOneChannel-v0",
    entry_point="small_envs:Ramp",
    kwargs={"length": 3, "shape": (50, 60, 1)},
    disable_env_checker=True,
)


class Line(gym.Env):
    """After k steps the observation is [k, -k]; each step pays 1; ends after `length` steps.

    Args:
        length: steps of an episode.
        end: "term" by termination, "trunc" by a time limit, "both" at once.
        low: bounds of the actions, one for each dimension; an action outside is an error.
        high: likewise.
        shape: of the actions.
        dtype: of the observations.
        action_dtype: of the actions.
        nan: "obs", "final", "reset" or "reward": what holds nan, from the 50th step of this environment on.
        draws: the reward is drawn from the environment's own action space.
        drawable: else a package that draws is missing.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(
        self,
        length=3,
        end="trunc",
        low=(-1,),
        high=(1,),
        shape=None,
        dtype=np.float32,
        action_dtype=np.float32,
        nan="",
        draws=False,
        drawable=True,
        render_mode=None,
    ):
        self.length, self.end, self.nan, self.draws, self.drawable = length, end, nan, draws, drawable
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), dtype)
        low, high = (np.array(bound, action_dtype).reshape(shape or len(bound)) for bound in (low, high))
        self.action_space = gym.spaces.Box(low, high, dtype=action_dtype)
        self.all_steps, self.seen = 0, []

    def _obs(self, spoilt):
        obs = np.array([self.step_count, -self.step_count], self.observation_space.dtype)
        if spoilt and self.all_steps >= 50:
            obs[1] = np.nan
        return obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_count = 0
        return self._obs(self.nan == "reset"), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action} is not in {self.action_space}"
        self.seen.append(action)
        self.step_count += 1
        self.all_steps += 1
        at, signal_name = os.environ.get("SIGNAL_AT", "0:none").split(":")
        if self.all_steps == int(at):
            del os.environ["SIGNAL_AT"]
            signal.raise_signal(getattr(signal, signal_name))
        ended = self.step_count >= self.length
        reward = float("nan") if self.nan == "reward" and self.all_steps >= 50 else 1.0
        if self.draws:
            reward = float(self.action_space.sample().sum())
        obs = self._obs(self.nan == "obs" or (self.nan == "final" and ended))
        # "episode" is a name that gymnasium's own statistics use.
        info = {"episode": self.step_count}
        return obs, reward, ended and self.end != "trunc", ended and self.end != "term", info

    def render(self):
        if not self.drawable:
            raise gym.error.DependencyNotInstalled("the package that draws is missing")
        return np.full((36, 36, 3), 40 * (self.step_count + 1) % 256, np.uint8)


for name, options in {
    "Line2Trunc": {"length": 2},
    "Line2Term": {"length": 2, "end": "term"},
    "Line2Both": {"length": 2, "end": "both"},
    "Line3Trunc": {},
    "Line3Float64": {"dtype": np.float64},
    "LineAsymmetric": {"low": (-0.3, 2.0), "high": (0.1, 5.0)},
    "LineMatrix": {"low": (-1, -1, -2, -2), "high": (1, 1, 2, 2), "shape": (2, 2)},
    "LineUnbounded": {"low": (-1, -np.inf), "high": (1, np.inf)},
    "LineFloat64Actions": {"low": (-0.1,), "high": (0.1,), "action_dtype": np.float64},
    "LineFloat16Actions": {"low": (-0.1,), "high": (0.1,), "action_dtype": np.float16},
    "LineHalf": {"low": (-0.5,), "high": (0.5,)},
    "LineFixed": {"low": (-1, 0.5), "high": (1, 0.5)},
    "LineDraws": {"draws": True},
    "LineUndrawable": {"drawable": False},
    "LineNanObs": {"nan": "obs"},
    "LineNanFinal": {"nan": "final"},
    "LineNanReset": {"nan": "reset"},
    "LineNanReward": {"nan": "reward"},
}.items():
    gym.register(f"{name}-v0", entry_point="small_envs:Line", kwargs=options, disable_env_checker=True)
# Pendulum cut off after 20 steps, which its observations do not tell.
gym.register("Pendulum20-v0", entry_point="gymnasium.envs.classic_control.pendulum:PendulumEnv", max_episode_steps=20)


class Vectors:
    """Turns the images of the environments above into a vector of one number: the first pixel, times `scale`."""

    scale = 1.0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def _vector(self, image):
        return np.full(1, self.scale * image.flat[0], np.float32)

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return self._vector(obs), info

    def step(self, action):
        obs, *rest = super().step(action)
        return self._vector(obs), *rest


class VectorRamp(Vectors, Ramp):
    """After k steps the observation is [k].

    Args:
        nan: "obs" or "reset": the observations that hold nan, from the 50th step of this environment on.
    """

    def __init__(self, *args, nan="", **kwargs):
        super().__init__(*args, **kwargs)
        self.nan, self.all_steps = nan, 0

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return obs * np.float32(np.nan) if self.nan == "reset" and self.all_steps >= 50 else obs, info

    def step(self, action):
        self.all_steps += 1
        obs, *rest = super().step(action)
        return obs * np.float32(np.nan) if self.nan == "obs" and self.all_steps >= 50 else obs, *rest


class VectorRightAction(Vectors, RightAction):
    """The observation is [1] or [0]."""

    scale = 1 / 200


class VectorConstant(Vectors, Constant):
    """The observation is always [1]."""

    scale = 1 / 128


class VectorNanLater(Vectors, NanLater):
    """After k steps the observation is [k]."""


class VectorHugeLater(Vectors, HugeLater):
    """After k steps the observation is [k]."""


class VectorSignalAt(Vectors, SignalAt):
    """After k steps the observation is [k]."""


class VectorGlobalDraw(Vectors, GlobalDraw):
    """After k steps the observation is [k]."""


for name, entry_point, options in (
    ("VectorRamp2Trunc", VectorRamp, {"length": 2, "end": "trunc"}),
    ("VectorRamp3Term", VectorRamp, {"length": 3, "end": "term"}),
    ("VectorRamp3Trunc", VectorRamp, {"length": 3, "end": "trunc"}),
    ("VectorRamp3Both", VectorRamp, {"length": 3, "end": "both"}),
    ("VectorRampNegativeStart", VectorRamp, {"length": 3, "first_action": -1}),
    ("VectorRampLateStart", VectorRamp, {"length": 3, "first_action": 5}),
    ("VectorRampEndless", VectorRamp, {"length": 10**9}),
    ("VectorRampNanObs", VectorRamp, {"nan": "obs"}),
    ("VectorRampNanReset", VectorRamp, {"nan": "reset"}),
    ("VectorRightAction", VectorRightAction, {}),
    ("VectorConstantTrunc", VectorConstant, {"end": "trunc"}),
    ("VectorConstantTerm", VectorConstant, {"end": "term"}),
    ("VectorNanLater", VectorNanLater, {}),
    ("VectorHugeLater", VectorHugeLater, {}),
    ("VectorSignalAt", VectorSignalAt, {"end": "trunc"}),
    ("VectorGlobalDraw", VectorGlobalDraw, {}),
):
    gym.register(f"{name}-v0", entry_point=entry_point, kwargs=options, disable_env_checker=True)
# Ends by a registered time limit alone.
gym.register(
    "VectorRampLimit7-v0",
    entry_point=VectorRamp,
    kwargs={"length": 10**9},
    max_episode_steps=7,
    disable_env_checker=True,
)

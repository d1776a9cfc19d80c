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
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.utils import EzPickle

GRAVITY = 9.81  # m/s^2
DECISION_TIME = 1 / 20  # s
MAX_DECISIONS = 500  # the time limit with which the environment is registered
MAX_SPEED = 100.0  # m/s and rad/s, to which Bullet cuts all speeds
CAMERA = {"distance": 3.5, "yaw": 0, "pitch": -10, "fov": 40, "near": 0.1, "far": 20}  # m and degrees
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

    | action | meaning                            |
    | ------ | ---------------------------------- |
    | 0      | push with `force` to -x for 1/20 s |
    | 1      | push with `force` to +x for 1/20 s |

    ## Observation Space

    `Box` of 4 float32:

    | index | meaning                                           | unit  | min            | max         |
    | ----- | ------------------------------------------------- | ----- | -------------- | ----------- |
    | 0     | position of the cart                              | m     | -(x_limit + 5) | x_limit + 5 |
    | 1     | speed of the cart                                 | m/s   | -100           | 100         |
    | 2     | angle of the pole, 0 upright, positive towards +x | rad   | -pi            | pi          |
    | 3     | angular speed of the pole                         | rad/s | -100           | 100         |

    ## Rewards

    `reward_kind="alive"`: 1 for every decision, the last one included, so that the return is the length.
    `"zero_at_end"`: the same, but 0 for the decision that ends the episode, be it by a fall or as its 500th, whatever
    other time limit `gymnasium.make` was given.

    ## Starting State

    Position and angle are uniform within +-start_range, then both speeds within +-start_velocity_range.

    ## Episode End

    Termination: the cart is further than `x_limit` from the middle, or the pole further than `angle_limit` from
    upright. Truncation: after 500 decisions, by the wrapper that `gymnasium.make` adds; `step` itself never truncates.

    ## Arguments

    All by keyword. What is not given comes from the preset: "default", or "original", the values of the hobbyist's
    experiment from which the task comes. In that the motor with which PyBullet holds every joint was left on at the
    slider, where it eats 20 N of the 50 N; one coarse step per decision and Bullet's damping distort the motion. With
    12 substeps no force that is allowed moves a cart whose motor is on.

    | argument               | default  | original      | meaning                                     |
    | ---------------------- | -------- | ------------- | ------------------------------------------- |
    | `force`                | 10       | 50            | N, above 0, at most 100                     |
    | `start_range`          | 0.05     | 0.05          | m and rad, 0 to 0.2, below both limits      |
    | `start_velocity_range` | 0.05     | 0             | m/s and rad/s, 0 to 1                       |
    | `x_limit`              | 10       | 10            | m, above 0, at most 12                      |
    | `angle_limit`          | 0.2095   | 0.2095        | rad, above 0, at most 1.5                   |
    | `substeps`             | 12       | 1             | physics steps of a decision, 1 to 100       |
    | `damping`              | 0        | 0.04          | Bullet's linear and angular damping, 0 to 1 |
    | `slider_motor`         | False    | True          | motor on: it eats 20 N times the substeps   |
    | `reward_kind`          | "alive"  | "zero_at_end" | see Rewards                                 |
    | `render_mode`          | None     | None          | "rgb_array": pictures; "human": a window    |
    | `width`, `height`      | 480, 320 | 480, 320      | of a picture, 16 to 4096                    |

    ## Version History

    * v0: first version
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["human", "rgb_array"], "render_fps": 20}

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
        # The arguments above by name: what stands in a preset, as far as it was given.
        given = {name: value for name, value in locals().items() if name in PRESETS["default"] and value is not None}
        EzPickle.__init__(self, preset=preset, render_mode=render_mode, width=width, height=height, **given)
        check_choice("preset", preset, PRESETS)
        settings = SimpleNamespace(**PRESETS[preset] | given)
        check_number("force", settings.force, above=0, most=100)
        check_number("x_limit", settings.x_limit, above=0, most=12)
        check_number("angle_limit", settings.angle_limit, above=0, most=1.5)
        check_number("start_range", settings.start_range, least=0, most=0.2)
        for name in ("angle_limit", "x_limit"):
            if settings.start_range >= (limit := getattr(settings, name)):
                rule = f"below {name}={limit!r}, or episodes would begin at their end"
                raise ValueError(f"start_range={settings.start_range!r} must be {rule}")
        check_number("start_velocity_range", settings.start_velocity_range, least=0, most=1)
        check_number("substeps", settings.substeps, least=1, most=100, whole=True)
        check_number("damping", settings.damping, least=0, most=1)
        check_choice("slider_motor", settings.slider_motor, (False, True))
        check_choice("reward_kind", settings.reward_kind, ("alive", "zero_at_end"))
        check_choice("render_mode", render_mode, (None, *self.metadata["render_modes"]))
        check_number("width", width, least=16, most=4096, whole=True)
        check_number("height", height, least=16, most=4096, whole=True)

        self.settings = settings
        self.render_mode, self.width, self.height = render_mode, width, height
        high = np.array([settings.x_limit + 5, MAX_SPEED, np.pi, MAX_SPEED], dtype=np.float32)
        self.observation_space = gym.spaces.Box(-high, high)
        self.action_space = gym.spaces.Discrete(2)
        # Decisions since the last reset; None before the first.
        self.decisions: int | None = None
        self.bullet = Bullet(human=render_mode == "human")
        self._build()

    def _build(self) -> None:
        """Sets up the world and loads cart and pole, once: loading again at every reset would let the memory grow."""
        bullet, settings = self.bullet, self.settings
        bullet.setGravity(0, 0, -GRAVITY)
        bullet.setTimeStep(DECISION_TIME)
        bullet.setPhysicsEngineParameter(numSubSteps=settings.substeps, deterministicOverlappingPairs=1)
        urdf = Path(__file__).parent / "assets" / "cartpole.urdf"
        # Without the flag PyBullet would put inertias of its own in place of the file's.
        flags = bullet.URDF_USE_INERTIA_FROM_FILE
        self.body = bullet.loadURDF(str(urdf), useFixedBase=True, flags=flags)
        # PyBullet starts every joint with a motor that holds it.
        for joint in (HINGE,) if settings.slider_motor else (SLIDER, HINGE):
            bullet.setJointMotorControl2(self.body, joint, bullet.VELOCITY_CONTROL, force=0)
        # Given for the base, -1, it holds for all links.
        bullet.changeDynamics(self.body, -1, linearDamping=settings.damping, angularDamping=settings.damping)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Starts an episode near the middle, the pole nearly upright; `options` has no effect."""
        self._check_open()
        super().reset(seed=seed)
        start, start_velocity = self.settings.start_range, self.settings.start_velocity_range
        # Both pairs are drawn even where a range is 0, so that one argument does not change what the other draws.
        x, angle = self.np_random.uniform(-start, start, 2)
        speed, angle_speed = self.np_random.uniform(-start_velocity, start_velocity, 2)
        self.bullet.resetJointState(self.body, SLIDER, x, speed)
        self.bullet.resetJointState(self.body, HINGE, angle, angle_speed)
        self.decisions = 0
        self._show()
        return self._observation(self._state()), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Pushes for 1/20 s. Never truncates: that is for the wrapper that keeps the time limit."""
        self._check_open(started=True)
        check_action(action, self.action_space)
        force = self.settings.force if action == 1 else -self.settings.force
        # It acts for one call of stepSimulation, all its substeps included.
        self.bullet.setJointMotorControl2(self.body, SLIDER, self.bullet.TORQUE_CONTROL, force=force)
        self.bullet.stepSimulation()
        self.decisions += 1
        self._show()
        state = self._state()
        x, _, angle, _ = state
        terminated = bool(abs(x) > self.settings.x_limit or abs(angle) > self.settings.angle_limit)
        ends = terminated or self.decisions == MAX_DECISIONS
        reward = 0.0 if self.settings.reward_kind == "zero_at_end" and ends else 1.0
        return self._observation(state), reward, terminated, False, {}

    def _state(self) -> tuple[float, float, float, float]:
        """Returns position and speed of the cart, angle and angular speed of the pole."""
        (x, speed, *_), (angle, angle_speed, *_) = self.bullet.getJointStates(self.body, (SLIDER, HINGE))
        return x, speed, angle, angle_speed

    def _observation(self, state: tuple[float, ...]) -> np.ndarray:
        """Returns a new array each time, since callers keep them."""
        return np.clip(state, self.observation_space.low, self.observation_space.high).astype(np.float32)

    def _camera(self) -> dict[str, Any]:
        """Returns where the camera is: fixed while the cart is near the middle, further out following it."""
        x, *_ = self._state()
        return CAMERA | {"target": (x - float(np.clip(x, -1.2, 1.2)), 0, 0.4)}

    def render(self) -> np.ndarray | None:
        """Returns a picture (height, width, 3) in the mode "rgb_array"; a window shows itself."""
        self._check_open(started=True)
        if self.render_mode is None:
            gym.logger.warn("render() draws nothing without a render_mode, for example 'rgb_array'")
        if self.render_mode != "rgb_array":
            return None
        # A shadow would take ten times as long: the rail is long, and nothing lies under it.
        return self.bullet.picture(self._camera(), self.width, self.height, shadow=0, lightDirection=(1, -2, 3))

    def _show(self) -> None:
        """Keeps a window at the pace of the clock and its camera at the cart."""
        if self.render_mode == "human":
            self.bullet.show(self._camera(), 1 / self.metadata["render_fps"])

    def _check_open(self, started: bool = False) -> None:
        """Raises an error after `close`; with `started` before the first `reset` too."""
        if not self.bullet.close.alive:
            raise gym.error.ClosedEnvironmentError("this environment was closed; make a new one")
        if started and self.decisions is None:
            raise gym.error.ResetNeeded("call reset() before step() and render()")

    def close(self) -> None:
        """Ends the simulation, and with it a window; a second call does nothing."""
        self.bullet.close()


# ----- The same text in every file of this folder -----
class Bullet:
    """A simulation of its own: has all that the module pybullet has, with this simulation's id in every call.

    Without the id a call reaches simulation 0, whichever environment that belongs to.

    Args:
        human: show it in a window.
    """

    def __init__(self, human: bool) -> None:
        try:
            import pybullet
        except ModuleNotFoundError as error:
            package = "pybullet" if sys.platform == "linux" and sys.version_info < (3, 12) else "pybullet-arm64"
            raise gym.error.DependencyNotInstalled(
                f"PyBullet is missing: pip install {package} (there are wheels of pybullet for Python 3.11 on Linux "
                "x86-64, of pybullet-arm64 for Python 3.11 to 3.13 on Linux, macOS and Windows)"
            ) from error
        if human:
            check_display()
        self.pybullet = pybullet
        self.id = pybullet.connect(pybullet.GUI if human else pybullet.DIRECT)
        if human:
            pybullet.configureDebugVisualizer(pybullet.COV_ENABLE_GUI, 0, physicsClientId=self.id)
        self.last_shown = 0.0
        # Closes the simulation of a forgotten environment too. It does not hang on the environment: EzPickle makes a
        # copy by taking over the attributes of a temporary one, whose end would close what the copy goes on with.
        self.close = weakref.finalize(self, disconnect, pybullet, self.id)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (whatever pybullet has)
        attribute = getattr(self.pybullet, name)
        return functools.partial(attribute, physicsClientId=self.id) if callable(attribute) else attribute

    def matrices(self, camera: dict[str, Any], width: int, height: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns what maps the world to the camera and the camera to a picture of this size; angles in degrees."""
        # No roll, and axis 2, z, points up.
        view = self.computeViewMatrixFromYawPitchRoll(
            camera["target"], camera["distance"], camera["yaw"], camera["pitch"], 0, 2
        )
        return view, self.computeProjectionMatrixFOV(camera["fov"], width / height, camera["near"], camera["far"])

    def picture(self, camera: dict[str, Any], width: int, height: int, **light: object) -> np.ndarray:
        """Returns an image (height, width, 3), drawn without a display."""
        # Without the matrices, or with OpenGL but no window, it would be blank.
        view, projection = self.matrices(camera, width, height)
        _, _, pixels, *_ = self.getCameraImage(width, height, view, projection, renderer=self.ER_TINY_RENDERER, **light)
        # Builds without numpy return a flat tuple. The fourth channel is opacity.
        return np.asarray(pixels, np.uint8).reshape(height, width, 4)[:, :, :3]

    def show(self, camera: dict[str, Any], seconds: float) -> None:
        """Points the window's camera, and waits until the last call is `seconds` ago."""
        self.resetDebugVisualizerCamera(camera["distance"], camera["yaw"], camera["pitch"], camera["target"])
        time.sleep(max(0.0, self.last_shown + seconds - time.monotonic()))
        self.last_shown = time.monotonic()


def disconnect(pybullet: ModuleType, client: int) -> None:
    """Ends a simulation, unless that has happened, as when a window was closed by hand."""
    if pybullet.isConnected(client):
        pybullet.disconnect(client)


def check_display() -> None:
    """Raises a RuntimeError where no window can be opened: there PyBullet would end the whole process."""
    attempt = "import pybullet; pybullet.disconnect(pybullet.connect(pybullet.GUI))"
    if sys.platform != "linux" or os.environ.get("DISPLAY"):
        # Only another process can try it.
        if subprocess.run([sys.executable, "-c", attempt], capture_output=True, check=False).returncode == 0:
            return
        found = "none can be opened"
    else:
        found = "DISPLAY is not set"
    raise RuntimeError(f"render_mode='human' needs a display, and {found}; use render_mode='rgb_array' without one")


def check_number(
    name: str,
    value: float,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    whole: bool = False,
) -> None:
    """Raises a ValueError unless the argument is a number within its range."""
    kind = numbers.Integral if whole else numbers.Real
    if isinstance(value, kind) and not isinstance(value, bool) and above < value and least <= value <= most:
        return
    limits = {"above": above, "at least": least, "at most": most}
    rule = " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if math.isfinite(limit))
    raise ValueError(f"{name}={value!r} must be a {'whole ' * whole}number {rule}")


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raises a ValueError unless the argument is one of the choices."""
    if value not in list(choices):
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")


def check_action(action: object, space: gym.Space) -> None:
    """Raises a ValueError unless the action lies in the space: PyBullet would take nan, and be nan ever after."""
    if not space.contains(action):
        kind = f" of {action.dtype}" if isinstance(action, np.ndarray) else ""
        raise ValueError(f"action {action!r}{kind} is not in {space}")

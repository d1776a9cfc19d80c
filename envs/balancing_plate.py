"""A ball on a plate that tilts about two hinges, simulated by PyBullet."""

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
PHYSICS_STEP = 1 / 100  # s
PIVOT = np.array([0.0, 0.0, 0.15])  # m, where both hinges and the middle of the plate are
HALF_SIDE = 0.15  # m, half the plate's edge
HALF_THICKNESS = 0.01  # m, half the plate's thickness
BALL_RADIUS = 0.02  # m
BALL_MASS = 0.0007  # kg: light for its size, a table tennis ball has 0.0027
PARKED = (0.0, 0.0, 5.0)  # m, far above the plate
FALLEN = 0.10  # m, the height of the ball's centre at which it has fallen in the original
CAMERA = {"target": (0, 0, 0.13), "distance": 0.6, "yaw": 40, "pitch": -35, "fov": 45, "near": 0.05, "far": 5}
PITCH, ROLL = 0, 1  # the joints, in the order of the URDF

PRESETS = {
    "default": {
        "torque": 0.003,
        "frame_skip": 4,
        "ball_range": 0.05,
        "tilt_range": math.radians(3),
        "tilt_velocity_range": 0.0,
        "drop_height": 0.0,
        "damping": 0.0,
        "joint_velocities": True,
        "observation_scale": 1.0,
        "reward_kind": "distance",
        "action_format": "discrete",
        "fall": "edge",
    },
    "original": {
        "torque": 0.0003,
        "frame_skip": 1,
        "ball_range": 0.0,
        "tilt_range": 0.0005,
        "tilt_velocity_range": 0.00005,
        "drop_height": 0.02,
        "damping": 0.04,
        "joint_velocities": False,
        "observation_scale": 10.0,
        "reward_kind": "alive",
        "action_format": "multi",
        "fall": "height",
    },
}


class BalancingPlate(gym.Env[np.ndarray, Any], EzPickle):
    """Keep a ball near the middle of a plate by tilting the plate.

    ## Description

    A plate of 0.3 kg and 0.3 m x 0.3 m turns without friction about two hinges that cross in its middle: pitch about
    the x axis, and roll, which turns with the pitch, about the plate's y axis (URDF and Bullet's Euler angles name them
    the other way round). A torque acts at each hinge. On the plate lies a ball of 0.7 g and 20 mm radius, a solid one,
    which rolls without slipping. It is nowhere at rest but on a level plate, and its weight turns the plate further:
    with no torque it is lost after about a second.

    For small angles, with I = 0.00226 kg m^2 of the plate about either hinge, m = 0.0007 kg and g = 9.81 m/s^2:

        x'' =  5/7 g roll      I roll''  = torque of roll  + m g x
        y'' = -5/7 g pitch     I pitch'' = torque of pitch - m g y

    5/7 is 1 / (1 + 2/5): the share of the work that does not go into the spin of a solid sphere.

    ## Action Space

    `action_format="discrete"`: `Discrete(4)`, the signs of two torques of the size `torque`:

    | action | torque of pitch | torque of roll | the ball, at rest in the middle, rolls to |
    | ------ | --------------- | -------------- | ----------------------------------------- |
    | 0      | -               | -              | -x, +y                                    |
    | 1      | -               | +              | +x, +y                                    |
    | 2      | +               | -              | -x, -y                                    |
    | 3      | +               | +              | +x, -y                                    |

    `"multi"`: `MultiDiscrete([2, 2])`, (pitch, roll) with 0 for - and 1 for +.
    `"box"`: `Box(-1, 1, (2,), float32)`, (pitch, roll) in units of `torque`.

    ## Observation Space

    `Box` of 10 float32, or of the first 8 with `joint_velocities=False`; all times `observation_scale`:

    | index | meaning                                                 | unit  | min  | max |
    | ----- | ------------------------------------------------------- | ----- | ---- | --- |
    | 0     | x of the ball's centre, from the middle                 | m     | -0.3 | 0.3 |
    | 1     | y of the ball's centre, from the middle                 | m     | -0.3 | 0.3 |
    | 2     | z of the ball's centre; 0.18 at rest on the level plate | m     | -0.5 | 0.5 |
    | 3     | speed of the ball along x                               | m/s   | -10  | 10  |
    | 4     | speed of the ball along y                               | m/s   | -10  | 10  |
    | 5     | speed of the ball along z                               | m/s   | -10  | 10  |
    | 6     | pitch                                                   | rad   | -1.6 | 1.6 |
    | 7     | roll                                                    | rad   | -1.6 | 1.6 |
    | 8     | speed of pitch                                          | rad/s | -100 | 100 |
    | 9     | speed of roll                                           | rad/s | -100 | 100 |

    The axes are those of the room; the hinges cross at (0, 0, 0.15). Without the last two the observation does not
    tell where the plate is going: a DQN that learns the task with them did not learn it without.

    ## Rewards

    `reward_kind="distance"`: 1 - d / 0.15 m for every decision, where d = hypot(x, y) after it: 1 in the middle, 0 at
    the middle of an edge, -0.41 in a corner. `"alive"`: 1 for every decision. The info dict of `reset` and `step` has
    d, in metres, as "distance".

    ## Starting State

    The ball is at rest on the plate, both coordinates, in the plane of the plate, uniform within +-ball_range from its
    middle, and `drop_height` above it. Then pitch and roll are uniform within +-tilt_range, then their speeds within
    +-tilt_velocity_range.

    ## Episode End

    Termination: with `fall="edge"` the ball's centre is beyond an edge, measured in the plane of the plate; with
    `"height"` it is below 0.10 m. Truncation: after 500 decisions, by the wrapper that `gymnasium.make` adds; `step`
    itself never truncates.

    ## Arguments

    All by keyword. What is not given comes from the preset: "default", or "original", the values of the hobbyist's
    experiment from which the task comes: from its start in the middle the ball can be kept, but from 5 cm off it the
    torque cannot bring it back. (m g times 44 mm is 0.0003 N m.)

    | argument              | default    | original | meaning                                         |
    | --------------------- | ---------- | -------- | ----------------------------------------------- |
    | `torque`              | 0.003      | 0.0003   | N m, above 0, at most 0.1                       |
    | `frame_skip`          | 4          | 1        | physics steps of 1/100 s in a decision, 1 to 20 |
    | `ball_range`          | 0.05       | 0        | m, 0 to 0.12                                    |
    | `tilt_range`          | 0.0524     | 0.0005   | rad, 0 to 0.2; 0.0524 is 3 degrees              |
    | `tilt_velocity_range` | 0          | 0.00005  | rad/s, 0 to 1                                   |
    | `drop_height`         | 0          | 0.02     | m, 0 to 0.1                                     |
    | `damping`             | 0          | 0.04     | Bullet's linear and angular damping, 0 to 1     |
    | `joint_velocities`    | True       | False    | the last two numbers of the observation         |
    | `observation_scale`   | 1          | 10       | above 0, at most 1000                           |
    | `reward_kind`         | "distance" | "alive"  | see Rewards                                     |
    | `action_format`       | "discrete" | "multi"  | see Action Space                                |
    | `fall`                | "edge"     | "height" | see Episode End                                 |
    | `render_mode`         | None       | None     | "rgb_array": pictures; "human": a window        |
    | `width`, `height`     | 480, 320   | 480, 320 | of a picture, 16 to 4096                        |

    ## Version History

    * v0: first version
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["human", "rgb_array"], "render_fps": 25}

    def __init__(
        self,
        *,
        preset: str = "default",
        torque: float | None = None,
        frame_skip: int | None = None,
        ball_range: float | None = None,
        tilt_range: float | None = None,
        tilt_velocity_range: float | None = None,
        drop_height: float | None = None,
        damping: float | None = None,
        joint_velocities: bool | None = None,
        observation_scale: float | None = None,
        reward_kind: str | None = None,
        action_format: str | None = None,
        fall: str | None = None,
        render_mode: str | None = None,
        width: int = 480,
        height: int = 320,
    ) -> None:
        # The arguments above by name: what stands in a preset, as far as it was given.
        given = {name: value for name, value in locals().items() if name in PRESETS["default"] and value is not None}
        EzPickle.__init__(self, preset=preset, render_mode=render_mode, width=width, height=height, **given)
        check_choice("preset", preset, PRESETS)
        settings = SimpleNamespace(**PRESETS[preset] | given)
        check_number("torque", settings.torque, above=0, most=0.1)
        check_number("frame_skip", settings.frame_skip, least=1, most=20, whole=True)
        check_number("ball_range", settings.ball_range, least=0, most=0.12)
        check_number("tilt_range", settings.tilt_range, least=0, most=0.2)
        check_number("tilt_velocity_range", settings.tilt_velocity_range, least=0, most=1)
        check_number("drop_height", settings.drop_height, least=0, most=0.1)
        check_number("damping", settings.damping, least=0, most=1)
        check_choice("joint_velocities", settings.joint_velocities, (False, True))
        check_number("observation_scale", settings.observation_scale, above=0, most=1000)
        check_choice("reward_kind", settings.reward_kind, ("distance", "alive"))
        check_choice("action_format", settings.action_format, ("discrete", "multi", "box"))
        check_choice("fall", settings.fall, ("edge", "height"))
        check_choice("render_mode", render_mode, (None, *self.metadata["render_modes"]))
        check_number("width", width, least=16, most=4096, whole=True)
        check_number("height", height, least=16, most=4096, whole=True)

        self.settings = settings
        self.render_mode, self.width, self.height = render_mode, width, height
        # Films have a picture for every decision: at this rate they play in real time.
        self.metadata = self.metadata | {"render_fps": 1 / (PHYSICS_STEP * settings.frame_skip)}
        high = np.array([0.3, 0.3, 0.5, 10, 10, 10, 1.6, 1.6, 100, 100][: 10 if settings.joint_velocities else 8])
        high = (high * settings.observation_scale).astype(np.float32)
        self.observation_space = gym.spaces.Box(-high, high)
        self.action_space = {
            "discrete": gym.spaces.Discrete(4),
            "multi": gym.spaces.MultiDiscrete([2, 2]),
            "box": gym.spaces.Box(-1, 1, (2,), np.float32),
        }[settings.action_format]
        self.started = False
        self.bullet = Bullet(human=render_mode == "human")
        self._build()

    def _build(self) -> None:
        """Sets up the world and loads plate and ball, once: loading again at every reset would let the memory grow."""
        bullet, settings = self.bullet, self.settings
        bullet.setGravity(0, 0, -GRAVITY)
        bullet.setTimeStep(PHYSICS_STEP * settings.frame_skip)
        bullet.setPhysicsEngineParameter(numSubSteps=settings.frame_skip, deterministicOverlappingPairs=1)
        urdf = Path(__file__).parent / "assets" / "balancing_plate.urdf"
        # Without the flag PyBullet would put inertias of its own in place of the file's.
        flags = bullet.URDF_USE_INERTIA_FROM_FILE
        self.plate = bullet.loadURDF(str(urdf), useFixedBase=True, flags=flags)
        # PyBullet starts every joint with a motor that holds it.
        for joint in (PITCH, ROLL):
            bullet.setJointMotorControl2(self.plate, joint, bullet.VELOCITY_CONTROL, force=0)
        self.ball = bullet.createMultiBody(
            BALL_MASS,
            bullet.createCollisionShape(bullet.GEOM_SPHERE, radius=BALL_RADIUS),
            bullet.createVisualShape(bullet.GEOM_SPHERE, radius=BALL_RADIUS, rgbaColor=(0.9, 0.3, 0.1, 1)),
            PARKED,
        )
        for body in (self.plate, self.ball):
            # Given for the base, -1, it holds for all links.
            bullet.changeDynamics(body, -1, linearDamping=settings.damping, angularDamping=settings.damping)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Starts an episode with the ball on the plate; `options` has no effect."""
        self._check_open()
        super().reset(seed=seed)
        settings = self.settings
        # All are drawn even where a range is 0, so that one argument does not change what the others draw.
        ball = self.np_random.uniform(-settings.ball_range, settings.ball_range, 2)
        pitch, roll = self.np_random.uniform(-settings.tilt_range, settings.tilt_range, 2)
        rates = self.np_random.uniform(-settings.tilt_velocity_range, settings.tilt_velocity_range, 2)

        # Bullet keeps the points in which bodies touch, and would start from those of the last episode. A step with the
        # ball far away empties that memory, so that an episode depends on its seed alone, bit for bit.
        self.bullet.resetBasePositionAndOrientation(self.ball, PARKED, (0, 0, 0, 1))
        self.bullet.stepSimulation()
        self.bullet.resetJointState(self.plate, PITCH, pitch, rates[0])
        self.bullet.resetJointState(self.plate, ROLL, roll, rates[1])
        above = HALF_THICKNESS + BALL_RADIUS + settings.drop_height
        place = PIVOT + plate_rotation(pitch, roll) @ (*ball, above)
        self.bullet.resetBasePositionAndOrientation(self.ball, place, (0, 0, 0, 1))
        self.bullet.resetBaseVelocity(self.ball, (0, 0, 0), (0, 0, 0))
        self.started = True
        self._show()
        state = self._state()
        return self._observation(state), {"distance": math.hypot(state[0], state[1])}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:  # noqa: ANN401 (three formats)
        """Turns the hinges for one decision. Never truncates: that is for the wrapper that keeps the time limit."""
        self._check_open(started=True)
        check_action(action, self.action_space)
        torques = self._torques(action)
        # They act for one call of stepSimulation, all its substeps included.
        self.bullet.setJointMotorControlArray(self.plate, (PITCH, ROLL), self.bullet.TORQUE_CONTROL, forces=torques)
        self.bullet.stepSimulation()
        self._show()
        state = self._state()
        distance = math.hypot(state[0], state[1])
        reward = 1.0 if self.settings.reward_kind == "alive" else 1 - distance / HALF_SIDE
        return self._observation(state), reward, self._fallen(state), False, {"distance": distance}

    def _torques(self, action: Any) -> tuple[float, float]:  # noqa: ANN401
        """Returns the torques of pitch and roll, N m."""
        if self.settings.action_format == "discrete":
            pitch, roll = (1 if action & bit else -1 for bit in (2, 1))
        elif self.settings.action_format == "multi":
            pitch, roll = (1 if bit else -1 for bit in action)
        else:
            pitch, roll = (float(part) for part in action)
        return pitch * self.settings.torque, roll * self.settings.torque

    def _state(self) -> tuple[float, ...]:
        """Returns the ten numbers of the observation, unscaled."""
        place, _ = self.bullet.getBasePositionAndOrientation(self.ball)
        velocity, _ = self.bullet.getBaseVelocity(self.ball)
        (pitch, pitch_rate, *_), (roll, roll_rate, *_) = self.bullet.getJointStates(self.plate, (PITCH, ROLL))
        return *place, *velocity, pitch, roll, pitch_rate, roll_rate

    def _observation(self, state: tuple[float, ...]) -> np.ndarray:
        """Returns a new array each time, since callers keep them."""
        space = self.observation_space
        scaled = np.array(state[: space.shape[0]]) * self.settings.observation_scale
        return np.clip(scaled, space.low, space.high).astype(np.float32)

    def _fallen(self, state: tuple[float, ...]) -> bool:
        """Says whether the ball has left the plate."""
        if self.settings.fall == "height":
            return state[2] < FALLEN
        # The transposed rotation turns the room's axes into the plate's.
        along_x, along_y, _ = plate_rotation(state[6], state[7]).T @ (np.array(state[:3]) - PIVOT)
        return bool(abs(along_x) > HALF_SIDE or abs(along_y) > HALF_SIDE)

    def render(self) -> np.ndarray | None:
        """Returns a picture (height, width, 3) in the mode "rgb_array"; a window shows itself."""
        self._check_open(started=True)
        if self.render_mode is None:
            gym.logger.warn("render() draws nothing without a render_mode, for example 'rgb_array'")
        if self.render_mode != "rgb_array":
            return None
        # The shadow shows how high the ball is; the default light comes from aside, so that the ball does not hide it.
        return self.bullet.picture(CAMERA, self.width, self.height, shadow=1)

    def _show(self) -> None:
        """Keeps a window at the pace of the clock."""
        if self.render_mode == "human":
            self.bullet.show(CAMERA, 1 / self.metadata["render_fps"])

    def _check_open(self, started: bool = False) -> None:
        """Raises an error after `close`; with `started` before the first `reset` too."""
        if not self.bullet.close.alive:
            raise gym.error.ClosedEnvironmentError("this environment was closed; make a new one")
        if started and not self.started:
            raise gym.error.ResetNeeded("call reset() before step() and render()")

    def close(self) -> None:
        """Ends the simulation, and with it a window; a second call does nothing."""
        self.bullet.close()


def plate_rotation(pitch: float, roll: float) -> np.ndarray:
    """Returns the matrix Rx(pitch) Ry(roll), whose columns are the plate's axes in the room."""
    (cp, sp), (cr, sr) = ((math.cos(angle), math.sin(angle)) for angle in (pitch, roll))
    return np.array([[cr, 0, sr], [sp * sr, cp, -sp * cr], [-cp * sr, sp, cp * cr]])


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

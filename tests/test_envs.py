"""The PyBullet environments: their physics against the equations of motion, and all else that they promise.

Numbers in comments were measured; those that equations give are computed here.
"""

import copy
import functools
import gc
import importlib
import inspect
import json
import math
import os
import pickle
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil
import pytest
from conftest import ROOT
from gymnasium.utils.env_checker import check_env
from gymnasium.utils.passive_env_checker import env_render_passive_checker
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from short_runs import command_line
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3

from envs import balancing_plate, bullet_cartpole
from envs.balancing_plate import BalancingPlate
from envs.bullet_cartpole import BulletCartPole

pybullet = pytest.importorskip("pybullet", reason="there is no wheel of PyBullet for this Python")

BOTH = ("BulletCartPole-v0", "BalancingPlate-v0")
# Every way in which an environment's spaces differ, and both presets.
VARIANTS = [
    (BulletCartPole, {}),
    (BulletCartPole, {"preset": "original"}),
    (BalancingPlate, {}),
    (BalancingPlate, {"action_format": "multi"}),
    (BalancingPlate, {"action_format": "box"}),
    (BalancingPlate, {"joint_velocities": False}),
    (BalancingPlate, {"preset": "original"}),
]
GRAVITY = 9.81
# Cart, pole, hinge to the pole's centre, and the pole's inertia about that centre: kg, kg, m, kg m^2.
CART, POLE, ARM = 1.0, 0.1, 0.5
POLE_INERTIA = POLE / 12 * (1.0**2 + 0.05**2)
LEFT, RIGHT = 0, 1
PLATE_INERTIA = 0.3 / 12 * (0.3**2 + 0.02**2)

variants = pytest.mark.parametrize(("make", "options"), VARIANTS, ids=str)
both_classes = pytest.mark.parametrize("make", [BulletCartPole, BalancingPlate])
both_ids = pytest.mark.parametrize("env_id", BOTH)


def started(make, seed=0, **options):
    """Returns an environment after its first reset; its simulation ends with it."""
    env = make(**options)
    env.reset(seed=seed)
    return env


def place_cart(env, x=0.0, speed=0.0, angle=0.0, rate=0.0):
    env.bullet.resetJointState(env.body, bullet_cartpole.SLIDER, x, speed)
    env.bullet.resetJointState(env.body, bullet_cartpole.HINGE, angle, rate)


def place_ball(env, x=0.0, y=0.0, pitch=0.0, roll=0.0):
    """Puts the ball on the plate at x, y of the plate's own axes, everything at rest."""
    env.bullet.resetBasePositionAndOrientation(env.ball, balancing_plate.PARKED, (0, 0, 0, 1))
    env.bullet.stepSimulation()
    env.bullet.resetJointState(env.plate, balancing_plate.PITCH, pitch, 0)
    env.bullet.resetJointState(env.plate, balancing_plate.ROLL, roll, 0)
    where = balancing_plate.PIVOT + rotation_of(env) @ (x, y, 0.03)
    env.bullet.resetBasePositionAndOrientation(env.ball, where, (0, 0, 0, 1))
    env.bullet.resetBaseVelocity(env.ball, (0, 0, 0), (0, 0, 0))


def rotation_of(env):
    """Returns the plate's rotation as Bullet has it, independent of the environment's own formula."""
    *_, orientation = env.bullet.getLinkState(env.plate, balancing_plate.ROLL, computeForwardKinematics=True)[:6]
    return np.array(env.bullet.getMatrixFromQuaternion(orientation)).reshape(3, 3)


def play(env, actions):
    """Returns the float64 states after each action."""
    states = []
    for action in actions:
        env.step(action)
        states.append(env._state())
    return np.array(states)


# ----- Physics of the cart-pole -----
def cartpole_derivative(state, force):
    """The equation of motion of the class's docstring, solved for both accelerations."""
    _, speed, angle, rate = state
    mass = [[CART + POLE, POLE * ARM * math.cos(angle)], [POLE * ARM * math.cos(angle), POLE_INERTIA + POLE * ARM**2]]
    right = [force + POLE * ARM * math.sin(angle) * rate**2, POLE * GRAVITY * ARM * math.sin(angle)]
    acceleration, angular_acceleration = np.linalg.solve(mass, right)
    return np.array([speed, acceleration, rate, angular_acceleration])


def cartpole_motion(state, force, seconds, steps=500):
    """Integrates it by the classical Runge-Kutta method: at 2 ms or less its error is far below Bullet's."""
    state, h = np.array(state, float), seconds / steps
    for _ in range(steps):
        k1 = cartpole_derivative(state, force)
        k2 = cartpole_derivative(state + h / 2 * k1, force)
        k3 = cartpole_derivative(state + h / 2 * k2, force)
        k4 = cartpole_derivative(state + h * k3, force)
        state = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return state


def cartpole_energy(state):
    _, speed, angle, rate = state
    kinetic = (CART + POLE) * speed**2 / 2 + (POLE_INERTIA + POLE * ARM**2) * rate**2 / 2
    return kinetic + POLE * ARM * math.cos(angle) * speed * rate + POLE * GRAVITY * ARM * math.cos(angle)


def fall_freely(env, decisions):
    for _ in range(decisions):
        env.bullet.stepSimulation()
    return env._state()


def test_the_reference_solution_is_that_of_another_integrator():
    """10 N for 0.25 s, and a fall from 0.1 rad for 1 s, as scipy's solve_ivp gives them at a tolerance of 1e-11."""
    assert cartpole_motion([0, 0, 0, 0], 10, 0.25) == pytest.approx([0.30550, 2.43909, -0.49032, -4.14887], abs=6e-6)
    x, speed, angle, rate = cartpole_motion([0, 0, 0.1, 0], 0, 0.5)
    assert (angle, rate, x, speed) == pytest.approx((0.36890, 1.39540, -0.01185, -0.05916), abs=6e-6)
    *_, angle, rate = cartpole_motion([0, 0, 0.1, 0], 0, 1.0)
    assert (angle, rate) == pytest.approx((2.2591, 7.0216), abs=6e-5)


def test_ten_newtons_for_a_quarter_of_a_second():
    env = started(BulletCartPole)
    place_cart(env)
    x, speed, angle, rate = play(env, [RIGHT] * 5)[-1]
    true_x, true_speed, true_angle, true_rate = cartpole_motion([0, 0, 0, 0], 10, 0.25)
    assert speed == pytest.approx(true_speed, abs=0.002)
    assert rate == pytest.approx(true_rate, abs=0.005)
    # A semi-implicit integrator has moved (1 + 1/60) times too far after 60 steps of constant acceleration.
    assert x == pytest.approx(true_x, rel=0.025)
    assert angle == pytest.approx(true_angle, rel=0.025)


def test_a_push_to_the_left_is_the_mirror_image():
    env = started(BulletCartPole)
    place_cart(env)
    to_the_right = play(env, [RIGHT] * 5)
    place_cart(env)
    to_the_left = play(env, [LEFT] * 5)
    np.testing.assert_allclose(to_the_left, -to_the_right, rtol=0, atol=1e-9)
    assert (to_the_right[:, 0] > 0).all()


def test_one_push():
    env = started(BulletCartPole)
    place_cart(env)
    obs, reward, terminated, truncated, info = env.step(RIGHT)
    assert (obs[1], obs[3]) == pytest.approx((0.48799, -0.73597), abs=1e-3)
    assert (reward, terminated, truncated, info) == (1, False, False, {})


def test_a_force_acts_for_its_own_decision_only():
    env = started(BulletCartPole)
    place_cart(env, angle=math.pi)
    env.step(RIGHT)
    momentum = []
    for _ in range(5):
        _, speed, angle, rate = fall_freely(env, 1)
        momentum.append((CART + POLE) * speed + POLE * ARM * math.cos(angle) * rate)
    # 10 N for 0.05 s, and nothing after that.
    assert momentum == pytest.approx([0.5] * 5, abs=1e-4)


def test_the_pole_falls_as_the_equation_of_motion_says():
    env = started(BulletCartPole)
    for decisions, tolerance in ((5, 0.01), (10, 0.015), (20, 0.01)):
        place_cart(env, angle=0.1)
        x, speed, angle, rate = fall_freely(env, decisions)
        true_x, true_speed, true_angle, true_rate = cartpole_motion([0, 0, 0.1, 0], 0, decisions / 20)
        assert rate == pytest.approx(true_rate, rel=0.001)
        assert angle == pytest.approx(true_angle, rel=tolerance)
        if decisions == 10:
            assert speed == pytest.approx(true_speed, rel=0.002)
            assert x == pytest.approx(true_x, rel=0.015)


def test_it_falls_more_exactly_with_more_substeps():
    *_, true_angle, _ = cartpole_motion([0, 0, 0.1, 0], 0, 0.5)
    errors = []
    for substeps in (1, 12, 60):
        env = started(BulletCartPole, substeps=substeps)
        place_cart(env, angle=0.1)
        errors.append(fall_freely(env, 10)[2] - true_angle)
    # 0.034, 0.0029, 0.0006: of first order.
    assert errors[0] > 10 * errors[1] > 40 * errors[2] > 0


def test_the_free_pole_keeps_its_energy():
    env = started(BulletCartPole)
    place_cart(env, angle=3.0)
    before = cartpole_energy(env._state())
    assert cartpole_energy(fall_freely(env, 200)) == pytest.approx(before, abs=1e-3)
    # Swinging through 0.28 rad about the lowest point in 10 s, it would lose a hundredth of its energy to damping.
    damped = started(BulletCartPole, damping=0.04)
    place_cart(damped, angle=3.0)
    assert cartpole_energy(fall_freely(damped, 200)) < before - 1e-3


def test_masses_and_inertias_are_those_of_the_solid_boxes():
    env = started(BulletCartPole)
    for link, mass, (a, b, c) in ((0, CART, (0.5, 0.3, 0.2)), (1, POLE, (0.05, 0.05, 1.0))):
        inertia = [mass / 12 * (b**2 + c**2), mass / 12 * (a**2 + c**2), mass / 12 * (a**2 + b**2)]
        found = env.bullet.getDynamicsInfo(env.body, link)
        assert found[0] == mass
        assert found[2] == pytest.approx(inertia, rel=1e-7)


def test_the_original_leaves_the_motor_on():
    env = started(BulletCartPole, preset="original")
    place_cart(env)
    with_motor = play(env, [RIGHT] * 5)[-1]
    # 20 N of the 50 N are lost in the motor: 1 N s in each step of 0.05 s.
    without_motor = started(BulletCartPole, preset="original", slider_motor=False, force=30.0)
    place_cart(without_motor)
    assert with_motor[1] == pytest.approx(6.8397, abs=1e-3)
    np.testing.assert_allclose(with_motor, play(without_motor, [RIGHT] * 5)[-1], rtol=0, atol=1e-3)
    weak = started(BulletCartPole, preset="original", force=20.0)
    place_cart(weak)
    assert abs(play(weak, [RIGHT] * 5)[-1][1]) < 1e-9


def test_the_original_moves_as_the_experiment_that_it_comes_from():
    """With the model that comes with PyBullet, its slider's motor on, 50 N and one step of 1/20 s."""
    env = started(BulletCartPole, preset="original")
    client = pybullet.connect(pybullet.DIRECT)
    try:
        model = Path(pytest.importorskip("pybullet_data").getDataPath()) / "cartpole.urdf"
        body = pybullet.loadURDF(str(model), physicsClientId=client)
        pybullet.setGravity(0, 0, -GRAVITY, physicsClientId=client)
        pybullet.setTimeStep(1 / 20, physicsClientId=client)
        pybullet.setJointMotorControl2(body, 1, pybullet.VELOCITY_CONTROL, force=0, physicsClientId=client)
        start = env._state()
        for joint in (0, 1):
            pybullet.resetJointState(body, joint, *start[2 * joint : 2 * joint + 2], physicsClientId=client)
        rng = np.random.default_rng(0)
        for _ in range(100):
            action = int(rng.integers(2))
            force = 50 if action else -50
            pybullet.setJointMotorControl2(body, 0, pybullet.TORQUE_CONTROL, force=force, physicsClientId=client)
            pybullet.stepSimulation(physicsClientId=client)
            env.step(action)
            states = pybullet.getJointStates(body, (0, 1), physicsClientId=client)
            assert [*states[0][:2], *states[1][:2]] == pytest.approx(env._state(), abs=1e-5)
    finally:
        pybullet.disconnect(client)


# ----- Physics of the plate -----
def torques_of(action):
    """Returns the signs of pitch and roll, by the table of the docstring."""
    return {0: (-1, -1), 1: (-1, 1), 2: (1, -1), 3: (1, 1)}[action]


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_torque_turns_the_plate_by_its_inertia(sign):
    """One at a time, for each rate acts on the other hinge: torque times time over inertia, in 10 times 0.04 s."""
    env = started(BalancingPlate, action_format="box")
    rates = []
    for action in ((sign, 0), (0, sign)):
        place_ball(env)
        env.bullet.resetBasePositionAndOrientation(env.ball, balancing_plate.PARKED, (0, 0, 0, 1))
        rates.append(play(env, [np.array(action, np.float32)] * 10)[-1, 8:])
    # The outer hinge turns the shaft too.
    pitch_rate, roll_rate = sign * 0.003 * 0.4 / (PLATE_INERTIA + 8.33333e-7), sign * 0.003 * 0.4 / PLATE_INERTIA
    np.testing.assert_allclose(rates, [[pitch_rate, 0], [0, roll_rate]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("action", [0, 1, 2, 3])
def test_the_ball_rolls_where_the_table_of_actions_says(action):
    env = started(BalancingPlate)
    place_ball(env)
    pitch_sign, roll_sign = torques_of(action)
    x, y, *_, pitch, roll, _, _ = play(env, [action] * 10)[-1]
    assert (x, y) == pytest.approx((roll_sign * 0.01067, -pitch_sign * 0.01067), rel=0.02)
    assert (pitch, roll) == pytest.approx((pitch_sign * 0.1089, roll_sign * 0.1089), rel=0.02)


@pytest.mark.parametrize(("action", "moves", "rests"), [((1, 0), (1, 6), (0, 7)), ((0, 1), (0, 7), (1, 6))], ids=str)
def test_one_hinge_leaves_the_other_axis_alone(action, moves, rests):
    env = started(BalancingPlate, action_format="box")
    place_ball(env)
    state = play(env, [np.array(action, np.float32)] * 10)[-1]
    assert abs(state[list(rests)]).max() < 1e-6
    assert abs(state[list(moves)]) == pytest.approx([0.01067, 0.1089], rel=0.02)


def roll_on_held_plate(env, pitch, roll, steps=30):
    """Returns the ball's velocity after 1/100 s times `steps` on the plate held by motors."""
    place_ball(env, pitch=pitch, roll=roll)
    hold = functools.partial(env.bullet.setJointMotorControl2, env.plate, controlMode=pybullet.POSITION_CONTROL)
    hold(jointIndex=balancing_plate.PITCH, targetPosition=pitch, force=1000)
    hold(jointIndex=balancing_plate.ROLL, targetPosition=roll, force=1000)
    for _ in range(steps):
        env.bullet.stepSimulation()
    return np.array(env._state()[3:6])


@pytest.mark.parametrize("tilt", [-0.15, -0.05, 0.05, 0.1, 0.15])
def test_the_ball_rolls_down_with_five_sevenths(tilt):
    """A rolling solid sphere accelerates with 5/7 g sin along the slope: 5/7 g sin cos horizontally."""
    env = started(BalancingPlate, frame_skip=1)
    expected = 5 / 7 * GRAVITY * math.sin(tilt) * math.cos(tilt)
    vx, vy, _ = roll_on_held_plate(env, 0, tilt) / 0.3
    assert vx == pytest.approx(expected, rel=1e-4)
    assert abs(vy) < 1e-6
    vx, vy, _ = roll_on_held_plate(env, tilt, 0) / 0.3
    assert vy == pytest.approx(-expected, rel=1e-4)
    assert abs(vx) < 1e-6


def test_damping_would_slow_the_ball():
    env = started(BalancingPlate, frame_skip=1, damping=0.04)
    vx, *_ = roll_on_held_plate(env, 0, 0.1, steps=50) / 0.5
    # A shortfall of 4.2 % was measured over half a second.
    assert vx == pytest.approx(0.958 * 5 / 7 * GRAVITY * math.sin(0.1) * math.cos(0.1), rel=0.005)


@pytest.mark.parametrize("seed", range(5))
def test_the_ball_stays_on_the_plate(seed):
    env = started(BalancingPlate, seed=seed)
    for _ in range(5):
        env.step(int(env.np_random.integers(4)))
        normal = rotation_of(env)[:, 2]
        height = (np.array(env._state()[:3]) - balancing_plate.PIVOT) @ normal
        # Half of the plate's thickness and the ball's radius; a contact is let in by some hundredths of a millimetre.
        assert height == pytest.approx(0.03, abs=1e-4)


def test_masses_and_inertias_of_plate_and_ball():
    env = started(BalancingPlate)
    mass, _, inertia, *_ = env.bullet.getDynamicsInfo(env.plate, balancing_plate.ROLL)
    assert mass == 0.3
    assert inertia == pytest.approx([PLATE_INERTIA, PLATE_INERTIA, 0.3 / 12 * (0.3**2 + 0.3**2)], rel=1e-6)
    mass, friction, inertia, *_, rolling, spinning, _, _, _, _ = env.bullet.getDynamicsInfo(env.ball, -1)
    assert (mass, friction, rolling, spinning) == (0.0007, 0.5, 0, 0)
    assert inertia == pytest.approx([2 / 5 * 0.0007 * 0.02**2] * 3, rel=1e-6)


def test_the_original_torque_cannot_bring_the_ball_back_from_afar():
    """The balance of torque and weight is at 0.0003 N m / (0.0007 kg 9.81 m/s^2) = 44 mm."""
    env = started(BalancingPlate, preset="original", tilt_velocity_range=0.0, drop_height=0.0)
    lengths = []
    for offset in (0.02, 0.06):
        place_ball(env, x=offset)
        terminated, length = False, 0
        while not terminated and length < 1000:
            pitch, roll = plate_control(np.array(env._state()))
            *_, terminated, _, _ = env.step(np.array([pitch > 0, roll > 0], dtype=np.int64))
            length += 1
        lengths.append(length)
    assert lengths[0] == 1000
    assert lengths[1] < 400


def test_the_original_drops_the_ball():
    env = started(BalancingPlate, preset="original")
    # 2 cm above contact, which is 3 cm above the pivot: within 6 steps of 1/100 s of free fall it has arrived.
    assert env._state()[2] == pytest.approx(0.15 + 0.03 + 0.02, abs=1e-6)
    heights = play(env, [np.array([0, 1]), np.array([1, 0])] * 5)[:, 2]
    fallen = [GRAVITY * 0.01**2 * n * (n + 1) / 2 for n in range(1, 6)]
    # The damping of 0.04 takes less than a tenth of a millimetre.
    np.testing.assert_allclose(heights[:5], 0.20 - np.array(fallen), rtol=0, atol=1e-4)
    # It goes in by half a millimetre, and does not bounce.
    assert heights[6:] == pytest.approx([0.18] * 4, abs=1e-3)


# ----- Who stays up -----
def cartpole_control(obs):
    """Returns the sign of the linear-quadratic control for 0.05 s decisions, Q = diag(1, 1, 10, 1), R = 0.1."""
    return int(np.array([2.2845, 4.3373, 39.9774, 10.3297]) @ obs > 0)


def plate_control(obs):
    """Returns the linear-quadratic torques of pitch and roll for 0.04 s decisions, N m."""
    x, y, _, vx, vy, _, pitch, roll, pitch_rate, roll_rate = obs
    gains = np.array([0.03404, 0.02554, 0.07413, 0.01808])
    return -gains @ [-y, -vy, pitch, pitch_rate], -gains @ [x, vx, roll, roll_rate]


def signs(obs):
    pitch, roll = plate_control(obs)
    return 2 * int(pitch > 0) + int(roll > 0)


def torques(obs):
    return np.clip(np.array(plate_control(obs)) / 0.003, -1, 1).astype(np.float32)


def episode(env, control, seed):
    """Returns length, return, whether it was truncated, and the observations."""
    obs, _ = env.reset(seed=seed)
    seen, score, done = [], 0.0, False
    while not done:
        obs, reward, terminated, truncated, _ = env.step(control(obs))
        seen.append(obs)
        score += reward
        done = terminated or truncated
    return len(seen), score, truncated and not terminated, np.array(seen)


@pytest.mark.parametrize("options", [{}, {"preset": "original"}, {"x_limit": 2.4}], ids=str)
def test_the_sign_of_a_linear_control_keeps_the_pole_up(options):
    with gym.make("BulletCartPole-v0", disable_env_checker=True, **options) as env:
        for seed in range(10):
            length, score, truncated, seen = episode(env, cartpole_control, seed)
            assert (length, truncated) == (500, True)
            # The original pays nothing for the last decision.
            assert score == (499 if "preset" in options else 500)
            if not options:
                assert abs(seen[250:, 0]).max() < 0.3


@pytest.mark.parametrize(("action_format", "control", "distance"), [
    ("discrete", signs, 0.005),
    ("box", torques, 1e-6),
])  # fmt: skip
def test_a_linear_control_keeps_the_ball_in_the_middle(action_format, control, distance):
    with gym.make("BalancingPlate-v0", disable_env_checker=True, action_format=action_format) as env:
        for seed in range(10):
            length, score, truncated, seen = episode(env, control, seed)
            assert (length, truncated) == (500, True)
            assert np.hypot(seen[250:, 0], seen[250:, 1]).max() < distance
            assert 470 < score < 500


@pytest.mark.parametrize(("env_id", "low", "high"), [("BulletCartPole-v0", 5, 12), ("BalancingPlate-v0", 18, 40)])
def test_random_play_does_not_last(env_id, low, high):
    with gym.make(env_id, disable_env_checker=True) as env:
        rng = np.random.default_rng(0)
        lengths = [episode(env, lambda _: int(rng.integers(env.action_space.n)), seed)[0] for seed in range(200)]
    assert low < np.mean(lengths) < high


# ----- Spaces, starts, rewards, ends -----
def test_the_first_observations():
    """Starts are part of a version: the numbers and their order must not change."""
    cartpole, _ = BulletCartPole().reset(seed=0)
    assert cartpole == pytest.approx([0.013696, -0.045903, -0.023021, -0.048347], abs=1e-6)
    plate, _ = BalancingPlate().reset(seed=0)
    expected = [0.012160, -0.021522, 0.181725, 0, 0, 0, -0.048069, -0.050629, 0, 0]
    assert plate == pytest.approx(expected, abs=1e-6)


def test_starts_of_the_cartpole_fill_their_ranges():
    env = BulletCartPole(start_range=0.2, start_velocity_range=0.7, angle_limit=0.3)
    env.reset(seed=0)
    starts = np.array([env.reset()[0] for _ in range(300)])
    for column, limit in enumerate((0.2, 0.7, 0.2, 0.7)):
        assert 0.95 * limit < abs(starts[:, column]).max() <= limit
        assert abs(starts[:, column].mean()) < 0.1 * limit


def test_starts_of_the_plate_fill_their_ranges():
    env = BalancingPlate(ball_range=0.1, tilt_range=0.15, tilt_velocity_range=0.5)
    starts = []
    for seed in range(300):
        env.reset(seed=seed)
        state = env._state()
        in_plate = rotation_of(env).T @ (np.array(state[:3]) - balancing_plate.PIVOT)
        assert in_plate[2] == pytest.approx(0.03, abs=1e-7)
        assert state[3:6] == (0, 0, 0)
        starts.append([*in_plate[:2], *state[6:]])
    for column, limit in enumerate((0.1, 0.1, 0.15, 0.15, 0.5, 0.5)):
        largest = abs(np.array(starts)[:, column]).max()
        assert 0.95 * limit < largest <= limit + 1e-7


@both_classes
def test_a_range_of_zero_changes_no_other_draw(make):
    if make is BulletCartPole:
        x, _, angle, _ = started(make, seed=3)._state()
        assert started(make, seed=3, start_velocity_range=0)._state() == (x, 0, angle, 0)
    else:
        tilts = started(make, seed=3)._state()[6:8]
        assert started(make, seed=3, ball_range=0)._state()[6:8] == tilts


def test_the_cartpole_ends_beyond_its_limits():
    env = BulletCartPole(start_velocity_range=1.0)
    ends = set()
    for seed in range(60):
        env.reset(seed=seed)
        if seed >= 40:
            # Near the end of the rail, moving outwards.
            place_cart(env, x=9.7 * (-1) ** seed, speed=2.0 * (-1) ** seed)
        terminated = False
        while not terminated:
            obs, reward, terminated, truncated, _ = env.step(int(env.np_random.integers(2)))
            x, _, angle, _ = env._state()
            assert terminated is (abs(x) > 10.0 or abs(angle) > 0.2095)
            assert not truncated
            assert reward == 1
            assert obs == pytest.approx(env._state(), rel=1e-6)
        ends.add((bool(x > 10), bool(x < -10), bool(angle > 0.2095), bool(angle < -0.2095)))
    assert np.array(list(ends)).any(axis=0).all()


@pytest.mark.parametrize(("name", "value", "where"), [
    ("x_limit", 1.0, {"x": 1.1}), ("x_limit", 1.0, {"x": -1.1}),
    ("angle_limit", 0.1, {"angle": 0.11}), ("angle_limit", 0.1, {"angle": -0.11}),
])  # fmt: skip
def test_the_limits_of_the_cartpole_are_arguments(name, value, where):
    for options, expected in (({name: value}, True), ({}, False)):
        env = started(BulletCartPole, **options)
        place_cart(env, **where)
        # The push that lets the pole fall further.
        assert env.step(LEFT if where.get("angle", 0) > 0 else RIGHT)[2] is expected


def test_the_reward_of_zero_at_the_end():
    env = started(BulletCartPole, reward_kind="zero_at_end")
    rewards, terminated = [], False
    while not terminated:
        _, reward, terminated, _, _ = env.step(RIGHT)
        rewards.append(reward)
    assert rewards == [1] * (len(rewards) - 1) + [0]
    obs, _ = env.reset(seed=0)
    rewards = []
    for _ in range(501):
        obs, reward, terminated, _, _ = env.step(cartpole_control(obs))
        rewards.append(reward)
    assert not terminated
    assert rewards == [1] * 499 + [0, 1]


def test_the_plate_ends_at_its_edges():
    env = BalancingPlate(ball_range=0.12, tilt_range=0.2)
    ends = set()
    for seed in range(60):
        env.reset(seed=seed)
        terminated = False
        while not terminated:
            obs, reward, terminated, truncated, info = env.step(int(env.np_random.integers(4)))
            state = np.array(env._state())
            x, y, _ = rotation_of(env).T @ (state[:3] - balancing_plate.PIVOT)
            assert terminated is bool(abs(x) > 0.15 or abs(y) > 0.15)
            assert not truncated
            distance = math.hypot(state[0], state[1])
            assert info == {"distance": distance}
            assert reward == pytest.approx(1 - distance / 0.15, abs=1e-12)
            assert obs == pytest.approx(state, rel=1e-6)
        ends |= {name for name, over in zip("xXyY", (x < -0.15, x > 0.15, y < -0.15, y > 0.15), strict=True) if over}
    assert ends == set("xXyY")


def test_the_original_plate_ends_where_the_ball_has_fallen():
    env = started(BalancingPlate, preset="original", ball_range=0.1, torque=0.01)
    terminated, heights = False, []
    while not terminated:
        obs, reward, terminated, _, info = env.step(np.array([1, 0]))
        # In metres, whatever the scale of the observation.
        assert info == {"distance": math.hypot(*env._state()[:2])}
        heights.append(env._state()[2])
        assert terminated is (heights[-1] < 0.10)
        assert reward == 1
        assert obs == pytest.approx(10 * np.array(env._state()[:8]), rel=1e-6)
    assert min(heights[:-1]) >= 0.10


def test_the_three_formats_of_actions_are_the_same_torques():
    plates = {name: BalancingPlate(action_format=name) for name in ("discrete", "multi", "box")}
    for env in plates.values():
        env.reset(seed=7)
    for action in (3, 0, 1, 2, 2, 3, 1, 0):
        pitch, roll = torques_of(action)
        plates["discrete"].step(action)
        plates["multi"].step(np.array([pitch > 0, roll > 0], dtype=np.int64))
        plates["box"].step(np.array([pitch, roll], dtype=np.float32))
        assert plates["discrete"]._state() == plates["multi"]._state() == plates["box"]._state()


def test_spaces():
    cartpole = BulletCartPole(x_limit=2.4)
    assert cartpole.action_space == gym.spaces.Discrete(2)
    high = np.array([7.4, 100, np.pi, 100], dtype=np.float32)
    assert cartpole.observation_space == gym.spaces.Box(-high, high)
    high = np.array([0.3, 0.3, 0.5, 10, 10, 10, 1.6, 1.6, 100, 100], dtype=np.float32)
    assert BalancingPlate().observation_space == gym.spaces.Box(-high, high)
    assert BalancingPlate(preset="original").observation_space == gym.spaces.Box(-10 * high[:8], 10 * high[:8])
    formats = {"discrete": gym.spaces.Discrete(4), "multi": gym.spaces.MultiDiscrete([2, 2])}
    formats["box"] = gym.spaces.Box(-1, 1, (2,), np.float32)
    for action_format, space in formats.items():
        assert BalancingPlate(action_format=action_format).action_space == space


@both_classes
def test_an_argument_beside_a_preset_overrides_it(make):
    name, value = ("damping", 0.01)
    original = started(make, preset="original", damping=value)
    module = sys.modules[make.__module__]
    assert vars(original.settings) == {**module.PRESETS["original"], name: value}
    assert vars(started(make).settings) == module.PRESETS["default"]
    assert module.PRESETS["default"].keys() == module.PRESETS["original"].keys()


def test_a_decision_of_the_plate_lasts_its_frames():
    fine, coarse = started(BalancingPlate, frame_skip=1), started(BalancingPlate, frame_skip=4)
    for action in (3, 1, 0, 2, 3):
        for _ in range(4):
            fine.step(action)
        coarse.step(action)
        assert fine._state() == coarse._state()
    assert fine.metadata["render_fps"] == pytest.approx(100)
    assert coarse.metadata["render_fps"] == pytest.approx(25)
    assert BalancingPlate.metadata["render_fps"] == 25


@variants
def test_play_goes_on_after_the_end_with_finite_numbers_in_the_space(make, options):
    env = started(make, **options)
    env.action_space.seed(0)
    ended = 0
    for _ in range(1000):
        obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        ended += terminated
        assert env.observation_space.contains(obs)
        assert math.isfinite(reward)
        assert not truncated
    assert np.isfinite(env._state()).all()
    assert ended > 100


@variants
def test_what_is_returned_belongs_to_the_caller(make, options):
    env = make(**options)
    first, first_info = env.reset(seed=0)
    env.action_space.seed(0)
    kept, copies, infos = [first], [first.copy()], [first_info]
    for _ in range(10):
        obs, *_, info = env.step(env.action_space.sample())
        assert obs.dtype == np.float32
        assert not any(obs is earlier or np.shares_memory(obs, earlier) for earlier in kept)
        assert not any(info is earlier for earlier in infos)
        kept.append(obs)
        copies.append(obs.copy())
        infos.append(info)
    env.reset()
    np.testing.assert_array_equal(kept, copies)


# ----- Determinism and separation -----
def actions_of(env, count, seed=1):
    env.action_space.seed(seed)
    return [env.action_space.sample() for _ in range(count)]


HISTORIES = [[(5, n)] for n in range(1, 7)] + [[(9, 40)], [(9, 2), (5, 4)], [(5, 300), (8, 0)], [(5, 0), (5, 3)]]


@variants
def test_an_episode_depends_on_its_seed_alone(make, options):
    """Bit for bit, whatever came before: Bullet keeps contact points beyond a reset of the bodies."""
    fresh = started(make, seed=5, **options)
    start = fresh._state()
    actions = actions_of(fresh, 30)
    expected = play(fresh, actions)
    used = make(**options)
    for history in HISTORIES:
        for seed, length in history:
            used.reset(seed=seed)
            play(used, actions[:length] if length <= 30 else actions_of(used, length))
        used.reset(seed=5)
        assert used._state() == start
        np.testing.assert_array_equal(play(used, actions), expected, err_msg=str(history))


@both_classes
def test_seeds_differ_and_a_reset_without_one_goes_on(make):
    env = started(make, seed=1)
    first = env._state()
    env.reset()
    second = env._state()
    env.reset(seed=1)
    assert env._state() == first
    env.reset()
    assert env._state() == second
    env.reset(seed=2)
    assert len({first, second, env._state()}) == 3


@variants
def test_neither_global_generator_is_used(make, options):
    states = []
    for seed in (0, 1):
        np.random.seed(seed)  # noqa: NPY002
        env = started(make, seed=4, **options)
        states.append(play(env, actions_of(env, 5)))
    np.testing.assert_array_equal(*states)


@both_classes
def test_two_environments_do_not_touch_each_other(make):
    alone = started(make, seed=1)
    actions = actions_of(alone, 40)
    expected = play(alone, actions)
    del alone
    one, other = started(make, seed=1), started(make, seed=2)
    third = started(BalancingPlate if make is BulletCartPole else BulletCartPole)
    states = []
    for t, action in enumerate(actions):
        states += play(one, [action]).tolist()
        if t < 20:
            play(other, [actions[-t]])
            third.step(t % 2)
        if t == 10:
            other.reset(seed=1)
        if t == 20:
            other.close()
    np.testing.assert_array_equal(states, expected)


CALLS = """
import pybullet
from envs.balancing_plate import BalancingPlate
from envs.bullet_cartpole import BulletCartPole

assert pybullet.connect(pybullet.DIRECT) == 0
for make in (BulletCartPole, BalancingPlate):
    env = make(render_mode="rgb_array")
    assert env.bullet.id != 0
    env.reset(seed=0)
    env.step(0)
    env.render()
    assert env.bullet.getNumBodies() > 0
    env.close()
    assert pybullet.isConnected(0)
    settings = pybullet.getPhysicsEngineParameters(physicsClientId=0)
    print(pybullet.getNumBodies(physicsClientId=0), settings["numSubSteps"])
"""


def test_every_call_names_its_simulation(tmp_path):
    """A call without an id reaches simulation 0: here one that belongs to somebody else, and stays as it is."""
    assert in_fresh_process(CALLS, tmp_path) == "0 0\n0 0\n"


# ----- Memory and ends of simulations -----
@pytest.mark.parametrize(("make", "bodies"), [(BulletCartPole, 1), (BalancingPlate, 2)])
def test_a_thousand_resets_leak_nothing(make, bodies):
    env = started(make)
    process = psutil.Process()

    def short_episodes():
        for seed in range(1000):
            env.reset(seed=seed)
            for _ in range(3):
                env.step(1)

    short_episodes()
    before = process.memory_info().rss
    short_episodes()
    for _ in range(1000):
        env.reset()
    assert process.memory_info().rss - before < 5 * 2**20
    assert env.bullet.getNumBodies() == bodies


@both_classes
def test_closing(make):
    env = started(make, render_mode="rgb_array")
    client = env.bullet.id
    assert pybullet.isConnected(client)
    env.close()
    assert not pybullet.isConnected(client)
    env.close()
    for call in (env.reset, lambda: env.step(0), env.render):
        with pytest.raises(gym.error.ClosedEnvironmentError, match="this environment was closed"):
            call()


@both_ids
def test_a_closed_environment_says_so_through_the_wrappers(env_id):
    env = gym.make(env_id)
    env.reset(seed=0)
    env.close()
    env.close()
    with pytest.raises(gym.error.ClosedEnvironmentError):
        env.step(0)
    with pytest.raises(gym.error.ClosedEnvironmentError):
        env.reset()


@both_classes
def test_closing_late_does_not_close_what_has_the_same_number_now(make):
    # Numbers are given again, the lowest first.
    gc.collect()
    env = started(make)
    client = env.bullet.id
    env.close()
    later = started(make)
    assert later.bullet.id == client
    env.close()
    del env
    gc.collect()
    later.step(0)


@both_classes
def test_a_forgotten_environment_ends_its_simulation(make):
    env = started(make)
    client = env.bullet.id
    del env
    gc.collect()
    assert not pybullet.isConnected(client)


@both_classes
def test_a_failed_construction_leaves_no_simulation(make, monkeypatch):
    opened = []
    monkeypatch.setattr(make, "_build", lambda self: opened.append(self.bullet.id) or self.bullet.loadURDF("missing"))
    with pytest.raises(pybullet.error):
        make()
    gc.collect()
    assert not pybullet.isConnected(opened[0])


@both_classes
def test_pickle(make):
    options = {"damping": 0.02, "preset": "original", "render_mode": "rgb_array", "width": 64}
    env = started(make, seed=3, **options)
    twin = pickle.loads(pickle.dumps(env))
    gc.collect()
    assert twin.bullet.id != env.bullet.id
    assert vars(twin.settings) == vars(env.settings)
    assert (twin.render_mode, twin.width, twin.height) == ("rgb_array", 64, 320)
    # A copy by deepcopy is made in the same way.
    for other in (twin, copy.deepcopy(env)):
        other.reset(seed=3)
        actions = actions_of(env, 10)
        env.reset(seed=3)
        np.testing.assert_array_equal(play(other, actions), play(env, actions))
        client = other.bullet.id
        other.close()
        assert not pybullet.isConnected(client)


# ----- Vector environments and checkers -----
@pytest.fixture(scope="module")
def sync_rollouts():
    """Observations of 3 environments of each id over 60 steps, all in this process."""
    rollouts = {}
    for env_id in BOTH:
        vector = SyncVectorEnv(
            [functools.partial(gym.make, f"envs:{env_id}")] * 3, autoreset_mode=AutoresetMode.SAME_STEP
        )
        rollouts[env_id] = rollout(vector)
    return rollouts


def rollout(vector):
    vector.action_space.seed(2)
    seen = [vector.reset(seed=11)[0].copy()]
    for _ in range(60):
        obs, _, terminations, *_ = vector.step(vector.action_space.sample())
        seen.append(obs.copy())
    assert terminations.shape == (3,)
    vector.close()
    return np.array(seen)


@both_ids
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_processes_give_the_same_observations(env_id, context, sync_rollouts):
    if context == "fork" and sys.platform != "linux":
        pytest.skip("no safe fork here")
    # Open before the fork, in the parent.
    bystander = started(BalancingPlate)
    make_envs = [functools.partial(gym.make, f"envs:{env_id}")] * 3
    with warnings.catch_warnings():
        # Python 3.12 and newer warn of any fork of a process with threads, as torch makes it.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        vector = AsyncVectorEnv(make_envs, context=context, autoreset_mode=AutoresetMode.SAME_STEP)
    np.testing.assert_array_equal(rollout(vector), sync_rollouts[env_id])
    bystander.step(0)


@variants
def test_the_checkers_of_gymnasium_and_stable_baselines3_have_nothing_to_say(make, options):
    env_id = BOTH[make is BalancingPlate]
    # Any warning is an error here. Drawing is checked apart, since the checker would open a window too.
    env = gym.make(env_id, render_mode="rgb_array", **options)
    check_env(env.unwrapped, skip_render_check=True)
    env.reset(seed=0)
    picture = env_render_passive_checker(env.unwrapped)
    assert picture.shape == (320, 480, 3)
    env.close()
    env = gym.make(env_id, **options)
    check_env_for_sb3(env)
    env.close()


# ----- Pictures -----
def pixel_of(env, point):
    """Returns column and row of a point of the room in the picture, and how far before the camera it is."""
    camera = balancing_plate.CAMERA if isinstance(env, BalancingPlate) else env._camera()
    # OpenGL's matrices lie column after column.
    view, projection = (np.reshape(m, (4, 4)).T for m in env.bullet.matrices(camera, env.width, env.height))
    x, y, _, depth = projection @ view @ (*point, 1)
    return (x / depth + 1) / 2 * env.width, (1 - y / depth) / 2 * env.height, depth


def colour_at(picture, pixel):
    column, row, _ = (int(coordinate) for coordinate in pixel)
    return picture[row, column].astype(int)


@pytest.mark.parametrize("place", [
    {}, {"x": 0.1}, {"x": -0.1, "y": 0.12}, {"y": -0.1, "pitch": 0.3}, {"x": 0.05, "roll": -0.3, "pitch": 0.1},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("size", [(480, 320), (160, 160)], ids=str)
def test_the_ball_is_seen_at_its_place(place, size):
    env = started(BalancingPlate, render_mode="rgb_array", width=size[0], height=size[1])
    place_ball(env, **place)
    picture = env.render()
    assert picture.shape == (size[1], size[0], 3)
    assert picture.dtype == np.uint8
    pixel = pixel_of(env, env._state()[:3])
    red, green, _ = colour_at(picture, pixel)
    assert red > 2 * green
    rows, columns = np.nonzero(picture[:, :, 0].astype(int) > 2 * picture[:, :, 1].astype(int))
    assert (columns.mean() + 0.5, rows.mean() + 0.5) == pytest.approx(pixel[:2], abs=3)
    # As large as a ball of 2 cm radius so far away; 45 degrees of view fill the height.
    radius = 0.02 / pixel[2] * env.height / 2 / math.tan(math.radians(45) / 2)
    assert len(rows) == pytest.approx(math.pi * radius**2, rel=0.15)
    assert (picture[0, 0] == 255).all()


@pytest.mark.parametrize("x", [0.0, -1.0, 1.0, 4.5, -9.9])
@pytest.mark.parametrize("angle", [0.0, 0.35, -0.2])
def test_cart_and_pole_are_seen_at_their_places(x, angle):
    env = started(BulletCartPole, render_mode="rgb_array")
    place_cart(env, x=x, angle=angle)
    picture = env.render()
    front_of_cart = pixel_of(env, (x, -0.15, 0))
    end_of_pole = pixel_of(env, (x + 0.98 * math.sin(angle), 0, 0.98 * math.cos(angle)))
    np.testing.assert_allclose(colour_at(picture, front_of_cart), (19, 70, 160), rtol=0, atol=25)
    np.testing.assert_allclose(colour_at(picture, end_of_pole), (170, 110, 40), rtol=0, atol=25)
    np.testing.assert_array_equal(picture[5, 5], (255, 255, 255))
    # All of it is in the picture, with a margin.
    red, _, blue = (picture[:, :, channel].astype(int) for channel in range(3))
    rows, columns = np.nonzero(abs(red - blue) > 60)
    assert columns.min() >= 30
    assert columns.max() < 450
    assert rows.min() >= 60
    assert rows.max() < 250


@both_classes
def test_pictures_change_with_the_state_and_stay_as_they_are(make):
    env = started(make, render_mode="rgb_array")
    first = env.render()
    kept = first.copy()
    np.testing.assert_array_equal(env.render(), first)
    for _ in range(10):
        env.step(1)
    assert (env.render() != kept).any(axis=2).sum() > 500
    np.testing.assert_array_equal(first, kept)


def test_a_following_camera_shows_that_the_cart_moves():
    env = started(BulletCartPole, render_mode="rgb_array")
    place_cart(env, x=5.0)
    one = env.render()
    place_cart(env, x=5.3)
    marks = slice(215, 240)
    assert (env.render()[marks] != one[marks]).any(axis=2).sum() > 100


@both_classes
def test_a_build_without_numpy_gives_the_same_pictures(make):
    env = started(make, render_mode="rgb_array")
    picture = env.render()
    as_arrays = env.bullet.getCameraImage

    def as_tuples(*args, **kwargs):
        width, height, pixels, *rest = as_arrays(*args, **kwargs)
        return width, height, tuple(np.asarray(pixels).ravel().tolist()), *rest

    env.bullet.getCameraImage = as_tuples
    np.testing.assert_array_equal(env.render(), picture)


@both_classes
def test_without_a_render_mode_nothing_is_drawn(make):
    env = started(make)
    with pytest.warns(UserWarning, match="draws nothing without a render_mode"):
        assert env.render() is None


linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the display does not hang on a variable")


@linux
@both_ids
@pytest.mark.parametrize(("display", "found"), [
    (None, "DISPLAY is not set"), ("", "DISPLAY is not set"), (":731", "none can be opened"),
])  # fmt: skip
def test_a_window_without_a_display_is_an_error(env_id, display, found, monkeypatch):
    """PyBullet itself would end the interpreter, and with it this test."""
    monkeypatch.delenv("DISPLAY", raising=False)
    if display is not None:
        monkeypatch.setenv("DISPLAY", display)
    with pytest.raises(RuntimeError, match=f"needs a display, and {found}; use render_mode='rgb_array'"):
        gym.make(env_id, render_mode="human")


# ----- Wrong use -----
@pytest.mark.parametrize(("make", "options", "actions"), [
    (BulletCartPole, {}, [2, -1, 1.0, np.float32(0), math.nan, None, "right", np.array([1]), (1,)]),
    (BalancingPlate, {}, [4, -1, 1.0, math.nan, None, np.array([1, 1])]),
    (BalancingPlate, {"action_format": "multi"}, [
        3, None, np.array([0, 2]), np.array([-1, 0]), np.array([0.5, 0.5]), np.array([0, math.nan]),
        np.array([0, 1, 0]),
    ]),
    (BalancingPlate, {"action_format": "box"}, [
        np.array([1.1, 0], np.float32), np.array([0, -1.1], np.float32), np.array([0, math.nan], np.float32),
        np.array([math.inf, 0], np.float32), np.zeros(3, np.float32), np.zeros((1, 2), np.float32),
        np.zeros(2, np.float64),
    ]),
], ids=str)  # fmt: skip
def test_an_action_outside_the_space_is_refused(make, options, actions):
    env = started(make, **options)
    before = env._state()
    for action in actions:
        with pytest.raises(ValueError, match=re.escape(f"is not in {env.action_space}")) as error:
            env.step(action)
        assert str(error.value).startswith(f"action {action!r}")
    assert env._state() == before
    # A refused action leaves nothing behind.
    legal = actions_of(env, 3)
    after_refusals = play(env, legal)
    env.reset(seed=0)
    np.testing.assert_array_equal(play(env, legal), after_refusals)


def test_the_type_of_an_array_that_is_refused_is_told():
    env = started(BalancingPlate, action_format="box")
    with pytest.raises(ValueError, match="of float64 is not in Box"):
        env.step(np.zeros(2))


@both_classes
def test_all_kinds_of_whole_numbers_are_actions(make):
    for action in (1, np.int64(1), np.int8(1), np.array(1), np.uint8(1)):
        env = started(make)
        one = play(env, [action])
        env.reset(seed=0)
        np.testing.assert_array_equal(one, play(env, [1]))


@both_classes
def test_a_reset_comes_first(make):
    env = make(render_mode="rgb_array")
    with pytest.raises(gym.error.ResetNeeded, match=re.escape("call reset()")):
        env.step(0)
    with pytest.raises(gym.error.ResetNeeded, match=re.escape("call reset()")):
        env.render()


def wrong(make, name, value, rule, **others):
    return pytest.param(make, {name: value, **others}, f"{name}={value!r} must be {rule}", id=f"{name}={value!r}")


WRONG = [
    wrong(BulletCartPole, "force", 0, "a number above 0 and at most 100"),
    wrong(BulletCartPole, "force", -10.0, "a number above 0 and at most 100"),
    wrong(BulletCartPole, "force", 100.1, "a number above 0 and at most 100"),
    wrong(BulletCartPole, "force", math.nan, "a number above 0 and at most 100"),
    wrong(BulletCartPole, "force", math.inf, "a number above 0 and at most 100"),
    wrong(BulletCartPole, "force", "10", "a number above 0 and at most 100"),
    wrong(BulletCartPole, "force", True, "a number above 0 and at most 100"),
    wrong(BulletCartPole, "start_range", -0.1, "a number at least 0 and at most 0.2"),
    wrong(BulletCartPole, "start_range", 0.21, "a number at least 0 and at most 0.2"),
    wrong(BulletCartPole, "start_range", 0.1, "below angle_limit=0.1", angle_limit=0.1),
    wrong(BulletCartPole, "start_range", 0.05, "below x_limit=0.01", x_limit=0.01),
    wrong(BulletCartPole, "start_velocity_range", 1.1, "a number at least 0 and at most 1"),
    wrong(BulletCartPole, "x_limit", 0.0, "a number above 0 and at most 12"),
    wrong(BulletCartPole, "x_limit", 12.1, "a number above 0 and at most 12"),
    wrong(BulletCartPole, "angle_limit", 1.6, "a number above 0 and at most 1.5"),
    wrong(BulletCartPole, "substeps", 0, "a whole number at least 1 and at most 100"),
    wrong(BulletCartPole, "substeps", 101, "a whole number at least 1 and at most 100"),
    wrong(BulletCartPole, "substeps", 1.5, "a whole number at least 1 and at most 100"),
    wrong(BulletCartPole, "damping", 1.1, "a number at least 0 and at most 1"),
    wrong(BulletCartPole, "slider_motor", "off", "one of False, True"),
    wrong(BulletCartPole, "reward_kind", "dead", "one of 'alive', 'zero_at_end'"),
    wrong(BalancingPlate, "torque", 0.0, "a number above 0 and at most 0.1"),
    wrong(BalancingPlate, "torque", 0.11, "a number above 0 and at most 0.1"),
    wrong(BalancingPlate, "frame_skip", 0, "a whole number at least 1 and at most 20"),
    wrong(BalancingPlate, "frame_skip", 21, "a whole number at least 1 and at most 20"),
    wrong(BalancingPlate, "frame_skip", 4.0, "a whole number at least 1 and at most 20"),
    wrong(BalancingPlate, "ball_range", 0.13, "a number at least 0 and at most 0.12"),
    wrong(BalancingPlate, "tilt_range", 0.21, "a number at least 0 and at most 0.2"),
    wrong(BalancingPlate, "tilt_velocity_range", -1, "a number at least 0 and at most 1"),
    wrong(BalancingPlate, "drop_height", 0.11, "a number at least 0 and at most 0.1"),
    wrong(BalancingPlate, "damping", -0.1, "a number at least 0 and at most 1"),
    wrong(BalancingPlate, "joint_velocities", 2, "one of False, True"),
    wrong(BalancingPlate, "observation_scale", 0, "a number above 0 and at most 1000"),
    wrong(BalancingPlate, "reward_kind", "zero_at_end", "one of 'distance', 'alive'"),
    wrong(BalancingPlate, "action_format", "continuous", "one of 'discrete', 'multi', 'box'"),
    wrong(BalancingPlate, "fall", "off", "one of 'edge', 'height'"),
]
WRONG += [
    wrong(make, name, value, rule)
    for make in (BulletCartPole, BalancingPlate)
    for name, value, rule in (
        ("preset", "best", "one of 'default', 'original'"),
        ("preset", ["default"], "one of 'default', 'original'"),
        ("render_mode", "ansi", "one of None, 'human', 'rgb_array'"),
        ("width", 15, "a whole number at least 16 and at most 4096"),
        ("height", 4097, "a whole number at least 16 and at most 4096"),
    )
]


@pytest.mark.parametrize(("make", "options", "message"), WRONG)
def test_a_wrong_argument_is_named_with_its_value_and_the_rule(make, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options)


@pytest.mark.parametrize(("make", "options"), [
    (BulletCartPole, {"force": 100, "start_range": 0.2, "start_velocity_range": 1, "x_limit": 12, "angle_limit": 1.5}),
    (BulletCartPole, {"force": np.float32(1e-3), "start_range": 0, "substeps": np.int64(100), "damping": 1}),
    (BalancingPlate, {"torque": 0.1, "frame_skip": 20, "ball_range": 0.12, "tilt_range": 0.2, "width": 16}),
    (BalancingPlate, {"tilt_velocity_range": 1, "drop_height": 0.1, "damping": 1, "observation_scale": 1000}),
], ids=str)  # fmt: skip
def test_values_on_the_border_are_allowed(make, options):
    env = started(make, **options)
    for action in (0, 1):
        obs, _, terminated, _, _ = env.step(action)
        assert type(terminated) is bool
    assert env.observation_space.contains(obs)


@both_ids
def test_the_message_reaches_who_calls_make(env_id):
    with pytest.raises(ValueError, match=re.escape("preset='best' must be one of 'default', 'original'")):
        gym.make(env_id, preset="best")
    with (
        pytest.warns(UserWarning, match="render_mode='ansi'"),
        pytest.raises(ValueError, match="render_mode='ansi' must be one of None, 'human', 'rgb_array'"),
    ):
        gym.make(env_id, render_mode="ansi")


@both_classes
@pytest.mark.parametrize(("platform", "version", "package"), [
    ("linux", (3, 11, 7), "pybullet"),
    ("linux", (3, 12, 0), "pybullet-arm64"),
    ("darwin", (3, 11, 0), "pybullet-arm64"),
    ("win32", (3, 13, 1), "pybullet-arm64"),
])  # fmt: skip
def test_without_pybullet_the_install_command_is_told(make, platform, version, package, monkeypatch):
    monkeypatch.setitem(sys.modules, "pybullet", None)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(gym.error.DependencyNotInstalled) as error:
        make()
    line = str(error.value)
    assert line.startswith(f"PyBullet is missing: pip install {package} (")
    assert "pybullet for Python 3.11 on Linux" in line
    assert "pybullet-arm64 for Python 3.11 to 3.13" in line
    assert "\n" not in line
    # The requirements name the same packages.
    assert re.search(rf"^{package}>=", (ROOT / "requirements.txt").read_text(), re.MULTILINE)


@both_classes
def test_arguments_are_checked_before_pybullet_is_looked_for(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "pybullet", None)
    with pytest.raises(ValueError, match="width=0 must be"):
        make(width=0)


# ----- Registration and files -----
def in_fresh_process(code, folder):
    """Returns standard output of an interpreter that is stopped by any warning; nothing but it may be said."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # PyBullet writes this line when it is imported, past Python's own streams.
    said = [line for line in done.stderr.splitlines() if line and not line.startswith("pybullet build time")]
    assert said == []
    return done.stdout


def test_the_import_is_silent_and_without_pybullet(tmp_path):
    code = "import envs, envs.balancing_plate, envs.bullet_cartpole, sys; assert 'pybullet' not in sys.modules"
    assert in_fresh_process(code, tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


@both_ids
def test_an_id_works_by_its_package_from_any_folder(env_id, tmp_path):
    code = f"import gymnasium; env = gymnasium.make('envs:{env_id}'); print(env.reset(seed=0)[0].shape)"
    assert in_fresh_process(code, tmp_path) == {BOTH[0]: "(4,)\n", BOTH[1]: "(10,)\n"}[env_id]


@pytest.mark.parametrize(("env_id", "threshold", "make"), [
    ("BulletCartPole-v0", 475, BulletCartPole), ("BalancingPlate-v0", 450, BalancingPlate),
])  # fmt: skip
def test_registration(env_id, threshold, make):
    spec = gym.spec(env_id)
    assert (spec.max_episode_steps, spec.reward_threshold) == (500, threshold)
    with gym.make(env_id) as env:
        assert type(env.unwrapped) is make


def test_every_argument_and_preset_is_in_the_table_of_the_docstring():
    for make, module in ((BulletCartPole, bullet_cartpole), (BalancingPlate, balancing_plate)):
        rows = {}
        for line in make.__doc__.split("## Arguments")[1].splitlines():
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            for name in re.findall(r"`(\w+)`", cells[0]) if len(cells) == 4 else ():
                rows[name] = cells
        named = {*module.PRESETS["default"], "render_mode", "width", "height"}
        assert rows.keys() == named
        assert named | {"self", "preset"} == inspect.signature(make.__init__).parameters.keys()
        for name in module.PRESETS["default"]:
            for column, preset in ((1, "default"), (2, "original")):
                value = module.PRESETS[preset][name]
                told = rows[name][column].strip('"')
                shown = f"{value:.3g}" if name == "tilt_range" else str(value)
                assert told == shown or float(told) == pytest.approx(float(shown), rel=0.01), name


def test_what_both_files_have_is_the_same_text():
    mark = "# ----- The same text in every file of this folder -----"
    one, other = (Path(module.__file__).read_text().split(mark) for module in (bullet_cartpole, balancing_plate))
    assert len(one) == len(other) == 2
    assert one[1] == other[1]
    for name in ("_check_open", "close"):
        texts = {inspect.getsource(getattr(make, name)) for make in (BulletCartPole, BalancingPlate)}
        assert len({text.replace("self.decisions is None", "not self.started") for text in texts}) == 1


# ----- The page -----
PAGE = ROOT / "envs" / "README.md"


def blocks_of(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_pictures_of_the_page_exist_and_are_small():
    named = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8"))
    assert len(named) == 2
    for name in named:
        assert 1000 < (PAGE.parent / name).stat().st_size < 50_000


COMMANDS = [line for block in blocks_of("sh") for line in block.splitlines()]
PACKAGES = {
    "my_grid": ["minigrid"],
    "my_road": ["highway_env"],
    "my_old": ["gym", "shimmy"],
    "my_team": ["supersuit", "pettingzoo.sisl.pursuit_v5"],
}
"""what a recipe's module needs beside the requirements"""
MY_PACKAGE = """
import gymnasium as gym
import numpy as np


class Env(gym.Env):
    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 1.0, False, False, {}


SPACES = {
    "Machine": (gym.spaces.Box(0, 1, (3,)), gym.spaces.MultiDiscrete([2, 3])),
    "FloatImages": (gym.spaces.Box(0, 1, (40, 48, 3)), gym.spaces.Discrete(2)),
    "Stack": (gym.spaces.Box(0, 255, (40, 48, 2), np.uint8), gym.spaces.Discrete(2)),
}
for name, (observations, actions) in SPACES.items():
    spaces = {"observation_space": observations, "action_space": actions}
    gym.register(f"{name}-v0", Env, max_episode_steps=20, kwargs=spaces)
"""
"""the package that the page's recipes speak of, with the spaces that they are for"""


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    """A folder with the page's examples: the first in my_envs.py, each recipe in the file that its first line names."""
    folder = tmp_path_factory.mktemp("recipes")
    first, *recipes = blocks_of("python")
    files = {"my_envs.py": first, "my_package.py": MY_PACKAGE}
    files |= {re.match(r"# (my_\w+\.py)\n", recipe)[1]: recipe for recipe in recipes}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_every_recipe_has_a_command():
    modules = {re.search(r"--env-id (\w+):", line)[1] for line in COMMANDS if ":" in line.split("--env-id")[1][:20]}
    named = {re.match(r"# (my_\w+)\.py", recipe)[1] for recipe in blocks_of("python")[1:]}
    assert modules == named | {"my_envs"}


@pytest.mark.parametrize("command", [*COMMANDS, "python ppo_cartpole.py --env-id my_ids:MachineCounted-v0"])
@pytest.mark.filterwarnings("ignore")  # those of other packages' environments
def test_the_examples_of_the_page_are_trained_by_a_script(command, recipes, tmp_path, monkeypatch, capsys):
    _, script, *flags = shlex.split(command)
    env_id = flags[flags.index("--env-id") + 1]
    for package in PACKAGES.get(env_id.split(":")[0], []):
        pytest.importorskip(package, exc_type=ImportError)
    monkeypatch.chdir(recipes)
    monkeypatch.syspath_prepend(recipes)  # before a user's files of these names, beside the scripts
    if "my_envs" in env_id:
        check_env(gym.make(env_id).unwrapped)
    flags += ["--no-progress", "--no-cuda", "--threads=1", "--eval-episodes=1", "--eval-every=0"]
    is_slow = re.search("CarRacing|CarSkip", env_id) is not None
    if is_slow:  # its own limit is 1,000 steps
        options = json.loads(flags[flags.index("--env-kwargs") + 1]) if "--env-kwargs" in flags else {}
        flags += ["--env-kwargs", json.dumps(options | {"max_episode_steps": 10})]
    flags += ["--learning-starts=100"] if script.startswith("dqn") else ["--num-envs=2", "--num-steps=16"]
    flags += ["--total-timesteps=32" if "ppo" in script else "--total-timesteps=300"]
    flags += ["--num-minibatches=2"] if "ppo" in script else []
    command_line(importlib.import_module(script.removesuffix(".py")), monkeypatch, *flags, f"--run-dir={tmp_path}")
    # One episode, and the line that sums it up; the longest of the examples have 200 steps, the old CartPole's 500.
    out = capsys.readouterr().out
    (length,) = re.findall(r"^episode \d+: return=\S+ length=(\d+)$", out, re.MULTILINE)
    assert 0 < int(length) <= (500 if "Old" in env_id else 10 if is_slow else 200)
    assert re.search(r"^eval: mean=\S+ .*episodes=1 ", out, re.MULTILINE)
    assert list(tmp_path.glob("*/*.pt"))

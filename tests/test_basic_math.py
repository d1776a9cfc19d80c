"""benchmarks/basic_math.py: answers as presses of buttons, and the real game that takes them."""

import sys

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import basic_math


@pytest.mark.parametrize(
    ("answer", "buttons"),
    [
        (0, ["UP"]),
        (4, ["UP"] * 5),
        (5, ["DOWN"] * 5),
        (9, ["DOWN"]),
        (10, ["UP", "LEFT", "UP", "UP"]),
        (18, ["DOWN", "DOWN", "LEFT", "UP", "UP"]),
    ],
)
def test_the_buttons_of_an_answer(answer, buttons):
    """A digit is blank, 0, 1, ... 9 by UP, and 9, 8, ... by DOWN; the tens stand to the left of the ones."""
    assert basic_math.presses(answer) == [*buttons, "FIRE"]


def test_a_game_of_right_answers_has_ten_points():
    assert basic_math.score("right", 5) == 10


def test_a_wrong_answer_pays_nothing_and_the_next_problem_follows():
    """The first problem is 1 + 1; the game ends after ten."""
    env = gym.make("BasicMath-v0")
    obs, _ = env.reset(seed=1)
    assert (obs.shape, obs.dtype, set(np.unique(obs))) == ((1, 60, 40), np.uint8, {0, 255})
    ram = env.unwrapped.ale.getRAM()
    assert (ram[basic_math.TOP], ram[basic_math.BOTTOM]) == (1, 1)
    steps = [env.step(answer) for answer in (3, 2, *[3] * 8)]
    ends = [terminated for _, _, terminated, _, _ in steps]
    assert (steps[0][1], ends) == (0, [False] * 9 + [True])
    # Where the game shows the right answer, this waits for its end: no picture has an answer in its last row of digits.
    assert not any(obs[0, 40:54].any() for obs, *_ in steps[:-1])

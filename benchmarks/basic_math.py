"""Registers Atari's BasicMath with a whole answer as one decision, which makes it a game that PPO learns.

In ALE/BasicMath-v5 the answer to 8 + 5 is seven presses of buttons and FIRE; a button that is held counts once in 16
frames only, and up to four seconds after FIRE nothing counts. Here a decision is a number from 0 to 18, whose buttons
are pressed and let go of, and the observation is the problem. Rewards, 1 for a right answer, and problems, ten, are the
game's.

Run:   python ppo_atari.py --env-id benchmarks.basic_math:BasicMath-v0, in the project's folder; benchmarks/README.md
       has the flags. python benchmarks/basic_math.py plays 20 games with right answers, and 20 with random ones.
"""

from typing import Any

import ale_py
import gymnasium as gym
import numpy as np

PRESS, RELEASE, POINT = 2, 2, 30  # frames of each; a right answer's point comes 26 frames after FIRE
NEXT_PROBLEM = {True: 100, False: 280}  # frames from FIRE on, where the answer was right and where it is shown
PROBLEM = np.s_[48:168, 24:104]  # rows and columns of the screen with the problem
TOP, BOTTOM = 52, 58  # bytes of the console's memory that hold the two numbers


def presses(answer: int) -> list[str]:
    """Returns the buttons for an answer; a digit goes from blank to 0, 1, ... by UP and to 9, 8, ... by DOWN."""
    tens, ones = divmod(answer, 10)
    digit = ["UP"] * (ones + 1) if ones < 5 else ["DOWN"] * (10 - ones)
    return [*digit, *["LEFT", "UP", "UP"] * tens, "FIRE"]


class WholeAnswers(gym.Wrapper):
    """Makes a decision one answer, 0 to 18, and shows (1, 60, 40) uint8: the problem, every second pixel of it."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(0, 255, (1, 60, 40), np.uint8)
        self.action_space = gym.spaces.Discrete(19)

    def wait(self, frames: int) -> float:
        """Lets the game go on without a button; returns its reward."""
        return float(sum(self.unwrapped.ale.act(ale_py.Action.NOOP) for _ in range(frames)))

    def reset(self, **options: Any) -> tuple[np.ndarray, dict]:  # noqa: ANN401
        """Starts a game at one of 60 frames: the problems depend on when buttons are pressed, and on nothing else."""
        _, info = self.env.reset(**options)
        self.wait(10 + int(self.np_random.integers(60)))
        return self.picture(), info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Gives an answer, and waits for the next problem or the end."""
        buttons = self.unwrapped.get_action_meanings()
        for button in presses(int(action)):
            _, _, _, truncated, info = self.env.step(buttons.index(button))
            self.wait(RELEASE)
        reward = self.wait(POINT)
        self.wait(NEXT_PROBLEM[reward > 0] - POINT)
        return self.picture(), reward, self.unwrapped.ale.game_over(), truncated, info

    def picture(self) -> np.ndarray:
        """Returns the part of the screen that has the problem: 255 where something is written, else 0."""
        written = self.unwrapped.ale.getScreenGrayscale()[PROBLEM] > 90
        return np.where(written, np.uint8(255), np.uint8(0))[None, ::2, ::2]


def make(**options: Any) -> gym.Env:  # noqa: ANN401
    """Returns the game of sums."""
    return WholeAnswers(gym.make("ALE/BasicMath-v5", frameskip=PRESS, repeat_action_probability=0.0, **options))


def score(player: str, seed: int) -> float:
    """Returns the score of one game of a player who gives "right" answers, or of one who gives "random" ones."""
    env, rng, total, over = gym.make("BasicMath-v0"), np.random.default_rng(seed), 0.0, False
    env.reset(seed=seed)
    while not over:
        ram = env.unwrapped.ale.getRAM()
        answer = int(ram[TOP]) + int(ram[BOTTOM]) if player == "right" else rng.integers(19)
        _, reward, over, _, _ = env.step(answer)
        total += reward
    return total


gym.register_envs(ale_py)
gym.register("BasicMath-v0", make, max_episode_steps=20, disable_env_checker=True)

if __name__ == "__main__":
    for player in ("right", "random"):
        scores = [score(player, seed) for seed in range(20)]
        print(f"{player} answers: mean {np.mean(scores):.2f}, {min(scores):.0f} to {max(scores):.0f}")

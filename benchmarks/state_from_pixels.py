"""How much of CartPole's state can be read from an observation of dqn_cartpole_pixels.py, choice by choice.

Run:    python benchmarks/state_from_pixels.py --out benchmarks/state_from_pixels.md
The smallest network, one linear layer, is fitted by least squares to observations of short episodes that start within
0.5 of the track's middle, whose ends are at 2.4. The table holds the share of the variance (R2) that it explains in
other, whole episodes.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dqn_cartpole_pixels as script

POLICIES = ("random", "balancing")
CHOICES = (
    "",
    "--no-show-action",
    "--stack 4",
    "--stack 2",
    "--frame-skip 1",
    "--resolution 7 60",
    "--resolution 14 60",
    "--reference-line",
    "--crop 0 1 0 1 --resolution 84 84 --frame-skip 4 --stack 4 --no-show-action",
)


@dataclass(frozen=True)
class Args:
    """Prints a row for each choice."""

    num: int = 2_000  # observations of each policy that the network is fitted to
    held_out: int = 1_000  # observations of each policy that it has not seen
    choices: tuple[str, ...] = CHOICES  # flags of dqn_cartpole_pixels.py, a row for each
    out: Path | None = None  # Markdown file


def observations(args: script.Args, policy: str, num: int, seed: int, spread: bool) -> tuple[Tensor, Tensor]:
    """Returns observations (num, S, H, W) whose frames are all there, and the states (num, 4) that they show.

    Args:
        args: how observations are built.
        policy: "random", or "balancing": a hand-written controller that acts at random in 3 of 10 decisions.
        num: how many.
        seed: of the first episode and of the actions.
        spread: 20 decisions each from wide starts, for a network to be fitted to; else whole episodes.
    """
    pictures, states, rng = [], [], np.random.default_rng(seed)
    with script.make_env(args) as env:
        while len(states) < num:
            obs, _ = env.reset(seed=seed + len(states))
            if spread:
                env.unwrapped.state = rng.uniform([-0.5, -0.5, -0.15, -0.5], [0.5, 0.5, 0.15, 0.5])
            step, ended = 0, False
            while not ended and (step < 20 or not spread):
                if step >= args.stack:
                    pictures.append(obs)
                    states.append(env.unwrapped.state)
                action = int(rng.integers(2))
                if policy == "balancing" and rng.random() < 0.7:
                    action = int(env.unwrapped.state @ [0.4, 0.6, 3, 0.7] > 0)
                obs, _, terminated, truncated, _ = env.step(action)
                step, ended = step + 1, terminated or truncated
    return torch.from_numpy(np.stack(pictures[:num])), torch.from_numpy(np.stack(states[:num]))


def shares_explained(fitted: list[tuple[Tensor, Tensor]], held_out: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Returns R2 (4,) of each held-out set, for one linear layer that was fitted to all the others together."""
    obs, states = (torch.cat(parts) for parts in zip(*fitted, strict=True))
    live = obs.flatten(1).float().std(0) > 0

    def inputs(obs: Tensor) -> Tensor:
        return nn.functional.pad(obs.flatten(1)[:, live].float() / 255, (0, 1), value=1.0)

    x = inputs(obs)
    # The penalty keeps weights of pixels small that are seldom anything but white.
    weights = torch.linalg.solve(x.T @ x + 0.05 * torch.eye(x.shape[1]), x.T @ states.float())
    return [1 - (inputs(obs) @ weights - states).square().mean(0) / states.var(0) for obs, states in held_out]


def measure(flags: str, num: int, held_out: int) -> list[Tensor]:
    """Returns R2 (4,) of position, speed, angle and rate for each policy."""
    args = tyro.cli(script.Args, args=shlex.split(flags))
    parts = [(observations(args, x, num, 0, True), observations(args, x, held_out, 100_000, False)) for x in POLICIES]
    return shares_explained(*map(list, zip(*parts, strict=True)))


def main() -> None:
    """Runs the command line."""
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    names = [f"{name}, {policy}" for policy in POLICIES for name in ("position", "speed", "angle", "rate")]
    lines = [f"| choice | {' | '.join(names)} |", "|---" * 9 + "|"]
    print(*lines, sep="\n")
    for flags in args.choices:
        shares = torch.cat(measure(flags, args.num, args.held_out)).tolist()
        lines.append(f"| {f'`{flags}`' if flags else 'as it is'} | {' | '.join(f'{x:.3f}' for x in shares)} |")
        print(lines[-1], flush=True)
    if args.out:
        command = f"`python benchmarks/state_from_pixels.py {shlex.join(sys.argv[1:])}`"
        args.out.write_text("\n".join([*lines, "", command]) + "\n")


if __name__ == "__main__":
    main()

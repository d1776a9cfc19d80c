"""Makes the strip of moving pictures at README's top: agents of benchmarks/agents play one episode each, side by side.

Run:   python benchmarks/make_strip.py --out benchmarks/strip.webp
Every panel runs at about the speed of its task. The seed of the episode is the script's own, so the strip can be made
again; a file larger than 1.5 MB is refused, since every reader of README loads it.
"""

import importlib
import io
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import torch
import tyro
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PANELS = {
    "ppo_atari__PongNoFrameskip-v4": (60, 1),
    "ppo_continuous__BipedalWalker-v3": (0, 4),
    "dqn_balancing_plate__BalancingPlate-v0": (0, 2),
    "reinforce_bullet_cartpole__BulletCartPole-v0": (0, 2),
}
"""agent files by name: the first step that is shown, and of how many steps one is"""
FPS, MAX_BYTES = 12, 1_500_000


@dataclass(frozen=True)
class Args:
    """Makes the strip of moving pictures at README's top."""

    out: Path = ROOT / "benchmarks" / "strip.webp"
    """animated WebP file to write"""
    height: int = 170
    """of the strip, pixels"""
    seconds: float = 14
    """length of the film"""
    quality: int = 60
    """of the pictures, 0 to 100"""


def film(name: str, start: int, every: int, num_pictures: int) -> list[np.ndarray]:
    """Returns pictures (height, width, 3) of an episode of this agent file: from step `start` on, one in `every`."""
    script, _ = name.split("__")
    module, path = importlib.import_module(script), str(ROOT / "benchmarks" / "agents" / f"{name}.pt")
    args = module.Args(**module.load_checkpoint(path)["args"])
    args = replace(args, eval_episodes=1, threads=1, cuda=False, **({"amp": False} if hasattr(args, "amp") else {}))
    device = module.prepare(args)
    with module.closing(module.make_envs(args, 1)) as envs:
        agent = module.Agent(args, envs)
    module.load_checkpoint(path, agent=agent)
    with tempfile.TemporaryDirectory() as folder:
        scores = module.evaluate(agent, args, args.seed + 20_000, device, Path(folder))
        print(f"{name}: return {scores['return'][0]:g}, {scores['length'][0]:g} steps")
        (path,) = Path(folder).glob("*.mp4")
        return list(islice(imageio.get_reader(path).iter_data(), start, start + num_pictures * every, every))


def strip(films: list[list[np.ndarray]], height: int) -> list[Image.Image]:
    """Returns pictures with those of all films side by side, scaled to one height; a film that is over is repeated."""
    joined = []
    for t in range(max(len(film) for film in films)):
        panels = [Image.fromarray(film[t % len(film)]) for film in films]
        panels = [panel.resize((round(panel.width * height / panel.height), height)) for panel in panels]
        joined.append(Image.fromarray(np.concatenate([np.asarray(panel) for panel in panels], axis=1)))
    return joined


def main() -> None:
    """Runs the command line: status 0 when done, 1 when the file would be too large."""
    args = tyro.cli(Args)
    torch.set_num_threads(1)
    num_pictures = round(args.seconds * FPS)
    films = [film(name, *steps, num_pictures) for name, steps in PANELS.items()]
    first, *others = strip(films, args.height)
    options = {"save_all": True, "append_images": others, "duration": round(1000 / FPS), "loop": 0, "method": 6}
    first.save(file := io.BytesIO(), "WEBP", quality=args.quality, **options)
    size = len(file.getvalue())
    print(f"{args.out}: {1 + len(others)} pictures of {first.width} x {first.height}, {size / 1e6:.2f} MB")
    if size > MAX_BYTES:
        sys.exit(f"error: more than {MAX_BYTES / 1e6} MB: take less --quality, --height or --seconds")
    args.out.write_bytes(file.getvalue())


if __name__ == "__main__":
    main()

"""Writes the scalars of a run to a CSV file, and its learning curve to a PNG file.

Run:   python benchmarks/export_curves.py runs/RUN benchmarks/results/pong
Reads all TensorBoard event files of the run's folder. A resumed run goes on from the step of a checkpoint; what had
been logged beyond it until then is left out, as in TensorBoard.
CSV:   tag,step,wall_time,value; one row for each point, values with 6 significant digits, wall_time in seconds since
       1970. Complete are the points of episodes and evaluations (charts/episodic_*, eval/*). The others, losses for
       example, have one for each iteration and are thinned to at most 500 of a tag: evenly chosen points, first and
       last among them, not averaged.
PNG:   one dot for each episode, the mean of the last 100 episodes as a line, the evaluations as diamonds.
"""

import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent

COMPLETE = ("charts/episodic_", "eval/")
"""beginnings of the tags of which every point is kept"""
MAX_POINTS = 500
"""points kept of any other tag"""
MEAN_OVER = 100
"""episodes in the running mean"""


class UsageError(Exception):
    """What the user asked for cannot be done: one line on standard error, exit status 2."""


@dataclass(frozen=True)
class Args:
    """Writes the scalars of a run to OUT_PREFIX.csv and its learning curve to OUT_PREFIX.png."""

    run_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_FOLDER")]
    """folder of the run; it is only read"""
    out_prefix: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT_PREFIX")]
    """path of both files, without their endings"""


def read_scalars(folder: Path) -> dict[str, list[ScalarEvent]]:
    """Returns the points of each tag, in the order of their steps, from all event files of a run's folder.

    Raises:
        UsageError: there is none.
    """
    if not any(folder.glob("events.out.tfevents.*")):
        raise UsageError(f"{folder}: there is no event file of TensorBoard here")
    # 0 keeps all points; the default keeps a random choice of them.
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=True).Reload()
    return {tag: events.Scalars(tag) for tag in sorted(events.Tags()["scalars"])}


def thinned(tag: str, points: list[ScalarEvent]) -> list[ScalarEvent]:
    """Returns the points of a tag that the CSV file gets."""
    if tag.startswith(COMPLETE) or len(points) <= MAX_POINTS:
        return points
    return [points[i] for i in np.linspace(0, len(points) - 1, MAX_POINTS).round().astype(int)]


def write_csv(path: Path, scalars: dict[str, list[ScalarEvent]]) -> int:
    """Writes the scalars in long format and returns the number of rows."""
    rows = [
        (tag, point.step, f"{point.wall_time:.1f}", f"{point.value:.6g}")
        for tag, points in scalars.items()
        for point in thinned(tag, points)
    ]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("tag", "step", "wall_time", "value"))
        writer.writerows(rows)
    return len(rows)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns (n,) the mean of each value and of the up to window - 1 values before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def plot(path: Path, scalars: dict[str, list[ScalarEvent]], run_args: dict[str, str | int]) -> None:
    """Draws the learning curve; shades and shapes tell the series apart without colours."""
    from matplotlib.figure import Figure

    env_id = str(run_args["env_id"])
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    episodes = scalars.get("charts/episodic_return", [])
    if episodes:
        millions = np.array([point.step for point in episodes]) / 1e6
        scores = np.array([point.value for point in episodes])
        axes.plot(millions, scores, ".", color="0.65", markersize=3, label="episode in training", rasterized=True)
        mean = running_mean(scores, MEAN_OVER)
        axes.plot(millions, mean, color="black", linewidth=1.5, label=f"mean of the last {MEAN_OVER} episodes")
    evaluations = scalars.get("eval/return_mean", [])
    if evaluations:
        millions = [point.step / 1e6 for point in evaluations]
        means = [point.value for point in evaluations]
        style = {"linestyle": "none", "marker": "D", "markersize": 7, "markeredgecolor": "black"}
        axes.plot(millions, means, **style, markerfacecolor="white", label="mean of an evaluation")
    is_atari = "NoFrameskip" in env_id or env_id.startswith("ALE/")
    axes.set_xlabel("environment steps, millions" + (" (4 frames each)" if is_atari else ""))
    axes.set_ylabel("score of an episode, " + ("game points" if is_atari else "sum of rewards"))
    axes.set_title(f"{env_id}, {run_args['exp_name']}, seed {run_args['seed']}")
    axes.grid(color="0.92")
    if episodes or evaluations:
        axes.legend(loc="best")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Runs the command line: status 0 when done, 2 when the arguments are wrong or matplotlib is missing."""
    args = tyro.cli(Args)
    # Not with_suffix, which would take the end of "pong-2.5e-4" for an ending.
    csv_path, png_path = (args.out_prefix.with_name(args.out_prefix.name + ending) for ending in (".csv", ".png"))
    try:
        scalars = read_scalars(args.run_folder)
        run_args = json.loads((args.run_folder / "args.json").read_text())["args"]
        num_rows = write_csv(csv_path, scalars)
        plot(png_path, scalars, run_args)
    except ModuleNotFoundError as error:
        print(f"error: the plot needs a package that only benchmarks/ uses: pip install {error.name}", file=sys.stderr)
        sys.exit(2)
    except (UsageError, OSError, KeyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{csv_path}: {num_rows} rows\n{png_path}: learning curve")


if __name__ == "__main__":
    main()

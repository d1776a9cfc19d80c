"""Writes the scalars of a run to a CSV file, which compare_runs.py draws.

Run:   python benchmarks/export_curves.py runs/RUN benchmarks/results/pong
Reads all TensorBoard event files of the run's folder. A resumed run goes on from the step of a checkpoint; what had
been logged beyond it until then is left out, as in TensorBoard.
CSV:   tag,step,wall_time,value; one row for each point, values with 6 significant digits, wall_time in seconds since
       1970. Complete are the points of episodes and evaluations (charts/episodic_*, eval/*). The others, losses for
       example, have one for each iteration and are thinned to at most 500 of a tag: evenly chosen points, first and
       last among them, not averaged.
"""

import csv
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


class UsageError(Exception):
    """What the user asked for cannot be done: one line on standard error, exit status 2."""


@dataclass(frozen=True)
class Args:
    """Writes the scalars of a run to OUT_PREFIX.csv."""

    run_folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_FOLDER")]
    """folder of the run; it is only read"""
    out_prefix: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT_PREFIX")]
    """path of the file, without its ending"""


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


def main() -> None:
    """Runs the command line: status 0 when done, 2 when the arguments are wrong."""
    args = tyro.cli(Args)
    # Not with_suffix, which would take the end of "pong-2.5e-4" for an ending.
    path = args.out_prefix.with_name(args.out_prefix.name + ".csv")
    try:
        num_rows = write_csv(path, read_scalars(args.run_folder))
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{path}: {num_rows} rows")


if __name__ == "__main__":
    main()

"""Compares scripts on one environment over several seeds: CSV files and a Markdown table of their runs.

Run:    python benchmarks/export_seeds.py runs/RUN1 runs/RUN2 runs/RUN3 --out benchmarks/Pendulum-v1
Reads all TensorBoard event files of each folder. A resumed run goes on from the step of a checkpoint; what had been
logged beyond it until then is left out, as in TensorBoard. The script is the run's exp_name, args.json tells it.
CSV:    OUT/SCRIPT__ENV.csv for each script: seed,tag,step,wall_time,value; values with 6 significant digits, wall_time
        in seconds since the run's first event. Complete are eval/return_mean and eval/return_std. The episodes,
        charts/episodic_return, are thinned by averaging: 200 bins of equal width cover the steps of the run, from 0 to
        the last step that was logged; a row is the mean of the episodes that ended in a bin, at the bin's end step and
        at the time of its last episode. A bin without episodes has no row: nothing is extrapolated.
Table:  on standard output. A seed's last training mean is that of its last 100 episodes, or of all if there are fewer.
        Wall time runs from a run's first event to its last scalar, with evaluations, and with pauses before it was
        resumed.
Pictures: python compare_runs.py OUT/SCRIPT__ENV.csv --pictures FOLDER
"""

import csv
import json
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent

EPISODES = "charts/episodic_return"
COMPLETE = ("eval/return_mean", "eval/return_std")
"""tags of which every point is kept"""
NUM_BINS = 200
MEAN_OVER = 100
"""episodes in the last training mean"""


class UsageError(Exception):
    """What the user asked for cannot be done: one line on standard error, exit status 2."""


@dataclass(frozen=True)
class Args:
    """Compares scripts on one environment over several seeds: CSV files and a Markdown table."""

    run_folders: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="RUN_FOLDER...", help_behavior_hint="(at least one)"),
    ]
    """folders of the runs, one for each script and seed; they are only read"""
    out: Path
    """folder of the files to write; it is made if it does not exist"""

    def __post_init__(self) -> None:
        if not self.run_folders:
            raise ValueError("RUN_FOLDER: at least one is needed")


@dataclass(frozen=True)
class Run:
    """What the log of a run says."""

    folder: Path
    script: str
    env_id: str
    seed: int
    start: float
    """time of its first event, seconds since 1970"""
    scalars: dict[str, list[ScalarEvent]]
    """points of each tag, in the order of their steps; at least one episode"""

    @property
    def last_step(self) -> int:
        """The last step that was logged."""
        return max(points[-1].step for points in self.scalars.values())

    @property
    def seconds(self) -> float:
        """From the first event to the last scalar."""
        return max(points[-1].wall_time for points in self.scalars.values()) - self.start

    @property
    def last_mean(self) -> float:
        """The mean of the last episodes in training."""
        return float(np.mean([point.value for point in self.scalars[EPISODES][-MEAN_OVER:]]))


# ----- Reading -----
def read_run(folder: Path) -> Run:
    """Returns a run from its args.json and all its event files.

    Raises:
        UsageError: one of them is missing or cannot be read, or no episode was logged.
    """
    if not any(folder.glob("events.out.tfevents.*")):
        raise UsageError(f"{folder}: there is no event file of TensorBoard here")
    path = folder / "args.json"
    try:
        run_args = json.loads(path.read_text(encoding="utf-8"))["args"]
        script, env_id, seed = str(run_args["exp_name"]), str(run_args["env_id"]), int(run_args["seed"])
    except FileNotFoundError as error:
        raise UsageError(f"{folder}: there is no args.json here") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: does not name exp_name, env_id and seed of a run") from error
    # 0 keeps all points; the default keeps a random choice of them.
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=True).Reload()
    # A resumed run may have lost all points of a tag.
    scalars = {tag: points for tag in events.Tags()["scalars"] if (points := events.Scalars(tag))}
    if EPISODES not in scalars:
        raise UsageError(f"{folder}: no episode was logged here, {EPISODES} is missing")
    return Run(folder, script, env_id, seed, events.FirstEventTimestamp(), scalars)


def read_runs(folders: tuple[Path, ...]) -> dict[str, list[Run]]:
    """Returns the runs of each script, scripts by name and runs by seed.

    Raises:
        UsageError: a run cannot be read, they are of several environments, or two have the same script and seed.
    """
    runs: dict[tuple[str, int], Run] = {}
    for folder in folders:
        run = read_run(folder)
        first = next(iter(runs.values()), run)
        if run.env_id != first.env_id:
            raise UsageError(
                f"all runs must have one environment: {first.folder} has {first.env_id}, {folder} has {run.env_id}"
            )
        twin = runs.setdefault((run.script, run.seed), run)
        if twin is not run:
            raise UsageError(f"{twin.folder} and {folder} are both {run.script} with seed {run.seed}")
    ordered = [runs[key] for key in sorted(runs)]
    return {script: list(group) for script, group in groupby(ordered, lambda run: run.script)}


# ----- Math -----
def binned(points: list[ScalarEvent], last_step: int) -> list[ScalarEvent]:
    """Returns the mean of each bin that has points, at its end step and at the time of its last point.

    Bin i of n holds the steps in (i * last_step / n, (i + 1) * last_step / n]; its end is rounded down to a step, which
    moves no point to another bin.
    """
    ends = last_step * np.arange(1, NUM_BINS + 1) // NUM_BINS
    # In a run of fewer steps than bins some ends are equal; the first of them gets the points.
    indices = np.searchsorted(ends, [point.step for point in points])
    means = []
    for i in np.unique(indices):
        inside = [points[j] for j in np.flatnonzero(indices == i)]
        mean = float(np.mean([point.value for point in inside]))
        means.append(ScalarEvent(wall_time=inside[-1].wall_time, step=int(ends[i]), value=mean))
    return means


# ----- Writing -----
def write_csv(path: Path, runs: list[Run]) -> int:
    """Writes the runs of a script in long format and returns the number of rows."""
    rows = []
    for run in runs:
        kept = {EPISODES: binned(run.scalars[EPISODES], run.last_step)}
        kept |= {tag: run.scalars.get(tag, []) for tag in COMPLETE}
        rows += [
            (run.seed, tag, point.step, f"{point.wall_time - run.start:.1f}", f"{point.value:.6g}")
            for tag, points in kept.items()
            for point in points
        ]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("seed", "tag", "step", "wall_time", "value"))
        writer.writerows(rows)
    return len(rows)


def table(scripts: dict[str, list[Run]]) -> str:
    """Returns the Markdown table, one row for each script."""
    lines = [
        f"| script | seeds | steps | last training mean: {MEAN_OVER} episodes of each seed, mean over seeds "
        "+- standard deviation (min to max) | wall time per seed, median, minutes |",
        "|---|---:|---:|---:|---:|",
    ]
    for script, runs in scripts.items():
        steps = sorted({run.last_step for run in runs})
        means = [run.last_mean for run in runs]
        digits = 1 if max(map(abs, means)) >= 10 else 3
        score = f"{np.mean(means):.{digits}f}"
        if len(runs) > 1:
            score += f" +- {np.std(means, ddof=1):.{digits}f} ({min(means):.{digits}f} to {max(means):.{digits}f})"
        cells = [
            f"`{script}`",
            f"{len(runs)}",
            f"{steps[0]:,}" + (f" to {steps[-1]:,}" if len(steps) > 1 else ""),
            score,
            f"{median(run.seconds for run in runs) / 60:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the command line: status 0 when done, 2 when the arguments are wrong."""
    args = tyro.cli(Args)
    try:
        scripts = read_runs(args.run_folders)
        env_id = next(iter(scripts.values()))[0].env_id
        file_env_id = env_id.replace("/", "-").replace(":", "-")
        args.out.mkdir(parents=True, exist_ok=True)
        written = []
        for script, runs in scripts.items():
            csv_path = args.out / f"{script}__{file_env_id}.csv"
            written.append(f"{csv_path}: {write_csv(csv_path, runs)} rows")
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    # On standard error, so that standard output is the table alone.
    print("\n".join(written), file=sys.stderr)
    print(table(scripts))


if __name__ == "__main__":
    main()

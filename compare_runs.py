"""Compares runs: final scores over seeds with honest intervals, learning curves, and which group is better.

Paper: Agarwal et al. 2021, https://arxiv.org/abs/2108.13264: interquartile mean, stratified bootstrap over runs,
       probability of improvement.
Run:   python compare_runs.py runs/
       python compare_runs.py runs/ --group-by env_id exp_name learning_rate --threshold -200 --pictures pictures/
       python compare_runs.py "runs/Pendulum-v1__*" benchmarks/ppo_continuous__Pendulum-v1.csv --out table.md
Reads: TensorBoard event files of these scripts, of CleanRL and of stable-baselines3, and the CSV files in benchmarks/.
       A folder with event files is one run; the files of a resumed run are one curve: what the cut file has from the
       step of the resumption on is dropped. Points at one step, of environments that finish together, are all kept.
       TensorBoard's fast data server keeps only the last of each step, and its Python reader takes ten times as long.
Statistics: the unit is the run, never the episode. A run's final score is the mean of its points in the last part of
       its x range. The interquartile mean of a group leaves out a quarter of the scores at each end (below four runs
       it is the mean). Its interval holds the middle 95 % of 10,000 resamples of the runs; where a group spans several
       environments, each one's runs are resampled among themselves (they are the strata). A group's curve exists only
       at x where every one of its runs has data: interpolated between points, never extrapolated.
"""

import csv
import glob
import importlib.util
import json
import math
import os
import re
import struct
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import tyro
from google.protobuf.message import DecodeError
from scipy.stats import trim_mean
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import masked_crc32c

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPISODES = "charts/episodic_return"
METRICS = {"return": (EPISODES, "rollout/ep_rew_mean"), "eval": ("eval/return_mean", "eval/mean_reward")}
"""aliases of --metric; of each run the first tag that it has is taken"""
EPISODES_IN_MEAN = 100
"""stable-baselines3's rollout/ep_rew_mean is the mean of so many episodes; so is ours, unless --smooth is given"""
HYPERPARAMETERS = "hyperparameters/text_summary"
UNIMPORTANT = """
    seed folder run_dir resume evaluate track wandb_project_name wandb_entity progress plot threads cuda capture_video
    checkpoint_every eval_every eval_episodes torch_deterministic save_model upload_model hf_entity
"""
"""keys that change nothing in what is learned: they split no groups unless --group-by names them"""
RESAMPLES = 10_000
GRID_POINTS = 300
FEW_SEEDS = 5
MOST_PAIRS = 60
"""of two groups each, in a picture"""
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Okabe and Ito's, which colour-blind people tell apart"""
LINE_STYLES, MARKERS = ("-", "--", "-.", ":"), "osv^D"


class UsageError(Exception):
    """What the user asked for cannot be done: one line on standard error, exit status 2."""


# ----- Arguments -----
@dataclass(frozen=True)
class Args:
    """Compares runs: a table of final scores with intervals over seeds, which group is better, pictures."""

    paths: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PATH...", help_behavior_hint="(at least one)")
    ]
    """run folders, folders that hold some at any depth, glob patterns, or CSV files as in benchmarks/"""
    group_by: tuple[str, ...] = ()
    """arguments of the runs, or folder (the one they are in); none: env_id, exp_name and what differs within these"""
    metric: str = "return"
    """return: of episodes in training; eval: mean of evaluations; or any tag"""
    x: Literal["step", "time"] = "step"
    """x axis: environment steps, or seconds since the run's first event without the pauses of resumed runs"""
    smooth: int | None = None
    """a point is the mean of so many, itself the last; none: 100 for single episodes, 1 for what is a mean already"""
    last_fraction: float = 0.1
    """part of a run's x range, at its end, whose mean is the final score"""
    threshold: float | None = None
    """score whose first reaching is reported in steps and wall time"""
    out: Path | None = None
    """write the table to this file, .csv or .md"""
    pictures: Path | None = None
    """write pictures into this folder; needs matplotlib"""
    format: Literal["png", "svg"] = "png"
    """format of the pictures"""

    def __post_init__(self) -> None:
        if not self.paths:
            raise ValueError("PATH: at least one is needed, before all flags")
        if self.smooth is not None and self.smooth < 1:
            raise ValueError(f"--smooth {self.smooth} must be at least 1 point")
        if not 0 < self.last_fraction <= 1:
            raise ValueError(f"--last-fraction {self.last_fraction} must be above 0 and at most 1")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ValueError(f"--threshold {self.threshold} must be a finite number")


# ----- Reading -----
@dataclass(frozen=True)
class Curve:
    """Points of one tag of one run, in the order of their steps."""

    steps: np.ndarray
    """(n,) environment steps; several points may share one"""
    seconds: np.ndarray
    """(n,) since the run's first event, without pauses"""
    values: np.ndarray
    """(n,)"""

    def x(self, axis: str) -> np.ndarray:
        """Returns the x values of an axis, step or time, which never fall."""
        return self.steps if axis == "step" else np.maximum.accumulate(self.seconds)


@dataclass(frozen=True)
class Run:
    """A run, with what groups it."""

    path: str
    keys: dict[str, str]
    """its arguments; env_id, exp_name, seed and folder at least"""
    curve: Curve
    window: int
    """points in a moving average"""

    @property
    def smoothed(self) -> np.ndarray:
        """(n,) moving averages of the values."""
        return trailing_mean(self.curve.values, self.window)


@dataclass
class EventFile:
    """What is needed of one event file; wall times are seconds since 1970."""

    start: float = math.inf
    end: float = 0.0
    resumes_at: int | None = None
    """step from which on this file replaces the earlier ones, where it says so"""
    points: dict[str, tuple[array, array, array]] = field(
        default_factory=lambda: defaultdict(lambda: (array("q"), array("d"), array("d")))
    )
    """steps, wall times and values of each tag"""
    hyperparameters: dict[str, str] = field(default_factory=dict)


def warn(message: str) -> None:
    """Prints one line on standard error; the rest of the comparison goes on."""
    print(f"note: {message}", file=sys.stderr)


def records(path: Path) -> Iterator[bytes]:
    """Yields the events in a file, as bytes: each stands between its length, a checksum of that, and one of its own.

    The checksums of whole events are not compared: done in Python, that takes most of the time of TensorBoard's reader.

    Raises:
        ValueError: the file is empty, damaged or ends within a record; all that is before has been yielded.
    """
    data = path.read_bytes()
    if not data:
        raise ValueError("is empty")
    position = 0
    size, length_at = len(data), struct.Struct("<Q").unpack_from
    while position + 12 <= size:
        length = length_at(data, position)[0]
        end = position + 12 + length
        # An event has a time at least, so one without a byte is none: a disk that filled up leaves zeros.
        if not length or end + 4 > size:
            break
        yield data[position + 12 : end]
        position = end + 4
    header = data[position : position + 12]
    if len(header) == 12 and struct.pack("<I", masked_crc32c(header[:8])) != header[8:]:
        raise ValueError(f"is damaged at byte {position:,}; what is before counts")
    if header:
        raise ValueError("ends within a record, still being written or cut; what is before counts")


def read_event_file(path: Path, tags: tuple[str, ...]) -> EventFile:
    """Returns the points of these tags, of all tags if there are none; what is wrong with the file is reported."""
    names = "|".join(map(re.escape, (*tags, HYPERPARAMETERS))) if tags else ""
    is_wanted = re.compile(names.encode()).search
    file = EventFile()
    record, problem = b"", ""
    try:
        for record in records(path):
            if file.start == math.inf:
                file.start = Event.FromString(record).wall_time
            # To look for a name is several times as fast as to parse. What is too short for a name may be the mark of
            # a resumption.
            if len(record) < 32 or is_wanted(record):
                add_event(file, Event.FromString(record), tags)
    except DecodeError:
        problem = "is damaged; what is before counts"
    except ValueError as error:
        problem = str(error)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    # The last event is mostly one of another tag, which has not been parsed yet.
    try:
        file.end = Event.FromString(record).wall_time
    except DecodeError:
        problem = problem or "is damaged in its last event"
    # Where that is damaged, the last point tells the time.
    file.end = max([file.end, *(times[-1] for _, times, _ in file.points.values() if times)])
    if problem:
        warn(f"{path} {problem}")
    return file


def add_event(file: EventFile, event: Event, tags: tuple[str, ...]) -> None:
    """Adds what an event holds of these tags, of all tags if there are none."""
    if event.HasField("session_log") and event.session_log.status == SessionLog.START:
        file.resumes_at = event.step
    for value in event.summary.value:
        tag = value.tag
        if (tag in tags or not tags) and value.HasField("simple_value"):
            steps, times, values = file.points[tag]
            steps.append(event.step)
            times.append(event.wall_time)
            values.append(value.simple_value)
        elif tag == HYPERPARAMETERS and value.tensor.string_val:
            text = value.tensor.string_val[0].decode(errors="replace")
            rows = re.findall(r"^\|([^|\n]+)\|(.*)\|$", text, re.MULTILINE)
            file.hyperparameters |= {name: content for name, content in rows if name not in ("param", "-")}


def joined(files: list[EventFile], tag: str) -> Curve:
    """Returns one curve of all event files of a run, pauses between them taken out.

    A resumed file says from which step on it replaces what came before. One that does not say so (another tool wrote
    it) replaces from its own first step on. Work after the checkpoint that the cut file lost did take its time.
    """
    steps, seconds, values = (np.empty(0, dtype) for dtype in (np.int64, float, float))
    pauses, latest = 0.0, -math.inf
    for file in sorted(files, key=lambda file: file.start):
        pauses += max(file.start - latest, 0.0) if latest > -math.inf else 0.0
        latest = max(latest, file.end)
        new_steps, times, new_values = (np.array(column) for column in file.points.get(tag, ([], [], [])))
        resumes_at = file.resumes_at
        if resumes_at is None:
            resumes_at = new_steps.min() if len(new_steps) else math.inf
        kept = steps < resumes_at
        steps = np.concatenate([steps[kept], new_steps.astype(np.int64)])
        seconds = np.concatenate([seconds[kept], times - pauses])
        values = np.concatenate([values[kept], new_values])
    # Stable, so that points at one step stay in the order in which they were logged.
    order = np.argsort(steps, kind="stable")
    start = min((file.start for file in files), default=0.0)
    return Curve(steps[order], seconds[order] - start, values[order])


def keys_of(folder: Path, hyperparameters: dict[str, str]) -> dict[str, str]:
    """Returns a run's arguments: from its args.json, else from its log and the name of its folder."""
    # A name may hold bytes that are no text.
    whole = folder.absolute()
    name, parent = (part.encode(errors="replace").decode() for part in (whole.name, whole.parent.name))
    keys = {"env_id": "unknown", "exp_name": name, "seed": "unknown", "folder": parent}
    parts = name.rsplit("__", 3)
    if len(parts) == 4 and parts[2].isdigit():
        keys |= dict(zip(("env_id", "exp_name", "seed"), parts, strict=False))
    keys |= hyperparameters
    path = folder / "args.json"
    if path.exists():
        try:
            keys |= {key: str(value) for key, value in json.loads(path.read_text(encoding="utf-8"))["args"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            warn(f"{path} is damaged; the arguments are taken from the log and the folder's name")
    # With the module that registers it or without, an id names the same environment.
    return keys | {"env_id": keys["env_id"].rpartition(":")[2]}


def make_run(path: str, keys: dict[str, str], curves: dict[str, Curve], args: Args, single: bool) -> Run | None:
    """Returns a run with the first of the curves that has points; `single`: not averaged before."""
    for tag, curve in curves.items():
        finite = np.isfinite(curve.values)
        if not finite.all():
            warn(f"{path}: {np.sum(~finite):,} points of {tag} are no finite numbers and left out")
            curve = Curve(curve.steps[finite], curve.seconds[finite], curve.values[finite])
        if len(curve.steps):
            return Run(path, keys, curve, args.smooth or (EPISODES_IN_MEAN if single and tag == EPISODES else 1))
    return None


def read_folder(folder: Path, tags: tuple[str, ...], args: Args) -> list[Run | None]:
    """Returns the run in a folder, None if it has no point of these tags, or nothing if it has no event."""
    files = [read_event_file(path, tags) for path in sorted(folder.glob("*tfevents*"))]
    files = [file for file in files if file.start < math.inf]
    if not files:
        return []
    hyperparameters = {key: value for file in files for key, value in file.hyperparameters.items()}
    curves = {tag: joined(files, tag) for tag in tags}
    return [make_run(str(folder), keys_of(folder, hyperparameters), curves, args, single=True)]


def csv_points(path: Path) -> dict[str, dict[str, list[tuple[int, float, float]]]]:
    """Returns (step, wall time, value) by seed and tag from a CSV file of benchmarks/; nothing if it is another."""
    points: dict[str, dict[str, list[tuple[int, float, float]]]] = defaultdict(lambda: defaultdict(list))
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(line for line in file if not line.startswith("#")):
                point = (int(row["step"]), float(row["wall_time"]), float(row["value"]))
                if not math.isfinite(point[1]):
                    raise ValueError("no time")
                points[row.get("seed") or "unknown"][row["tag"]].append(point)
    except OSError as error:
        warn(f"{path} cannot be read ({error.strerror})")
    except (KeyError, ValueError, TypeError, csv.Error):
        warn(f"{path} is no CSV file of curves, which has the columns tag, step, wall_time, value; or it is damaged")
        return {}
    else:
        if not points:
            warn(f"{path} has no row of a curve")
    return points


def read_csv(path: Path, tags: tuple[str, ...], args: Args) -> list[Run | None]:
    """Returns the runs in a CSV file SCRIPT__ENV.csv, one for each seed; None for one without these tags."""
    script, _, env_id = path.stem.partition("__")
    runs = []
    for seed, points in csv_points(path).items():
        # Some files hold seconds since the run's first event, others since 1970.
        first = min(seconds for rows in points.values() for _, seconds, _ in rows)
        start = first if first > 1e8 else 0.0
        curves = {}
        for tag in tags:
            steps, seconds, values = np.array(sorted(points.get(tag, []), key=lambda row: row[0])).reshape(-1, 3).T
            curves[tag] = Curve(steps.astype(np.int64), seconds - start, values)
        keys = {"env_id": env_id or "unknown", "exp_name": script, "seed": seed, "folder": path.parent.name}
        runs.append(make_run(f"{path} seed {seed}", keys, curves, args, single=False))
    return runs


def find_sources(paths: tuple[str, ...]) -> list[Path]:
    """Returns run folders and CSV files, each once.

    Raises:
        UsageError: a path leads to none.
    """
    found: dict[Path, Path] = {}
    for pattern in paths:
        given = Path(os.path.expanduser(pattern))
        names = [given] if given.exists() else sorted(glob.glob(str(given), recursive=True))
        matches = [Path(name) for name in names]
        sources = [source for match in matches for source in sources_in(match)]
        if not sources:
            rule = "a run's folder holds an event file, *tfevents*" if matches else "there is nothing of this name"
            raise UsageError(f"{pattern}: no run found; {rule}")
        found |= {source.resolve(): source for source in sources}
    return list(found.values())


def sources_in(path: Path) -> list[Path]:
    """Returns what a path leads to: run folders at any depth, or itself if it is a CSV file."""
    if path.is_dir():
        found, visited = [], set()
        # Links are followed, each folder once: a link may lead to a folder above it.
        for folder, below, files in os.walk(path, followlinks=True):
            real = os.path.realpath(folder)
            if real in visited:
                below.clear()
            elif any("tfevents" in name for name in files):
                found.append(Path(folder))
            visited.add(real)
        return sorted(found)
    if "tfevents" in path.name:
        return [path.parent]
    return [path] if path.suffix.lower() == ".csv" else []


def tags_in(source: Path) -> set[str]:
    """Returns all tags of a run folder or CSV file."""
    if source.is_dir():
        return {tag for path in source.glob("*tfevents*") for tag in read_event_file(path, ()).points}
    return {tag for points in csv_points(source).values() for tag in points}


def read_runs(args: Args) -> list[Run]:
    """Returns all runs that have the metric; files and runs that cannot be used are reported.

    Raises:
        UsageError: there is no run, or none has the metric; the message names the tags that exist.
    """
    tags = METRICS.get(args.metric, (args.metric,))
    sources = find_sources(args.paths)
    runs, lacking = [], []
    for source in sources:
        found = read_folder(source, tags, args) if source.is_dir() else read_csv(source, tags, args)
        runs += [run for run in found if run]
        lacking += [source] * (None in found)
    if not runs and not lacking:
        raise UsageError(f"{' '.join(args.paths)}: no run found that can be read")
    if not runs:
        existing = set().union(*map(tags_in, lacking))
        wanted = args.metric if args.metric in tags else f"{args.metric} ({' or '.join(tags)})"
        lack = "no run has a finite point of it" if existing & set(tags) else "no run has it"
        raise UsageError(f"--metric {wanted}: {lack}; they have {', '.join(sorted(existing)) or 'no scalars'}")
    for source in lacking:
        warn(f"{source} has no finite point of {' or '.join(tags)} and is left out")
    return runs


# ----- Grouping -----
@dataclass(frozen=True)
class Group:
    """Runs that share the values of some arguments."""

    name: str
    """these values, but for the environment"""
    runs: list[Run]

    @property
    def environments(self) -> list[str]:
        """The environment ids of its runs."""
        return sorted({run.keys["env_id"] for run in self.runs})

    @property
    def environment(self) -> str:
        """The environment id, or several."""
        return ", ".join(self.environments)

    @property
    def strata(self) -> np.ndarray:
        """(n,) which of the environments each run has."""
        return np.array([self.environments.index(run.keys["env_id"]) for run in self.runs])


def differing_keys(runs: list[Run]) -> list[str]:
    """Returns the keys that make groups where nothing is said: env_id, exp_name, and those that differ further.

    A key counts only if it differs between runs of one environment and experiment: other scripts have other defaults.
    """
    values: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for run in runs:
        for key, value in run.keys.items():
            values[run.keys["env_id"], run.keys["exp_name"]][key].add(value)
    differing = [key for keys in values.values() for key, found in keys.items() if len(found) > 1]
    return ["env_id", "exp_name", *(key for key in dict.fromkeys(differing) if key not in UNIMPORTANT.split())]


def group_runs(runs: list[Run], keys: Iterable[str]) -> list[Group]:
    """Returns the runs by their values of these keys, in the order of the values.

    Raises:
        UsageError: no run has such a key; the message names those that exist.
    """
    existing = sorted({key for run in runs for key in run.keys})
    for key in keys:
        if key not in existing:
            raise UsageError(f"--group-by {key}: no run has this argument; they have {', '.join(existing)}")
    groups: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in runs:
        groups[tuple(run.keys.get(key, "none") for key in keys)].append(run)
    named = []
    for values in sorted(groups):
        shown = {key: value for key, value in zip(keys, values, strict=True) if key != "env_id"}
        name = " ".join(value if key == "exp_name" else f"{key}={value}" for key, value in shown.items())
        named.append(Group(name or "all runs", groups[values]))
    return named


# ----- Statistics -----
def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns (n,) the mean of each value and the window - 1 before it, or of as many as there are."""
    if window == 1:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - min(window, len(values)), 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def final_score(x: np.ndarray, values: np.ndarray, fraction: float) -> float:
    """Returns the mean of the values in the last part of the x range, (n,) each."""
    return float(values[x >= x[0] + (1 - fraction) * (x[-1] - x[0])].mean())


def first_reach(run: Run, threshold: float) -> int | None:
    """Returns the index of the first point at which the smoothed curve reaches a threshold, from a full window on.

    Event files hold float32, in which 0.9 lies below 0.9; and a mean of values may lie a rounding error below them.
    """
    full = min(run.window, len(run.curve.values)) - 1
    values = run.smoothed[full:]
    reached = np.flatnonzero((values >= threshold) | np.isclose(values, threshold, rtol=1e-6, atol=1e-9))
    return full + int(reached[0]) if len(reached) else None


def resampled(strata: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns (RESAMPLES, n) indices, drawn with replacement among the runs (n,) of the same stratum."""
    indices = np.empty((RESAMPLES, len(strata)), dtype=np.int64)
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)
        indices[:, members] = rng.choice(members, size=(RESAMPLES, len(members)))
    return indices


def resampled_counts(strata: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns (RESAMPLES, n) how often each run was drawn: what is a mean over runs needs no more."""
    indices = resampled(strata, rng) + len(strata) * np.arange(RESAMPLES)[:, None]
    return np.bincount(indices.ravel(), minlength=RESAMPLES * len(strata)).reshape(RESAMPLES, -1).astype(float)


def has_interval(strata: np.ndarray) -> bool:
    """Says whether every environment has two runs at least; a single one says nothing about its spread."""
    return np.unique(strata, return_counts=True)[1].min() > 1


def interquartile_mean(scores: np.ndarray, strata: np.ndarray) -> tuple[float, float | None, float | None]:
    """Returns the interquartile mean of the scores (n,) and the ends of its 95 % interval, None without one."""
    middle = float(trim_mean(scores, 0.25))
    if not has_interval(strata):
        return middle, None, None
    indices = resampled(strata, np.random.default_rng(0))
    low, high = np.percentile(trim_mean(scores[indices], 0.25, axis=1), (2.5, 97.5))
    return middle, float(low), float(high)


def wins(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns (n, m) 1 where a run of X scores higher than one of Y, and a half where they tie; scores (n,), (m,)."""
    return (x[:, None] > y) + 0.5 * (x[:, None] == y)


def improvement(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float | None, float | None]:
    """Returns the probability that a run of X scores higher than one of Y, ties half, and its 95 % interval.

    pairs: scores of X (n,) and Y (m,) in each environment; the probability is the mean over the environments.
    """
    rng = np.random.default_rng(0)
    matrices = [wins(x, y) for x, y in pairs]
    probability = float(np.mean([matrix.mean() for matrix in matrices]))
    if min(min(matrix.shape) for matrix in matrices) < 2:
        return probability, None, None
    total = np.zeros(RESAMPLES)
    for matrix in matrices:
        times_x, times_y = (resampled_counts(np.zeros(size), rng) for size in matrix.shape)
        total += ((times_x @ matrix) * times_y).sum(1) / matrix.size
    low, high = np.percentile(total / len(matrices), (2.5, 97.5))
    return probability, float(low), float(high)


def on_grid(curves: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (g,) x where every curve has data and (n, g) the values there; g is 0 if they have no range in common.

    curves: x and values (n,) of each. Points at one x count by their mean.
    """
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if low > high:
        return np.empty(0), np.empty((len(curves), 0))
    grid = np.linspace(low, high, GRID_POINTS) if low < high else np.array([float(low)])
    rows = []
    for x, values in curves:
        own, starts, counts = np.unique(x, return_index=True, return_counts=True)
        rows.append(np.interp(grid, own, np.add.reduceat(values, starts) / counts))
    return grid, np.stack(rows)


def mean_band(values: np.ndarray, strata: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the ends (g,) of the 95 % interval of the mean of curves (n, g), or None without one."""
    if not has_interval(strata):
        return None
    means = resampled_counts(strata, np.random.default_rng(0)) @ values / len(values)
    low, high = np.percentile(means, (2.5, 97.5), axis=0)
    return low, high


# ----- Tables -----
@dataclass(frozen=True)
class Summary:
    """A row of the table. None: there is no such number."""

    environment: str
    group: str
    seeds: int
    final_mean: float
    iqm: float
    iqm_low: float | None
    iqm_high: float | None
    reached: int | None
    """runs that reached the threshold; the next two are their medians"""
    steps_to_threshold: float | None
    seconds_to_threshold: float | None
    steps_per_second: float | None


def final_scores(group: Group, args: Args) -> np.ndarray:
    """Returns (n,) the final score of each run."""
    curves = [run.curve for run in group.runs]
    return np.array([final_score(curve.x(args.x), curve.values, args.last_fraction) for curve in curves])


def reaching(group: Group, threshold: float) -> list[tuple[int, float]]:
    """Returns steps and seconds to the threshold of each run that reached it."""
    found = [(run.curve, first_reach(run, threshold)) for run in group.runs]
    return [(int(curve.steps[i]), float(curve.seconds[i])) for curve, i in found if i is not None]


def summarise(group: Group, args: Args) -> Summary:
    """Returns a group's row."""
    scores = final_scores(group, args)
    reached = reaching(group, args.threshold) if args.threshold is not None else []
    # From the first point on: what is left of a run may begin far from step 0.
    spans = [(np.ptp(run.curve.steps), np.ptp(run.curve.seconds)) for run in group.runs]
    speeds = [steps / seconds for steps, seconds in spans if seconds > 0]
    return Summary(
        group.environment,
        group.name,
        len(group.runs),
        float(scores.mean()),
        *interquartile_mean(scores, group.strata),
        reached=len(reached) if args.threshold is not None else None,
        steps_to_threshold=float(np.median([steps for steps, _ in reached])) if reached else None,
        seconds_to_threshold=float(np.median([seconds for _, seconds in reached])) if reached else None,
        steps_per_second=float(np.median(speeds)) if speeds else None,
    )


def number(value: float) -> str:
    """Returns a score with four digits or more."""
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"


def time_unit(seconds: float) -> tuple[int, str]:
    """Returns the unit that suits a wall time, in seconds, and its name."""
    return (3600, "hours") if seconds >= 7200 else (60, "minutes") if seconds >= 120 else (1, "seconds")


def shortened(environment: str) -> str:
    """Returns the ids of a group's environments, or of the first three and how many more there are."""
    first, more = environment.split(", ")[:3], len(environment.split(", ")) - 3
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")


def cells(row: Summary, args: Args) -> list[str]:
    """Returns a row as it is shown."""
    lack = "one seed" if row.seeds == 1 else "an environment has one seed"
    interval = lack if row.iqm_low is None else f"{number(row.iqm_low)} to {number(row.iqm_high)}"
    shown = [shortened(row.environment), row.group, str(row.seeds), number(row.final_mean), number(row.iqm), interval]
    if args.threshold is not None:
        share = f"({row.reached} of {row.seeds})"
        steps, seconds = row.steps_to_threshold, row.seconds_to_threshold
        unit, name = time_unit(seconds or 0)
        times = (
            [f"{steps:,.0f} {share}", f"{seconds / unit:.1f} {name} {share}"] if row.reached else [f"never {share}"] * 2
        )
        shown += times
    return [*shown, "" if row.steps_per_second is None else f"{row.steps_per_second:,.0f}"]


def markdown_table(rows: list[Summary], args: Args) -> str:
    """Returns the table, padded so that it reads well as plain text too."""
    header = ["environment", "group", "seeds", "final mean", "IQM", "95 % interval of the IQM"]
    if args.threshold is not None:
        header += [f"steps to {args.threshold:g}", f"wall time to {args.threshold:g}"]
    lines = [[*header, "steps/s"], *(cells(row, args) for row in rows)]
    # An argument may hold anything.
    lines = [[" ".join(text.split()).replace("|", r"\|") for text in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    # Words stand left, numbers right.
    sides = "<<" + ">" * (len(widths) - 2)
    padded = [[f"{t:{side}{w}}" for t, side, w in zip(line, sides, widths, strict=True)] for line in lines]
    rule = ["-" * (w - 1) + (":" if side == ">" else "-") for side, w in zip(sides, widths, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [padded[0], rule, *padded[1:]])


def write_csv(path: Path, rows: list[Summary]) -> None:
    """Writes the table with all digits that matter; what there is not is empty."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(Summary.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.10g}" if isinstance(v, float) else v for k, v in asdict(row).items()})


@dataclass(frozen=True)
class Verdict:
    """How two groups compare; the first is the better one, unless they are equal."""

    environment: str
    better: str
    worse: str
    seeds: tuple[int, int]
    ties: float
    """share of the pairs of runs with equal scores"""
    probability: float
    """that the better one scores higher; a tie counts half"""
    low: float | None
    high: float | None

    def sentence(self) -> str:
        """Returns what it means, in words."""
        if self.ties == 1:
            return f"{shortened(self.environment)}: {self.better} and {self.worse} score the same in all pairs of runs."
        if self.probability == 0.5:
            text = f"neither {self.better} nor {self.worse} is better: each scores higher in half of all pairs of runs"
        else:
            text = f"a run of {self.better} scores higher than one of {self.worse} in {self.probability:.0%} of pairs"
        text = f"{shortened(self.environment)}: {text}"
        if self.ties:
            text += f", a tie counted as half ({self.ties:.0%} are ties)"
        if self.low is None:
            return f"{text}; with one seed of a group nobody can say how sure that is."
        text += f" (95 % interval {self.low:.0%} to {self.high:.0%})"
        sure = "which is more than chance" if self.low > 0.5 else "which may be chance: 50 % is a toss of a coin"
        if min(self.seeds) >= FEW_SEEDS:
            return f"{text}, {sure}."
        # Of all ways to deal the scores to the two groups, two part them wholly.
        chance = 2 / math.comb(sum(self.seeds), self.seeds[0])
        return (
            f"{text}, {sure}. Few seeds ({self.seeds[0]} and {self.seeds[1]}): two equal groups would be parted wholly "
            f"in {chance:.2g} of cases, so run more."
        )


def compare(groups: list[Group], args: Args) -> list[Verdict]:
    """Returns a verdict for each two groups that share an environment."""
    scores = [final_scores(group, args) for group in groups]
    verdicts = []
    for i, j in combinations(range(len(groups)), 2):
        shared = sorted(set(groups[i].environments) & set(groups[j].environments))
        if not shared:
            continue
        pairs = [tuple(scores[k][[r.keys["env_id"] == env for r in groups[k].runs]] for k in (i, j)) for env in shared]
        better, worse = i, j
        if np.mean([wins(x, y).mean() for x, y in pairs]) < 0.5:
            better, worse, pairs = j, i, [(y, x) for x, y in pairs]
        seeds = (min(len(x) for x, _ in pairs), min(len(y) for _, y in pairs))
        names = groups[better].name, groups[worse].name
        ties = float(np.mean([(wins(x, y) == 0.5).mean() for x, y in pairs]))
        verdicts.append(Verdict(", ".join(shared), *names, seeds, ties, *improvement(pairs)))
    return verdicts


def notes(groups: list[Group]) -> list[str]:
    """Returns what a reader should know before believing the table."""
    lines = []
    for group in groups:
        name = f"{shortened(group.environment)} {group.name}"
        if len(group.environments) > 1:
            lines.append(
                f"{name}: returns of different environments are not normalised; they are the bootstrap's strata"
            )
        counts = Counter((run.keys["env_id"], run.keys["seed"]) for run in group.runs if run.keys["seed"] != "unknown")
        twice = sorted({seed for (_, seed), count in counts.items() if count > 1})
        if twice:
            lines.append(f"{name}: seed {', '.join(twice)} more than once; such runs are no independent samples")
        ends = [run.curve.steps[-1] for run in group.runs]
        if min(ends) < 0.95 * max(ends):
            lines.append(f"{name}: runs end at {min(ends):,} to {max(ends):,} steps; each is scored at its own end")
        if 1 < np.bincount(group.strata).min() < FEW_SEEDS:
            lines.append(f"{name}: fewer than {FEW_SEEDS} seeds, the interval is likely too narrow")
    return lines


# ----- Pictures -----
def style(i: int) -> dict[str, str]:
    """Returns colour, line style and marker of the i-th group; 140 of them differ."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "linestyle": LINE_STYLES[i % len(LINE_STYLES)],
        "marker": MARKERS[i % len(MARKERS)],
    }


def as_label(text: str) -> str:
    """Returns a text as matplotlib shows it: it takes $ for mathematics, and leaves out what begins with _."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def x_unit(axis: str, longest: float) -> tuple[float, str]:
    """Returns what to divide x by, and the label of the axis."""
    if axis == "step":
        return (1e6, "environment steps, millions") if longest >= 1e6 else (1e3, "environment steps, thousands")
    unit, name = time_unit(longest)
    return unit, f"wall time, {name}"


def new_figure(height: float, title: str) -> "Figure":
    """Returns an empty figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    figure.suptitle(as_label(title))
    return figure


def draw_curves(groups: list[Group], args: Args) -> "Figure":
    """Returns the mean curve of each group with the 95 % interval of the mean, where all its runs have data."""
    figure = new_figure(5, shortened(groups[0].environment))
    axes = figure.subplots()
    axes.grid(color="0.92")
    unit, label = x_unit(args.x, max(float(run.curve.x(args.x)[-1]) for group in groups for run in group.runs))
    for i, group in enumerate(groups):
        grid, values = on_grid([(run.curve.x(args.x), run.smoothed) for run in group.runs])
        if not len(grid):
            warn(f"{group.environment} {group.name}: its runs have no range of x in common, so there is no curve")
            continue
        seeds = "one seed" if len(group.runs) == 1 else f"{len(group.runs)} seeds"
        every = max(len(grid) // 10, 1)
        axes.plot(
            grid / unit,
            values.mean(0),
            label=as_label(f"{group.name}, {seeds}"),
            markevery=every,
            markersize=5,
            **style(i),
        )
        band = mean_band(values, group.strata)
        if band:
            axes.fill_between(grid / unit, *band, color=style(i)["color"], alpha=0.2, linewidth=0)
    axes.set_xlabel(label)
    axes.set_ylabel(f"{args.metric}, mean over runs and its 95 % interval")
    if axes.lines:
        axes.legend(loc="best")
    return figure


def draw_threshold(groups: list[Group], args: Args) -> "Figure":
    """Returns steps and wall time to the threshold: a mark for each run that reached it, a bar at their median."""
    figure = new_figure(
        1.6 + 0.5 * len(groups), f"{shortened(groups[0].environment)}: first reaching {args.threshold:g}"
    )
    for column, (axis, axes) in enumerate(zip(("step", "time"), figure.subplots(1, 2, sharey=True), strict=True)):
        found = [[pair[column] for pair in reaching(group, args.threshold)] for group in groups]
        unit, label = x_unit(axis, max((max(own) for own in found if own), default=0))
        for i, own in enumerate(found):
            look = style(i)
            axes.plot(np.array(own) / unit, [i] * len(own), look["marker"], color=look["color"], markerfacecolor="none")
            if own:
                axes.plot([np.median(own) / unit] * 2, [i - 0.3, i + 0.3], color="black", linewidth=2)
        axes.set_xlim(left=0)
        axes.set_xlabel(label)
        axes.grid(color="0.92")
    names = [f"{as_label(g.name)}\n{len(own)} of {len(g.runs)} runs" for g, own in zip(groups, found, strict=True)]
    figure.axes[0].set_yticks(range(len(groups)), names)
    figure.axes[0].set_ylim(len(groups) - 0.5, -0.5)
    return figure


def draw_improvement(verdicts: list[Verdict]) -> "Figure":
    """Returns the probability of improvement of each two groups with its 95 % interval."""
    figure = new_figure(1.6 + 0.6 * len(verdicts), shortened(verdicts[0].environment))
    axes = figure.subplots()
    axes.axvline(0.5, color="0.5", linestyle="--", linewidth=1)
    for i, verdict in enumerate(verdicts):
        if verdict.low is not None:
            axes.plot([verdict.low, verdict.high], [i, i], color=COLOURS[0], linewidth=6, alpha=0.4)
        axes.plot([verdict.probability], [i], "o", color="black")
    axes.set_yticks(range(len(verdicts)), [f"{as_label(v.better)}\nover {as_label(v.worse)}" for v in verdicts])
    axes.set_ylim(len(verdicts) - 0.5, -0.5)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("probability that a run scores higher; 0.5 is a toss of a coin")
    axes.grid(axis="x", color="0.92")
    return figure


def write_pictures(groups: list[Group], verdicts: list[Verdict], args: Args) -> list[Path]:
    """Writes one picture of each kind for each environment, and returns their paths."""
    args.pictures.mkdir(parents=True, exist_ok=True)
    written, names = [], Counter()
    # Groups over different environments are compared on those that they share, which no group may have alone.
    for environment in dict.fromkeys([*(g.environment for g in groups), *(v.environment for v in verdicts)]):
        own = [group for group in groups if group.environment == environment]
        pairs = [verdict for verdict in verdicts if verdict.environment == environment]
        figures = {"curves": draw_curves(own, args)} if own else {}
        if own and args.threshold is not None:
            figures["threshold"] = draw_threshold(own, args)
        if 0 < len(pairs) <= MOST_PAIRS:
            figures["improvement"] = draw_improvement(pairs)
        elif pairs:
            warn(f"{shortened(environment)}: {len(pairs)} pairs of groups are too many for a picture of them")
        for kind, figure in figures.items():
            # Names of files have 255 bytes at most; two environments may differ in what is left out here alone.
            name = f"{kind}__{re.sub(r'[^A-Za-z0-9._-]+', '-', shortened(environment))[:142]}"
            names[name] += 1
            path = args.pictures / f"{name}{f'-{names[name]}' if names[name] > 1 else ''}.{args.format}"
            figure.savefig(path, dpi=120)
            written.append(path)
    return written


# ----- Command line -----
def check_outputs(args: Args) -> None:
    """Raises a UsageError, before anything is read, if what was asked for cannot be written."""
    if args.out and args.out.suffix not in (".csv", ".md"):
        raise UsageError(f"--out {args.out}: the name must end in .csv or .md")
    for flag, folder in (("out", args.out and args.out.absolute().parent), ("pictures", args.pictures)):
        if folder:
            parents = (folder.absolute(), *folder.absolute().parents)
            existing = next(path for path in parents if path.exists())
            if not existing.is_dir() or not os.access(existing, os.W_OK):
                raise UsageError(f"--{flag} {getattr(args, flag)}: {existing} is no folder that can be written to")
    if args.pictures and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--pictures needs a package that is missing: pip install matplotlib")


def report(args: Args) -> None:
    """Reads, groups, prints the table and what it means, and writes what was asked for."""
    check_outputs(args)
    runs = read_runs(args)
    keys = args.group_by or differing_keys(runs)
    groups = group_runs(runs, keys)
    rows = [summarise(group, args) for group in groups]
    verdicts = compare(groups, args)
    table = markdown_table(rows, args)
    below = [f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}, grouped by {', '.join(keys)}; metric: {args.metric}."]
    below += [verdict.sentence() for verdict in verdicts]
    below += [f"note: {line}" for line in notes(groups)]
    print("\n".join([table, "", *below]))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        if args.out.suffix == ".csv":
            write_csv(args.out, rows)
        else:
            args.out.write_text("\n\n".join([table, *below]) + "\n", encoding="utf-8")
        print(f"written: {args.out}")
    if args.pictures:
        print(f"written: {', '.join(map(str, write_pictures(groups, verdicts, args)))}")


def parse_args(argv: list[str]) -> Args:
    """Returns the arguments; wrong ones end the process in tyro, with status 2."""
    return tyro.cli(Args, args=argv)


def main() -> None:
    """Runs the command line: status 0 when done, 2 when the arguments are wrong."""
    args = parse_args(sys.argv[1:])
    try:
        report(args)
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "tyro>=1.0.16", "tensorboard>=2.21.0", "numpy>=2.1.0", "scipy>=1.15.0", "matplotlib>=3.10.8",
# ]
# ///
"""Compares runs: final scores over seeds with intervals that hold, learning curves, and which group is better.

Papers: Agarwal et al. 2021, https://arxiv.org/abs/2108.13264: interquartile mean, optimality gap, performance profile.
        Newcombe 2006, https://doi.org/10.1002/sim.2324, method 5: interval of the probability of improvement.
Run:    python compare_runs.py runs/
        python compare_runs.py runs/ --group-by env_id exp_name learning_rate --threshold -200 --pictures pictures/
        python compare_runs.py "runs/Pendulum-v1__*" benchmarks/ppo_continuous__Pendulum-v1.csv --out table.md
        python compare_runs.py runs/ --normalise benchmarks/normalise.csv --baseline ppo_atari
Reads:  run folders of these scripts, CleanRL, Stable-Baselines3 and its zoo, RLlib, tianshou, torchrl and skrl; CSV
        files of benchmarks/, of TensorBoard's download and of Weights & Biases (charts, histories). A folder is one
        run; a resumed run's event files are one curve: what the cut file has from the step of the resumption on is
        dropped. All points at one step are kept, which TensorBoard's fast data server does not do. RLlib's progress.csv
        has the columns of its first line alone: evaluations that began later stand in its event file.
Statistics: the unit is the run, never the episode. Scores, pictures and thresholds are taken from one curve, a trailing
        mean of 100 episodes (--smooth). A group gets the median with an interval between two order statistics, whose
        confidence holds for any distribution; from 8 runs on the interquartile mean too. A verdict is an exact
        two-sided Mann-Whitney test at 5 % after Holm's correction over all pairs; over several environments labels are
        permuted within each. A bootstrap's interval is shown from 5 runs in each environment on, of one from 8.
"""

import contextlib
import csv
import functools
import glob
import json
import math
import os
import re
import sys
import textwrap
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

import matplotlib
import numpy as np
import tyro
from google.protobuf.message import DecodeError
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import brentq
from scipy.stats import binom, binomtest, rankdata, trim_mean
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

EPISODES = "charts/episodic_return"
# Tags of --metric return, and of how many episodes a point is the mean (the program's default); None: it varies.
RETURNS = {
    EPISODES: 1,  # these scripts, CleanRL
    "rollout/ep_rew_mean": 100,  # Stable-Baselines3
    **dict.fromkeys(("episode_reward_mean", "ray/tune/episode_reward_mean"), 100),  # RLlib, old
    **dict.fromkeys(("env_runners/episode_return_mean", "ray/tune/env_runners/episode_return_mean")),  # RLlib, new
    "Reward / Total reward (mean)": None,  # skrl, whose steps are those of the vector environment
    **dict.fromkeys(("training/returns_stat/mean", "train/returns_stat/mean", "train/reward")),  # tianshou
    "train/episode_reward": None,  # torchrl, which has train/reward too
}
EVALUATIONS = (
    *("eval/return_mean", "eval/mean_reward", "test/returns_stat/mean", "test/reward", "eval/reward"),
    *("eval/episode_reward", "evaluation/env_runners/episode_return_mean", "evaluation/episode_reward_mean"),
    *("ray/tune/evaluation/env_runners/episode_return_mean", "ray/tune/evaluation/episode_reward_mean"),
)
# Of means, the tags with the mean length of the same episodes, which tell from which step on there are as many.
LENGTHS = {tag: re.sub("(rew|reward)_mean$", "len_mean", tag) for tag in RETURNS if (RETURNS[tag] or 0) > 1}
METRICS = {"return": tuple(RETURNS), "eval": EVALUATIONS}  # of each run the first tag that it has is taken
# Columns with steps: Stable-Baselines3, RLlib new and old, synced TensorBoard, Weights & Biases' own count (two).
STEPS = ("time/total_timesteps", "num_env_steps_sampled_lifetime", "timesteps_total", "global_step", "_step", "Step")
TIMES = ("time/time_elapsed", "time_total_s", "_runtime", "_timestamp", "Relative Time (Process)", "Wall Time")
# Names of tags and arguments that tell the program a run is of, the first that fits; two programs are two groups.
PROGRAMS = {
    "Stable-Baselines3": r"^(rollout/|eval/mean_reward)",
    "RLlib": r"^(ray/|env_runners/|evaluation/|episode_reward_mean)",
    "skrl": r"^Reward / ",
    "tianshou": r"returns_stat|^test/reward",
    "torchrl": r"^(train|eval)/episode_reward|^eval/reward",
    "onefile-rl": "^run_dir$",
    "CleanRL": "^wandb_project_name$",
}
EPISODES_IN_MEAN = 100  # of a point of every curve, unless --smooth is given: as Stable-Baselines3 and RLlib log it
ITERATIONS = "ray/tune/num_env_steps_sampled_lifetime"  # RLlib's event files count iterations; this tag has the steps
HYPERPARAMETERS = "hyperparameters/text_summary"
# Keys that change nothing in what is learned: they split no groups unless --group-by names them.
UNIMPORTANT = """
    seed folder run_dir resume evaluate track wandb_project_name wandb_entity progress plot threads cuda capture_video
    checkpoint_every eval_every eval_episodes torch_deterministic save_model upload_model hf_entity
    vector save_replay ray_address num_workers
"""
ENV_ID = r"(?P<env_id>[A-Za-z][\w.]*(?:-[A-Za-z]\w*)*-v\d+)"
# What a run's path says, as with --label: the first that fits counts.
LAYOUTS = (
    r"(?P<env_id>(?:ALE/)?[^/]+)__(?P<exp_name>[^/]+)__(?P<seed>\d+)__[^/]*$",  # these scripts, CleanRL
    rf"(?P<exp_name>[^/]+)/{ENV_ID}_(?P<seed>\d+)$",  # Stable-Baselines3's zoo: ppo/CartPole-v1_1
    rf"{ENV_ID}/(?P<exp_name>[^/]+)_(?P<seed>\d+)$",  # the zoo's event files: CartPole-v1/PPO_1
    rf"{ENV_ID}/(?P<exp_name>[^/]+)/(?P<seed>\d+)/[^/]+$",  # tianshou: CartPole-v1/ppo/0/240131-120000
    rf"(?P<exp_name>[A-Z]\w+?)_{ENV_ID}_\w+_\d{{5}}_\d+[^/]*$",  # RLlib: PPO_CartPole-v1_1a2b3_00000_0_2024
    rf"(?P<exp_name>[^/]+)_{ENV_ID}_[0-9a-f]{{8}}_[\d_-]+$",  # torchrl
    r"/\d\d-\d\d-\d\d_[\d-]+_(?P<exp_name>[^/]+)$",  # skrl: 26-11-29_04-00-41-993384_PPO
    rf"(?:{ENV_ID}/)?(?P<exp_name>[^/]+?)(?:_\d{{8}}-\d{{6}})?/(?:exp_)?seed[_=-]?(?P<seed>\d+)$",  # tianshou, ...
    r"(?P<exp_name>[^/]*[A-Za-z][^/]*)_(?P<seed>\d+)$",  # Stable-Baselines3: PPO_1, the environment is not told
)
LOG_NAME = re.compile(r"tfevents|^progress\.csv$|^evaluations\.npz$|monitor\.csv$")  # such a file makes a run's folder
UNKNOWN = "unknown"
LEVEL = 0.05  # alpha: of a table's verdicts together, where all groups are equal
FEW_RUNS, ENOUGH_RUNS = 5, 8  # for an interval of a median that is 90 % sure; for a bootstrap that covers what it says
RESAMPLES, RESAMPLES_OF_CURVES, GRID_POINTS = 10_000, 2000, 300
MOST_PAIRS = 60  # of two groups each, in a picture
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")  # Okabe and Ito's
LINE_STYLES, MARKERS = ("-", "--", "-.", ":"), "osv^D"
# Letters of a paper at its text's width; those of pdf and svg stay text, which journals ask for.
LOOK = {"font.size": 8, "legend.title_fontsize": 7, "pdf.fonttype": 42, "svg.fonttype": "none"}
LOOK |= {"axes.grid": True, "grid.color": "0.92", "figure.labelsize": "medium", "figure.titlesize": "medium"}
BAND = f"Lines: medians of runs. Bands: between order statistics, 90 % sure or more from {FEW_RUNS} runs on, else all."


class UsageError(Exception):
    """What the user asked for cannot be done: one line on standard error, exit status 2."""


# ----- Arguments -----
@dataclass(frozen=True)
class Args:
    """Compares runs: a table of final scores with intervals over seeds, which group is better, pictures."""

    paths: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PATH...", help_behavior_hint="(at least one)")
    ]
    """run folders, folders that hold some at any depth, glob patterns, or CSV files (benchmarks/, TensorBoard, W&B)"""
    group_by: tuple[str, ...] = ()  # arguments of the runs, or folder; none: env_id, exp_name and what differs in these
    label: str | None = None  # regex, searched in each run's path: its named groups, (?P<seed>...), are arguments of it
    baseline: str | None = None  # name of a group: the others are compared with it alone, which asks for fewer seeds
    metric: str = "return"  # return: of episodes in training; eval: mean of evaluations; or any tag
    x: Literal["step", "time"] = "step"  # x axis: environment steps, or seconds without the pauses of resumed runs
    smooth: int | None = None  # moving average over so many points; none: 100 episodes; logged means stay as they are
    last_fraction: float = 0.1  # part of a run's x range, at its end, whose mean is the final score
    at_step: int | None = None  # compare the runs as they were at this step: what comes later is left out
    threshold: float | None = None  # score whose first reaching is reported in steps and wall time
    normalise: Path | None = None  # CSV file as benchmarks/normalise.csv: low becomes 0, high 1; over all environments
    out: Path | None = None  # write the table to this file: .csv (with one of the runs beside it), .md or .tex
    pictures: Path | None = None  # write pictures into this folder
    format: Literal["png", "svg", "pdf"] = "png"  # format of the pictures; png has 300 dots per inch
    width: float = 6.5  # of the pictures, inches

    def __post_init__(self) -> None:
        for holds, message in (
            (self.paths, "PATH: at least one is needed, before all flags"),
            (self.smooth is None or self.smooth >= 1, f"--smooth {self.smooth} must be at least 1 point"),
            (0 < self.last_fraction <= 1, f"--last-fraction {self.last_fraction} must be above 0 and at most 1"),
            (math.isfinite(self.threshold or 0), f"--threshold {self.threshold} must be a finite number"),
            (1 <= self.width <= 100, f"--width {self.width} must be 1 to 100 inches"),
            (not self.out or self.out.suffix in (".csv", ".md", ".tex"), f"--out {self.out}: not .csv, .md or .tex"),
        ):
            if not holds:
                raise UsageError(message)
        try:
            named = self.label is None or re.compile(self.label).groupindex
        except re.error as error:
            raise UsageError(f"--label {self.label} is no regular expression: {error}") from error
        if not named:
            raise UsageError(f"--label {self.label} needs a named group, such as (?P<exp_name>[^/]+)")


# ----- Reading -----
@dataclass(frozen=True)
class Curve:
    """Points of one tag of one run, in the order of their steps."""

    steps: np.ndarray  # (n,) environment steps; several points may share one
    seconds: np.ndarray  # (n,) since the run's first event, without pauses; NaN where the log has no times
    values: np.ndarray  # (n,)

    def x(self, axis: str) -> np.ndarray:
        """Returns the x values of an axis, step or time, which never fall."""
        return self.steps if axis == "step" else np.maximum.accumulate(self.seconds)


def in_order(steps: np.ndarray, seconds: np.ndarray, values: np.ndarray) -> Curve:
    """Returns points (n,) as a curve; those at one step stay in the order in which they were logged."""
    order = np.argsort(steps, kind="stable")
    return Curve(steps[order].astype(np.int64), seconds[order], values[order])


@dataclass
class Log:
    """What one run left behind."""

    path: str
    keys: dict[str, str]
    curves: dict[str, Curve]
    about: dict[str, str] = field(default_factory=dict)  # what it ran on: device, versions
    unit: str = "episodes"  # what a point of single episodes is in this file, where some are left out or averaged


@dataclass(frozen=True)
class Run:
    """A run, with what groups it."""

    path: str
    keys: dict[str, str]  # its arguments; env_id, exp_name, seed and folder at least
    curve: Curve  # as logged
    window: int = 1  # points in a moving average
    smoothing: str = ""  # what a point is after that, in words; scores are compared only where it is the same
    full: int = 0  # index of the first point that is the mean of a full window
    about: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def smoothed(self) -> np.ndarray:
        """(n,) moving averages of the values."""
        return trailing_mean(self.curve.values, self.window)


def warn(message: str) -> None:
    """Prints one line on standard error; the rest of the comparison goes on."""
    print(f"note: {message}", file=sys.stderr)


def records(path: Path) -> Iterator[bytes]:
    """Yields the events in a file as bytes; damage is a ValueError."""
    # Each stands between its length, a checksum of that, and one of its own.
    data, end = path.read_bytes(), 0
    if not data:
        raise ValueError("is empty")
    while end < len(data):
        start, end = end, end + 16 + int.from_bytes(data[end : end + 8], "little")
        if end > len(data):
            raise ValueError("ends within a record, being written or cut; what is before counts")
        record, checksum = data[start + 12 : end - 4], int.from_bytes(data[end - 4 : end], "little")
        # An event has a time at least, so one without a byte is none: a disk that filled up leaves zeros.
        if not record or masked_crc32c(record) != checksum:
            raise ValueError(f"is damaged at byte {start:,}; what is before counts")
        yield record


class EventFile:
    """What is needed of one event file; wall times are seconds since 1970."""

    def __init__(self, path: Path, tags: tuple[str, ...]) -> None:
        """Reads the points of these tags, of all tags if there are none; what is wrong with the file is reported."""
        self.start, self.end = math.inf, 0.0
        self.resumes_at = None  # step from which on this file replaces the earlier ones, where it says so
        self.hyperparameters: dict[str, str] = {}
        self.points = defaultdict(list)  # of each tag (step, wall time, value) of its points
        try:
            for event in map(Event.FromString, records(path)):
                self.start, self.end = self.start if self.end else event.wall_time, event.wall_time
                for value in event.summary.value:
                    if value.HasField("simple_value") and (value.tag in tags or not tags):
                        self.points[value.tag].append((event.step, self.end, value.simple_value))
                    elif value.tag == HYPERPARAMETERS and value.tensor.string_val:
                        text = value.tensor.string_val[0].decode(errors="replace")
                        rows = re.findall(r"^\|([^|\n]+)\|(.*)\|$", text, re.MULTILINE)
                        self.hyperparameters |= {name: content for name, content in rows if name not in ("param", "-")}
                if event.session_log.status == SessionLog.START:
                    self.resumes_at = event.step
        except (DecodeError, ValueError, OSError) as error:
            warn(f"{path} {error}")


def joined(files: list[EventFile], tag: str) -> Curve:
    """Returns one curve of all event files of a run, pauses between them taken out."""
    # A resumed file says from which step on it replaces what came before. One that does not say so (another tool wrote
    # it) replaces from its own first step on. Work after the checkpoint that the cut file lost did take its time.
    files = sorted(files, key=lambda file: file.start)
    points, pauses, latest = np.empty((0, 3)), 0.0, files[0].start
    for file in files:
        pauses += max(file.start - latest, 0.0)
        latest = max(latest, file.end)
        new = np.array(file.points.get(tag, [])).reshape(-1, 3) - (0, pauses, 0)
        resumes_at = new[:, 0].min(initial=math.inf) if file.resumes_at is None else file.resumes_at
        points = np.concatenate([points[points[:, 0] < resumes_at], new])
    return in_order(*(points - (0, files[0].start, 0)).T)


def keys_of(path: Path) -> dict[str, str]:
    """Returns what the path of a run's folder, or a name in its place, says of its arguments."""
    # A name may hold bytes that are no text.
    whole = path.absolute().as_posix().encode(errors="replace").decode()
    *_, folder, name = ["", *whole.split("/")]
    keys = {"env_id": UNKNOWN, "exp_name": name, "seed": UNKNOWN, "folder": folder}
    found = next((match for layout in LAYOUTS if (match := re.search(layout, whole))), None)
    return keys | {key: value for key, value in (found.groupdict() if found else {}).items() if value}


def files_beside(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the arguments in args.json, RLlib's params.json or the zoo's args.yml, and what the run was made with."""
    arguments, about = {}, {}
    try:
        for path in folder.glob("*/args.yml"):
            arguments |= re.findall(r"- - (\w+)\n +- (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        for path in (*folder.glob("params.json"), *folder.glob("args.json")):
            content = json.loads(path.read_text(encoding="utf-8"))
            arguments |= content if path.stem == "params" else content["args"]
            about = {key: content.get(key) for key in ("git_commit", "device")} | content.get("versions", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        warn(f"{path} is damaged; the arguments are taken from the log and the folder's name")
    names = {"env": "env_id", "algo": "exp_name"}  # other programs'; what has parts splits no groups
    arguments = {names.get(key, key): x for key, x in arguments.items() if names.get(key) not in arguments}
    told = {key: str(value) for key, value in arguments.items()}
    lacking = [key for key in ("env_id", "seed") if told.get(key) == "None"]
    return {key: told[key] for key in told if key not in lacking}, {key: str(about[key]) for key in about if about[key]}


def read_source(source: Path, tags: tuple[str, ...]) -> list[Log]:
    """Returns what the runs of a folder or CSV file left, with the curves of these tags; of all if there are none."""
    # Of several logs in a folder that one counts which says most: single episodes, and evaluations in full.
    if not source.is_dir():
        return read_csv(source, tags)
    paths = sorted(source.glob("*tfevents*"))
    files = [file for path in paths if (file := EventFile(path, tags)).start < math.inf]
    curves = {tag: joined(files, tag) for tag in dict.fromkeys(tag for file in files for tag in file.points)}
    if known := curves.get(ITERATIONS):
        for tag, curve in curves.items():
            steps = np.interp(curve.steps, known.steps, known.values)
            curves[tag] = in_order(steps, curve.seconds, curve.values)
    for path in source.glob("progress.csv"):
        curves |= {tag: curve for log in read_csv(path, tags) for tag, curve in log.curves.items()}
    for path in (*source.glob("scalars/**/*.csv"), *source.glob("evaluations.npz")):  # torchrl's, Stable-Baselines3's
        try:
            if path.suffix == ".csv":
                tag = path.relative_to(source / "scalars").with_suffix("").as_posix()
                lines = path.read_text(encoding="utf-8").splitlines()
                steps, values = np.array([line.split(",") for line in lines], dtype=float).T
            else:
                with np.load(path) as content:
                    tag, steps, values = "eval/mean_reward", content["timesteps"], content["results"].mean(1)
            seconds = np.full(len(steps), np.nan)
            if (known := curves.get(tag)) and len(known.steps):  # an event file has the times, too
                seconds = np.interp(steps, known.steps, known.seconds)
            curves[tag] = in_order(steps, seconds, values)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            warn(f"{path} is damaged")
    episodes, env_id = read_monitors(sorted(source.glob("*monitor.csv")))
    arguments, about = files_beside(source)
    keys = keys_of(source) | {key: value for file in files for key, value in file.hyperparameters.items()} | arguments
    keys["env_id"] = env_id if keys["env_id"] == UNKNOWN else keys["env_id"]
    keys |= {"program": "Stable-Baselines3"} if episodes else {}
    curves |= episodes
    return [Log(str(source), keys, curves, about)] if files or curves or not paths else []


def read_monitors(paths: list[Path]) -> tuple[dict[str, Curve], str]:
    """Returns the episodes in Stable-Baselines3's monitor.csv files, one an environment, as a curve, and its id."""
    # Each row is an episode with its return, length and seconds since the start, which the first line tells. As in
    # stable_baselines3.common.results_plotter, an episode's step is the sum of all lengths until then.
    parts, starts, env_id = [np.empty((3, 0))], [], UNKNOWN
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                about = json.loads(file.readline().lstrip("#"))
            table = table_of(path)
            parts.append(np.stack([numbers(table["t"]) + about["t_start"], numbers(table["l"]), numbers(table["r"])]))
            starts.append(about["t_start"])
            env_id = about.get("env_id") or env_id
        except (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error):
            warn(f"{path} is damaged")
    times, lengths, returns = np.concatenate(parts, axis=1)
    order = np.argsort(times, kind="stable")
    steps = np.cumsum(lengths[order]).astype(np.int64)
    curve = Curve(steps, times[order] - min(starts, default=0), returns[order])
    return {EPISODES: curve} if len(steps) else {}, env_id


def table_of(path: Path) -> dict[str, tuple[str, ...]]:
    """Returns the columns (n,) of a CSV file by name; a ValueError is raised if it is no table."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        header, *rows = [row for row in csv.reader(line for line in file if not line.startswith("#")) if row] or [[]]
    if len(set(header)) < len(header):
        raise ValueError("two columns have one name")
    # What is still being written may end within a row.
    if rows and len(rows[-1]) < len(header):
        rows.pop()
    return dict(zip(header, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(header, ())


def numbers(texts: Iterable[str]) -> np.ndarray:
    """Returns a column as numbers (n,), NaN for what is empty."""
    return np.array([float(text or "nan") for text in texts])


def since_start(seconds: np.ndarray) -> np.ndarray:
    """Returns seconds (n,) since the first of them, where they are since 1970."""
    first = np.min(seconds, where=np.isfinite(seconds), initial=math.inf)
    return seconds - first if 1e8 < first < math.inf else seconds


def read_csv(path: Path, tags: tuple[str, ...]) -> list[Log]:
    """Returns the runs in a CSV file, told by its columns, with the curves of these tags; of all if there are none."""
    problem = "is no CSV file of curves that is known here"
    try:
        table = table_of(path)
        if {"tag", "step", "wall_time", "value"} <= set(table):
            return read_benchmark(path, table)
        if {"Wall time", "Step", "Value"} <= set(table):
            return read_download(path, table, tags)
        if set(STEPS) & set(table) or any(" - " in name for name in table):
            return read_wide(path, table, tags)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except (ValueError, csv.Error):
        problem += ", or it is damaged"
    warn(f"{path} {problem}")
    return []


def read_benchmark(path: Path, table: dict[str, tuple[str, ...]]) -> list[Log]:
    """Returns the runs in a file SCRIPT__ENV.csv of benchmarks/, one for each seed."""
    steps, seconds, values = (numbers(table[name]) for name in ("step", "wall_time", "value"))
    if not len(steps) or not np.isfinite([steps, seconds]).all():
        raise ValueError("no row, or one without step or time")
    tags, seeds = np.array(table["tag"]), np.array(table.get("seed", [UNKNOWN] * len(steps)))
    # Where seeds share a file, a point is the mean over a bin of steps, of nobody knows how many episodes.
    unit = "bins of episodes" if "seed" in table else "episodes"
    script, _, env_id = path.stem.partition("__")
    keys = keys_of(path.parent / script) | {"env_id": env_id or UNKNOWN, "exp_name": script}
    logs = []
    for seed in dict.fromkeys(seeds.tolist()):
        own = seeds == seed
        columns = steps[own], since_start(seconds[own]), values[own]
        kept = {tag: tags[own] == tag for tag in dict.fromkeys(tags[own].tolist())}
        curves = {tag: in_order(*(column[mask] for column in columns)) for tag, mask in kept.items()}
        logs.append(Log(f"{path} seed {seed}", keys | {"seed": seed or UNKNOWN}, curves, unit=unit))
    return logs


def read_download(path: Path, table: dict[str, tuple[str, ...]], tags: tuple[str, ...]) -> list[Log]:
    """Returns the run in a file run-RUN-tag-TAG.csv as TensorBoard offers it; signs in the names have become _."""
    name = re.search(r"^run-(.+)-tag-(.+?)(?: ?\(\d+\))?$", path.stem)
    run, tag = name.groups() if name else (path.stem, path.stem)
    known = {re.sub(r"\W", "_", x): x for x in (*EVALUATIONS, *RETURNS, *tags)}
    tag = known.get(re.sub(r"\W", "_", tag), tag)
    steps, seconds, values = (numbers(table[column]) for column in ("Step", "Wall time", "Value"))
    # TensorBoard keeps a random thousand of a curve's points unless told otherwise.
    unit = "episodes" if len(steps) < 1000 else "sampled episodes"
    keys = keys_of(path.parent if run == "." else path.parent / run)
    return [Log(str(path), keys, {tag: in_order(steps, since_start(seconds), values)}, unit=unit)]


def read_wide(path: Path, table: dict[str, tuple[str, ...]], tags: tuple[str, ...]) -> list[Log]:
    """Returns the runs in a table with a column for each tag, or for each run and tag, "RUN - TAG", as in a chart."""
    # Weights & Biases samples the points of both its charts and, unless told otherwise, its histories.
    name = next((column for column in (*STEPS, *table) if any(table.get(column, ()))), None)
    if name is None:
        raise ValueError("no row")
    steps = numbers(table[name])
    if name in ("_step", "Step"):
        warn(f"{path}: {name} is the count of Weights & Biases, which need not be that of the environment's steps")
    elif name not in STEPS:
        warn(f"{path}: {name} is taken for the environment's steps")
    times = next((table[column] for column in TIMES if any(table.get(column, ()))), None)
    seconds = np.full(len(steps), np.nan) if times is None else since_start(numbers(times))
    named = dict.fromkeys(column.rpartition(" - ")[0] for column in table if " - " in column)
    curves: dict[str, dict[str, Curve]] = {run: {} for run in named or [""]}
    for column, texts in table.items():
        run, _, tag = column.rpartition(" - ")
        if run.startswith(("Group: ", "Grouped runs")) and curves.pop(run, None) is not None:
            warn(f"{path}: {run} is a mean over runs, which is no run, and left out; export the chart without groups")
        if run not in curves or (tags and tag not in tags):
            continue
        with contextlib.suppress(ValueError):  # a column of texts is no curve
            values = numbers(texts)
            kept = np.isfinite(steps) & ~np.isnan(values)
            curves[run][tag] = in_order(steps[kept], seconds[kept], values[kept])
    unit = "episodes" if path.name == "progress.csv" else "sampled episodes"
    return [
        Log(f"{path} {run}".strip(), keys_of(path.parent / (run or path.stem)), own, unit=unit)
        for run, own in curves.items()
    ]


def smoothing(tag: str, unit: str, args: Args) -> tuple[int, str]:
    """Returns over how many points of a tag a curve is averaged, and what that makes of its points, in words."""
    # unit: what the tag's points are, where they are single episodes.
    episodes = RETURNS.get(tag)
    if episodes and episodes > 1:
        return 1, f"means of {episodes} episodes"
    if not episodes:
        unit = "evaluations" if tag in EVALUATIONS else f"points of {tag}"
    window = args.smooth or (EPISODES_IN_MEAN if unit in ("episodes", "sampled episodes") else 1)
    return window, f"means of {window} {unit}" if window > 1 else unit


def make_run(log: Log, tags: tuple[str, ...], args: Args) -> Run | None:
    """Returns a run with the first of the tags of which it has points."""
    match = re.search(args.label or "", Path(log.path).as_posix())
    if not match:
        warn(f"{log.path} does not fit --label")
    keys = log.keys | {key: value for key, value in (match.groupdict() if match else {}).items() if value is not None}
    for tag, curve in ((tag, log.curves[tag]) for tag in tags if tag in log.curves):
        finite = np.isfinite(curve.values)
        if not finite.all():
            warn(f"{log.path}: {np.sum(~finite):,} points of {tag} are no finite numbers and left out")
        within = curve.steps <= (math.inf if args.at_step is None else args.at_step)
        timed = np.isfinite(curve.seconds) | (args.x == "step")
        curve = Curve(*(column[finite & within & timed] for column in (curve.steps, curve.seconds, curve.values)))
        if not len(curve.steps):
            continue
        window, words = smoothing(tag, log.unit, args)
        full, lengths = min(window, len(curve.steps)) - 1, log.curves.get(LENGTHS.get(tag, ""))
        if lengths and len(lengths.steps):
            # Where the mean is not over all episodes yet, the steps are the sum of their lengths, which float32 rounds.
            needed = RETURNS[tag] * np.interp(curve.steps, lengths.steps, lengths.values)
            full = int(np.argmax([*(curve.steps[:-1] >= needed[:-1] * (1 - 1e-6)), True]))
        # With the module that registers it or without, an id names the same environment; names of files hold no /.
        env_id = re.sub("^ALE-", "ALE/", keys["env_id"].rpartition(":")[2])
        keys = keys | {"env_id": env_id, "smoothing": words}
        told = (name for name, sign in PROGRAMS.items() if any(re.search(sign, text) for text in (tag, *keys)))
        keys = {"program": next(told, UNKNOWN)} | keys
        return Run(log.path, keys, curve, window, words, full, log.about)
    return None


def find_sources(paths: tuple[str, ...]) -> list[Path]:
    """Returns run folders and CSV files, each once; a path that leads to none is a UsageError."""
    found: dict[Path, Path] = {}
    for pattern in paths:
        given = Path(os.path.expanduser(pattern))
        matches = [given] if given.exists() else sorted(map(Path, glob.glob(str(given), recursive=True)))
        sources = [source for match in matches for source in sources_in(match)]
        if not sources:
            rule = "a run's folder holds an event file or the like; a CSV file is given by its own name"
            rule = rule if matches else "there is nothing of this name"
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
            elif any(map(LOG_NAME.search, files)) or "scalars" in below:
                found.append(Path(folder))
            visited.add(real)
        return sorted(found)
    if LOG_NAME.search(path.name):
        return [path.parent]
    return [path] if path.suffix.lower() == ".csv" else []


def read_runs(args: Args) -> list[Run]:
    """Returns all runs that have the metric, and reports what cannot be used; if there is none, in a UsageError."""
    tags = METRICS.get(args.metric, (args.metric,))
    read = (*tags, *(LENGTHS[tag] for tag in tags if tag in LENGTHS), ITERATIONS)
    runs, lacking = [], []
    for source in find_sources(args.paths):
        found = [make_run(log, tags, args) for log in read_source(source, read)]
        runs += [run for run in found if run]
        lacking += [source] * (None in found)
    if not runs and not lacking:
        raise UsageError(f"{' '.join(args.paths)}: no run found that can be read")
    cut = "" if args.at_step is None else f" up to step {args.at_step:,}"
    cut += " with a time" * (args.x == "time")
    if not runs:
        existing = {tag for source in lacking for log in read_source(source, ()) for tag in log.curves}
        wanted = args.metric if args.metric in tags else f"{args.metric} ({' or '.join(tags[:2])})"
        lack = f"no run has a finite point of it{cut}" if existing & set(tags) else "no run has it"
        raise UsageError(f"--metric {wanted}: {lack}; they have {', '.join(sorted(existing)) or 'no scalars'}")
    for source in lacking:
        warn(f"{source} has no finite point of {' or '.join(tags[:2])}{cut} and is left out")
    return runs


# ----- Grouping -----
@dataclass(frozen=True)
class Group:
    """Runs that share the values of some arguments."""

    name: str  # those of these values that tell it from others, but for the environment
    runs: list[Run]

    @property
    def environments(self) -> list[str]:
        """The environment ids of its runs."""
        return sorted({run.keys["env_id"] for run in self.runs})

    def of(self, environment: str) -> list[Run]:
        """Returns its runs of one environment."""
        return [run for run in self.runs if run.keys["env_id"] == environment]


def differing_keys(runs: list[Run]) -> list[str]:
    """Returns the keys that make groups where nothing is said: env_id, exp_name, and those that differ further."""
    # A key counts only if it differs between runs of one environment and experiment: other scripts have other defaults.
    values: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for run in runs:
        for key, value in run.keys.items():
            values[run.keys["env_id"], run.keys["exp_name"]][key].add(value)
    differing = [key for keys in values.values() for key, found in keys.items() if len(found) > 1]
    return ["env_id", "exp_name", *(key for key in dict.fromkeys(differing) if key not in UNIMPORTANT.split())]


def in_numeric_order(text: str) -> list[tuple[int, float, str]]:
    """Returns a key that sorts texts by the numbers in them: 4, 8, 16."""
    parts = re.split(r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)", text)
    return [(1, float(part), "") if i % 2 else (0, 0.0, part) for i, part in enumerate(parts)]


def names_of(groups: list[dict[str, str]]) -> list[str]:
    """Returns names that hold only what differs between groups, given as their arguments."""
    # An argument is named where a group of the same environment and experiment has another value of it.
    names = []
    for own in groups:
        peers = [peer for peer in groups if all(peer.get(key) == own.get(key) for key in ("env_id", "exp_name"))]
        parts = [f"{key}={value}" for key, value in own.items() if any(peer.get(key) != value for peer in peers)]
        if "exp_name" in own and (len({group.get("exp_name") for group in groups}) > 1 or not parts):
            parts.insert(0, own["exp_name"])
        names.append(" ".join(parts) or "all runs")
    return names


def group_runs(runs: list[Run], keys: Iterable[str]) -> list[Group]:
    """Returns the runs by their values of these keys, in the order of the values; an unknown key is a UsageError."""
    existing = sorted({key for run in runs for key in run.keys})
    for key in keys:
        if key not in existing:
            raise UsageError(f"--group-by {key}: no run has this argument; they have {', '.join(existing)}")
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = defaultdict(list)
    for run in runs:
        values = {key: run.keys.get(key, "none") for key in keys}
        # Nobody knows whether runs of unknown environments in two folders are of the same one.
        if run.keys["env_id"] == UNKNOWN:
            values["folder"] = Path(run.path).parent.as_posix()
        groups[tuple(values.items())].append(run)
    ordered = sorted(groups, key=lambda values: [in_numeric_order(value) for _, value in values])
    names = names_of([dict(values) for values in ordered])
    return [Group(name, groups[values]) for name, values in zip(names, ordered, strict=True)]


# ----- Statistics -----
def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns (n,) the mean of each value and the window - 1 before it, or of as many as there are."""
    window, n = min(window, len(values)), len(values)
    return np.convolve(values, np.ones(window))[:n] / np.arange(1, n + 1).clip(max=window)


def one_point_each(x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the different x and the mean of the values at each; x (n,) never falls, values (n,)."""
    own, starts, counts = np.unique(x, return_index=True, return_counts=True)
    return own, np.add.reduceat(values, starts) / counts


def final_score(x: np.ndarray, values: np.ndarray, fraction: float) -> float:
    """Returns the mean of a curve, (n,) each, over the last part of its x range."""
    # A point stands for the range since the one before it, so that the score does not depend on how often was logged.
    x, values = one_point_each(x, values)
    start = x[-1] - fraction * (x[-1] - x[0])
    shares = np.diff(np.maximum(x, start), prepend=start)
    score = np.average(values, weights=shares) if shares.any() else values[-1]
    return float(f"{score:.10g}")  # equal curves of other lengths differ by rounding, which a test of ranks would count


def median_interval(scores: np.ndarray) -> tuple[float, float, float | None]:
    """Returns the ends of an interval for the median of what scores (n,) were drawn from, and its confidence."""
    # The ends are the innermost symmetric pair of ordered scores that holds the median with at least 90 %, whatever the
    # distribution: as many scores lie below it as a coin thrown n times shows heads. Below five runs no pair does: the
    # ends are then least and greatest, without a confidence. Scores may be infinite.
    ordered, n = np.sort(scores), len(scores)
    if n < FEW_RUNS:
        return float(ordered[0]), float(ordered[-1]), None
    k = int(binom.ppf(0.05, n, 0.5))  # the median lies beyond each end with less than 5 %
    return float(ordered[k - 1]), float(ordered[n - k]), float(1 - 2 * binom.cdf(k - 1, n, 0.5))


iqm = functools.partial(trim_mean, proportiontocut=0.25, axis=-1)  # interquartile mean along the last axis


def bootstrapped(columns: list[np.ndarray], measure: Callable, resamples: int = RESAMPLES) -> np.ndarray:
    """Returns (3, ...) a measure of scores (..., n) and the ends of its 95 % percentile interval, nan of few runs."""
    # columns: scores (n_e,) of each environment, among which is drawn: these are the strata.
    rng = np.random.default_rng(0)
    drawn = np.concatenate([rng.choice(column, size=(resamples, len(column))) for column in columns], axis=1)
    ends = np.percentile(measure(drawn), (2.5, 97.5), axis=0)
    # Few runs vary less than what they were drawn from: of 3 the interval would hold in 75 to 85 of 100 tables.
    few = min(map(len, columns)) < (FEW_RUNS if len(columns) > 1 else ENOUGH_RUNS)
    return np.stack([measure(np.concatenate(columns)), *(np.full_like(ends, np.nan) if few else ends)])


def compare_in_all(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Returns the exact two-sided p value of the sum of ranks, over environments with scores (n,) and (m,) each."""
    # Where both groups are draws of one distribution, all permutations of an environment's labels are as probable. In
    # one without ties this is the Mann-Whitney test; scipy's is not exact with ties, its permutation test has no
    # strata. Exact, so slow with many: seconds for 100 runs against 100, minutes for 300.
    total, chances = 0, np.ones(1)
    for x, y in pairs:
        # Twice, because runs that tie share their mean rank, which may be half a number.
        ranks = (2 * rankdata(np.concatenate([x, y]))).astype(int)
        # In how many ways k of the runs so far have ranks that sum to s, at [k, s].
        ways = np.zeros((len(x) + 1, ranks.sum() + 1))
        ways[0, 0] = 1
        for rank in ranks:
            ways[1:, rank:] += ways[:-1, :-rank]  # this run is one of the k, or not
        total, chances = total + ranks[: len(x)].sum(), np.convolve(chances, ways[-1] / ways[-1].sum())
    return min(1.0, 2 * float(min(chances[: total + 1].sum(), chances[total:].sum())))


def least_p(sizes: list[tuple[int, int]]) -> float:
    """Returns the p value of groups that are fully separated: no outcome of so many runs has a lower one."""
    return min(1.0, 2 / math.prod(math.comb(n + m, n) for n, m in sizes))


def holm(p_values: Iterable[float]) -> np.ndarray:
    """Returns (n,) p values after Holm's correction, which may be compared with 5 % as if there were one."""
    p = np.fromiter(p_values, float)
    order = np.argsort(p)
    return np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1)[np.argsort(order)]


def improvement_interval(probability: float, n: int, m: int) -> tuple[float, float]:
    """Returns Newcombe's 95 % interval for the probability that one of n runs scores higher than one of m."""

    def excess(true: float) -> float:
        rest = 1 + ((n + m) / 2 - 1) * ((1 - true) / (2 - true) + true / (1 + true))
        # 0 where it lies 1.96 of its own standard errors from the one that was seen.
        return (probability - true) ** 2 - 1.959964**2 * true * (1 - true) * rest / (n * m)

    return brentq(excess, 0, probability - 1e-9), brentq(excess, probability + 1e-9, 1)


def on_grid(curves: list[tuple[np.ndarray, np.ndarray]], points: int = GRID_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Returns (g,) x over all that curves cover and (n, g) their values there, NaN where a curve has no data."""
    # curves: x and values (n,) of each. Points at one x count by their mean; nothing is extrapolated. Curves that begin
    # or end within a twentieth of the range of the longest count as beginning and ending with it.
    firsts, lasts = (np.array([x[i] for x, _ in curves]) for i in (0, -1))
    near = 0.05 * (lasts.max() - firsts.min())
    ends = firsts[firsts <= firsts.min() + near].max(), lasts[lasts >= lasts.max() - near].min()
    grid = np.unique(np.linspace(*ends, points))
    rows = [np.interp(grid, *one_point_each(x, values), left=np.nan, right=np.nan) for x, values in curves]
    return grid, np.stack(rows)


def median_band(values: np.ndarray) -> np.ndarray:
    """Returns (3, g) median, low and high end of its interval, of the curves (n, g) that have data at a point."""
    columns = [column[np.isfinite(column)] for column in values.T]
    # Between two curves that have no range in common is no data at all.
    rows = [(np.median(own), *median_interval(own)[:2]) if len(own) else (np.nan,) * 3 for own in columns]
    return np.array(rows).T


def interquartile_curve(columns: list[np.ndarray]) -> np.ndarray:
    """Returns (3, g) the interquartile mean of normalised curves (n_e, g), and the ends of its interval."""
    # A run is drawn as a whole.
    curves = np.concatenate(columns)
    runs = np.split(np.arange(len(curves)), np.cumsum([*map(len, columns[:-1])]))
    return bootstrapped(runs, lambda drawn: np.stack([iqm(at[drawn]) for at in curves.T], -1), RESAMPLES_OF_CURVES)


# ----- Tables -----
def final_scores(runs: list[Run], args: Args) -> np.ndarray:
    """Returns (n,) the final score of each run."""
    return np.array([final_score(run.curve.x(args.x), run.smoothed, args.last_fraction) for run in runs])


def first_reach(run: Run, threshold: float) -> tuple[float, float]:
    """Returns steps and seconds until a curve reaches a threshold, from a full window on; infinite if never."""
    # Event files hold float32, in which 0.9 lies below 0.9; and a mean of values may lie a rounding error below them.
    reached = (run.smoothed >= threshold) | np.isclose(run.smoothed, threshold, rtol=1e-6, atol=1e-9)
    first = run.full + int(reached[run.full :].argmax())
    return (float(run.curve.steps[first]), float(run.curve.seconds[first])) if reached[first] else (math.inf, math.inf)


def median_row(name: str, values: np.ndarray) -> dict[str, float | None]:
    """Returns the median of values (n,) and the ends of its interval, as columns; None for unknown times."""
    found = (None,) * 3 if np.isnan(values).any() else (float(np.median(values)), *median_interval(values)[:2])
    return dict(zip((name, f"{name}_low", f"{name}_high"), found, strict=True))


def summarise(group: Group, environment: str, args: Args) -> dict[str, Any]:
    """Returns a group's row of an environment. None: there is no such number; infinite: never."""
    # The confidence is that of all medians' intervals; without one they are least and greatest.
    runs = group.of(environment)
    scores = final_scores(runs, args)
    row = {"environment": environment, "group": group.name, "runs": len(runs), **median_row("median", scores)}
    row |= {"confidence": median_interval(scores)[2], "iqm": None, "iqm_low": None, "iqm_high": None}
    if len(runs) >= ENOUGH_RUNS:
        row |= zip(("iqm", "iqm_low", "iqm_high"), bootstrapped([scores], iqm).tolist(), strict=True)
    if args.threshold is not None:
        steps, seconds = np.array([first_reach(run, args.threshold) for run in runs]).T
        row["reached"] = int(np.isfinite(steps).sum())
        wilson = binomtest(row["reached"], len(runs)).proportion_ci(method="wilson")
        row |= zip(("reached_low", "reached_high"), map(float, wilson), strict=True)
        row |= median_row("steps_to_threshold", steps) | median_row("seconds_to_threshold", seconds)
    # From the first point on: what is left of a run may begin far from step 0.
    speeds = [np.ptp(curve.steps) / np.ptp(curve.seconds) for run in runs if np.ptp((curve := run.curve).seconds) > 0]
    return row | {"steps_per_second": float(np.median(speeds)) if speeds else None}


def number(value: float) -> str:
    """Returns a score with four digits or more."""
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"


def time_unit(seconds: float) -> tuple[int, str]:
    """Returns the unit that suits a wall time, in seconds, and its name."""
    return (3600, "hours") if seconds >= 7200 else (60, "minutes") if seconds >= 120 else (1, "seconds")


def with_interval(row: dict[str, Any], name: str, show: Callable[[float], str], kind: str = "") -> str:
    """Returns a number of a row and its interval as they are shown: infinite is never, None is nothing."""
    numbers = [row[key] for key in (name, f"{name}_low", f"{name}_high") if row[key] is not None]
    shown = ["never" if number == math.inf else show(number) for number in numbers]
    return shown[0] if row["runs"] == 1 or len(shown) == 1 else f"{shown[0]} ({shown[1]} to {shown[2]}{kind})"


def cells(rows: list[dict[str, Any]], args: Args) -> list[list[str]]:
    """Returns the table as it is shown, its header first."""
    with_middle = any(row["iqm"] is not None for row in rows)
    header = ["environment", "group", "runs", "median (its interval)", *["IQM (95 %)"] * with_middle]
    if args.threshold is not None:
        at = f"{args.threshold:g}"
        header += [f"reached {at} (95 %)", f"median steps to {at}", f"median time to {at}"]
    lines = [[*header, "steps/s"]]
    for row in rows:
        kind = ", min to max" if row["confidence"] is None else f", {100 * row['confidence']:.1f} %"
        line = [row["environment"], row["group"], str(row["runs"]), with_interval(row, "median", number, kind)]
        if with_middle:
            line.append("" if row["iqm"] is None else with_interval(row, "iqm", number))
        if args.threshold is not None:
            line.append(f"{row['reached']} of {row['runs']} ({row['reached_low']:.0%} to {row['reached_high']:.0%})")
            line.append(with_interval(row, "steps_to_threshold", "{:,.0f}".format))
            seconds = [row[f"seconds_to_threshold{end}"] for end in ("", "_low", "_high")]
            unit, name = time_unit(max((x for x in seconds if x is not None and x < math.inf), default=0))
            shown = functools.partial(lambda unit, name, x: f"{x / unit:,.1f} {name}", unit, name)
            line.append("not logged" if None in seconds else with_interval(row, "seconds_to_threshold", shown))
        lines.append([*line, "" if row["steps_per_second"] is None else f"{row['steps_per_second']:,.0f}"])
    return lines


def markdown_table(lines: list[list[str]]) -> str:
    """Returns a table, its header first, padded so that it reads well as plain text too."""
    lines = [[" ".join(text.split()).replace("|", r"\|") for text in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    # Words stand left, numbers right.
    sides = ["<" if name in ("environment", "group") else ">" for name in lines[0]]
    padded = [[f"{t:{side}{w}}" for t, side, w in zip(line, sides, widths, strict=True)] for line in lines]
    rule = ["-" * (w - 1) + (":" if side == ">" else "-") for side, w in zip(sides, widths, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [padded[0], rule, *padded[1:]])


def latex_table(lines: list[list[str]]) -> str:
    """Returns a table, its header first, for LaTeX with the package booktabs."""
    signs = {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
    escaped = str.maketrans(signs | {sign: f"\\{sign}" for sign in "&%$#_{}"})
    rows = [" & ".join(" ".join(text.split()).translate(escaped) for text in line) + r" \\" for line in lines]
    sides = "".join("l" if name in ("environment", "group") else "r" for name in lines[0])
    lines = [f"\\begin{{tabular}}{{{sides}}}", "\\toprule", rows[0], "\\midrule", *rows[1:], "\\bottomrule"]
    return "\n".join([*lines, "\\end{tabular}"])


def rows_of_runs(groups: list[Group], args: Args) -> list[dict[str, Any]]:
    """Returns a row for each run, for other tools."""
    rows = []
    for group in groups:
        for run, score in zip(group.runs, final_scores(group.runs, args).tolist(), strict=True):
            row = {"environment": run.keys["env_id"], "group": group.name, "seed": run.keys["seed"], "score": score}
            if args.threshold is not None:
                row["steps_to_threshold"], row["seconds_to_threshold"] = first_reach(run, args.threshold)
            rows.append(row | {"last_step": int(run.curve.steps[-1]), "smoothing": run.smoothing, "path": run.path})
    return rows


# ----- Verdicts -----
@dataclass
class Verdict:
    """How two groups compare; the first is the one whose runs score higher more often, unless neither does."""

    environment: str  # or several
    better: str
    worse: str
    sizes: list[tuple[int, int]]  # runs of both in each environment
    probability: float  # that a run of the better one scores higher; a tie counts half
    p: float | None  # of the exact test; None: their points are not comparable
    caveats: list[str]
    adjusted: float = 1.0  # p after Holm's correction
    needed: int | None = None  # runs of each that allow one, if all pairs had them, where no outcome of these could

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the probability; None with few runs, or over several environments."""
        (n, m), *others = self.sizes
        return None if others or min(n, m) < FEW_RUNS else improvement_interval(self.probability, n, m)

    def sentence(self) -> str:
        """Returns what it means, in words."""
        name, pair = self.environment, f"{self.better} and {self.worse}"
        counts = " and ".join(sorted({f"{n} against {m}" for n, m in self.sizes}))
        if self.p is None:
            return f"{name}: no verdict on {pair}: {'; '.join(self.caveats)}."
        if self.needed:
            text = f"no verdict on {pair}: {counts} runs can give none, however they score; {self.needed} of each could"
        elif self.adjusted <= LEVEL:
            text = f"{self.better} scores higher than {self.worse} (p = {self.adjusted:.2g}, {counts} runs)"
        else:
            text = f"no difference shown between {pair} (p = {self.adjusted:.2g}, {counts} runs)"
        text += f". A run of {self.better} scores higher in {self.probability:.0%} of pairs, ties counted half"
        text += f" (95 % interval {self.interval[0]:.0%} to {self.interval[1]:.0%})" if self.interval else ""
        return f"{name}: {text}." + f" But {'; '.join(self.caveats)}." * bool(self.caveats)


def caveats(x: list[Run], y: list[Run], names: tuple[str, str]) -> list[str]:
    """Returns what else than the groups differs between runs that are compared, the gravest first."""
    found, runs = [], [*x, *y]
    smoothings = sorted({run.smoothing for run in runs})
    if len(smoothings) > 1:
        found.append(f"their points are not comparable ({' and '.join(smoothings)})")
    ends = [np.array([run.curve.steps[-1] for run in own]) for own in (x, y)]
    budgets = [int(own.max()) for own in ends]
    if min(budgets) < 0.95 * max(budgets):
        shown = " and ".join(f"{name} ends at step {budget:,}" for name, budget in zip(names, budgets, strict=True))
        found.append(f"{shown}, each scored at its own end; --at-step {min(budgets)} compares them at one")
    for name, own in zip(names, ends, strict=True):
        early = np.sort(own[own < 0.95 * own.max()])
        if len(early):
            at = " to ".join(f"{step:,}" for step in dict.fromkeys((early[0], early[-1])))
            found.append(f"{len(early)} of {len(own)} runs of {name} end at step {at}, not at {own.max():,}")
    fewest, *_, most = sorted(min(run.full + 1, run.window) for run in runs)
    if 2 * fewest < most:
        found.append(f"not all points are {runs[0].smoothing}: a run has {fewest}, another {most} or more")
    about = {key: sorted({run.about[key] for run in runs if key in run.about}) for run in runs for key in run.about}
    mixed = "; ".join(f"{key} {', '.join(values)}" for key, values in about.items() if len(values) > 1)
    found += [f"the runs were not made with the same ({mixed})"] * bool(mixed)
    if any(run.keys["env_id"] == UNKNOWN for run in runs):
        found.append("the logs do not tell the environment, which must be the same (--label can tell it)")
    return found


def compare(groups: list[Group], args: Args) -> list[Verdict]:
    """Returns a verdict for each two groups that share an environment, or for each with the baseline."""
    names = list(dict.fromkeys(group.name for group in groups))
    if args.baseline and args.baseline not in names:
        raise UsageError(f"--baseline {args.baseline}: no group has this name; there are {', '.join(names)}")
    scores = [{env: final_scores(group.of(env), args) for env in group.environments} for group in groups]
    verdicts = []
    for i, j in combinations(range(len(groups)), 2):
        shared = [env for env in scores[i] if env in scores[j]]
        if not shared or (args.baseline and args.baseline not in (groups[i].name, groups[j].name)):
            continue
        # Over all pairs of runs, as the test counts them: an environment with more runs counts more.
        signs = [np.sign(scores[i][env][:, None] - scores[j][env]).ravel() for env in shared]
        probability = float(np.concatenate(signs).mean()) / 2 + 0.5
        better, worse = (i, j) if probability >= 0.5 else (j, i)
        pairs = [(scores[better][env], scores[worse][env]) for env in shared]
        sides = [(groups[better].of(env), groups[worse].of(env)) for env in shared]
        own = groups[better].name, groups[worse].name
        p = compare_in_all(pairs) if all(len({run.smoothing for run in (*x, *y)}) == 1 for x, y in sides) else None
        sizes = [(len(x), len(y)) for x, y in pairs]
        found = list(dict.fromkeys(line for x, y in sides for line in caveats(x, y, own)))
        name = ", ".join(shared[:3]) + f" and {len(shared) - 3} more" * (len(shared) > 3)
        verdicts.append(Verdict(name, *own, sizes, max(probability, 1 - probability), p, found))
    tested = [verdict for verdict in verdicts if verdict.p is not None]
    adjusted = holm(verdict.p for verdict in tested)
    best = holm(least_p(verdict.sizes) for verdict in tested)  # where all groups are fully separated
    for verdict, p, least in zip(tested, adjusted, best, strict=True):
        verdict.adjusted = p
        if least > LEVEL:
            pairs, environments = len(tested), len(verdict.sizes)
            verdict.needed = next(n for n in range(1, 100) if pairs * least_p([(n, n)] * environments) <= LEVEL)
    return verdicts


def notes(groups: list[Group]) -> list[str]:
    """Returns what a reader should know before believing the table."""
    lines = []
    for group in groups:
        for env in group.environments:
            runs = group.of(env)
            seeds = [run.keys["seed"] for run in runs if run.keys["seed"] != UNKNOWN]
            twice = ", ".join(sorted({seed for seed in seeds if seeds.count(seed) > 1}, key=in_numeric_order))
            found = [f"seed {twice} more than once; such runs are no independent samples"] * bool(twice)
            found += caveats(runs, runs, (group.name, group.name)) if len(runs) > 1 else []
            lines += [f"{env} {group.name}: {line}" for line in dict.fromkeys(found)]
    return lines


# ----- Over environments -----
def read_references(path: Path) -> dict[str, tuple[float, float]]:
    """Returns the low and the high score of each environment in a CSV file; if it has none, that is a UsageError."""
    try:
        table = table_of(path)
        scores = np.stack([numbers(table["low"]), numbers(table["high"])]).T
        if not (scores[:, 0] < scores[:, 1]).all():
            raise ValueError("each low must be below its high")
        return dict(zip(table["env_id"], map(tuple, scores.tolist()), strict=True))
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise UsageError(f"--normalise {path}: no table with columns env_id, low, high ({error})") from error


def normalised(group: Group, values: Callable[[list[Run]], np.ndarray], args: Args) -> list[np.ndarray]:
    """Returns values (n_e, ...) of a group's runs in each environment, its low score being 0 and its high one 1."""
    # A row for a whole id counts, else one for the name, which holds for all its versions; neither is a UsageError.
    references, columns = read_references(args.normalise), []
    for environment in group.environments:
        name = re.sub(r"^ALE[/-]|(NoFrameskip|Deterministic)?-v\d+$", "", environment)
        if not (found := references.get(environment) or references.get(name)):
            raise UsageError(f"--normalise {args.normalise}: no row for {environment}, nor for {name}")
        columns.append((values(group.of(environment)) - found[0]) / (found[1] - found[0]))
    return columns


def sample_efficiency(group: Group, args: Args) -> tuple[np.ndarray, np.ndarray]:
    """Returns (g,) x where all of a group's runs have data, and (3, g) their interquartile mean with its interval."""
    curves = {id(run): one_point_each(run.curve.x(args.x), run.smoothed) for run in group.runs}
    first, last = max(x[0] for x, _ in curves.values()), min(x[-1] for x, _ in curves.values())
    grid = np.linspace(first, max(first, last), 50)
    columns = normalised(group, lambda runs: np.stack([np.interp(grid, *curves[id(run)]) for run in runs]), args)
    return grid, interquartile_curve(columns)


def aggregate(groups: list[Group], args: Args) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Returns a row for each group over all its environments, and the table as it is shown, its header first."""
    lines = [["group", "environments", "runs", "IQM, normalised (95 %)", "optimality gap (95 %)"]]
    measures, rows = {"iqm": iqm, "optimality_gap": lambda scores: 1 - np.minimum(scores, 1).mean(-1)}, []
    for group in groups:
        row = {"group": group.name, "environments": len(group.environments), "runs": len(group.runs)}
        columns = normalised(group, lambda runs: final_scores(runs, args), args)
        for name, measure in measures.items():
            middle, *ends = bootstrapped(columns, measure).tolist()
            found = (middle, *(None if math.isnan(end) else end for end in ends))
            row |= zip((name, f"{name}_low", f"{name}_high"), found, strict=True)
        shown = [with_interval(row, name, "{:.3f}".format) for name in measures]
        rows.append(row)
        lines.append([*map(str, list(row.values())[:3]), *shown])
    return rows, lines


# ----- Pictures -----
def style(i: int) -> dict[str, str]:
    """Returns colour, line style and marker of the i-th group; 140 of them differ."""
    looks = {"color": COLOURS, "linestyle": LINE_STYLES, "marker": MARKERS}
    return {name: values[i % len(values)] for name, values in looks.items()}


def as_label(text: str, width: int = 40) -> str:
    """Returns a text in lines as matplotlib shows it, which takes $ for mathematics."""
    return "\n".join(textwrap.wrap(text, width, break_on_hyphens=False)).replace("$", r"\$")


def x_unit(axis: str, longest: float) -> tuple[float, str]:
    """Returns what to divide x by, and the label of the axis."""
    if axis == "step":
        return (1e6, "environment steps, millions") if longest >= 1e6 else (1e3, "environment steps, thousands")
    unit, name = time_unit(longest)
    return unit, f"wall time, {name}"


def panels(args: Args, names: list[str]) -> tuple[Figure, list[Axes]]:
    """Returns a figure with a panel for each name, three in a row."""
    columns = min(len(names), 3)
    rows = math.ceil(len(names) / columns)
    figure = Figure((args.width, 0.3 + rows * max(0.62 * args.width / columns, 1.3)), layout="constrained")
    axes = [figure.add_subplot(rows, columns, i + 1, title=as_label(name)) for i, name in enumerate(names)]
    return figure, axes


def draw_line(axes: Axes, x: np.ndarray, band: np.ndarray, look: dict[str, str], label: str) -> None:
    """Draws a line and a band, (3, g) middle, low and high end."""
    middle, low, high = band
    # matplotlib leaves out of a legend what begins with _.
    style = look | {"label": " " * label.startswith("_") + label, "markersize": 3, "linewidth": 1.2}
    axes.plot(x, middle, markevery=max(len(x) // 10, 1), **style)
    if (low < high).any():
        axes.fill_between(x, low, high, color=look["color"], alpha=0.2, linewidth=0)


def legend_below(figure: Figure, title: str) -> None:
    """Puts one legend for all panels below them, where it covers nothing, and makes room for it."""
    entries = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    width = figure.get_figwidth()
    names, title = [as_label(name, int(11 * width)) for name in entries], as_label(title, int(16 * width))
    longest = max(len(line) for name in names for line in name.splitlines())
    columns = max(1, min(len(names), int(width / (0.7 + 0.07 * longest))))
    lines = 2 + title.count("\n") + math.ceil(sum(1 + name.count("\n") for name in names) / columns)
    figure.set_figheight(figure.get_figheight() + 0.14 * lines)
    figure.legend(entries.values(), names, loc="outside lower center", ncols=columns, title=title, frameon=False)


def run_counts(values: list[np.ndarray]) -> str:
    """Returns how many runs a group's curves (n, g) are medians of, and how many of them last to the end."""
    lasting = [(len(curves), int(np.isfinite(curves[:, -1]).sum())) for curves in values]
    texts = {f"{n} run{'s' * (n > 1)}" + f", {left} at the end" * (left < n) for n, left in lasting}
    return " or ".join(sorted(texts, key=in_numeric_order))


def draw_curves(groups: list[Group], args: Args) -> Figure:
    """Returns the median curve of each group with its band, in a panel for each environment."""
    environments = sorted({env for group in groups for env in group.environments}, key=in_numeric_order)
    figure, axes_of = panels(args, environments)
    curves: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = defaultdict(dict)
    for group in groups:
        for environment in group.environments:
            of_runs = [(run.curve.x(args.x), run.smoothed) for run in group.of(environment)]
            curves[group.name][environment] = on_grid(of_runs)
    for environment, axes in zip(environments, axes_of, strict=True):
        longest = max(float(own[environment][0][-1]) for own in curves.values() if environment in own)
        unit, label = x_unit(args.x, longest)
        axes.set_xlabel(label)
        for i, (name, own) in enumerate(curves.items()):
            if environment in own:
                x, values = own[environment]
                counts = run_counts([values for _, values in own.values()])
                draw_line(axes, x / unit, median_band(values), style(i), f"{name} ({counts})")
    smoothings = sorted({run.smoothing for group in groups for run in group.runs})
    figure.supylabel(as_label(f"{args.metric}: {' or '.join(smoothings)}"))
    legend_below(figure, BAND)
    return figure


def draw_threshold(groups: list[Group], args: Args) -> Figure:
    """Returns steps and wall time to the threshold: a mark for each run that reached it, a bar at the median of all."""
    rows = [(group, environment) for group in groups for environment in group.environments]
    figure = Figure((args.width, 1 + 0.45 * len(rows)), layout="constrained")
    figure.suptitle(f"first reaching {args.threshold:g}")
    names = list(dict.fromkeys(group.name for group in groups))
    reached = [np.array([first_reach(run, args.threshold) for run in group.of(env)]) for group, env in rows]
    for column, (axis, axes) in enumerate(zip(("step", "time"), figure.subplots(1, 2, sharey=True), strict=True)):
        found = [own[:, column] for own in reached]
        unit, label = x_unit(axis, max((x for own in found for x in own if x < math.inf), default=0))
        for i, (own, (group, _)) in enumerate(zip(found, rows, strict=True)):
            look, finite = style(names.index(group.name)), own[np.isfinite(own)]
            axes.plot(finite / unit, [i] * len(finite), look["marker"], color=look["color"], markerfacecolor="none")
            if np.median(own) < math.inf:
                axes.plot([np.median(own) / unit] * 2, [i - 0.3, i + 0.3], color="black", linewidth=2)
        axes.set_xlim(left=0)
        axes.set_xlabel(label)
    texts = [f"{as_label(f'{environment} {group.name}', 30)}\n" for group, environment in rows]
    shares = [f"{np.isfinite(own[:, 0]).sum()} of {len(own)} runs" for own in reached]
    labels = [text + share for text, share in zip(texts, shares, strict=True)]
    figure.axes[0].set_yticks(range(len(rows)), labels)
    figure.axes[0].set_ylim(len(rows) - 0.5, -0.5)
    return figure


def draw_improvement(verdicts: list[Verdict], args: Args) -> Figure:
    """Returns the probability of improvement of each two groups, with its interval where there is one."""
    labels = [as_label(f"{v.environment}: {v.better} over {v.worse}", 34) for v in verdicts]
    height = 0.8 + sum(0.36 + 0.16 * label.count("\n") for label in labels)
    figure = Figure((args.width, height), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0.5, color="0.5", linestyle="--", linewidth=1)
    for i, verdict in enumerate(verdicts):
        if verdict.interval:
            axes.plot(verdict.interval, [i, i], color=COLOURS[0], linewidth=5, alpha=0.4, solid_capstyle="butt")
        axes.plot([verdict.probability], [i], "o" if verdict.adjusted <= LEVEL else "x", color="black")
    axes.set_yticks(range(len(verdicts)), labels)
    axes.set(xlim=(-0.02, 1.02), ylim=(len(verdicts) - 0.5, -0.5))
    text = "probability that a run scores higher, 95 % interval; dot: the test finds a difference, cross: none"
    figure.supxlabel(as_label(text, int(13 * args.width)))
    return figure


def draw_aggregates(groups: list[Group], args: Args) -> Figure:
    """Returns performance profiles and sample efficiency over all environments, with pointwise 95 % intervals."""
    figure, (profile, efficiency) = panels(args, ["performance profile", "sample efficiency"])
    of_all = [normalised(group, lambda runs: final_scores(runs, args), args) for group in groups]
    levels = np.linspace(0, max(1.0, *(float(column.max()) for columns in of_all for column in columns)), 101)
    unit, label_x = x_unit(args.x, max(float(run.curve.x(args.x)[-1]) for group in groups for run in group.runs))
    for i, (group, columns) in enumerate(zip(groups, of_all, strict=True)):
        label = f"{group.name} ({len(group.environments)} environments, {len(group.runs)} runs)"
        shares = bootstrapped(columns, lambda x: (x[..., None, :] > levels[:, None]).mean(-1), RESAMPLES_OF_CURVES)
        draw_line(profile, levels, shares, style(i), label)
        grid, band = sample_efficiency(group, args)
        draw_line(efficiency, grid / unit, band, style(i), label)
    profile.set(xlabel="normalised score s", ylabel="share of runs above s")
    efficiency.set(xlabel=label_x, ylabel="IQM of normalised scores")
    legend_below(figure, "Bands: pointwise 95 % intervals, runs resampled within each environment; few runs have none.")
    return figure


def write_pictures(groups: list[Group], verdicts: list[Verdict], args: Args) -> list[Path]:
    """Writes one picture of each kind, and returns their paths."""
    verdicts = [verdict for verdict in verdicts if verdict.p is not None]  # a cross would say that the test finds none
    with matplotlib.rc_context(LOOK):
        figures = {"curves": draw_curves(groups, args)}
        if args.threshold is not None:
            figures["threshold"] = draw_threshold(groups, args)
        if args.normalise:
            figures["environments"] = draw_aggregates(groups, args)
        if 0 < len(verdicts) <= MOST_PAIRS:
            figures["improvement"] = draw_improvement(verdicts, args)
        elif verdicts:
            warn(f"{len(verdicts)} pairs of groups are too many for a picture of them")
        for kind, figure in figures.items():
            figure.savefig(args.pictures / f"{kind}.{args.format}", dpi=300)
    return [args.pictures / f"{kind}.{args.format}" for kind in figures]


# ----- Command line -----
def write_tables(path: Path, tables: dict[str, tuple[list[dict], list[list[str]]]], below: list[str]) -> list[Path]:
    """Writes tables, given as rows and as shown, to one file; as CSV with all digits to one for each."""
    if path.suffix == ".csv":
        written = [path.with_name(f"{path.stem}{suffix}.csv") for suffix in tables]
        for name, (rows, _) in zip(written, tables.values(), strict=True):
            with open(name, "w", newline="", encoding="utf-8", errors="replace") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                for row in rows:  # what there is not is empty, and never is inf
                    numbers = {k: f"{v:.10g}".replace("nan", "") for k, v in row.items() if isinstance(v, float)}
                    writer.writerow(row | numbers)
        return written
    table, start = (markdown_table, "") if path.suffix == ".md" else (latex_table, "% ")
    shown = [table(lines) for _, lines in tables.values() if lines]
    path.write_text("\n\n".join([*shown, *(start + line for line in below)]) + "\n", "utf-8", "replace")
    return [path]


def report(args: Args) -> None:
    """Reads, groups, prints the table and what it means, and writes what was asked for."""
    runs = read_runs(args)
    for flag, path in (("out", args.out and args.out.parent), ("pictures", args.pictures)):
        try:
            os.makedirs(path or ".", exist_ok=True)
        except OSError as error:
            problem = f"no folder that can be written to ({error.strerror})"
            raise UsageError(f"--{flag} {getattr(args, flag)}: {problem}") from error
    keys = list(args.group_by) or [key for key in differing_keys(runs) if key != "env_id" or not args.normalise]
    groups = group_runs(runs, keys)
    rows = [summarise(group, env, args) for group in groups for env in group.environments]
    tables = {"": (rows, cells(rows, args)), "_runs": (rows_of_runs(groups, args), [])}
    if args.normalise:
        tables["_all"] = aggregate(groups, args)
    verdicts = compare(groups, args)
    points = " or ".join(sorted({run.smoothing for run in runs}))
    counted = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}, grouped by {', '.join(keys)}"
    below = [f"{counted}; metric: {args.metric}, points are {points}."]
    if tested := sum(verdict.p is not None for verdict in verdicts):
        correction = f", p after Holm's correction over {tested} pairs" if tested > 1 else ""
        below.append(f"Verdicts: exact two-sided Mann-Whitney test at {LEVEL:.0%}{correction}.")
    if args.normalise and len({frozenset(group.environments) for group in groups}) > 1:
        below.append("note: the groups are over different environments, so their normalised scores are not comparable")
    below += [verdict.sentence() for verdict in verdicts] + [f"note: {line}" for line in notes(groups)]
    skrl = [run for run in runs if run.keys["program"] == "skrl"]
    below += ["note: skrl counts a step of all its environments as one; times their number it is ours."] * bool(skrl)
    below = [" ".join(line.split()) for line in below]  # a name may hold line breaks
    print("\n\n".join([*(markdown_table(lines) for _, lines in tables.values() if lines), "\n".join(below)]))
    written = write_tables(args.out, tables, below) if args.out else []
    written += write_pictures(groups, verdicts, args) if args.pictures else []
    if written:
        print(f"written: {', '.join(map(str, written))}")


def main() -> None:
    """Runs the command line: status 0 when done, 2 when the arguments are wrong."""
    sys.stdout.reconfigure(errors="replace")  # what the terminal has no letter for
    try:
        report(tyro.cli(Args))
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

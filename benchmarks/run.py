"""Repeats the figures that the README claims: runs a table of commands, and compares what came out.

Run:    python benchmarks/run.py --list
        python benchmarks/run.py --only cartpole-dqn --jobs 2
        python benchmarks/run.py --only peers-cartpole peers-plate --out benchmarks/results
        python benchmarks/run.py --only cartpole-ppo --ray auto
Suite:  a TOML file of [[entry]] tables, `Entry` describes their keys. A learning entry is a training for each of its
        seeds. A report is a command that measures by itself and writes a Markdown file; reports run last, and alone.
Order:  at most --jobs at a time. Each training gets --threads CPU threads, or its share of the cores, or what its entry
        fixes; the environment variables of OpenMP and MKL say the same.
Files:  RUN_DIR/ENTRY/ holds the run folders, and for each seed S
        started-S.json  what was started, so that a run that was cut off is found again,
        done-S.json     the closing eval lines, command, versions, machine, date, wall time: a run with it is skipped,
        log-S.txt, errors-S.txt  what it printed, all its starts one after another.
        RUN_DIR/results.csv has a row for each evaluation of each run that is done, with --out also DIR/TASK.csv for
        each task (a group, or an entry that is in none), the comparison in DIR/TASK.md and pictures in DIR/TASK/.
Claims: where an entry has figures, its line says "holds" or "falls short". Seeds other than those of the claim have no
        say in that. What came out may be below the claim by what chance explains: of several seeds, whose means are
        compared, by the deviation of the claimed ones; of one seed by two standard errors over its episodes; of a ratio
        of speeds, which a report measures, by a twentieth.
Again:  the same command skips what is done, and resumes what was cut off from its last checkpoint; where there is none,
        it starts anew. So does a run whose command in the suite has changed. Nothing is ever deleted.
Times:  wall seconds are those of the training's process, its start and its evaluations included. Of a run that was cut
        off by a kill, the time up to its last checkpoint counts.
Ray:    with --ray the trainings run on a cluster, as many at once as it has CPUs, each with as many as its threads, 1
        unless --threads or its entry says otherwise. What they write comes here while they run, a checkpoint when it is
        whole. A run whose node died goes on elsewhere from the newest one, ten times at most. Reports run here.
Signal: Ctrl-C, SIGTERM and a closed terminal end the runs, which write their checkpoints (on Windows they are killed,
        and keep the last). A second signal kills.
Status: 0 when all is done, 1 when something failed, 2 when the arguments are wrong, 128 + its number after a signal.
"""

import csv
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil
import tyro

ROOT = Path(__file__).resolve().parent.parent
COMPARE = ROOT / "compare_runs.py"
COLUMNS = [
    *("entry", "script", "env_id", "flags", "seed", "evaluation", "mean", "std", "episodes", "mean_length"),
    *("wall_seconds", "steps", "steps_per_second", "starts", "threads", "command", "versions", "machine", "date"),
]


class UsageError(Exception):
    """What the user asked for cannot be done: one line on standard error, exit status 2."""


class RunError(Exception):
    """A run failed: the others go on, and the exit status is 1."""


@dataclass(frozen=True)
class Args:
    """Repeats the figures that the README claims, and compares what came out."""

    suite: Path = ROOT / "benchmarks" / "suite.toml"
    """TOML file of the commands"""
    only: tuple[str, ...] = ()
    """names of entries or of whole groups; empty: all"""
    seeds: tuple[int, ...] = ()
    """seeds in place of those in the suite"""
    list: bool = False
    """show the entries, what they claim and what is done, and run nothing"""
    jobs: int = 1
    """runs at a time"""
    threads: int = 0
    """CPU threads of each run where its entry does not fix them; 0: cores / jobs, at least 1; with --ray 1"""
    ray: str | None = None
    """run the trainings on the Ray cluster at this address, host:port or auto, in place of --jobs"""
    run_dir: Path = Path("runs/benchmarks")
    """parent folder of the entries' folders"""
    compare: bool = True
    """end with compare_runs.py for each task"""
    out: Path | None = None
    """folder for a CSV file of each task, and its comparison; it is made if it does not exist"""

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ValueError(f"--jobs {self.jobs} must be at least 1")
        if self.threads < 0:
            raise ValueError(f"--threads {self.threads} must be at least 0")


@dataclass(frozen=True)
class Entry:
    """A command of the suite, whose keys are these names."""

    name: str
    """of the entry, and of its folder"""
    script: str
    """path from the root of the repository"""
    claims: str
    """the figure that the README gives, in words; empty: it gives none"""
    claimed: list[float] = field(default_factory=list)
    """the same in numbers: of a learning entry the first evaluation of each of its seeds, of a report its ratios"""
    env_id: str = ""
    flags: str = ""
    """as on a command line, without those that are keys here"""
    kind: str = "learning"
    """or report"""
    group: str = ""
    """entries of one group are compared with each other"""
    seeds: list[int] = field(default_factory=list)
    threshold: float | None = None
    """mean return to reach"""
    metric: str = "eval"
    """of the comparison"""
    threads: int = 0
    """CPU threads that are fixed; 0: what --threads says"""
    evaluations: list[str] = field(default_factory=list)
    """flags of further evaluations after the training; without any, the training's closing line is the result"""
    checkpoint: str = "latest.pt"
    """which of a run the further evaluations take"""

    @property
    def task(self) -> str:
        """What it is compared in."""
        return self.group or self.name

    @property
    def arguments(self) -> list[str]:
        """What makes the training what it is, apart from the seed."""
        env_id = ["--env-id", self.env_id] if self.env_id else []
        return [self.script, *env_id, *shlex.split(self.flags)]


@dataclass(frozen=True)
class Job:
    """An entry with one of its seeds, or a report, which has none."""

    entry: Entry
    seed: int | None
    folder: Path
    """of the entry"""

    @property
    def title(self) -> str:
        """How lines of state call it."""
        return self.entry.name if self.seed is None else f"{self.entry.name}, seed {self.seed}"

    def file(self, kind: str, ending: str) -> Path:
        """Returns the path of one of its files."""
        return self.folder / (f"{kind}.{ending}" if self.seed is None else f"{kind}-{self.seed}.{ending}")

    def read(self, kind: str) -> dict[str, Any]:
        """Returns what started- or done-SEED.json says, or an empty dict."""
        with suppress(OSError, ValueError):
            return json.loads(self.file(kind, "json").read_text(encoding="utf-8"))
        return {}

    def write(self, kind: str, content: dict[str, Any]) -> None:
        """Writes such a file, at once or not at all."""
        path = self.file(kind, "json")
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)

    def run_folders(self) -> list[str]:
        """Returns the names of this seed's run folders."""
        pattern = re.compile(rf".+__{self.seed}__\d+(-\d+)?")
        return sorted(x.name for x in self.folder.iterdir() if pattern.fullmatch(x.name) and x.is_dir())

    def own_run_folder(self, started: dict[str, Any]) -> Path | None:
        """Returns the folder that the run made since it was started, None if it has not come so far."""
        made = sorted(set(self.run_folders()) - set(started["folders_before"]))
        return self.folder / made[-1] if made else None

    def done(self) -> dict[str, Any]:
        """Returns what done-SEED.json says if it is of this command and its run is there, else an empty dict."""
        done = self.read("done")
        if any(done.get(key) != getattr(self.entry, key) for key in ("arguments", "evaluations", "checkpoint")):
            return {}
        return done if (self.folder / done.get("run_folder", done["results"][0])).exists() else {}


# ----- The suite -----
def read_suite(path: Path) -> list[Entry]:
    """Returns the entries of a suite.

    Raises:
        UsageError: it cannot be read, or an entry lacks a key or has a wrong one.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--suite {path}: cannot be read ({' '.join(str(error).split())})") from error
    tables = content.get("entry")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"--suite {path}: there is no [[entry]] in it")
    entries = []
    for i, table in enumerate(tables, 1):
        where = f"--suite {path}: entry {i}, {table.get('name', 'without a name')}"
        entries.append(read_entry(table, where))
    names = [entry.name for entry in entries]
    taken = [name for name in names if names.count(name) > 1 or name in {entry.group for entry in entries}]
    if taken:
        raise UsageError(f"--suite {path}: the name {taken[0]} comes twice")
    return entries


def read_entry(table: dict[str, Any], where: str) -> Entry:
    """Returns an entry from its table.

    Raises:
        UsageError: a key is missing, unknown or of a wrong type.
    """
    kind = table.get("kind", "learning")
    if kind not in ("learning", "report"):
        raise UsageError(f"{where}: kind {kind!r} must be 'learning' or 'report'")
    needed = {"name", "script", "claims"} | ({"env_id", "flags", "seeds", "threshold"} if kind == "learning" else set())
    for problem, keys in (
        ("lacks", needed - set(table)),
        ("has unknown", set(table) - {x.name for x in fields(Entry)}),
    ):
        if keys:
            raise UsageError(f"{where} {problem} {', '.join(sorted(keys))}")
    types = {
        "seeds": (list, int),
        "claimed": (list, (int, float)),
        "evaluations": (list, str),
        "threads": (int, None),
        "threshold": ((int, float), None),
    }
    for key, value in table.items():
        outer, inner = types.get(key, (str, None))
        if not isinstance(value, outer) or (inner and not all(isinstance(item, inner) for item in value)):
            raise UsageError(f"{where}: {key} = {value!r} has the wrong type")
    entry = Entry(**table)
    if not re.fullmatch(r"[\w.-]+", entry.name) or not re.fullmatch(r"[\w.-]*", entry.group):
        raise UsageError(f"{where}: name and group must be letters, digits, '-', '_' and '.'")
    if kind == "learning" and not entry.seeds:
        raise UsageError(f"{where}: seeds is empty")
    if kind == "learning" and entry.claimed and len(entry.claimed) != len(entry.seeds):
        raise UsageError(f"{where}: claimed has {len(entry.claimed)} figures of {len(entry.seeds)} seeds")
    return entry


def chosen(entries: list[Entry], only: tuple[str, ...]) -> list[Entry]:
    """Returns the entries of these names and groups, all for none.

    Raises:
        UsageError: there is none of a name; the message has all.
    """
    groups = list(dict.fromkeys(entry.group for entry in entries if entry.group))
    known = [*(entry.name for entry in entries), *groups]
    for name in only:
        if name not in known:
            raise UsageError(f"--only {name}: there is no such entry or group; there are {', '.join(known)}")
    return [entry for entry in entries if not only or {entry.name, entry.group} & set(only)]


def jobs_of(entries: list[Entry], args: Args) -> list[Job]:
    """Returns the jobs in order: all trainings, then all reports."""
    run_dir = args.run_dir.absolute()
    jobs = []
    for entry in sorted(entries, key=lambda entry: entry.kind == "report"):
        seeds = [None] if entry.kind == "report" else list(dict.fromkeys(args.seeds or entry.seeds))
        jobs += [Job(entry, seed, run_dir / entry.name) for seed in seeds]
    return jobs


# ----- Processes -----
class Children:
    """The processes that run at the moment, and whether they are to end."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: set[Any] = set()
        self.signals: list[int] = []
        self.cluster: Any = None

    @contextmanager
    def catching_signals(self) -> Iterator[None]:
        """Notes Ctrl-C, SIGTERM and the closing of the terminal in `signals`."""

        def note(signum: int, frame: FrameType | None) -> None:
            self.signals.append(signum)

        caught = [signal.SIGINT, signal.SIGTERM]
        if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            # The terminal was closed; under nohup that is ignored.
            caught.append(signal.SIGHUP)
        previous = {signum: signal.signal(signum, note) for signum in caught}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def start(
        self, command: list[str], stdout: IO[str], stderr: IO[str], environment: dict[str, str]
    ) -> subprocess.Popen:
        """Starts a process in a group of its own: Ctrl-C in a terminal reaches only this program, which ends them once.

        Raises:
            RunError: all are to end, or there is no such program.
        """
        group = (
            {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
            if sys.platform == "win32"
            else {"start_new_session": True}
        )
        with self.lock:
            if self.signals:
                raise RunError("not started")
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment, **group
                )
            except OSError as error:
                raise RunError(str(error)) from error
            self.running.add(process)
            return process

    def start_on_cluster(self, command: list[str], folder: Path, threads: int, stdout: IO[str], stderr: IO[str]) -> Any:  # noqa: ANN401
        """Starts a process on the cluster, as soon as it has so many CPUs; its files come to `folder`.

        Raises:
            ConnectionError: its node died.
            ValueError: it cannot be started, or all are to end.
        """
        outputs = {"log": stdout.buffer, "errors": stderr.buffer}
        process = self.cluster.start(command, folder, threads, outputs, self.signals)
        with self.lock:
            self.running.add(process)
            if self.signals:
                process.terminate()
        return process

    def wait(self, process: Any) -> int:  # noqa: ANN401
        """Returns the exit status."""
        try:
            return process.wait()
        finally:
            with self.lock:
                self.running.discard(process)

    def end(self, at_once: bool) -> None:
        """Asks all processes to end in order, or kills them."""
        with self.lock:
            for process in self.running:
                with suppress(OSError):
                    if not at_once or sys.platform == "win32":
                        process.terminate()
                    elif isinstance(process, subprocess.Popen):
                        os.killpg(process.pid, signal.SIGKILL)
                    else:
                        process.kill()


class Runner:
    """Runs jobs, prints a line of state for each, and leaves done-SEED.json behind."""

    def __init__(self, args: Args, children: Children) -> None:
        self.args, self.children = args, children
        self.cores = usable_cores()

    def say(self, job: Job, text: str) -> None:
        """Prints a line of state, in one piece."""
        sys.stdout.write(f"{datetime.now():%H:%M:%S} {job.title}: {text}\n")
        sys.stdout.flush()

    def threads(self, entry: Entry) -> int:
        """Returns how many CPU threads a training of this entry gets."""
        share = 1 if self.args.ray else max(self.cores // self.args.jobs, 1)
        return entry.threads or self.args.threads or share

    def run(self, job: Job, deaths: int = 0) -> bool:
        """Runs a job to its end, and says whether it is done; so many nodes have died under it."""
        done = job.done()
        if done:
            self.say(job, f"skipped, done on {done['date'][:10]}: {done['results'][0]}")
            return True
        try:
            job.folder.mkdir(parents=True, exist_ok=True)
            done = self.run_report(job) if job.seed is None else self.run_training(job)
            job.write("done", done)
        except (RunError, OSError, ValueError) as error:
            if isinstance(error, ConnectionError) and deaths < 10 and not self.children.signals:
                self.say(job, str(error))
                return self.run(job, deaths + 1)
            if self.children.signals:
                self.say(job, "cut off; the same command goes on with it")
            else:
                self.say(job, f"failed: {error}")
            return False
        self.say(job, f"done in {done['wall_seconds']:,.0f} s: {done['results'][0]}")
        return True

    def run_training(self, job: Job) -> dict[str, Any]:
        """Trains and evaluates; returns the content of done-SEED.json.

        Raises:
            RunError: one of its processes failed, or the training of an earlier start still runs.
        """
        entry, threads = job.entry, self.threads(job.entry)
        started, run_folder = self.unfinished(job)
        flags = ["--seed", str(job.seed), *entry.arguments[1:], "--threads", str(threads)]
        python = [sys.executable, str(ROOT / entry.script)]
        command = [*python, *flags, "--run-dir", str(job.folder)]
        if run_folder:
            command += ["--resume", str(run_folder)]
            started["starts"] += 1
            self.say(job, f"resumed from {run_folder.name}")
        else:
            left = " anew, since there is no checkpoint" if started else ""
            started = {"arguments": entry.arguments, "folders_before": job.run_folders(), "seconds": 0.0, "starts": 1}
            self.say(job, f"started{left}")
        results = [self.run_process(job, command, threads, started)]
        run_folder = job.own_run_folder(started)
        if run_folder is None:
            raise RunError(f"it made no run folder in {job.folder}")
        if entry.evaluations:
            base = [*python, "--threads", str(threads), "--evaluate", str(run_folder / entry.checkpoint)]
            results = [self.run_process(job, base + shlex.split(flags), threads) for flags in entry.evaluations]
        shown = Path(self.args.run_dir.name if self.args.run_dir.is_absolute() else self.args.run_dir) / entry.name
        about = json.loads((run_folder / "args.json").read_text(encoding="utf-8"))
        steps = steps_of(run_folder, about)
        return {
            "arguments": entry.arguments,
            "evaluations": entry.evaluations,
            "checkpoint": entry.checkpoint,
            "results": results,
            "run_folder": run_folder.name,
            "command": shlex.join(["python", entry.script, *flags, "--run-dir", shown.as_posix()]),
            "threads": threads,
            "starts": started["starts"],
            "wall_seconds": round(started["seconds"], 3),
            "steps": steps,
            "versions": versions_of(about),
            "machine": started["machine"],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def unfinished(self, job: Job) -> tuple[dict[str, Any], Path | None]:
        """Returns what an earlier start of this command left: its record and the run folder, if there is a checkpoint.

        Raises:
            RunError: it still runs.
        """
        started = job.read("started")
        if started and is_running(started):
            raise RunError(f"process {started['pid']} of an earlier start still runs; end it or wait for it")
        if started.get("arguments") != job.entry.arguments:
            return {}, None
        run_folder = job.own_run_folder(started)
        checkpoint = run_folder / "latest.pt" if run_folder else None
        if checkpoint is None or not checkpoint.is_file():
            return started, None
        if started["running"]:
            # Its start was killed together with this program: what it did since its checkpoint is done once more.
            started["seconds"] += max(checkpoint.stat().st_mtime - started["time"], 0.0)
        return started, run_folder

    def run_process(
        self, job: Job, command: list[str], threads: int | None, started: dict[str, Any] | None = None
    ) -> str:
        """Runs one process of a job to its end, output to its files, and returns its eval line, if it prints one.

        Args:
            job: whose files.
            command: of the process.
            threads: for the libraries that take their number from the environment; None: as they are.
            started: of a training: the record to keep while it runs.

        Raises:
            RunError: it failed; the message is its last line on standard error.
        """
        # Unbuffered, so that the log shows where a run stands.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if threads:
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        log, errors = job.file("log", "txt"), job.file("errors", "txt")
        with open(log, "a", encoding="utf-8") as stdout, open(errors, "a", encoding="utf-8") as stderr:
            log_start, errors_start = (os.fstat(file.fileno()).st_size for file in (stdout, stderr))
            if self.children.cluster and threads:
                process = self.children.start_on_cluster(command, job.folder, threads, stdout, stderr)
            else:
                process = self.children.start(command, stdout, stderr, environment)
            start = time.time()
            if started is not None:
                started["machine"] = getattr(process, "machine", machine(self.cores))
                job.write("started", {**started, "running": True, "time": start, **identity(process)})
            try:
                status = self.children.wait(process)
            except ConnectionError:
                if started is not None:
                    job.write("started", {**started, "running": True, "time": start})
                raise
        if started is not None:
            started["seconds"] += time.time() - start
            job.write("started", {**started, "running": False})
        if status:
            lines = lines_from(errors, errors_start)
            raise RunError(f"{lines[-1] if lines else 'nothing on standard error'} (status {status}, see {errors})")
        lines = [line for line in lines_from(log, log_start) if line.startswith("eval: ")]
        if not lines and job.seed is not None:
            raise RunError(f"it printed no eval line (see {log})")
        return lines[-1] if lines else ""

    def run_report(self, job: Job) -> dict[str, Any]:
        """Runs a command that measures by itself; returns the content of done.json.

        Raises:
            RunError: it failed.
        """
        self.say(job, "started")
        out = job.folder / f"{job.entry.name}.md"
        start = time.time()
        self.run_process(
            job, [sys.executable, str(ROOT / job.entry.script), *job.entry.arguments[1:], "--out", str(out)], None
        )
        if not out.is_file():
            raise RunError(f"it wrote no {out}")
        return {
            "arguments": job.entry.arguments,
            "evaluations": job.entry.evaluations,
            "checkpoint": job.entry.checkpoint,
            "results": [str(out)],
            "command": shlex.join(["python", *job.entry.arguments, "--out", out.name]),
            "wall_seconds": round(time.time() - start, 3),
            "machine": machine(self.cores),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def run_all(self, jobs: list[Job]) -> bool:
        """Runs all jobs, at most so many at a time as the arguments say, and returns whether all are done."""
        trainings, reports = ([job for job in jobs if (job.seed is None) == is_report] for is_report in (False, True))
        # Nothing else may run while speed is measured.
        results = []
        cluster = self.children.cluster
        for group, workers in ((trainings, max(sum(cluster.cpus()), 1) if cluster else self.args.jobs), (reports, 1)):
            if self.children.signals:
                return False
            with ThreadPoolExecutor(workers) as pool:
                results += self.wait_for([pool.submit(self.run, job) for job in group])
        return all(results)

    def wait_for(self, futures: list[Future]) -> list[bool]:
        """Returns all results; ends the processes when signals come."""
        seen = 0
        waiting = set(futures)
        while waiting:
            # In short pieces, since on Windows a wait is deaf to Ctrl-C.
            waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED).not_done
            if len(self.children.signals) > seen:
                seen = len(self.children.signals)
                for future in waiting:
                    future.cancel()
                waiting = {future for future in waiting if not future.cancelled()}
                self.children.end(at_once=seen > 1)
        return [future.result() for future in futures if not future.cancelled()]


def identity(process: subprocess.Popen) -> dict[str, Any]:
    """Returns what tells a process from a later one of the same number; nothing of one that has ended."""
    with suppress(psutil.Error):
        return {"pid": process.pid, "created": psutil.Process(process.pid).create_time()}
    return {}


def is_running(started: dict[str, Any]) -> bool:
    """Says whether the process of a record still runs."""
    with suppress(psutil.Error, KeyError):
        process = psutil.Process(started["pid"])
        return process.create_time() == started["created"] and process.status() != psutil.STATUS_ZOMBIE
    return False


def lines_from(path: Path, start: int) -> list[str]:
    """Returns the lines of a file that are not empty, from a byte on."""
    with open(path, "rb") as file:
        file.seek(start)
        text = file.read().decode("utf-8", errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


# ----- Results -----
def steps_of(run_folder: Path, about: dict[str, Any]) -> int:
    """Returns the environment steps of a run: of its last checkpoint, or what args.json says where there is none."""
    path = run_folder / "latest.pt"
    if not path.is_file():
        return int(about.get("global_step") or 0)
    import torch

    return int(torch.load(path, map_location="cpu", mmap=True, weights_only=True)["counters"]["global_step"])


def versions_of(about: dict[str, Any]) -> str:
    """Returns the versions that args.json tells, in words."""
    versions = [f"{name} {version}" for name, version in about.get("versions", {}).items()]
    return ", ".join([*versions, f"commit {(about.get('git_commit') or 'unknown')[:7]}"])


def usable_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(cores: int) -> str:
    """Returns the machine in words: CPU, cores that this process may use, system."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{cpu}, {cores} cores, {platform.system()}"


def numbers_of(line: str) -> dict[str, float]:
    """Returns the pairs of an eval line."""
    return {name: float(value) for name, _, value in (pair.partition("=") for pair in line.split()[1:])}


def done_jobs(entries: list[Entry], run_dir: Path) -> list[tuple[Job, dict[str, Any]]]:
    """Returns all runs that are done, of any seed, with what done-SEED.json says."""
    found = []
    for entry in entries:
        folder = run_dir / entry.name
        seeds = sorted(int(path.stem.removeprefix("done-")) for path in folder.glob("done-*.json"))
        jobs = [Job(entry, seed, folder) for seed in seeds]
        found += [(job, done) for job in jobs if (done := job.done())]
    return found


def rows_of(job: Job, done: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the rows of results.csv, one for each evaluation."""
    for evaluation, line in zip(job.entry.evaluations or ["closing line"], done["results"], strict=True):
        seconds = done["wall_seconds"]
        columns = asdict(job.entry) | done | numbers_of(line)
        columns |= {"entry": job.entry.name, "seed": job.seed, "evaluation": evaluation}
        columns["steps_per_second"] = f"{done['steps'] / seconds:.1f}" if seconds else ""
        yield {name: columns[name] for name in COLUMNS}


def write_csv(path: Path, runs: list[tuple[Job, dict[str, Any]]]) -> None:
    """Writes the rows of these runs."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for run in runs for row in rows_of(*run))


def summary(entries: list[Entry], runs: list[tuple[Job, dict[str, Any]]]) -> str:
    """Returns a line for each entry: what it reached, what was claimed, and whether that holds."""
    lines = []
    for entry in entries:
        results = {job.seed: numbers_of(done["results"][0]) for job, done in runs if job.entry == entry}
        if not results:
            continue
        found = ", ".join(f"{numbers['mean']:g}" for numbers in results.values())
        reached = sum(numbers["mean"] >= entry.threshold for numbers in results.values())
        seeds = ("seed " if len(results) == 1 else "seeds ") + " ".join(map(str, results))
        line = f"{entry.name}, {seeds}: {found}; {reached} of {len(results)} reach {entry.threshold:g}"
        line += f"; claimed: {entry.claims}" if entry.claims else ""
        lines.append(line + (f"; {verdict(entry, results)}" if entry.claimed else ""))
    return "\n".join(lines)


def verdict(entry: Entry, results: dict[int, dict[str, float]]) -> str:
    """Returns whether the figures of a claim hold, by the eval lines of some of its seeds and of others.

    What is claimed of a peer stands beside ours, so better figures refute it too.
    """
    claimed = {seed: figure for seed, figure in zip(entry.seeds, entry.claimed, strict=True) if seed in results}
    others = [seed for seed in results if seed not in entry.seeds]
    note = f"; not claimed: seeds {' '.join(map(str, others))}" if others else ""
    if not claimed:
        return "none of the claimed seeds was run" + note
    if len(entry.claimed) > 1:
        allowed, why = statistics.stdev(entry.claimed), "the deviation over the claimed seeds"
    else:
        numbers = results[entry.seeds[0]]
        allowed, why = 2 * numbers["std"] / numbers["episodes"] ** 0.5, "two standard errors"
    short = statistics.fmean(claimed.values()) - statistics.fmean(results[seed]["mean"] for seed in claimed)
    peer = Path(entry.script).name == "peer_sb3.py"
    # What is printed is rounded.
    word = "falls short" if short > allowed + 1e-9 else "is passed" if peer and -short > allowed + 1e-9 else "holds"
    some = "" if len(claimed) == len(entry.claimed) else f" in {len(claimed)} of {len(entry.claimed)} seeds"
    return f"{word}{some} ({-short:+.4g} beside the claim, allowed {'+-' if peer else '-'}{allowed:.4g}: {why}){note}"


def report_verdict(entry: Entry, done: dict[str, Any]) -> str:
    """Returns whether the ratios that a report measured are those of the claim."""
    text = Path(done["results"][0]).read_text(encoding="utf-8")
    # Not what another line measures, such as milliseconds: those of steps/s are called ratios.
    found = [float(x) for x in re.findall(r"ratio.* to reach: .*measured: (\d+\.\d+)", text)]
    if len(found) != len(entry.claimed):
        return f"has {len(found)} ratios where {len(entry.claimed)} are claimed"
    word = "holds" if all(x >= 0.95 * y for x, y in zip(found, entry.claimed, strict=True)) else "falls short"
    return f"{word} ({', '.join(f'{x:g}' for x in found)}; claimed: {', '.join(f'{x:g}' for x in entry.claimed)})"


def compare(task: str, runs: list[tuple[Job, dict[str, Any]]], out: Path | None) -> bool:
    """Compares the runs of a task by compare_runs.py, which prints a table; returns whether it could."""
    entry = runs[0][0].entry
    folders = [str(job.folder / done["run_folder"]) for job, done in runs]
    command = [sys.executable, str(COMPARE), *folders, "--metric", entry.metric]
    if len({job.entry.threshold for job, _ in runs}) == 1:
        command += [f"--threshold={entry.threshold:g}"]
    if out:
        command += ["--out", str(out / f"{task}.md"), "--pictures", str(out / task)]
    print(f"\ncomparison of {task}:", flush=True)
    return subprocess.run(command).returncode == 0


def listing(entries: list[Entry], args: Args) -> str:
    """Returns a paragraph for each entry."""
    lines = []
    for entry in entries:
        jobs = jobs_of([entry], args)
        kind = entry.kind if entry.kind == "report" else "seeds " + " ".join(str(job.seed) for job in jobs)
        done = sum(bool(job.done()) for job in jobs)
        group = f", group {entry.group}" if entry.group else ""
        lines.append(f"{entry.name}{group}: {kind}, done {done} of {len(jobs)}")
        lines.append(f"    python {shlex.join(entry.arguments)}")
        if entry.threshold is not None:
            lines.append(f"    to reach: {entry.threshold:g}" + (f"; claimed: {entry.claims}" if entry.claims else ""))
        elif entry.claims:
            lines.append(f"    claimed: {entry.claims}")
    return "\n".join(lines)


def make_folder(path: Path, flag: str) -> None:
    """Makes a folder that can be written to.

    Raises:
        UsageError: it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".{os.getpid()}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"{flag} {path}: is no folder that can be written to ({error.strerror})") from error


def run_suite(args: Args) -> int:
    """Does what the arguments say, and returns the exit status.

    Raises:
        UsageError: they are wrong.
    """
    suite = read_suite(args.suite)
    entries = chosen(suite, args.only)
    if args.list:
        print(listing(entries, args))
        return 0
    for entry in entries:
        if not (ROOT / entry.script).is_file():
            raise UsageError(f"--suite {args.suite}: {entry.name} wants {entry.script}, which does not exist")
    make_folder(args.run_dir, "--run-dir")
    if args.out:
        make_folder(args.out, "--out")
    children = Children()
    with ExitStack() as stack:
        if args.ray:
            import ray_jobs

            try:
                children.cluster = stack.enter_context(ray_jobs.joined(args.ray))
            except ConnectionError as error:
                raise UsageError(str(error)) from error
        stack.enter_context(children.catching_signals())
        all_done = Runner(args, children).run_all(jobs_of(entries, args))
        runs = done_jobs(suite, args.run_dir.absolute())
        write_csv(args.run_dir / "results.csv", runs)
        if not children.signals:
            all_done &= show(entries, runs, args)
    return 128 + children.signals[0] if children.signals else int(not all_done)


def show(entries: list[Entry], runs: list[tuple[Job, dict[str, Any]]], args: Args) -> bool:
    """Prints what came out, and writes what --out asks for; returns whether it could compare the runs."""
    print(summary(entries, runs))
    for entry in entries:
        done = Job(entry, None, args.run_dir.absolute() / entry.name).done() if entry.kind == "report" else {}
        if done and entry.claimed:
            print(f"{entry.name}: {report_verdict(entry, done)}")
    compared = []
    for task in dict.fromkeys(entry.task for entry in entries):
        of_task = [run for run in runs if run[0].entry.task == task]
        if of_task and args.out:
            write_csv(args.out / f"{task}.csv", of_task)
        if of_task and args.compare:
            compared.append(compare(task, of_task, args.out))
    return all(compared)


def main() -> None:
    """Runs the command line."""
    args = tyro.cli(Args)
    try:
        sys.exit(run_suite(args))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

"""What the speed_*.py share: a process of its own for each measurement, the machine in words, report and CSV file."""

import csv
import importlib.metadata
import io
import multiprocessing
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent


def check_args(args: Any, positive: tuple[str, ...]) -> None:  # noqa: ANN401 (each script has its own)
    """Raises a ValueError unless the named arguments are at least 1, and args.out is None or a Markdown file's path."""
    for name in positive:
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.out and (args.out.suffix == ".csv" or not args.out.parent.is_dir()):
        raise ValueError(f"--out {args.out}: must be a Markdown file in a folder that exists")


def in_own_process(function: Callable, *args: Any) -> Any:  # noqa: ANN401 (what the function takes and returns)
    """Returns what a function returns in a fresh process: no thread setting or allocator leaks into the next one."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def peak_rss_mib() -> float:
    """Returns the largest resident memory of this process so far, in MiB."""
    if sys.platform == "linux":
        # Not getrusage, whose maximum starts at the size of the process that started this one.
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**10
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def num_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def median_and_extremes(numbers: list[float]) -> str:
    """Returns numbers in words."""
    return f"{median(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"


def heading(script: str, packages: tuple[str, ...], device: str, load: float) -> list[str]:
    """Returns a report's lines on date, machine, versions, commit and command; `device` is "cpu" or a GPU's name."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cpu = f"{cpu}, {num_cores()} cores, {'no GPU used' if device == 'cpu' else device}, {platform.system()}"
    versions = [f"python {platform.python_version()}"]
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return [
        f"- Date: {datetime.now(UTC).isoformat(timespec='seconds')}",
        f"- Machine: {cpu}; load average at the start: {load:.2f}",
        f"- Versions: {', '.join(versions)}; commit {commit()}",
        f"- Command: `{command(script)}`",
    ]


def commit() -> str:
    """Returns the short hash of the commit that was measured, with -dirty after it if a file differed."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def command(script: str) -> str:
    """Returns the command line; of an absolute path only the file's name, since the report is to be published."""
    flags = [flag.rpartition("=") for flag in sys.argv[1:]]
    shown = [f"{flag}{sign}{Path(value).name if Path(value).is_absolute() else value}" for flag, sign, value in flags]
    return shlex.join(["python", f"benchmarks/{script}", *shown])


def publish(measurements: Iterator[Any], report: Callable[[list[Any], float], str], out: Path | None) -> None:
    """Writes each measurement, a dataclass, to the CSV file beside `out` as it comes, then the report; prints it.

    The report is made of all measurements and of the machine's load average before the first one.
    """
    load, done = psutil.getloadavg()[0], []
    with open(out.with_suffix(".csv"), "w", newline="") if out else nullcontext(io.StringIO()) as file:
        for measurement in measurements:
            rows = csv.DictWriter(file, asdict(measurement), lineterminator="\n")
            if not done:
                rows.writeheader()
            rows.writerow(asdict(measurement))
            file.flush()
            done.append(measurement)
    text = report(done, load)
    if out:
        out.write_text(text)
    print(text)

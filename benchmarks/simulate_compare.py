"""How often what compare_runs.py says is so: coverage of its intervals, false verdicts and found differences.

Run:    python benchmarks/simulate_compare.py --out benchmarks/simulate_compare.md
Scores are drawn from known distributions, so that the truth is known. Coverage is the share of samples whose interval
holds the true value. A false verdict is a table of groups of one distribution in which any pair gets a verdict.
"""

import contextlib
import csv
import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import tyro
from scipy.stats import binomtest, trim_mean
from scipy.stats import t as student

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import compare_runs

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
SHAPES: dict[str, Draw] = {
    "normal": lambda rng, size: rng.normal(300, 50, size),
    "skewed": lambda rng, size: 500 - rng.exponential(80, size),
    "two peaks": lambda rng, size: np.where(
        rng.random(size) < 0.7, rng.normal(450, 20, size), rng.normal(150, 50, size)
    ),
    "ceiling": lambda rng, size: np.minimum(rng.normal(480, 60, size), 500),
}
SIZES = (3, 5, 8, 10, 20)


@dataclass(frozen=True)
class Args:
    """Simulates tables of compare_runs.py, whose truth is known."""

    samples: int = 2000  # samples of each row on coverage, and tables of each row on verdicts
    command_lines: int = 50  # tables that are made by the command line too, from files
    seed: int = 1  # of the random numbers
    out: Path | None = None  # write the report to this file as well


def covered(intervals: np.ndarray, truth: float) -> float:
    """Returns the share of intervals (n, 2) that hold the truth; an end that equals it holds it."""
    return float(((intervals[:, 0] <= truth + 1e-9) & (truth - 1e-9 <= intervals[:, 1])).mean())


def t_intervals(samples: np.ndarray) -> np.ndarray:
    """Returns (samples, 2) Student's 95 % intervals of the mean of samples (samples, n)."""
    n = samples.shape[1]
    half = student.ppf(0.975, n - 1) * samples.std(1, ddof=1) / n**0.5
    return np.stack([samples.mean(1) - half, samples.mean(1) + half], 1)


def coverage_rows(args: Args, rng: np.random.Generator) -> Iterator[list[str]]:
    """Yields a row for each shape and number of runs: coverage and median width of each interval for a group."""
    for shape, draw in SHAPES.items():
        many = draw(rng, (1_000_000,))
        median, iqm, mean = np.median(many), trim_mean(many, 0.25), many.mean()
        for n in SIZES:
            samples = draw(rng, (args.samples, n))
            medians = [compare_runs.median_interval(row) for row in samples]
            said = "min to max" if medians[0][2] is None else f"{medians[0][2]:.1%}"
            ends = np.array([row[:2] for row in medians])
            students = t_intervals(samples)
            cells = [f"{covered(ends, median):.1%}", f"{np.median(np.diff(ends)):.0f}"]
            if n >= compare_runs.ENOUGH_RUNS:
                bootstrap = np.array([compare_runs.bootstrapped([row], compare_runs.iqm)[1:] for row in samples])
                cells += [f"{covered(bootstrap, iqm):.1%}", f"{np.median(np.diff(bootstrap)):.0f}"]
            else:
                cells += ["not shown", ""]
            cells += [f"{covered(students, mean):.1%}", f"{np.median(np.diff(students)):.0f}"]
            yield [shape, str(n), said, *cells]


def share_rows(args: Args, rng: np.random.Generator) -> Iterator[list[str]]:
    """Yields a row for each true share of runs that reach a threshold: coverage of Wilson's interval."""
    for share in (0.5, 0.8, 0.95):
        cells = []
        for n in SIZES:
            reached = rng.binomial(n, share, args.samples)
            ends = np.array([binomtest(k, n).proportion_ci(method="wilson") for k in range(n + 1)])
            cells.append(f"{covered(ends[reached], share):.1%}")
        yield [f"{share:.0%}", *cells]


def improvement_rows(args: Args, rng: np.random.Generator) -> Iterator[list[str]]:
    """Yields a row for each shift of two normal groups: coverage of the probability of improvement's interval."""
    for shift in (0, 1, 2):
        truth = float((rng.normal(shift, 1, 1_000_000) > rng.normal(0, 1, 1_000_000)).mean())
        cells = []
        for n in SIZES:
            x, y = rng.normal(shift, 1, (args.samples, n)), rng.normal(0, 1, (args.samples, n))
            seen = (x[:, :, None] > y[:, None]).mean((1, 2))
            ends = np.array([compare_runs.improvement_interval(float(p), n, n) for p in seen])
            cells.append(f"{covered(ends, truth):.1%}")
        yield [f"{truth:.2f}", *cells]


def has_verdict(groups: np.ndarray) -> bool:
    """Says whether any pair of groups (k, n) gets a verdict after Holm's correction."""
    p = [compare_runs.compare_in_all([(groups[i], groups[j])]) for i, j in combinations(range(len(groups)), 2)]
    return bool((compare_runs.holm(p) <= compare_runs.LEVEL).any())


def verdict_rows(args: Args, rng: np.random.Generator) -> Iterator[list[str]]:
    """Yields a row for each number of groups: share of tables of groups of one distribution with a verdict."""
    for k in (2, 3, 5, 10):
        cells = []
        for n in (3, 5, 10):
            shapes = list(SHAPES.values())
            tables = [shapes[i % len(shapes)](rng, (k, n)) for i in range(args.samples)]
            cells.append(f"{np.mean([has_verdict(table) for table in tables]):.1%}")
        yield [str(k), *cells]


def by_command_line(groups: np.ndarray) -> bool:
    """Says whether compare_runs.py, given files of runs with these scores (k, n), prints a verdict."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        for i, scores in enumerate(groups):
            for seed, score in enumerate(scores, 1):
                run = Path(folder) / f"Task-v0__group{i}__{seed}__0"
                run.mkdir()
                with open(run / "progress.csv", "w", newline="") as file:
                    rows = [(step, score) for step in (1000, 2000, 3000)]
                    csv.writer(file).writerows([("time/total_timesteps", "eval/mean_reward"), *rows])
        compare_runs.report(compare_runs.Args((folder,), metric="eval", smooth=1))
    return " scores higher than " in printed.getvalue()


def table(header: str, rows: Iterator[list[str]]) -> str:
    """Returns a Markdown table; its header's cells are parted by |."""
    names = header.split("|")
    return "\n".join("| " + " | ".join(row) + " |" for row in [names, ["---"] * len(names), *rows]) + "\n"


def report(args: Args) -> str:
    """Returns the whole report."""
    rng = np.random.default_rng(args.seed)
    groups = "|".join(f"{n} runs" for n in SIZES)
    error = 2 * (0.05 * 0.95 / args.samples) ** 0.5
    header = "scores|runs|median: says|covers|width|IQM, 95 %: covers|width|mean, t 95 %: covers|width"
    parts = [
        f"# What compare_runs.py says, and what is so\n\n{args.samples:,} samples a row, seed {args.seed}: "
        f"`python {Path(__file__).parent.name}/{Path(__file__).name} --samples {args.samples} --seed {args.seed}`.\n",
        "## Intervals of a group\n\nThe t interval is not printed; it stands here to compare.\n",
        table(header, coverage_rows(args, rng)),
        "## Share of runs that reach a threshold: coverage of Wilson's 95 % interval\n",
        table(f"true share|{groups}", share_rows(args, rng)),
        "## Probability of improvement: coverage of Newcombe's 95 % interval, normal scores\n",
        table(f"true probability|{groups}", improvement_rows(args, rng)),
        f"## False verdicts: tables of groups of one distribution with any verdict\n\nAllowed: {0.05 + error:.1%}.\n",
        table("groups|3 runs each|5 runs each|10 runs each", verdict_rows(args, rng)),
    ]
    apart = [np.array([[3], [0]]) + rng.normal(size=(2, 5)) for _ in range(args.samples)]
    found = np.mean([has_verdict(scores) for scores in apart])
    parts.append(f"## Found differences\n\nTwo groups of 5 runs, three deviations apart: a verdict in {found:.1%}.\n")
    equal = [rng.normal(size=(2, 5)) for _ in range(args.command_lines)]
    both = [*equal, *apart[: args.command_lines]]
    same = sum(by_command_line(scores) == has_verdict(scores) for scores in both)
    parts.append(
        f"By the command line, from files: the same answer in {same} of {len(both)} tables, half of each kind.\n"
    )
    return "\n".join(parts)


def main() -> None:
    """Prints the report, and writes it where --out says."""
    args = tyro.cli(Args)
    text = report(args)
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

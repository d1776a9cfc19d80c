"""benchmarks/run.py, its suite, and benchmarks/peer_sb3.py.

What only concerns the order, the files and the messages of runs is tested with a stub in place of a script, since a
real one takes seconds to start; whatever stops and goes on is tested with a real one.
"""

import csv
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import tyro
from conftest import ROOT
from short_runs import load, scalars, spy
from stable_baselines3.common import evaluation
from test_readme import TEXT, commands_of

sys.path.append(str(ROOT / "benchmarks"))
import peer_sb3
import run

DETAILS = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
SUITE = run.read_suite(ROOT / "benchmarks" / "suite.toml")
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="there processes get no signals")
STUB = """
import argparse, json, os, signal, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("seed", "env-id", "threads", "run-dir", "resume", "evaluate", "score", "fail", "meet", "eval-episodes"):
    parser.add_argument(f"--{name}")
parser.add_argument("--stubborn", action="store_true")
args = parser.parse_args()
if args.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if args.evaluate:
    mean = 8 if Path(args.evaluate).name == "best.pt" else 7
    print(f"eval: mean={mean} std=1 min=6 max=9 episodes={args.eval_episodes} mean_length=3")
    sys.exit()
if args.fail == args.seed:
    print("error: this is not the last line", file=sys.stderr)
    print("error: seed", args.seed, "fails", file=sys.stderr, flush=True)
    print("on standard output")
    sys.exit(3)
folder = Path(args.run_dir) / f"{args.env_id}__stub__{args.seed}__{int(time.time())}"
folder.mkdir()
content = {"global_step": 1000, "versions": {"python": "3.0", "torch": "9.9"}, "git_commit": "abcdef0123456789"}
threads = [args.threads, *(os.environ.get(x) for x in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))]
(folder / "args.json").write_text(json.dumps(content | {"threads": threads, "args": {}}))
if args.meet:
    # Goes on when so many runs are there at once.
    Path(args.meet, args.seed).touch()
    deadline = time.monotonic() + 60
    while len(list(Path(args.meet).iterdir())) < 2:
        assert time.monotonic() < deadline, "no other run came"
        time.sleep(0.01)
print("eval: mean=1 std=0 min=1 max=1 episodes=1 mean_length=1")
print(f"eval: mean={float(args.score) + int(args.seed):g} std=0.5 min=1 max=9 episodes=20 mean_length=30")
"""


def table_of(keys):
    """Returns an entry in TOML, where strings, numbers and lists of them are what they are in JSON."""
    return "\n".join(["[[entry]]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()), ""])


def entry(script, name="stub", **keys):
    """Returns a learning entry in TOML."""
    table = {"name": name, "script": str(script), "env_id": "Env-v0", "flags": "--score 10", "seeds": [1, 2]}
    return table_of(table | {"threshold": 12, "claims": "11, 12"} | keys)


@pytest.fixture
def stub(tmp_path):
    path = tmp_path / "stub.py"
    path.write_text(STUB)
    return path


def suite_of(tmp_path, *entries):
    path = tmp_path / "suite.toml"
    path.write_text("\n".join(entries), encoding="utf-8")
    return path


def main(monkeypatch, tmp_path, *words):
    """Runs the command line on the suite in tmp_path; returns the exit status."""
    words = ["--suite", tmp_path / "suite.toml", "--run-dir", tmp_path / "runs", *words]
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, words)])
    with pytest.raises(SystemExit) as exit_info:
        run.main()
    return exit_info.value.code


def states(capsys):
    """Returns the lines of state without their time of day, and how long runs took as N."""
    lines = [line[9:] for line in capsys.readouterr().out.splitlines() if re.match(r"\d\d:\d\d:\d\d ", line)]
    return [re.sub(r"in [\d,]+ s", "in N s", line) for line in lines]


# ----- Running, skipping, failing -----
EVAL_11 = "eval: mean=11 std=0.5 min=1 max=9 episodes=20 mean_length=30"
EVAL_12 = EVAL_11.replace("mean=11", "mean=12", 1)


def test_what_is_done_is_skipped(monkeypatch, tmp_path, capsys, stub):
    suite_of(tmp_path, entry(stub))
    assert main(monkeypatch, tmp_path, "--no-compare") == 0
    assert states(capsys) == [
        "stub, seed 1: started",
        f"stub, seed 1: done in N s: {EVAL_11}",
        "stub, seed 2: started",
        f"stub, seed 2: done in N s: {EVAL_12}",
    ]
    folder = tmp_path / "runs" / "stub"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main(monkeypatch, tmp_path, "--no-compare") == 0
    date = json.loads((folder / "done-1.json").read_text())["date"][:10]
    assert states(capsys) == [
        f"stub, seed 1: skipped, done on {date}: {EVAL_11}",
        f"stub, seed 2: skipped, done on {date}: {EVAL_12}",
    ]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_done_says_how_it_was_made(monkeypatch, tmp_path, stub):
    suite_of(tmp_path, entry(stub, threads=1))
    assert main(monkeypatch, tmp_path, "--no-compare", "--seeds", 2) == 0
    done = json.loads((tmp_path / "runs" / "stub" / "done-2.json").read_text())
    (run_folder,) = (tmp_path / "runs" / "stub").glob("Env-v0__stub__2__*")
    assert (done["run_folder"], done["results"]) == (run_folder.name, [EVAL_12])
    flags = "--seed 2 --env-id Env-v0 --score 10 --threads 1"
    # Of an absolute path only the last name is told: the file may be published.
    assert done["command"] == f"python {stub} {flags} --run-dir runs/stub"
    assert (done["versions"], done["steps"]) == ("python 3.0, torch 9.9, commit abcdef0", 1000)
    assert re.fullmatch(r".+, \d+ cores, \w+", done["machine"])
    assert not (tmp_path / "runs" / "stub" / "done-1.json").exists()


def test_a_changed_command_starts_anew(monkeypatch, tmp_path, capsys, stub):
    for score in (10, 20):
        suite_of(tmp_path, entry(stub, flags=f"--score {score}", seeds=[1], env_id=f"Env-v{score}"))
        assert main(monkeypatch, tmp_path, "--no-compare") == 0
        assert states(capsys)[0] == "stub, seed 1: started"
    done = json.loads((tmp_path / "runs" / "stub" / "done-1.json").read_text())
    assert done["run_folder"].startswith("Env-v20__")
    assert len(list((tmp_path / "runs" / "stub").glob("Env-v*"))) == 2


def test_a_lost_run_folder_is_made_again(monkeypatch, tmp_path, capsys, stub):
    suite_of(tmp_path, entry(stub, seeds=[1]))
    assert main(monkeypatch, tmp_path, "--no-compare") == 0
    (run_folder,) = (tmp_path / "runs" / "stub").glob("Env-v0__*")
    run_folder.rename(tmp_path / "elsewhere")
    capsys.readouterr()
    assert main(monkeypatch, tmp_path, "--no-compare") == 0
    assert states(capsys)[0] == "stub, seed 1: started anew, since there is no checkpoint"


def test_a_failing_run_does_not_stop_the_others(monkeypatch, tmp_path, capsys, stub):
    entries = [entry(stub, flags="--score 10 --fail 1"), entry(stub, "later", seeds=[3])]
    suite_of(tmp_path, *entries)
    assert main(monkeypatch, tmp_path, "--no-compare") == 1
    errors = tmp_path / "runs" / "stub" / "errors-1.txt"
    assert states(capsys) == [
        "stub, seed 1: started",
        f"stub, seed 1: failed: error: seed 1 fails (status 3, see {errors})",
        "stub, seed 2: started",
        f"stub, seed 2: done in N s: {EVAL_12}",
        "later, seed 3: started",
        f"later, seed 3: done in N s: {EVAL_11.replace('mean=11', 'mean=13', 1)}",
    ]
    assert not (tmp_path / "runs" / "stub" / "done-1.json").exists()
    assert (tmp_path / "runs" / "stub" / "log-1.txt").read_text() == "on standard output\n"
    # What is done is skipped, what failed is tried again, once more in vain.
    assert main(monkeypatch, tmp_path, "--no-compare") == 1
    assert [line.split(":")[1].split(",")[0] for line in states(capsys)] == [
        " started anew",
        " failed",
        " skipped",
        " skipped",
    ]


def test_a_run_without_an_eval_line_fails(monkeypatch, tmp_path, capsys):
    script = tmp_path / "silent.py"
    script.write_text("print('no result')")
    suite_of(tmp_path, entry(script, seeds=[1]))
    assert main(monkeypatch, tmp_path, "--no-compare") == 1
    log = tmp_path / "runs" / "stub" / "log-1.txt"
    assert states(capsys)[1] == f"stub, seed 1: failed: it printed no eval line (see {log})"


# ----- Threads, and runs at a time -----
@pytest.mark.parametrize(("flags", "fixed", "threads"), [
    ([], 0, "8"),
    (["--jobs", "3"], 0, "2"),
    (["--jobs", "20"], 0, "1"),
    (["--jobs", "3", "--threads", "5"], 0, "5"),
    (["--jobs", "3", "--threads", "5"], 1, "1"),
])  # fmt: skip
def test_threads(monkeypatch, tmp_path, stub, flags, fixed, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    suite_of(tmp_path, entry(stub, threads=fixed, seeds=[1]))
    assert main(monkeypatch, tmp_path, "--no-compare", *flags) == 0
    (path,) = (tmp_path / "runs" / "stub").glob("Env-v0__*/args.json")
    assert json.loads(path.read_text())["threads"] == [threads] * 3


def test_two_jobs_run_at_once(monkeypatch, tmp_path, stub):
    """Each of the two waits for the other."""
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    suite_of(tmp_path, entry(stub, flags=f"--score 1 --meet {shlex.quote(str(meeting))}"))
    assert main(monkeypatch, tmp_path, "--no-compare", "--jobs", 2) == 0


# ----- Results -----
def test_results_have_a_row_for_each_evaluation(monkeypatch, tmp_path, stub):
    further = entry(stub, "further", evaluations=["--eval-episodes 3", "--eval-episodes 4"], group="both", seeds=[5])
    suite_of(tmp_path, entry(stub, group="both"), further, entry(stub, "alone", seeds=[1]))
    assert main(monkeypatch, tmp_path, "--no-compare", "--out", tmp_path / "out") == 0
    with open(tmp_path / "runs" / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ("entry", "seed", "evaluation", "mean", "std", "episodes", "mean_length", "steps")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        ("stub", "1", "closing line", "11.0", "0.5", "20.0", "30.0", "1000"),
        ("stub", "2", "closing line", "12.0", "0.5", "20.0", "30.0", "1000"),
        ("further", "5", "--eval-episodes 3", "7.0", "1.0", "3.0", "3.0", "1000"),
        ("further", "5", "--eval-episodes 4", "7.0", "1.0", "4.0", "3.0", "1000"),
        ("alone", "1", "closing line", "11.0", "0.5", "20.0", "30.0", "1000"),
    ]
    for row in rows:
        assert (row["script"], row["env_id"], row["flags"]) == (str(stub), "Env-v0", "--score 10")
        assert float(row["steps_per_second"]) == pytest.approx(1000 / float(row["wall_seconds"]), abs=0.06)
        assert row["command"].startswith("python ")
        assert all(row[name] for name in ("versions", "machine", "date"))
    lines = (tmp_path / "runs" / "results.csv").read_text().splitlines()
    assert (tmp_path / "out" / "both.csv").read_text().splitlines() == lines[:5]
    assert (tmp_path / "out" / "alone.csv").read_text().splitlines() == [lines[0], lines[5]]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"both.csv", "alone.csv"}


def test_the_end_says_what_was_reached(monkeypatch, tmp_path, capsys, stub):
    suite_of(tmp_path, entry(stub), entry(stub, "other", seeds=[7], threshold=-1.5, claims=""))
    assert main(monkeypatch, tmp_path, "--no-compare") == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "stub, seeds 1 2: 11, 12; 1 of 2 reach 12; claimed: 11, 12",
        "other, seed 7: 17; 1 of 1 reach -1.5",
    ]


@pytest.mark.parametrize(("keys", "line"), [
    # The stub's seeds 1 and 2 give 11 and 12, with a deviation of 0.5 over 20 episodes.
    ({"claimed": [11, 13]}, "holds (-0.5 beside the claim, allowed -1.414: the deviation over the claimed seeds)"),
    ({"claimed": [14, 15]}, "falls short (-3 beside the claim, allowed -0.7071: the deviation over the claimed seeds)"),
    ({"claimed": [10, 10]}, "holds (+1.5 beside the claim, allowed -0: the deviation over the claimed seeds)"),
    ({"claimed": [11.2], "seeds": [1]}, "holds (-0.2 beside the claim, allowed -0.2236: two standard errors)"),
    ({"claimed": [11.3], "seeds": [1]}, "falls short (-0.3 beside the claim, allowed -0.2236: two standard errors)"),
])  # fmt: skip
def test_the_end_says_whether_a_claim_holds(monkeypatch, tmp_path, capsys, stub, keys, line):
    suite_of(tmp_path, entry(stub, **keys))
    assert main(monkeypatch, tmp_path, "--no-compare") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"; claimed: 11, 12; {line}")


@pytest.mark.parametrize(("claimed", "line"), [
    ([11, 13], "holds (-0.5 beside the claim, allowed +-1.414: the deviation over the claimed seeds)"),
    ([9, 10], "is passed (+2 beside the claim, allowed +-0.7071: the deviation over the claimed seeds)"),
    ([14, 15], "falls short (-3 beside the claim, allowed +-0.7071: the deviation over the claimed seeds)"),
])  # fmt: skip
def test_better_figures_of_a_peer_are_told_too(monkeypatch, tmp_path, capsys, stub, claimed, line):
    suite_of(tmp_path, entry(stub.rename(tmp_path / "peer_sb3.py"), claimed=claimed))
    assert main(monkeypatch, tmp_path, "--no-compare") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"; {line}")


def test_the_checkpoint_that_an_entry_names_is_evaluated(monkeypatch, tmp_path, capsys, stub):
    """The stub gives 8 for best.pt, 7 for any other."""
    both = [{"name": "last"}, {"name": "best", "checkpoint": "best.pt"}]
    suite_of(tmp_path, *(entry(stub, seeds=[1], evaluations=["--eval-episodes 3"], **keys) for keys in both))
    assert main(monkeypatch, tmp_path, "--no-compare") == 0
    ends = [line.partition(";")[0] for line in capsys.readouterr().out.splitlines()[-2:]]
    assert ends == ["last, seed 1: 7", "best, seed 1: 8"]


def test_seeds_that_were_not_claimed_have_no_say(monkeypatch, tmp_path, capsys, stub):
    suite_of(tmp_path, entry(stub, claimed=[11, 13]))
    assert main(monkeypatch, tmp_path, "--no-compare", "--seeds", 7) == 0
    assert capsys.readouterr().out.endswith("; none of the claimed seeds was run; not claimed: seeds 7\n")
    assert main(monkeypatch, tmp_path, "--no-compare", "--seeds", 2) == 0
    right = "holds in 1 of 2 seeds (-1 beside the claim, allowed -1.414: the deviation over the claimed seeds)"
    assert capsys.readouterr().out.endswith(f"; {right}; not claimed: seeds 7\n")


@pytest.mark.parametrize(("measured", "line"), [
    (("1.62", "1.20"), "holds (1.62, 1.2; claimed: 1.66, 1.25)"),
    (("1.62", "1.18"), "falls short (1.62, 1.18; claimed: 1.66, 1.25)"),
    (("1.62",), "has 1 ratios where 2 are claimed"),
])  # fmt: skip
def test_a_report_says_whether_its_ratios_hold(monkeypatch, tmp_path, capsys, measured, line):
    """0.95 times 1.25 is 1.1875."""
    lines = [f"- ratio to reach: 1.6, measured: {x} (ours): reached" for x in measured]
    lines += ["- ms to reach: at most 1, measured: median 0.438"]
    (tmp_path / "report.py").write_text(f"import sys; open(sys.argv[2], 'w').write({chr(10).join(lines)!r})")
    keys = {"name": "speed", "kind": "report", "script": str(tmp_path / "report.py"), "claims": "fast"}
    suite_of(tmp_path, table_of(keys | {"claimed": [1.66, 1.25]}))
    assert main(monkeypatch, tmp_path, "--no-compare") == 0
    assert capsys.readouterr().out.endswith(f"speed: {line}\n")


def test_each_task_is_compared(monkeypatch, tmp_path, capfd, stub):
    """With a program that shows its arguments in place of compare_runs.py; the second task has it fail."""
    compare = tmp_path / "compare_runs.py"
    compare.write_text("import sys; print(sys.argv[1:]); sys.exit('--threshold=-3' in sys.argv)")
    monkeypatch.setattr(run, "COMPARE", compare)
    entries = [entry(stub, group="both", seeds=[1]), entry(stub, "more", group="both", seeds=[2])]
    alone = entry(stub, "alone", seeds=[1], threshold=-3, metric="return")
    suite_of(tmp_path, *entries, entry(stub, "left-out", seeds=[1]), alone)
    assert main(monkeypatch, tmp_path, "--only", "both", "alone", "--out", tmp_path / "out") == 1
    out = capfd.readouterr().out
    folders = [str(next((tmp_path / "runs" / name).glob("Env-v0__*"))) for name in ("stub", "more", "alone")]
    files = [
        ["--out", str(tmp_path / "out" / f"{task}.md"), "--pictures", str(tmp_path / "out" / task)]
        for task in ("both", "alone")
    ]
    assert f"comparison of both:\n{[*folders[:2], '--metric', 'eval', '--threshold=12', *files[0]]}\n" in out
    assert f"comparison of alone:\n{[folders[2], '--metric', 'return', '--threshold=-3', *files[1]]}\n" in out
    assert "left-out" not in out
    assert main(monkeypatch, tmp_path, "--only", "both") == 0
    # Of different thresholds none is that of all.
    suite_of(tmp_path, entries[0], entry(stub, "more", group="both", seeds=[2], threshold=13))
    capfd.readouterr()
    assert main(monkeypatch, tmp_path, "--only", "both") == 0
    assert f"comparison of both:\n{[*folders[:2], '--metric', 'eval']}\n" in capfd.readouterr().out


def test_a_report_runs_last_and_alone(monkeypatch, tmp_path, capsys, stub):
    script = tmp_path / "report.py"
    script.write_text(
        "import os, sys; from pathlib import Path\n"
        "assert sys.argv[1:4] == ['--rounds', '2', '--out']\n"
        "Path(sys.argv[4]).write_text(str(os.environ.get('OMP_NUM_THREADS')))\n"
    )
    keys = {"name": "speed", "kind": "report", "script": str(script), "flags": "--rounds 2", "claims": "fast"}
    suite_of(tmp_path, table_of(keys), entry(stub, seeds=[1]))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert main(monkeypatch, tmp_path, "--no-compare", "--jobs", 2) == 0
    made = tmp_path / "runs" / "speed" / "speed.md"
    lines = ["stub, seed 1: started", f"stub, seed 1: done in N s: {EVAL_11}"]
    assert states(capsys) == [*lines, "speed: started", f"speed: done in N s: {made}"]
    assert made.read_text() == "None"
    assert main(monkeypatch, tmp_path, "--no-compare", "--only", "speed") == 0
    assert states(capsys)[0].startswith("speed: skipped, done on ")
    made.unlink()
    assert main(monkeypatch, tmp_path, "--no-compare", "--only", "speed") == 0
    assert states(capsys) == ["speed: started", f"speed: done in N s: {made}"]


def test_list_runs_nothing(monkeypatch, tmp_path, capsys, stub):
    suite_of(tmp_path, entry(stub, group="both"), entry(stub, "other", seeds=[4], claims=""))
    assert main(monkeypatch, tmp_path, "--no-compare", "--seeds", 2, "--only", "stub") == 0
    capsys.readouterr()
    assert main(monkeypatch, tmp_path, "--list") == 0
    assert capsys.readouterr().out == (
        f"stub, group both: seeds 1 2, done 1 of 2\n    python {stub} --env-id Env-v0 --score 10\n"
        "    to reach: 12; claimed: 11, 12\n"
        f"other: seeds 4, done 0 of 1\n    python {stub} --env-id Env-v0 --score 10\n    to reach: 12\n"
    )
    assert not (tmp_path / "runs" / "other").exists()


# ----- Stopping and going on, with a real script -----
TOTAL = 6_000
FLAGS = (
    f"--no-cuda --total-timesteps {TOTAL} --batch-size 8 --hidden-sizes 8 --learning-starts 100 --train-frequency 100 "
    "--checkpoint-every 500 --eval-every 0 --eval-episodes 2"
)


def start(tmp_path):
    words = ["--suite", tmp_path / "suite.toml", "--run-dir", tmp_path / "runs", "--no-compare"]
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_until(is_so, process=None):
    deadline = time.monotonic() + 300
    while not (found := is_so()):
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    return found


def started(tmp_path):
    return json.loads((tmp_path / "runs" / "dqn" / "started-1.json").read_text())


@POSIX
def test_a_killed_run_goes_on(monkeypatch, tmp_path, capsys):
    suite_of(tmp_path, entry("dqn_cartpole_vec.py", "dqn", env_id="CartPole-v1", flags=FLAGS, seeds=[1]))
    first = start(tmp_path)
    (checkpoint,) = wait_until(lambda: list((tmp_path / "runs").glob("dqn/*__1__*/latest.pt")), first)
    training = psutil.Process(started(tmp_path)["pid"])
    training.suspend()
    try:
        first.kill()
        first.communicate()
        # Two that train in one folder would spoil it.
        assert main(monkeypatch, tmp_path, "--no-compare") == 1
        out = capsys.readouterr().out
        assert f"dqn, seed 1: failed: process {training.pid} of an earlier start still runs; end it or wait" in out
    finally:
        training.kill()
    wait_until(lambda: not run.is_running(started(tmp_path)))
    folder = checkpoint.parent
    stopped_at = load(folder)["counters"]["global_step"]
    assert 0 < stopped_at < TOTAL

    assert main(monkeypatch, tmp_path, "--no-compare") == 0
    assert f"dqn, seed 1: resumed from {folder.name}\n" in capsys.readouterr().out
    assert list(folder.parent.glob("*__1__*")) == [folder]
    assert load(folder)["counters"]["global_step"] == TOTAL
    assert len(list(folder.glob("events.out.tfevents.*"))) == 2
    assert [step for step, _ in scalars(folder)["charts/SPS"]] == list(range(100, TOTAL + 1, 100))
    assert json.loads((folder / "args.json").read_text())["global_step"] == stopped_at
    done = json.loads((folder.parent / "done-1.json").read_text())
    assert (done["steps"], done["starts"], done["run_folder"]) == (TOTAL, 2, folder.name)
    assert done["results"][0].startswith("eval: mean=")


def test_the_time_before_a_kill_counts_up_to_the_checkpoint(tmp_path):
    """A start at 1,000 s after an hour's that was cut off in order; its last checkpoint came 30 s later."""
    suite_of(tmp_path, entry("dqn_cartpole_vec.py", seeds=[1]))
    (stub,) = run.read_suite(tmp_path / "suite.toml")
    job = run.Job(stub, 1, tmp_path)
    folder = tmp_path / "Env-v0__dqn__1__123"
    folder.mkdir()
    record = {"arguments": stub.arguments, "folders_before": [], "seconds": 3600.0, "starts": 1, "time": 1000.0}
    for running, seconds in ((True, 3630.0), (False, 3600.0)):
        job.write("started", {**record, "running": running})
        (folder / "latest.pt").touch()
        os.utime(folder / "latest.pt", (1030, 1030))
        started, found = run.Runner(run.Args(), run.Children()).unfinished(job)
        assert (started["seconds"], found) == (seconds, folder)
    (folder / "latest.pt").unlink()
    assert run.Runner(run.Args(), run.Children()).unfinished(job)[1] is None


@POSIX
def test_sigterm_ends_runs_in_order(tmp_path):
    suite_of(tmp_path, entry("dqn_cartpole_vec.py", "dqn", env_id="CartPole-v1", flags=FLAGS, seeds=[1, 2]))
    process = start(tmp_path)
    wait_until(lambda: list((tmp_path / "runs").glob("dqn/*__1__*/events.*")), process)
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=300)[0]
    assert process.returncode == 143, out
    lines = [line[9:] for line in out.splitlines()]
    assert lines == ["dqn, seed 1: started", "dqn, seed 1: cut off; the same command goes on with it"]
    (folder,) = (tmp_path / "runs" / "dqn").glob("*__1__*")
    assert 0 <= load(folder)["counters"]["global_step"] < TOTAL
    assert "interrupted at step" in (tmp_path / "runs" / "dqn" / "log-1.txt").read_text()
    assert (started(tmp_path)["running"], run.is_running(started(tmp_path))) == (False, False)


@POSIX
@pytest.mark.parametrize(("flags", "signals"), [
    ("", [signal.SIGINT]),
    # What does not end when it is asked to is killed by the second signal.
    ("--stubborn", [signal.SIGINT, signal.SIGTERM]),
])  # fmt: skip
def test_ctrl_c_ends_runs(tmp_path, stub, flags, signals):
    """The stub waits for another one, in vain."""
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    suite_of(tmp_path, entry(stub, "dqn", flags=f"--score 1 {flags} --meet {shlex.quote(str(meeting))}"))
    process = start(tmp_path)
    wait_until(lambda: list(meeting.iterdir()), process)
    for signum in signals:
        process.send_signal(signum)
    out = process.communicate(timeout=300)[0]
    assert process.returncode == 130, out
    assert [line[9:] for line in out.splitlines()] == [
        "dqn, seed 1: started",
        "dqn, seed 1: cut off; the same command goes on with it",
    ]
    assert not run.is_running(started(tmp_path))


# ----- What wrong input gets -----
def refused(monkeypatch, tmp_path, capsys, *words):
    assert main(monkeypatch, tmp_path, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert not list((tmp_path / "runs").rglob("*"))
    return captured.err


def test_an_unknown_name_is_told_with_those_that_exist(monkeypatch, tmp_path, capsys, stub):
    suite_of(tmp_path, entry(stub, group="both"), entry(stub, "other"))
    assert refused(monkeypatch, tmp_path, capsys, "--only", "other", "sub") == (
        "error: --only sub: there is no such entry or group; there are stub, other, both\n"
    )


@pytest.mark.parametrize(("text", "message"), [
    (None, "cannot be read ([Errno 2] No such file or directory"),
    ("[[entry]\n", "cannot be read ("),
    ("x = 1\n", "there is no [[entry]] in it"),
    ('[[entry]]\nname = "a"\nscript = "x.py"\n', "entry 1, a lacks claims, env_id, flags, seeds, threshold"),
    ('[[entry]]\nkind = "report"\nscript = "x.py"\n', "entry 1, without a name lacks claims, name"),
    (entry("x.py", claimed=[1.0]), "entry 1, stub: claimed has 1 figures of 2 seeds"),
    (entry("x.py", colour="red"), "entry 1, stub has unknown colour"),
    (entry("x.py", kind="other"), "entry 1, stub: kind 'other' must be 'learning' or 'report'"),
    (entry("x.py", seeds=["1"]), "entry 1, stub: seeds = ['1'] has the wrong type"),
    (entry("x.py", threshold="1"), "entry 1, stub: threshold = '1' has the wrong type"),
    (entry("x.py", seeds=[]), "entry 1, stub: seeds is empty"),
    (entry("x.py", "a/b"), "entry 1, a/b: name and group must be letters, digits, '-', '_' and '.'"),
    (entry("x.py") + entry("x.py"), "the name stub comes twice"),
    (entry("x.py") + entry("x.py", "b", group="stub"), "the name stub comes twice"),
    (entry("no_such.py"), "stub wants no_such.py, which does not exist"),
])  # fmt: skip
def test_a_wrong_suite_is_refused(monkeypatch, tmp_path, capsys, text, message):
    if text is not None:
        suite_of(tmp_path, text)
    error = refused(monkeypatch, tmp_path, capsys)
    assert error.startswith(f"error: --suite {tmp_path / 'suite.toml'}: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("flag", ["--run-dir", "--out"])
def test_a_file_in_the_way_is_refused(monkeypatch, tmp_path, capsys, stub, flag):
    suite_of(tmp_path, entry(stub))
    (tmp_path / "file").touch()
    error = refused(monkeypatch, tmp_path, capsys, flag, tmp_path / "file" / "runs")
    assert (
        error == f"error: {flag} {tmp_path / 'file' / 'runs'}: is no folder that can be written to (Not a directory)\n"
    )


@pytest.mark.parametrize(("flags", "message"), [
    (["--jobs", "0"], "--jobs 0 must be at least 1"),
    (["--threads", "-1"], "--threads -1 must be at least 0"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(monkeypatch, tmp_path, capsys, flags, message):
    assert message in refused(monkeypatch, tmp_path, capsys, *flags)


# ----- The committed suite -----
def parsed(entry, flags):
    """Returns the arguments of an entry's script."""
    module = importlib.import_module(Path(entry.script).stem)
    return tyro.cli(module.Args, args=flags)


@pytest.mark.parametrize("entry", SUITE, ids=[entry.name for entry in SUITE])
def test_every_command_of_the_suite_parses(entry, tmp_path, capsys):
    assert (ROOT / entry.script).is_file()
    try:
        if entry.kind == "report":
            parsed(entry, [*entry.arguments[1:], "--out", str(tmp_path / "report.md")])
            return
        flags = [*entry.arguments[1:], "--seed", "7", "--threads", "3", "--run-dir", "elsewhere"]
        args = parsed(entry, flags)
        for evaluation in entry.evaluations:
            parsed(entry, [*flags, *shlex.split(evaluation), "--evaluate", "runs/RUN"])
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    assert (args.env_id, args.seed, args.threads, args.run_dir) == (entry.env_id, 7, 3, "elsewhere")
    # These are run.py's to give.
    assert not {"--seed", "--threads", "--run-dir", "--env-id"} & set(shlex.split(entry.flags))
    if entry.script == "benchmarks/peer_sb3.py":
        assert peer_sb3.hyperparameters(args)


def test_both_sides_of_a_comparison_are_measured_alike():
    groups = {entry.group for entry in SUITE if entry.group.startswith("peers-")}
    assert groups == {f"peers-{task}" for task in ("cartpole", "pendulum", "walker", "bullet-cartpole", "plate")}
    for group in groups:
        sides = [entry for entry in SUITE if entry.group == group]
        peers = [entry for entry in sides if entry.script == "benchmarks/peer_sb3.py"]
        assert 0 < len(peers) < len(sides)
        alike = set()
        for side in sides:
            flags = shlex.split(side.flags)
            every, episodes = (flags[flags.index(x) + 1] for x in ("--eval-every", "--eval-episodes"))
            task = side.env_id.rpartition(":")[2]
            alike.add((task, tuple(side.seeds), side.threads, side.threshold, every, episodes, side.checkpoint))
            # The peer's closing line is of 100 episodes.
            assert side.evaluations == ([] if side in peers else ["--eval-episodes 100"])
        assert len(alike) == 1
        assert len(sides[0].seeds) >= 3


def learning_rows():
    """Returns (task, script, figure, name) of each row of the first table under Results."""
    section = TEXT.split("\n## Results\n")[1].split("\n**Beside")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    script = re.compile(r"(\w+\.py)")
    return [(task, script.search(flags)[1], figure, name.strip("`")) for task, flags, _, figure, name in rows[2:]]


def test_the_table_of_results_is_read():
    assert ("Pendulum-v1", "ppo_continuous.py", "seeds 41 to 50: -168.4 to -139.6", "pendulum-ppo") in learning_rows()


@pytest.mark.parametrize(("task", "script", "figure", "name"), learning_rows())
def test_every_figure_of_the_results_has_an_entry(task, script, figure, name):
    found = [entry for entry in SUITE if entry.name == name]
    assert len(found) == 1
    assert (found[0].env_id, found[0].script) == (task, script)
    assert found[0].claims.startswith(figure.split(":")[0])
    assert re.findall(r"-?\d+\.\d+", figure) == re.findall(r"-?\d+\.\d+", found[0].claims)
    numbers, claimed = [float(x) for x in re.findall(r"-?\d+\.\d+", figure.split(";")[0])], found[0].claimed
    # Of ten seeds and more the README gives the least and the largest, or the one that all have.
    assert claimed
    assert numbers[: len(claimed)] == claimed if len(claimed) < 10 else set(numbers) == {min(claimed), max(claimed)}


def trains_alike(one, other):
    """Says whether two arguments give the same weights."""
    names = [
        name for name in vars(one) if not name.startswith(("eval", "checkpoint", "run_dir", "threads", "seed", "prog"))
    ]
    return all(getattr(one, name) == getattr(other, name) for name in names)


def test_every_training_command_of_the_results_has_an_entry():
    """They stand in benchmarks/README.md."""
    section = "## Pong:" + DETAILS.split("\n## Pong:")[1].split("\n## Beside")[0]
    commands = [x for x in commands_of(section) if x[0] != "compare_runs.py" and "--evaluate" not in x[1]]
    assert len(commands) >= 7
    for script, flags in commands:
        entries = [entry for entry in SUITE if entry.script == script]
        wanted = parsed(entries[0], flags)
        assert any(trains_alike(wanted, parsed(entry, entry.arguments[1:])) for entry in entries), (script, flags)


def test_every_report_has_an_entry():
    scripts = {f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("speed_*.py")}
    reports = [entry for entry in SUITE if entry.kind == "report"]
    assert {entry.script for entry in reports} == scripts
    for entry in reports:
        assert f"python benchmarks/run.py --only {entry.name}" in DETAILS
        report = (ROOT / "benchmarks" / f"{entry.name.replace('-', '_')}.md").read_text(encoding="utf-8")
        assert f"python {entry.script} {entry.flags} --out" in report


# ----- stable-baselines3 -----
def train_peer(monkeypatch, tmp_path, capsys, *words):
    """Returns the run folder, its scalars, and the numbers of the closing line."""
    monkeypatch.setattr(sys, "argv", ["peer_sb3.py", "--run-dir", str(tmp_path), *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    peer_sb3.main()
    (folder,) = tmp_path.iterdir()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("eval: mean=")
    return folder, scalars(folder), run.numbers_of(line)


def test_a_run_of_the_peer(monkeypatch, tmp_path, capsys):
    words = ["--algo", "ppo", "--env-id", "CartPole-v1", "--seed", "3", "--total-timesteps", "512"]
    words += ["--eval-every", "256", "--eval-episodes", "3", "--final-episodes", "4"]
    folder, tags, numbers = train_peer(monkeypatch, tmp_path, capsys, *words)
    assert re.fullmatch(r"CartPole-v1__sb3_ppo__3__\d+", folder.name)
    about = json.loads((folder / "args.json").read_text())
    expected = {"exp_name": "sb3_ppo", "env_id": "CartPole-v1", "seed": 3, "hyperparameters": "zoo", "n_envs": 8}
    assert expected | {"learning_rate": "lin_0.001"} | about["args"] == about["args"]
    assert (about["global_step"], about["versions"].keys() >= {"torch", "stable-baselines3"}) == (512, True)
    assert [step for step, _ in tags["eval/mean_reward"]] == [256, 512]
    assert [step for step, _ in tags["rollout/ep_rew_mean"]] == [256, 512]
    # The rate at the start of the second of two iterations, half-way down from 1e-3.
    assert tags["train/learning_rate"][-1][1] == pytest.approx(5e-4)
    assert (list(numbers), numbers["episodes"]) == (["mean", "std", "min", "max", "episodes", "mean_length"], 4)
    # In CartPole a step pays 1.
    assert numbers["mean"] == numbers["mean_length"] >= 1


def test_the_peers_scores_are_true_ones(monkeypatch, tmp_path, capsys):
    """Scaled rewards of Pendulum would sum up to -200 or so; a policy that has hardly learned gets -900 and less."""
    settings = {"normalize": True, "n_envs": 2, "n_steps": 32, "batch_size": 32, "gamma": 0.9}
    monkeypatch.setitem(peer_sb3.ZOO, ("ppo", "Pendulum-v1"), settings)
    words = ["--algo", "ppo", "--env-id", "Pendulum-v1", "--total-timesteps", "64", "--eval-every", "64"]
    evaluated = []
    note = lambda model, envs, *_, deterministic, **__: evaluated.append((envs.obs_rms.count, deterministic))  # noqa: E731
    spy(monkeypatch, evaluation, "evaluate_policy", note)
    _, tags, numbers = train_peer(
        monkeypatch, tmp_path, capsys, *words, "--eval-episodes", "5", "--final-episodes", "5"
    )
    ((step, mean),) = tags["eval/mean_reward"]
    assert step == 64
    # 64 steps and the first observations of 2 environments; Stable-Baselines3 counts from 1e-4.
    assert evaluated == [(pytest.approx(66.0001), True)]
    assert mean < -500
    assert numbers["mean"] < -500
    assert numbers["mean_length"] == 200


def test_the_peer_learns_the_plate_by_dqn(monkeypatch, tmp_path, capsys):
    pytest.importorskip("pybullet")
    words = ["--algo", "dqn", "--env-id", "BalancingPlate-v0", "--total-timesteps", "100", "--eval-every", "0"]
    folder, tags, numbers = train_peer(monkeypatch, tmp_path, capsys, *words, "--final-episodes", "2")
    assert folder.name.startswith("BalancingPlate-v0__sb3_dqn__1__")
    assert "eval/mean_reward" not in tags
    assert numbers["episodes"] == 2
    assert json.loads((folder / "args.json").read_text())["args"]["train_freq"] == 256


@pytest.mark.parametrize(("words", "message"), [
    ("dqn Pendulum-v1 zoo", "error: --env-id Pendulum-v1: here are published flags of dqn for CartPole-v1, "),
    ("dqn Pendulum-v1 default", "error: --env-id Pendulum-v1: dqn wants Discrete actions, not Box"),
    ("ppo Pendulu-v1 default", "error: Environment `Pendulu` doesn't exist"),
    ("ppo no_such:Pendulum-v1 default", "error: No module named 'no_such'"),
])  # fmt: skip
def test_what_the_peer_refuses(monkeypatch, tmp_path, capsys, words, message):
    flags = [x for pair in zip(("--algo", "--env-id", "--hyperparameters"), words.split(), strict=True) for x in pair]
    monkeypatch.setattr(sys, "argv", ["peer_sb3.py", "--run-dir", str(tmp_path), *flags])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as exit_info:
        peer_sb3.main()
    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

"""benchmarks/run.py --ray on clusters of this machine; benchmarks/README.md says how to install Ray and run this."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import PurePath
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ROOT
from short_runs import load, scalars

if not os.environ.get("RAY_TESTS"):
    pytest.skip("wants RAY_TESTS=1 and requirements-ray.txt", allow_module_level=True)
if os.name == "nt":
    pytest.skip("Ray joins no machines there", allow_module_level=True)

sys.path.append(str(ROOT / "benchmarks"))
import ray_jobs
import run

# Ray's own warnings are not ours to mend.
pytestmark = pytest.mark.filterwarnings("default")
TOTAL = 40 * 1024
FLAGS = "--no-cuda --total-timesteps {} --checkpoint-every 4096 --eval-every 0 --eval-episodes 2"


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one core on this machine, with a secret of their own; the last test kills one."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    os.environ.setdefault("RAY_AUTH_TOKEN", "6f" * 32)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def suite_of(tmp_path, **changes):
    """Writes a suite of one entry."""
    entry = {"name": "cartpole", "script": "ppo_cartpole.py", "env_id": "CartPole-v1", "flags": FLAGS.format(TOTAL)}
    entry |= {"seeds": [1], "threshold": 5, "claims": "", **changes}
    lines = [f"{key} = {json.dumps(value)}" for key, value in entry.items()]
    (tmp_path / "suite.toml").write_text("\n".join(["[[entry]]", *lines]))


def start(tmp_path, address, *words):
    """Starts the suite in a process of its own."""
    words = ["--suite", tmp_path / "suite.toml", "--run-dir", tmp_path / "runs", "--ray", address, *words]
    command = [sys.executable, ROOT / "benchmarks" / "run.py", *words]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_until(is_so, process):
    deadline = time.monotonic() + 300
    while not (found := is_so()):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    return found


def checkpoints(tmp_path):
    return list((tmp_path / "runs" / "cartpole").glob("*/latest.pt"))


def trainings():
    """Returns the processes that train on this machine's nodes, by the command line that only these have."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(re.search(r"/suite-\w+/code/ppo_cartpole.py$", word) for word in words):
            found.append(process)
    return found


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_no_training_outlives_the_suite(tmp_path, cluster, signum):
    suite_of(tmp_path, flags=FLAGS.format(10**7))
    process = start(tmp_path, cluster.address)
    wait_until(lambda: checkpoints(tmp_path), process)
    family = trainings()
    folders = {word.split("/code/")[0] for x in family for word in x.cmdline() if "/code/" in word}
    assert (len(family), len(folders)) == (1, 1)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=120)
    assert psutil.wait_procs(family, timeout=60)[1] == []
    (checkpoint,) = checkpoints(tmp_path)
    step = load(checkpoint.parent)["counters"]["global_step"]
    if signum == signal.SIGINT:
        assert process.returncode == 130, out
        assert "cartpole, seed 1: cut off; the same command goes on with it\n" in out
        log = (tmp_path / "runs" / "cartpole" / "log-1.txt").read_text()
        assert f"interrupted at step {step:,}; go on with: " in log
        # The same command goes on; what it says is what it does on one machine.
        again = start(tmp_path, cluster.address)
        line = again.stdout.readline()
        assert line.endswith(f"cartpole, seed 1: resumed from {checkpoint.parent.name}\n")
        again.send_signal(signal.SIGTERM)
        again.communicate(timeout=120)
        assert (again.returncode, trainings()) == (143, [])
    else:
        assert (step > 0, step % 1024) == (True, 0)


# ----- Episodes without RLlib -----
def test_episodes_are_the_same_from_any_number_of_actors_and_of_the_weights_sent(cluster):
    import ray
    import ray_collect

    def linear(bias):
        policy = torch.nn.Linear(1, 2)
        torch.nn.init.zeros_(policy.weight)
        policy.bias.data = torch.tensor(bias)
        return policy

    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        several = []
        for number in (1, 2):
            actors = [ray_collect.Collector.remote("small_envs:VectorRamp3Term-v0") for _ in range(number)]
            pool = ray.util.ActorPool(actors)
            several.append(ray_collect.collect(pool, linear([0.0, 0.0]), range(8)))
            for episode in several[-1]:
                assert (episode["obs"].tolist(), episode["next_obs"].tolist()) == ([[0], [1], [2]], [[1], [2], [3]])
                assert episode["rewards"].tolist() == [1, 1, 1]
            right = ray_collect.collect(pool, linear([0.0, 1000.0]), range(2))
            assert [episode["actions"].tolist() for episode in right] == [[1, 1, 1]] * 2
            for actor in actors:
                ray.kill(actor)
    finally:
        ray.shutdown()
    actions = [[episode["actions"].tolist() for episode in episodes] for episodes in several]
    assert actions[0] == actions[1]
    assert len({tuple(x) for x in actions[0]}) > 1  # of 8 episodes of three coins, two differ


# ----- What comes from a node -----
STUB = """
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1], "run")
folder.mkdir()
for content in ("0123456789", "abcdefghijk"):
    with open(folder / "events.out.tfevents.1", "a") as events:
        events.write(content)
    (folder / "latest.pt.tmp").write_text(content)
    os.replace(folder / "latest.pt.tmp", folder / "latest.pt")
    print(content)
    while content == "0123456789" and not pathlib.Path("go").exists():
        time.sleep(0.01)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(child.pid, flush=True)
while not pathlib.Path("end").exists():
    time.sleep(0.01)
sys.exit(3)
"""


def test_what_a_process_writes_comes_in_small_pieces_and_checkpoints_come_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_jobs, "PIECE", 4)
    worker = ray_jobs.Worker()
    command = [PurePath("code/stub.py"), PurePath("runs")]
    assert worker.start({"stub.py": STUB.encode()}, command, 1) == run.machine(run.usable_cores())
    log = io.BytesIO()
    here = SimpleNamespace(folder=tmp_path, outputs={"log": log, "errors": io.BytesIO()})
    checkpoint, events = tmp_path / "run" / "latest.pt", tmp_path / "run" / "events.out.tfevents.1"
    seen, answer = [], worker.next()
    while not isinstance(answer, int):
        assert len(answer[2]) <= 4
        if answer[:2] == ("run/latest.pt", 4):
            (worker.folder / "code" / "go").touch()  # while this version is under way, the next one replaces it
            while (worker.folder / "runs" / "run" / "latest.pt").read_text() != "abcdefghijk":
                time.sleep(0.01)
        ray_jobs.Process.keep(here, *answer)
        if checkpoint.exists() and checkpoint.read_text() not in seen:
            seen.append(checkpoint.read_text())
            assert events.read_text().endswith(seen[-1])
        if answer[0] == "log" and log.getvalue().count(b"\n") == 3:
            (worker.folder / "code" / "end").touch()
        answer = worker.next()
    assert (answer, seen) == (3, ["0123456789", "abcdefghijk"])
    assert events.read_text() == "0123456789abcdefghijk"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {checkpoint.name, events.name}
    lines = log.getvalue().decode().splitlines()
    assert lines[:2] == ["0123456789", "abcdefghijk"]
    # The actor's end closes this, which ends what the process left, and deletes its files.
    child = psutil.Process(int(lines[2]))
    worker.guard.stdin.close()
    assert psutil.wait_procs([child], timeout=60)[1] == []
    while worker.folder.exists():
        time.sleep(0.01)


# ----- Wrong use -----
def test_what_cannot_run_is_told_in_one_line(tmp_path, cluster):
    (tmp_path / "lacks.py").write_text("import no_such_package")
    suite_of(tmp_path, script=str(tmp_path / "lacks.py"))
    process = start(tmp_path, cluster.address)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "cartpole, seed 1: failed: ModuleNotFoundError: No module named 'no_such_package' (status 1, see " in out
    suite_of(tmp_path, threads=2)
    process = start(tmp_path, cluster.address)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "cartpole, seed 1: failed: no node of the cluster has 2 CPUs\n" in out
    assert trainings() == []


@pytest.mark.parametrize(("address", "has_ray", "message"), [
    ("127.0.0.1:9", True, "--ray 127.0.0.1:9: no cluster that fits: "),
    ("somewhere", True, "--ray somewhere: no cluster that fits: "),
    ("auto", False, "--ray needs Ray: pip install -r requirements-ray.txt\n"),
])  # fmt: skip
def test_no_cluster_is_told_in_one_line(tmp_path, monkeypatch, capsys, address, has_ray, message):
    suite_of(tmp_path)
    if not has_ray:
        monkeypatch.setitem(sys.modules, "ray", None)
    words = ["--suite", tmp_path / "suite.toml", "--run-dir", tmp_path / "runs", "--ray", address]
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, words)])
    with pytest.raises(SystemExit) as exit_info:
        run.main()
    text = capsys.readouterr().err
    assert (exit_info.value.code, text.count("\n")) == (2, 1)
    assert text.startswith(f"error: {message}")


# ----- The death of a node, last: the cluster is spoilt by it -----
def test_a_run_whose_node_died_goes_on_elsewhere(tmp_path, cluster):
    suite_of(tmp_path, seeds=[1, 2], evaluations=["--eval-episodes 3"])
    process = start(tmp_path, cluster.address, "--out", tmp_path / "out")
    wait_until(lambda: len(checkpoints(tmp_path)) == 2, process)
    assert len(trainings()) == 2
    (second,) = cluster.worker_nodes
    cluster.remove_node(second, allow_graceful=False)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    seed = re.search(r"cartpole, seed (\d): its node died: ", out)[1]
    name = re.search(rf"cartpole, seed {seed}: resumed from (\S+)\n", out)[1]
    folders = {path.parent.name.split("__")[2]: path.parent for path in checkpoints(tmp_path)}
    assert (len(folders), folders[seed].name) == (2, name)
    for key, folder in folders.items():
        assert load(folder)["counters"]["global_step"] == TOTAL
        assert [step for step, _ in scalars(folder)["charts/SPS"]] == list(range(1024, TOTAL + 1, 1024))
        assert {path.suffix for path in folder.iterdir() if "tfevents" not in path.name} == {".pt", ".json"}
        # For some seconds Ray may still send to the dead node: a start that never runs, or an evaluation, for which a
        # finished training is resumed once more.
        starts = range(1 + (key == seed), 2 + out.count(f"cartpole, seed {key}: resumed from"))
        assert len(list(folder.glob("events.*"))) in starts
        resumed_at = json.loads((folder / "args.json").read_text())["global_step"]
        assert resumed_at in (range(4096, TOTAL + 1, 4096) if key == seed else (0, TOTAL))
        done = json.loads((folder.parent / f"done-{key}.json").read_text())
        assert done["starts"] in starts
        assert done["steps"] == TOTAL
    with open(tmp_path / "runs" / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["seed"], row["evaluation"], row["episodes"]) for row in rows] == [
        (seed, "--eval-episodes 3", "3.0") for seed in ("1", "2")
    ]
    assert "comparison of cartpole:\n" in out
    assert (tmp_path / "out" / "cartpole.md").is_file()
    assert trainings() == []

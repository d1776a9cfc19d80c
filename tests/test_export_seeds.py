"""benchmarks/export_seeds.py, against numbers worked out by hand, and export_agent.py."""

import json
import sys
import time
from unittest.mock import patch

import pytest
import torch
from conftest import ROOT
from short_runs import command_line, load, only_run, small_run
from tensorboard.backend.event_processing.event_accumulator import ScalarEvent
from torch.utils.tensorboard import SummaryWriter

sys.path.append(str(ROOT / "benchmarks"))
import export_agent
import export_seeds

EPISODES = "charts/episodic_return"
START = 1000.0


def write_events(folder, points, start=START, purge_step=None):
    """Writes an event file of (tag, step, seconds since START, value)."""
    # The first event, written here, has no other source of its time.
    with patch.object(time, "time", return_value=start):
        writer = SummaryWriter(str(folder), purge_step=purge_step)
    for tag, step, seconds, value in points:
        writer.add_scalar(tag, value, step, walltime=START + seconds)
    writer.close()


def write_run(folder, points, script="ppo_x", seed=1, env_id="Env-v0"):
    """Makes a run folder of points as `write_events` takes them, and returns its path."""
    write_events(folder, points)
    content = {"args": {"exp_name": script, "seed": seed, "env_id": env_id}, "device": "cpu"}
    (folder / "args.json").write_text(json.dumps(content))
    return folder


def episodes(*pairs, last_step=400, seconds=60):
    """Points of episodes (step, return), 1 second apart, and one that makes the run this long: 400 is 2 steps a bin."""
    points = [(EPISODES, step, i, value) for i, (step, value) in enumerate(pairs, 1)]
    return [*points, ("charts/SPS", last_step, seconds, 5)]


def curve(*pairs):
    return [ScalarEvent(wall_time=0.0, step=step, value=value) for step, value in pairs]


def run_main(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["export_seeds.py", *map(str, words)])
    export_seeds.main()


def refused(monkeypatch, capsys, *words):
    """Runs the command line, which must fail with status 2; returns what it says on standard error."""
    with pytest.raises(SystemExit) as exit_info:
        run_main(monkeypatch, *words)
    captured = capsys.readouterr()
    assert (exit_info.value.code, captured.out) == (2, "")
    return captured.err


# ----- Bins -----
@pytest.mark.parametrize(("last_step", "points", "means"), [
    # Bins of 2 steps, (0, 2], (2, 4] and so on: 10 and 20 share the first, 4 is the second's end, 5 lies in the third.
    (400, [(1, 10), (2, 20), (4, -6), (5, 8), (400, 7)], [(2, 15), (4, -6), (6, 8), (400, 7)]),
    # Bins of 1.5 steps, (0, 1.5], (1.5, 3], (3, 4.5], (4.5, 6]; the ends are rounded down to 1, 3, 4, 6.
    (300, [(1, 1), (2, 2), (3, 6), (4, 5), (5, 9), (6, 3)], [(1, 1), (3, 4), (4, 5), (6, 6)]),
    # Bins of a 100th of a step.
    (2, [(1, 4), (1, 6), (2, 8)], [(1, 5), (2, 8)]),
    # Step 0, which no bin has, counts as the first one's.
    (400, [(0, 3), (2, 5)], [(2, 4)]),
])  # fmt: skip
def test_bins(last_step, points, means):
    assert [(point.step, point.value) for point in export_seeds.binned(curve(*points), last_step)] == means


def test_a_bin_has_the_time_of_its_last_episode():
    points = [ScalarEvent(wall_time=5.0, step=1, value=0.0), ScalarEvent(wall_time=9.0, step=2, value=1.0)]
    assert export_seeds.binned(points, 400) == [ScalarEvent(wall_time=9.0, step=2, value=0.5)]


def test_a_run_of_one_episode_each_step_fills_all_bins():
    """Bin i has the steps 2i + 1 and 2i + 2, and with step for value the mean 2i + 1.5."""
    means = export_seeds.binned(curve(*((step, step) for step in range(1, 401))), 400)
    assert [point.step for point in means] == list(range(2, 401, 2))
    assert [point.value for point in means] == [2 * i + 1.5 for i in range(200)]


# ----- Reading -----
def test_runs_are_ordered_by_script_and_seed(tmp_path):
    ids = [("b", 2), ("a", 10), ("b", 1), ("a", 9)]
    folders = [write_run(tmp_path / f"{x}{i}", episodes((2, 1)), script=x, seed=i) for x, i in ids]
    scripts = export_seeds.read_runs(tuple(folders))
    assert [(script, [run.seed for run in runs]) for script, runs in scripts.items()] == [("a", [9, 10]), ("b", [1, 2])]


def test_the_last_mean_is_of_100_episodes(tmp_path):
    """Of 0 to 149 the last 100 are 50 to 149."""
    points = [(EPISODES, step, step, step) for step in range(150)]
    run = export_seeds.read_run(write_run(tmp_path / "run", points))
    assert run.last_mean == 99.5


def test_a_resumed_run_is_read_from_both_files(tmp_path):
    """It stopped after step 6 and went on from the checkpoint of step 4, 100 seconds later."""
    folder = write_run(tmp_path / "run", [(EPISODES, step, step, float(step)) for step in (2, 4, 6)])
    write_events(folder, [(EPISODES, 8, 120, 80.0), ("charts/SPS", 400, 150, 5)], start=START + 100, purge_step=5)
    run = export_seeds.read_run(folder)
    assert [(point.step, point.value) for point in run.scalars[EPISODES]] == [(2, 2), (4, 4), (8, 80)]
    assert (run.start, run.seconds, run.last_step) == (START, 150, 400)


# ----- Files and table -----
def test_csv(tmp_path):
    """Width 2: the first two episodes share a bin; evaluations are kept as they are, other tags are not written."""
    more = [("eval/return_mean", 200, 30.25, 12.5), ("eval/return_mean", 400, 60, 1234567.0)]
    more += [("eval/return_std", 200, 30.25, 0.5), ("eval/length_mean", 200, 30.25, 9.0)]
    first = write_run(tmp_path / "first", [*episodes((1, 10), (2, 15), (399, -3)), *more], seed=7)
    second = write_run(tmp_path / "second", episodes((3, 0.125)), seed=3)
    (runs,) = export_seeds.read_runs((first, second)).values()
    assert export_seeds.write_csv(tmp_path / "x.csv", runs) == 6
    assert (tmp_path / "x.csv").read_bytes().decode() == (
        "seed,tag,step,wall_time,value\n"
        "3,charts/episodic_return,4,1.0,0.125\n"
        "7,charts/episodic_return,2,2.0,12.5\n"
        "7,charts/episodic_return,400,3.0,-3\n"
        "7,eval/return_mean,200,30.2,12.5\n"
        "7,eval/return_mean,400,60.0,1.23457e+06\n"
        "7,eval/return_std,200,30.2,0.5\n"
    )


TABLE_HEAD = (
    "| script | seeds | steps | last training mean: 100 episodes of each seed, mean over seeds +- standard deviation "
    "(min to max) | wall time per seed, median, minutes |\n|---|---:|---:|---:|---:|\n"
)


def test_table(tmp_path):
    """Seeds of a: means 10 and 20, so 15 +- 10 / sqrt(2); 2 and 4 minutes. One seed of b; small means have 3 digits."""
    folders = [
        write_run(tmp_path / "a1", episodes((2, 5), (4, 15), last_step=20_000, seconds=120), script="a", seed=1),
        write_run(tmp_path / "a2", episodes((2, 20), last_step=10_000, seconds=240), script="a", seed=2),
        write_run(tmp_path / "b1", episodes((2, 0.5), (4, 0.75), seconds=30), script="b", seed=1),
    ]
    assert export_seeds.table(export_seeds.read_runs(tuple(folders))) == (
        f"{TABLE_HEAD}| `a` | 2 | 10,000 to 20,000 | 15.0 +- 7.1 (10.0 to 20.0) | 3.0 |\n"
        "| `b` | 1 | 400 | 0.625 | 0.5 |"
    )


def test_the_command_line_writes_files_and_prints_the_table(tmp_path, monkeypatch, capsys):
    folders = [
        write_run(tmp_path / script, episodes((2, 10), (6, 30)), script=script, env_id="my.games:ALE/Pong-v5")
        for script in ("rpo_x", "ppo_x")
    ]
    out = tmp_path / "new" / "folder"
    run_main(monkeypatch, *folders, "--out", out)
    names = [f"{script}__my.games-ALE-Pong-v5.csv" for script in ("ppo_x", "rpo_x")]
    assert sorted(path.name for path in out.iterdir()) == names
    assert len((out / names[0]).read_text().splitlines()) == 3
    captured = capsys.readouterr()
    assert captured.out == f"{TABLE_HEAD}| `ppo_x` | 1 | 400 | 20.0 | 1.0 |\n| `rpo_x` | 1 | 400 | 20.0 | 1.0 |\n"
    assert captured.err.splitlines() == [f"{out / name}: 2 rows" for name in names]


# ----- Errors -----
def test_runs_of_several_environments_are_refused(tmp_path, monkeypatch, capsys):
    one = write_run(tmp_path / "one", episodes((2, 1)), env_id="A-v0")
    other = write_run(tmp_path / "other", episodes((2, 1)), env_id="B-v0", seed=2)
    assert refused(monkeypatch, capsys, one, other, "--out", tmp_path / "out") == (
        f"error: all runs must have one environment: {one} has A-v0, {other} has B-v0\n"
    )
    assert not (tmp_path / "out").exists()


def test_a_script_and_seed_that_come_twice_are_refused(tmp_path, monkeypatch, capsys):
    one, other = (write_run(tmp_path / name, episodes((2, 1)), seed=5) for name in ("one", "other"))
    assert refused(monkeypatch, capsys, one, other, "--out", tmp_path / "out") == (
        f"error: {one} and {other} are both ppo_x with seed 5\n"
    )
    assert not (tmp_path / "out").exists()


def test_a_folder_without_events_is_refused(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    message = f"error: {folder}: there is no event file of TensorBoard here\n"
    assert refused(monkeypatch, capsys, folder, "--out", tmp_path / "out") == message
    folder.mkdir()
    (folder / "args.json").write_text("{}")
    assert refused(monkeypatch, capsys, folder, "--out", tmp_path / "out") == message


def test_a_folder_without_episodes_is_refused(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "run", episodes())
    assert refused(monkeypatch, capsys, folder, "--out", tmp_path / "out") == (
        f"error: {folder}: no episode was logged here, charts/episodic_return is missing\n"
    )


def test_a_run_that_lost_its_episodes_is_refused(tmp_path, monkeypatch, capsys):
    """It was resumed from a checkpoint before its first episode, and none has ended since."""
    folder = write_run(tmp_path / "run", episodes((4, 1)))
    write_events(folder, [("charts/SPS", 3, 70, 5)], start=START + 65, purge_step=3)
    assert refused(monkeypatch, capsys, folder, "--out", tmp_path / "out") == (
        f"error: {folder}: no episode was logged here, charts/episodic_return is missing\n"
    )


def test_a_folder_without_args_json_is_refused(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "run", episodes((2, 1)))
    (folder / "args.json").unlink()
    assert refused(monkeypatch, capsys, folder, "--out", tmp_path / "out") == (
        f"error: {folder}: there is no args.json here\n"
    )


@pytest.mark.parametrize("text", [
    '{"args": {"exp_n',
    "[]",
    '{"args": null}',
    '{"args": {"exp_name": "x", "env_id": "y"}}',
    '{"args": {"exp_name": "x", "env_id": "y", "seed": null}}',
])  # fmt: skip
def test_a_damaged_args_json_is_refused(tmp_path, monkeypatch, capsys, text):
    path = write_run(tmp_path / "run", episodes((2, 1))) / "args.json"
    path.write_text(text)
    assert refused(monkeypatch, capsys, path.parent, "--out", tmp_path / "out") == (
        f"error: {path}: does not name exp_name, env_id and seed of a run\n"
    )


def test_no_run_at_all_is_refused(tmp_path, monkeypatch, capsys):
    assert "RUN_FOLDER: at least one is needed" in refused(monkeypatch, capsys, "--out", tmp_path / "out")


def test_a_file_in_the_way_is_refused(tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "run", episodes((2, 1)))
    (tmp_path / "out").write_text("in the way")
    message = refused(monkeypatch, capsys, folder, "--out", tmp_path / "out")
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert str(tmp_path / "out") in message
    assert (tmp_path / "out").read_text() == "in the way"


# ----- Agent files -----
def test_an_agent_file_has_what_an_evaluation_needs(tmp_path, monkeypatch, capsys):
    script, args = small_run("dqn_cartpole_vec", tmp_path / "runs")
    script.train(args)
    checkpoint = only_run(tmp_path / "runs") / "best.pt"
    monkeypatch.setattr(sys, "argv", ["export_agent.py", str(checkpoint), str(tmp_path / "agent.pt")])
    export_agent.main()
    before, after = load(checkpoint.parent, "best.pt"), load(tmp_path, "agent.pt")
    assert after.keys() == {"script", "format_version", "args", "counters", "agent"}
    # Paths are nobody's business, weights are halved, and what has one axis is small.
    assert after["args"] == before["args"] | {"run_dir": "runs"}
    for name, x in before["agent"].items():
        assert torch.equal(after["agent"][name], x.half() if x.dim() > 1 else x)
    capsys.readouterr()
    command_line(script, monkeypatch, "--evaluate", str(tmp_path / "agent.pt"), "--no-cuda", "--threads=1")
    assert capsys.readouterr().out.splitlines()[-1].startswith("eval: mean=")


def test_what_is_no_checkpoint_is_no_agent_either(tmp_path, monkeypatch, capsys):
    torch.save({"script": "x", "format_version": 2, "args": {}, "counters": {}}, tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("text")
    for name in ("other.pt", "text.pt", "none.pt"):
        monkeypatch.setattr(sys, "argv", ["export_agent.py", str(tmp_path / name), str(tmp_path / "agent.pt")])
        with pytest.raises(SystemExit, match="2"):
            export_agent.main()
        assert capsys.readouterr().err.startswith(f"error: {tmp_path / name}: ")
    assert not (tmp_path / "agent.pt").exists()

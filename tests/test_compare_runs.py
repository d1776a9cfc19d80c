"""compare_runs.py: reading, grouping, statistics, tables, pictures and messages, against numbers worked out by hand."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from itertools import combinations
from unittest.mock import patch

import matplotlib
import numpy as np
import pytest
from conftest import ROOT
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from scipy import stats
from short_runs import command_line, failed
from stable_baselines3.common.logger import configure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import compare_runs
import ppo_continuous

EPISODES = "charts/episodic_return"
START = 1_000_000.0
DEFAULTS = compare_runs.Args(("runs",))


def write_events(folder, points, start=0.0, purge_step=None, text=None):
    """Writes an event file of (step, seconds after START, value) or (step, seconds, value, tag)."""
    # The first event, and the file's name, have no other source of their time.
    with patch.object(time, "time", return_value=START + start):
        writer = SummaryWriter(str(folder), purge_step=purge_step)
        # A short time between it and the first point is no pause.
        writer.add_scalar("other", 0.0, purge_step or 0, walltime=START + start)
    if text:
        writer.add_text("hyperparameters", text, walltime=START + start)
    for step, seconds, value, *tag in points:
        writer.add_scalar(tag[0] if tag else EPISODES, value, step, walltime=START + seconds)
    writer.close()
    return folder


def write_run(folder, points, **args):
    """Makes a run folder as a training script does, and returns it."""
    write_events(folder, points)
    args = {"env_id": "Env-v0", "exp_name": "ppo", "seed": 1, **args}
    (folder / "args.json").write_text(json.dumps({"args": args, "device": "cpu"}))
    return folder


def constant(value, last=100):
    """Points of a run that scores the same from step 0 on."""
    return [(step, step / 10, value) for step in range(0, last + 1, 10)]


def event_file(folder):
    (path,) = folder.glob("*tfevents*")
    return path


def read(*paths, **args):
    return compare_runs.read_runs(compare_runs.Args(tuple(map(str, paths)), **args))


def points_of(run):
    return list(zip(run.curve.steps.tolist(), run.curve.seconds.tolist(), run.curve.values.tolist(), strict=True))


def make_run(values, steps=None, seconds=None, window=1, smoothing="episodes", about=(), **keys):
    """A run as the reader returns it."""
    steps = np.arange(len(values)) if steps is None else np.array(steps)
    seconds = steps.astype(float) if seconds is None else np.array(seconds, float)
    keys = {"env_id": "Env-v0", "exp_name": "ppo", "seed": "1", **keys}
    curve = compare_runs.Curve(steps, seconds, np.array(values, float))
    return compare_runs.Run("run", keys, curve, window, smoothing, min(window, len(values)) - 1, dict(about))


def row_of(runs, **args):
    """The row of the table of runs of one group."""
    group = compare_runs.Group("ppo", runs)
    return compare_runs.summarise(group, group.environments[0], compare_runs.Args(("runs",), **args))


def table_of(rows, **args):
    """The cells of a table under their headers, in lists."""
    header, *lines = compare_runs.cells(rows, compare_runs.Args(("runs",), **args))
    return {name: [line[i] for line in lines] for i, name in enumerate(header)}


def groups_of(scores_by_name, **keys):
    """Groups whose runs have these final scores."""
    runs = [
        make_run([score], exp_name=name, seed=str(i), **keys)
        for name, scores in scores_by_name.items()
        for i, score in enumerate(scores)
    ]
    return compare_runs.group_runs(runs, ["env_id", "exp_name"])


# Reading


def test_tags_of_ours_and_cleanrl(tmp_path):
    """CleanRL leaves no args.json: folder name and text summary tell the arguments."""
    ours = write_run(tmp_path / "ours", [(5, 1.0, 10.0), (5, 1.0, 20.0), (9, 2.0, 30.0)], gamma=0.9)
    table = "|param|value|\n|-|-|\n|exp_name|dqn|\n|gamma|0.99|\n|env_id|ALE/Pong-v5|"
    clean = write_events(tmp_path / "ALE-Pong-v5__dqn__3__1700000000", [(7, 1.5, -1.0)], text=table)
    runs = {run.path: run for run in read(tmp_path)}
    assert points_of(runs[str(ours)]) == [(5, 1.0, 10.0), (5, 1.0, 20.0), (9, 2.0, 30.0)]
    assert runs[str(ours)].keys["gamma"] == "0.9"
    assert points_of(runs[str(clean)]) == [(7, 1.5, -1.0)]
    keys = runs[str(clean)].keys
    assert (keys["env_id"], keys["exp_name"], keys["seed"], keys["gamma"]) == ("ALE/Pong-v5", "dqn", "3", "0.99")


@pytest.mark.parametrize("name", ["ALE-Pong-v5__dqn__3__17", "ALE/Pong-v5__dqn__3__17"])
def test_a_game_of_ale_has_one_id(tmp_path, name):
    (run,) = read(write_events(tmp_path / name, constant(1.0)))
    assert (run.keys["env_id"], run.keys["seed"]) == ("ALE/Pong-v5", "3")


def test_folder_name_alone(tmp_path):
    folder = write_events(tmp_path / "Ant-v5__sac__12__1700000000", constant(1.0))
    (run,) = read(folder)
    assert (run.keys["env_id"], run.keys["exp_name"], run.keys["seed"]) == ("Ant-v5", "sac", "12")
    (run,) = read(write_events(tmp_path / "mine", constant(1.0)))
    assert (run.keys["env_id"], run.keys["exp_name"], run.keys["folder"]) == ("unknown", "mine", tmp_path.name)


def test_tags_of_stable_baselines3(tmp_path):
    logger = configure(str(tmp_path / "PPO_1"), ["tensorboard"])
    for step, train, evaluation in ((10, 1.0, 5.0), (20, 2.0, 6.0)):
        logger.record("rollout/ep_rew_mean", train)
        logger.record("eval/mean_reward", evaluation)
        logger.dump(step)
    logger.close()
    (run,) = read(tmp_path)
    assert (run.curve.steps.tolist(), run.curve.values.tolist()) == ([10, 20], [1.0, 2.0])
    assert run.window == 1
    (run,) = read(tmp_path, metric="eval")
    assert run.curve.values.tolist() == [5.0, 6.0]
    (run,) = read(tmp_path, metric="eval/mean_reward")
    assert run.curve.values.tolist() == [5.0, 6.0]


def test_our_evaluations(tmp_path):
    points = [(1, 1.0, 3.0), (2, 2.0, 7.0, "eval/return_mean")]
    (run,) = read(write_run(tmp_path / "a", points), metric="eval")
    assert points_of(run) == [(2, 2.0, 7.0)]


def test_resumed_run_is_one_curve(tmp_path):
    """Points from the resume step on are dropped from the cut file, also where the new file has none at these steps."""
    cut = [(10, 1.0, 1.0), (20, 2.0, 2.0), (20, 2.0, 2.5), (30, 3.0, 3.0), (40, 4.0, 4.0)]
    folder = write_run(tmp_path / "run", cut)
    # A minute's pause: the cut file's last event was at 4 s, the new file's first is at 64 s.
    write_events(folder, [(40, 65.0, -4.0), (50, 66.0, -5.0), (50, 66.0, -5.5)], start=64.0, purge_step=21)
    (run,) = read(folder)
    kept = [(10, 1.0, 1.0), (20, 2.0, 2.0), (20, 2.0, 2.5)]
    assert points_of(run) == [*kept, (40, 5.0, -4.0), (50, 6.0, -5.0), (50, 6.0, -5.5)]


def test_three_starts_take_out_two_pauses(tmp_path):
    folder = write_run(tmp_path / "run", [(10, 5.0, 1.0)])
    write_events(folder, [(20, 108.0, 2.0)], start=105.0, purge_step=11)
    write_events(folder, [(30, 209.0, 3.0)], start=208.0, purge_step=21)
    (run,) = read(folder)
    assert points_of(run) == [(10, 5.0, 1.0), (20, 8.0, 2.0), (30, 9.0, 3.0)]


def test_second_file_without_a_resume_mark(tmp_path):
    """It replaces from its own first step on; files that were written at the same time have no pause between."""
    folder = write_run(tmp_path / "run", [(10, 1.0, 1.0), (20, 2.0, 2.0), (30, 9.0, 3.0)])
    write_events(folder, [(20, 6.0, -2.0), (30, 7.0, -3.0)], start=5.0)
    (run,) = read(folder)
    assert points_of(run) == [(10, 1.0, 1.0), (20, 6.0, -2.0), (30, 7.0, -3.0)]


def test_equals_tensorboards_own_reader(tmp_path):
    """Many points, several at one step, and a resumption: TensorBoard's accumulator keeps the same ones."""
    rng = np.random.default_rng(0)
    points = [(i // 3, i / 100, value) for i, value in enumerate(rng.normal(size=3000))]
    folder = write_run(tmp_path / "run", points)
    points = [(800 + i // 3, 200 + i / 100, value) for i, value in enumerate(rng.normal(size=900))]
    write_events(folder, points, start=199.0, purge_step=800)
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    expected = [(event.step, event.value) for event in events.Scalars(EPISODES)]
    assert len(expected) == 3 * 800 + 900
    (run,) = read(folder)
    assert list(zip(run.curve.steps.tolist(), run.curve.values.tolist(), strict=True)) == expected


def test_growing_and_cut_files(tmp_path, capsys):
    folder = write_run(tmp_path / "run", constant(1.0))
    path = event_file(folder)
    whole = path.read_bytes()
    for part in (5, 20):
        path.write_bytes(whole + whole[:part])
        (run,) = read(folder)
        assert len(run.curve.steps) == 11
        assert (
            capsys.readouterr().err
            == f"note: {path} ends within a record, being written or cut; what is before counts\n"
        )
    # The last record is cut.
    path.write_bytes(whole[:-3])
    (run,) = read(folder)
    assert run.curve.steps[-1] == 90
    assert str(path) in capsys.readouterr().err


def test_damaged_empty_and_foreign_files(tmp_path, capsys):
    write_run(tmp_path / "good", constant(1.0))
    path = event_file(write_run(tmp_path / "length", constant(2.0)))
    data = bytearray(path.read_bytes())
    # The length of the last of equal records.
    size = len(data) - data.rindex(b"\x00\x00\x00\x00\x00\x00\x00", 0, data.rindex(EPISODES.encode()))
    data[-size - 1 + 6] ^= 0x7F
    path.write_bytes(data)
    empty = tmp_path / "empty" / "events.out.tfevents.1"
    foreign = tmp_path / "foreign" / "events.out.tfevents.1"
    for file, content in ((empty, b""), (foreign, b"no events at all, but some text")):
        file.parent.mkdir()
        file.write_bytes(content)
    runs = read(tmp_path)
    assert [len(run.curve.steps) for run in runs] == [11, 10]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0] == f"note: {empty} is empty"
    whole = "ends within a record, being written or cut; what is before counts"
    assert lines[1:] == [f"note: {foreign} {whole}", f"note: {path} {whole}"]


def test_damaged_event(tmp_path, capsys):
    """A record of whole length whose content is none: what stands before it is used."""
    path = event_file(write_run(tmp_path / "run", constant(1.0)))
    data = path.read_bytes()
    at = data.index(EPISODES.encode())
    end = at + len(EPISODES)
    path.write_bytes(data[:end] + b"\xff" * 4 + data[end + 4 :])
    assert compare_runs.EventFile(path, (EPISODES,)).points == {}
    assert capsys.readouterr().err == f"note: {path} is damaged at byte {at - 27}; what is before counts\n"


@pytest.mark.parametrize("part", ["name", "value", "step", "other name", "length"])
def test_a_flipped_bit_is_told(tmp_path, capsys, part):
    """In the sixth of eleven points: five are left, whatever was hit, and not one has another value."""
    points = [point for step in range(0, 101, 10) for point in ((step, 1.0, 2.0), (step, 1.0, 3.0, "losses/value"))]
    path = event_file(write_run(tmp_path / "run", points))
    data = bytearray(path.read_bytes())
    at = [match.start() for match in re.finditer(EPISODES.encode(), data)][5]
    # Before the name: 12 bytes of length and checksum, 9 of time, 2 of the step, 2 each of summary, value and name.
    start = at - 29
    assert data[at + len(EPISODES)] == 0x15
    where = {"name": at + 3, "value": at + len(EPISODES) + 3, "step": start + 22, "length": start}
    where["other name"] = data.index(b"losses/value", at)
    data[where[part]] ^= 1
    path.write_bytes(data)
    (run,) = read(tmp_path)
    left = 6 if part == "other name" else 5
    assert points_of(run) == [(step, 1.0, 2.0) for step in range(0, 10 * left, 10)]
    damaged = where[part] - 29 if part == "other name" else start
    assert capsys.readouterr().err == f"note: {path} is damaged at byte {damaged:,}; what is before counts\n"


@pytest.mark.parametrize(("damage", "last_whole"), [("last event", 9.0), ("zeros", 10.0)])
def test_damaged_end_of_a_file_that_was_resumed(tmp_path, capsys, damage, last_whole):
    """The pause between the last whole event and the resumption is taken out; a full disk leaves zeros."""
    folder = write_events(tmp_path / "run", constant(1.0))
    path = event_file(folder)
    data = path.read_bytes()
    *_, last = compare_runs.records(path)
    path.write_bytes(
        data + bytes(64) if damage == "zeros" else data[: -4 - len(last)] + b"\xff" * len(last) + data[-4:]
    )
    write_events(folder, [(110, 151.0, 9.0)], start=150.0, purge_step=101)
    (run,) = read(folder)
    assert points_of(run)[-1] == (110, last_whole + 1, 9.0)
    assert f"note: {path} is damaged" in capsys.readouterr().err


def test_file_of_zeros(tmp_path, capsys):
    path = event_file(write_run(tmp_path / "run", constant(1.0)))
    path.write_bytes(bytes(160))
    assert compare_runs.EventFile(path, (EPISODES,)).points == {}
    assert capsys.readouterr().err == f"note: {path} is damaged at byte 0; what is before counts\n"


def test_values_that_are_no_numbers(tmp_path, capsys):
    (run,) = read(write_run(tmp_path / "run", [(1, 1.0, 1.0), (2, 2.0, float("nan")), (3, 3.0, 3.0)]))
    assert run.curve.steps.tolist() == [1, 3]
    assert "1 points of charts/episodic_return are no finite numbers" in capsys.readouterr().err


def test_an_id_with_its_module_is_the_same_environment(tmp_path):
    for i, env_id in enumerate(("Env-v0", "package.module:Env-v0")):
        write_run(tmp_path / str(i), constant(i), env_id=env_id, seed=i)
    runs = read(tmp_path)
    (group,) = compare_runs.group_runs(runs, ["env_id", "exp_name"])
    assert (group.environments, len(group.runs)) == (["Env-v0"], 2)


@pytest.mark.parametrize(("own", "name"), [({"exp_name": "sb3_dqn"}, "sb3_dqn"), ({}, "dqn")])
def test_the_name_of_an_algorithm_stands_in_for_that_of_an_experiment_alone(tmp_path, own, name):
    """Other programs' `algo` would else take the place of a name that the run has."""
    folder = tmp_path / "CartPole-v1__other__1__1"
    write_events(folder, constant(5))
    (folder / "args.json").write_text(json.dumps({"args": {"env_id": "CartPole-v1", "algo": "dqn", **own}}))
    (run,) = read(folder)
    assert run.keys["exp_name"] == name
    assert "algo" not in run.keys


def test_damaged_args_json(tmp_path, capsys):
    folder = write_run(tmp_path / "Env-v0__ppo__4__17", constant(1.0))
    (folder / "args.json").write_text('{"args": {"seed"')
    (run,) = read(folder)
    assert run.keys["seed"] == "4"
    assert "args.json is damaged" in capsys.readouterr().err


def test_csv_files(tmp_path, capsys):
    """Seconds are since the run's first event or since 1970; files that are no curves are named."""
    path = tmp_path / "rpo__Env-v0.csv"
    rows = ["# a comment", "seed,tag,step,wall_time,value", f"1,{EPISODES},10,0.5,1", f"2,{EPISODES},10,0.5,3"]
    path.write_text("\n".join([*rows, "2,eval/return_mean,20,1.0,9", f"2,{EPISODES},20,1.0,5"]))
    one, two = read(path)
    assert points_of(one) == [(10, 0.5, 1.0)]
    assert points_of(two) == [(10, 0.5, 3.0), (20, 1.0, 5.0)]
    assert (two.keys["env_id"], two.keys["exp_name"], two.keys["seed"], two.window) == ("Env-v0", "rpo", "2", 1)
    old, other = tmp_path / "old__Env-v0.csv", tmp_path / "speed.csv"
    old.write_text(f"tag,step,wall_time,value\n{EPISODES},,1,4\n")
    with pytest.raises(compare_runs.UsageError, match="no run found that can be read"):
        read(old)
    assert "it is damaged" in capsys.readouterr().err
    old.write_text(f"tag,step,wall_time,value\nx,1,1700000000,0\n{EPISODES},2,1700000030,4\n")
    other.write_text("table,round\n1,2\n")
    (run,) = read(old, other)
    assert points_of(run) == [(2, 30.0, 4.0)]
    assert capsys.readouterr().err.startswith(f"note: {other} is no CSV file of curves")


def test_csv_files_of_benchmarks():
    paths = sorted(ROOT.glob("benchmarks/ppo_continuous__*.csv"))
    runs = read(*paths)
    assert {run.keys["env_id"] for run in runs} >= {"BipedalWalker-v3", "Pendulum-v1"}
    assert all(len(run.curve.steps) > 50 for run in runs)


def test_paths(tmp_path):
    """Folders at any depth, patterns and event files; what is found twice counts once."""
    a = write_run(tmp_path / "x" / "deep" / "a", constant(1.0))
    write_run(tmp_path / "x" / "b", constant(2.0))
    sources = compare_runs.find_sources((str(tmp_path), str(a), str(tmp_path / "x" / "*"), str(event_file(a))))
    assert sorted(source.name for source in sources) == ["a", "b"]
    assert [source.name for source in compare_runs.find_sources((str(tmp_path / "*" / "b*"),))] == ["b"]


# Grouping


def test_links_are_followed_once(tmp_path):
    """A folder of links to runs; one more leads back to the folder itself."""
    write_run(tmp_path / "elsewhere" / "a", constant(1.0), seed=1)
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    (chosen / "link").symlink_to(tmp_path / "elsewhere" / "a", target_is_directory=True)
    (chosen / "again").symlink_to(tmp_path / "elsewhere" / "a", target_is_directory=True)
    (chosen / "back").symlink_to(chosen, target_is_directory=True)
    assert len(read(chosen)) == 1


def test_a_run_given_as_the_working_folder(tmp_path, monkeypatch):
    folder = write_events(tmp_path / "Ant-v5__sac__12__1700000000", constant(1.0))
    monkeypatch.chdir(folder)
    (run,) = read(".")
    assert (run.keys["env_id"], run.keys["exp_name"], run.keys["folder"]) == ("Ant-v5", "sac", tmp_path.name)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "is no CSV file of curves"),
        ("seed,tag,step,wall_time,value\n", "or it is damaged"),
        ("global_step,charts/episodic_return\n", "or it is damaged"),
        ("global_step,ppo - losses/x\n1,2\n", "has no finite point of charts/episodic_return"),
        ("seed,tag,step,wall_time,value\n1,charts/episodic_return,1,nan,2\n", "or it is damaged"),
        ("seed,tag,step,wall_time,value\n1,charts/episodic_return,1,1," + 200_000 * "2", "or it is damaged"),
    ],
)
def test_useless_csv_files_are_named(tmp_path, capsys, content, problem):
    write_run(tmp_path / "run", constant(1.0))
    path = tmp_path / "ppo__Env-v0.csv"
    path.write_text(content)
    assert len(read(tmp_path / "run", path)) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"note: {path} ")
    assert problem in error


def test_a_csv_file_as_a_spreadsheet_writes_it(tmp_path, capsys):
    """It begins with a byte order mark, and ends with empty lines; its steps have a name of their own."""
    path = tmp_path / "chart.csv"
    path.write_text("trainer/epoch,ppo - charts/episodic_return\n10,1\n20,3\n\n\n", encoding="utf-8-sig")
    (run,) = read(path)
    assert (run.curve.steps.tolist(), run.curve.values.tolist()) == ([10, 20], [1, 3])
    assert capsys.readouterr().err == f"note: {path}: trainer/epoch is taken for the environment's steps\n"


def test_what_there_is_not_is_empty_in_the_csv_file(tmp_path, monkeypatch):
    """A log without times reaches the threshold at a step, and at no second that is known."""
    (tmp_path / "chart.csv").write_text("global_step,ppo - charts/episodic_return\n10,1\n20,3\n")
    flags = ("--threshold", "2", "--smooth", "1", "--out", str(tmp_path / "out.csv"))
    command_line(compare_runs, monkeypatch, str(tmp_path / "chart.csv"), *flags)
    with open(tmp_path / "out_runs.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["steps_to_threshold"], row["seconds_to_threshold"]) == ("20", "")


@pytest.mark.parametrize(("flags", "cut"), [({"at_step": 5}, " up to step 5"), ({"x": "time"}, " with a time")])
def test_points_that_a_flag_leaves_out_are_told_as_such(tmp_path, flags, cut):
    path = tmp_path / "chart.csv"
    path.write_text("global_step,ppo - charts/episodic_return\n10,1\n20,3\n")
    with pytest.raises(compare_runs.UsageError, match=f"no run has a finite point of it{cut}; they have charts/epi"):
        read(path, **flags)


def test_args_json_that_is_too_deep(tmp_path, capsys):
    folder = write_events(tmp_path / "Ant-v5__sac__12__1700000000", constant(1.0))
    (folder / "args.json").write_text("[" * 100_000)
    (run,) = read(folder)
    assert run.keys["env_id"] == "Ant-v5"
    assert "args.json is damaged" in capsys.readouterr().err


def test_infinite_values_alone(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "run", [(1, 1.0, float("inf"))])
    with pytest.raises(SystemExit) as exit_info:
        command_line(compare_runs, monkeypatch, str(tmp_path))
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        f"note: {tmp_path / 'run'}: 1 points of charts/episodic_return are no finite numbers and left out",
        "error: --metric return (charts/episodic_return or rollout/ep_rew_mean): no run has a finite point of it; they "
        "have charts/episodic_return, other",
    ]


def test_groups_by_what_differs(tmp_path):
    """Seeds and what changes nothing do not split; what only another script sets differently does not either."""
    for seed in (1, 2):
        for rate in (0.1, 0.2):
            write_run(tmp_path / f"ppo{seed}{rate}", constant(1.0), seed=seed, learning_rate=rate, threads=seed)
        write_run(tmp_path / f"dqn{seed}", constant(1.0), exp_name="dqn", seed=seed, learning_rate=0.3, buffer=9)
    runs = read(tmp_path)
    keys = compare_runs.differing_keys(runs)
    assert keys == ["env_id", "exp_name", "learning_rate"]
    groups = compare_runs.group_runs(runs, keys)
    assert [(group.name, len(group.runs)) for group in groups] == [
        ("dqn", 2),
        ("ppo learning_rate=0.1", 2),
        ("ppo learning_rate=0.2", 2),
    ]
    groups = compare_runs.group_runs(runs, ["learning_rate"])
    assert [group.name for group in groups] == ["learning_rate=0.1", "learning_rate=0.2", "learning_rate=0.3"]
    groups = compare_runs.group_runs(runs, ["buffer"])
    assert [(group.name, len(group.runs)) for group in groups] == [("buffer=9", 2), ("buffer=none", 4)]
    assert [group.name for group in compare_runs.group_runs(runs, ["env_id"])] == ["all runs"]


def test_numbers_in_order():
    """Not 16, 32, 4, 8; and texts with numbers in them likewise."""
    runs = [make_run([1], num_envs=str(n), seed=str(seed)) for n in (32, 4, 16, 8) for seed in (1, 2)]
    groups = compare_runs.group_runs(runs, ["env_id", "exp_name", "num_envs"])
    assert [group.name for group in groups] == [f"num_envs={n}" for n in (4, 8, 16, 32)]
    names = ["1e-3", "-2", "0.5", "layer10", "layer9", "none"]
    assert sorted(names, key=compare_runs.in_numeric_order) == ["-2", "1e-3", "0.5", "layer9", "layer10", "none"]


def test_names_hold_only_what_differs():
    """Of five arguments one differs, in one of two experiments; the environment is never part of a name."""
    same = {"gamma": "0.99", "clip_coef": "0.2", "num_steps": "128", "ent_coef": "0.01"}
    runs = [make_run([1], learning_rate=rate, **same) for rate in ("0.1", "0.2")]
    runs += [make_run([1], exp_name="dqn", learning_rate="0.3", env_id=env, **same) for env in ("Env-v0", "Other-v0")]
    groups = compare_runs.group_runs(runs, ["env_id", "exp_name", "learning_rate", *same])
    assert [(group.environments, group.name) for group in groups] == [
        (["Env-v0"], "dqn"),
        (["Env-v0"], "ppo learning_rate=0.1"),
        (["Env-v0"], "ppo learning_rate=0.2"),
        (["Other-v0"], "dqn"),
    ]


# Layouts of other programs


def stable_baselines3_run(folder, formats, points):
    """Logs (step, mean return, mean length) as the library does."""
    logger = configure(str(folder), formats)
    for step, value, length in points:
        logger.record("time/total_timesteps", step)
        logger.record("rollout/ep_rew_mean", value)
        logger.record("rollout/ep_len_mean", length)
        logger.dump(step)
    logger.close()
    return folder


def test_numbered_folders_of_stable_baselines3(tmp_path):
    """PPO_1 and PPO_2 are seeds of PPO; those of another folder are a group of their own."""
    for folder in ("one/PPO_1", "one/PPO_2", "one/DQN_1", "two/PPO_1"):
        stable_baselines3_run(tmp_path / folder, ["tensorboard"], [(10, 1.0, 5.0)])
    runs = read(tmp_path)
    assert {(run.keys["env_id"], run.keys["exp_name"], run.keys["seed"]) for run in runs} == {
        ("unknown", "PPO", "1"),
        ("unknown", "PPO", "2"),
        ("unknown", "DQN", "1"),
    }
    groups = compare_runs.group_runs(runs, ["exp_name"])
    one, two = (f"folder={(tmp_path / name).as_posix()}" for name in ("one", "two"))
    assert [(group.name, len(group.runs)) for group in groups] == [("DQN", 1), (f"PPO {one}", 2), (f"PPO {two}", 1)]
    verdicts = compare_runs.compare(groups, DEFAULTS)
    assert all("But the logs do not tell the environment" in verdict.sentence() for verdict in verdicts)


def test_zoo(tmp_path):
    """algo/env_1/ holds evaluations and episodes; args.yml tells the true seed."""
    folder = tmp_path / "ppo" / "CartPole-v1_1"
    (folder / "CartPole-v1").mkdir(parents=True)
    (folder / "CartPole-v1" / "args.yml").write_text(
        "!!python/object/apply:collections.OrderedDict\n- - - algo\n    - ppo\n  - - env\n    - CartPole-v1\n"
        "  - - seed\n    - 4012\n  - - device\n    - auto\n"
    )
    np.savez(folder / "evaluations.npz", timesteps=[100, 200], results=[[1.0, 3.0], [5.0, 6.0]])
    (folder / "0.monitor.csv").write_text(
        '#{"t_start": 1700000000.0, "env_id": "CartPole-v1"}\nr,l,t\n10.0,10,1.0\n30.0,30,4.0\n'
    )
    (folder / "1.monitor.csv").write_text('#{"t_start": 1700000001.0, "env_id": "CartPole-v1"}\nr,l,t\n20.0,20,1.5\n')
    (run,) = read(tmp_path)
    # At 1, 2.5 and 4 s: 10, 20 and 30 steps long.
    assert points_of(run) == [(10, 1.0, 10.0), (30, 2.5, 20.0), (60, 4.0, 30.0)]
    assert [run.keys[key] for key in ("env_id", "exp_name", "seed")] == ["CartPole-v1", "ppo", "4012"]
    # Where the folder tells no environment, the first line does.
    folder.rename(tmp_path / "A2C_1")
    shutil.rmtree(tmp_path / "A2C_1" / "CartPole-v1")
    (other,) = read(tmp_path)
    assert [other.keys[key] for key in ("env_id", "exp_name", "seed")] == ["CartPole-v1", "A2C", "1"]
    folder = tmp_path / "A2C_1"
    assert (run.smoothing, run.window) == ("means of 100 episodes", 100)
    (run,) = read(folder / "evaluations.npz", metric="eval")
    assert (run.curve.steps.tolist(), run.curve.values.tolist()) == ([100, 200], [2.0, 5.5])
    assert np.isnan(run.curve.seconds).all()
    assert table_of([row_of([run], threshold=2.0)], threshold=2.0)["median time to 2"] == ["not logged"]
    # The event file beside it has the times, here 10 s a hundred steps.
    write_events(folder, [(100, 10.0, 2.0, "eval/mean_reward"), (300, 30.0, 5.5, "eval/mean_reward")])
    (run,) = read(folder, metric="eval", x="time")
    assert points_of(run) == [(100, 10.0, 2.0), (200, 20.0, 5.5)]


def test_progress_of_stable_baselines3(tmp_path):
    points = [(100, 1.0, 10.0), (2000, 2.0, 10.0), (3000, 3.0, 10.0)]
    folder = stable_baselines3_run(tmp_path / "CartPole-v1" / "PPO_3", ["csv", "tensorboard"], points)
    for path in (folder, folder / "progress.csv"):
        (run,) = read(path)
        assert (run.curve.steps.tolist(), run.curve.values.tolist()) == ([100, 2000, 3000], [1.0, 2.0, 3.0])
        assert [run.keys[key] for key in ("env_id", "exp_name", "seed")] == ["CartPole-v1", "PPO", "3"]
        # 100 steps are 10 episodes of 10, 2000 are 200: the first mean of 100.
        assert (run.window, run.full) == (1, 1)


def test_progress_of_rllib(tmp_path):
    folder = tmp_path / "PPO_CartPole-v1_1a2b3_00004_4_2024-01-31_12-00-00"
    folder.mkdir()
    (folder / "params.json").write_text('{"env": "CartPole-v1", "seed": null, "lr": 0.1, "model": {"fcnet": [1]}}')
    (folder / "progress.csv").write_text(
        "date,env_runners/episode_return_mean,num_env_steps_sampled_lifetime,time_total_s\n"
        "2024-01-31,,1000,1.5\n2024-01-31,20.5,2000,3.0\n"
    )
    (run,) = read(tmp_path)
    assert points_of(run) == [(2000, 3.0, 20.5)]
    assert [run.keys[key] for key in ("env_id", "exp_name", "seed", "lr")] == ["CartPole-v1", "PPO", "unknown", "0.1"]
    # Of the episodes of an iteration, however many.
    assert run.smoothing == "points of env_runners/episode_return_mean"


def test_download_of_tensorboard(tmp_path):
    path = tmp_path / "run-Ant-v5__sac__12__1700000000-tag-charts_episodic_return (1).csv"
    path.write_text("Wall time,Step,Value\n1700000000.5,10,1.0\n1700000002.5,20,2.0\n")
    (run,) = read(path)
    assert points_of(run) == [(10, 0.0, 1.0), (20, 2.0, 2.0)]
    assert [run.keys[key] for key in ("env_id", "exp_name", "seed")] == ["Ant-v5", "sac", "12"]
    assert run.smoothing == "means of 100 episodes"
    # TensorBoard shows a random thousand of more: no mean of episodes that follow each other.
    path.write_text("Wall time,Step,Value\n" + "".join(f"{i},{i},{i}\n" for i in range(1000)))
    assert read(path)[0].smoothing == "means of 100 sampled episodes"


def test_chart_of_weights_and_biases(tmp_path, capsys):
    """Two runs and the mean of a group; each has a minimum and a maximum too, and nothing where it has no point."""
    path = tmp_path / "wandb_export.csv"
    names = ["Ant-v5__sac__1__17", "Ant-v5__sac__2__17", "Group: sac"]
    columns = [f'"{name} - charts/episodic_return{end}"' for name in names for end in ("", "__MIN", "__MAX")]
    path.write_text(f'"global_step",{",".join(columns)}\n10,1,1,1,,,,1,1,1\n20,2,2,2,5,5,5,3,2,5\n')
    one, two = read(path)
    assert (one.curve.steps.tolist(), one.curve.values.tolist()) == ([10, 20], [1.0, 2.0])
    assert (two.curve.steps.tolist(), two.curve.values.tolist()) == ([20], [5.0])
    assert [run.keys["seed"] for run in (one, two)] == ["1", "2"]
    assert "Group: sac is a mean over runs" in capsys.readouterr().err


def test_history_of_weights_and_biases(tmp_path, capsys):
    path = tmp_path / "Ant-v5__sac__3__17.csv"
    path.write_text(
        "_step,_runtime,_timestamp,global_step,charts/episodic_return,note\n0,1.5,1700000000,10,,a\n1,2.5,1700000001,20,7.0,b\n"
    )
    (run,) = read(path)
    assert points_of(run) == [(20, 2.5, 7.0)]
    assert [run.keys[key] for key in ("env_id", "exp_name", "seed")] == ["Ant-v5", "sac", "3"]
    assert capsys.readouterr().err == ""
    path.write_text("_step,charts/episodic_return\n0,1.0\n")
    read(path)
    assert "_step is the count of Weights & Biases" in capsys.readouterr().err


def test_label(tmp_path, capsys):
    for name in ("lr0.1/a/x7", "lr0.1/b/x8", "other"):
        write_events(tmp_path / name, constant(1.0))
    runs = read(tmp_path, label=r"lr(?P<rate>[\d.]+)/(?P<exp_name>\w)/x(?P<seed>\d+)(?P<none>y)?")
    assert [(run.keys.get("rate"), run.keys["exp_name"], run.keys["seed"]) for run in runs] == [
        ("0.1", "a", "7"),
        ("0.1", "b", "8"),
        (None, "other", "unknown"),
    ]
    assert capsys.readouterr().err == f"note: {tmp_path / 'other'} does not fit --label\n"


# One smoothing


def test_the_same_episodes_in_two_logs(tmp_path):
    """5 runs of 1,000 episodes that get longer and better: single ones, and means of 100 after each 2,000 steps."""
    rng = np.random.default_rng(3)
    for seed in range(5):
        lengths = np.minimum(np.arange(1, 1001) // 2 + rng.integers(10, 60, 1000), 500)
        ends = np.cumsum(lengths)
        write_run(tmp_path / f"ours{seed}", zip(ends, ends / 100, lengths, strict=True), exp_name="ours", seed=seed)
        means = compare_runs.trailing_mean(lengths.astype(float), 100)
        logged = [
            (step, means[i], means[i])
            for step in range(2000, ends[-1] + 1, 2000)
            if (i := np.sum(ends <= step) - 1) >= 0
        ]
        stable_baselines3_run(tmp_path / f"PPO_{seed}", ["tensorboard"], logged)
    runs = read(tmp_path, label="(?P<env_id>Env-v0)?$")
    for run in runs:
        run.keys["env_id"] = "Env-v0"
    ours, other = compare_runs.group_runs(runs, ["exp_name"])[::-1]
    assert {run.smoothing for run in runs} == {"means of 100 episodes"}
    rows = [
        compare_runs.summarise(group, "Env-v0", compare_runs.Args(("runs",), threshold=300)) for group in (ours, other)
    ]
    assert rows[0]["median"] == pytest.approx(rows[1]["median"], rel=0.005)
    # No further apart than two logs.
    assert 0 <= rows[1]["steps_to_threshold"] - rows[0]["steps_to_threshold"] <= 4000
    (verdict,) = compare_runs.compare([ours, other], DEFAULTS)
    assert verdict.adjusted > 0.3


def test_a_run_beside_its_csv_file_gets_no_verdict(tmp_path):
    """The file has means over bins of steps, which nobody can make means of 100 episodes of."""
    write_run(tmp_path / "run", constant(1.0))
    path = tmp_path / "ppo__Env-v0.csv"
    path.write_text(f"seed,tag,step,wall_time,value\n1,{EPISODES},10,0.5,1\n1,{EPISODES},20,0.5,1\n")
    runs = read(tmp_path / "run", path)
    groups = compare_runs.group_runs(runs, compare_runs.differing_keys(runs))
    assert [group.name for group in groups] == ["smoothing=bins of episodes", "smoothing=means of 100 episodes"]
    (verdict,) = compare_runs.compare(groups, DEFAULTS)
    expected = "their points are not comparable (bins of episodes and means of 100 episodes)."
    assert verdict.sentence().startswith(
        f"Env-v0: no verdict on {groups[0].name} and {groups[1].name}: {expected[:-1]}"
    )
    figure = compare_runs.draw_curves(groups, DEFAULTS)
    assert figure.get_supylabel() == "return: bins of episodes or means of 100\nepisodes"


@pytest.mark.parametrize(
    ("tag", "unit", "smooth", "expected"),
    [
        (EPISODES, "episodes", None, (100, "means of 100 episodes")),
        (EPISODES, "episodes", 1, (1, "episodes")),
        (EPISODES, "sampled episodes", 20, (20, "means of 20 sampled episodes")),
        (EPISODES, "bins of episodes", None, (1, "bins of episodes")),
        # A mean of 100 stays one, whatever is asked for.
        ("rollout/ep_rew_mean", "episodes", 20, (1, "means of 100 episodes")),
        ("train/reward", "episodes", None, (1, "points of train/reward")),
        ("eval/mean_reward", "episodes", None, (1, "evaluations")),
        ("losses/value_loss", "episodes", 5, (5, "means of 5 points of losses/value_loss")),
    ],
)
def test_smoothing(tag, unit, smooth, expected):
    assert compare_runs.smoothing(tag, unit, compare_runs.Args(("runs",), smooth=smooth)) == expected


# Statistics


def test_equal_curves_of_other_lengths_have_equal_scores(tmp_path, capsys):
    """Each episode of each run returns 0.9, which no binary number is: what rounding leaves must not be ranked."""
    for name, length in (("PPO", 10), ("DQN", 25)):
        for seed in range(1, 6):
            (tmp_path / f"{name}_{seed}").mkdir()
            rows = "".join(f"0.9,{length},{i}.0\n" for i in range(5000 // length + seed))
            text = f'#{{"t_start": 1700000000.0, "env_id": "Env-v0"}}\nr,l,t\n{rows}'
            (tmp_path / f"{name}_{seed}" / "monitor.csv").write_text(text)
    compare_runs.report(compare_runs.Args((str(tmp_path),)))
    assert "no difference shown between DQN and PPO (p = 1, 5 against 5 runs)" in capsys.readouterr().out


def test_two_columns_of_one_name_are_refused(tmp_path, capsys):
    """As two runs of one display name in a table of Weights & Biases: which of them is meant cannot be told."""
    path = tmp_path / "table.csv"
    path.write_text('"Step","ppo - charts/episodic_return","ppo - charts/episodic_return"\n1,2,3\n')
    with pytest.raises(compare_runs.UsageError, match="no run found that can be read"):
        read(path)
    assert "is no CSV file of curves that is known here" in capsys.readouterr().err


def test_trailing_mean():
    values = np.array([1.0, 2.0, 3.0, 6.0])
    assert compare_runs.trailing_mean(values, 2).tolist() == [1.0, 1.5, 2.5, 4.5]
    assert compare_runs.trailing_mean(values, 9).tolist() == [1.0, 1.5, 2.0, 3.0]
    assert compare_runs.trailing_mean(values, 1).tolist() == values.tolist()
    # One huge value is no longer there once it has left the window.
    assert compare_runs.trailing_mean(np.array([-1e17, 0.5, 0.5, 0.5]), 2).tolist() == [-1e17, -5e16, 0.5, 0.5]


def test_final_score():
    """A point stands for the steps since the one before."""
    x, values = np.array([0, 50, 90, 100]), np.array([1.0, 2.0, 3.0, 5.0])
    assert compare_runs.final_score(x, values, 0.1) == 5.0
    # 10 of 20 steps each, then 10 of 50, 40 of 50, then all.
    assert compare_runs.final_score(x, values, 0.2) == 4.0
    assert compare_runs.final_score(x, values, 0.5) == pytest.approx(0.2 * 5 + 0.8 * 3)
    assert compare_runs.final_score(x + 1000, values, 1.0) == pytest.approx(0.1 * 5 + 0.4 * 3 + 0.5 * 2)
    # Points at one step count by their mean, also where there is no other step.
    assert compare_runs.final_score(np.array([0, 9, 9]), np.array([1.0, 2.0, 4.0]), 0.1) == 3.0
    assert compare_runs.final_score(np.array([9, 9]), np.array([2.0, 4.0]), 0.1) == 3.0


@pytest.mark.parametrize(
    ("runs", "ends", "confidence"),
    [
        (1, (1, 1), None),
        (4, (1, 4), None),
        (5, (1, 5), 1 - 2 / 32),  # 93.8 %
        (6, (1, 6), 1 - 2 / 64),
        (7, (1, 7), 1 - 2 / 128),
        (8, (2, 7), 1 - 2 * (1 + 8) / 256),  # 93.0 %
        (10, (2, 9), 1 - 2 * (1 + 10) / 1024),
        (20, (6, 15), 1 - 2 * (1 + 20 + 190 + 1140 + 4845 + 15504) / 2**20),
    ],
)
def test_median_interval(runs, ends, confidence):
    scores = np.random.default_rng(0).permutation(np.arange(1.0, runs + 1))
    low, high, sure = compare_runs.median_interval(scores)
    assert (low, high) == ends
    assert sure is None if confidence is None else sure == pytest.approx(confidence)


def test_median_interval_of_scores_that_are_infinite():
    assert compare_runs.median_interval(np.array([1.0, np.inf, 2.0])) == (1.0, np.inf, None)


def test_wilson_interval():
    """By the formula (k + z^2/2 +- z sqrt(k (n-k)/n + z^2/4)) / (n + z^2), z = 1.959964."""
    for scores, ends in (([9] * 5, (0.565518, 1.0)), ([9, 9, 9, 1, 1], (0.230724, 0.882380))):
        row = row_of([make_run([score]) for score in scores], threshold=5.0)
        assert (row["reached_low"], row["reached_high"]) == pytest.approx(ends, abs=1e-5)


def test_interquartile_interval_against_scipy():
    scores = np.random.default_rng(1).normal(100, 20, size=10)
    _, low, high = compare_runs.bootstrapped([scores], compare_runs.iqm).tolist()
    expected = stats.bootstrap(
        (scores,),
        lambda x, axis: stats.trim_mean(x, 0.25, axis=axis),
        n_resamples=10_000,
        method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval
    # Two bootstraps of 10,000 resamples differ in their third digit.
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.6)
    assert high - low > 10
    assert compare_runs.bootstrapped([scores], compare_runs.iqm)[1:].tolist() == [low, high]


@pytest.mark.parametrize(("n", "m"), [(3, 3), (4, 6), (5, 5), (8, 3), (10, 12)])
def test_p_values_without_ties_are_those_of_scipy(n, m):
    rng = np.random.default_rng(n)
    for shift in (0.0, 1.0, 9.0):
        x, y = rng.normal(shift, 1, n), rng.normal(0, 1, m)
        expected = stats.mannwhitneyu(x, y, method="exact").pvalue
        assert compare_runs.compare_in_all([(x, y)]) == pytest.approx(expected)
        assert compare_runs.compare_in_all([(y, x)]) == pytest.approx(expected)


def test_p_value_with_ties_is_that_of_all_permutations():
    x, y = np.array([1.0, 5.0, 5.0, 5.0]), np.array([5.0, 5.0, 7.0, 7.0, 9.0])

    def rank_sum(x, y):
        return stats.rankdata(np.concatenate([x, y]))[: len(x)].sum()

    # All 126 ways to deal them.
    expected = stats.permutation_test((x, y), rank_sum, n_resamples=np.inf).pvalue
    assert compare_runs.compare_in_all([(x, y)]) == pytest.approx(expected)
    # Equal scores, and scores at a ceiling.
    assert compare_runs.compare_in_all([(np.full(5, 500.0), np.full(5, 500.0))]) == 1.0


def test_p_value_over_environments_by_hand():
    """2 against 2 parted wholly in two environments: 1 of 6 ways in each, 1 of 36 in both, 2 of 36 on two sides."""
    low, high = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    assert compare_runs.compare_in_all([(high, low), (high, low)]) == pytest.approx(2 / 36)
    # Apart in opposite directions.
    assert compare_runs.compare_in_all([(high, low), (low, high)]) == 1.0
    assert compare_runs.least_p([(2, 2), (2, 2)]) == pytest.approx(2 / 36)


@pytest.mark.parametrize(("n", "least"), [(3, 0.1), (4, 0.029), (5, 0.0079), (6, 0.0022)])
def test_least_p(n, least):
    parted = compare_runs.compare_in_all([(np.arange(n) + 100.0, np.arange(n))])
    assert compare_runs.least_p([(n, n)]) == pytest.approx(parted)
    assert parted == pytest.approx(least, rel=0.02)


@pytest.mark.parametrize("n", [3, 4, 5])
def test_equal_groups_in_every_rank_order(n):
    """Of all ways to deal 2 n ranks to two groups at most 5 % get a verdict, and none at 3 against 3."""
    ranks = set(range(2 * n))
    ways = [np.array(chosen, float) for chosen in combinations(ranks, n)]
    false = sum(compare_runs.compare_in_all([(own, np.array(sorted(ranks - {*own}), float))]) <= 0.05 for own in ways)
    # By the tables of the Mann-Whitney test: U at most 0 of 70 ways, 2 of 252; on both sides.
    assert false == {3: 0, 4: 2, 5: 8}[n]
    assert false / len(ways) <= 0.05


def test_holm_by_hand():
    """0.01 x 4, 0.03 x 2 and 0.04 x 1 raised to the one before; order stays; none is above 1."""
    assert compare_runs.holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert compare_runs.holm([0.9, 0.8]).tolist() == [1.0, 1.0]
    assert compare_runs.holm([]).tolist() == []


def test_improvement_interval():
    """The ends solve Newcombe's equation of method 5; at 1 the upper end is 1, and the lower one is far from it."""
    for seen, n, m in ((0.8, 5, 5), (0.5, 6, 9), (1.0, 5, 5), (0.0, 5, 8)):
        low, high = compare_runs.improvement_interval(seen, n, m)
        for end in {low, high} - {0.0, 1.0}:
            rest = 1 + ((n + m) / 2 - 1) * ((1 - end) / (2 - end) + end / (1 + end))
            assert abs(seen - end) == pytest.approx(1.959964 * np.sqrt(end * (1 - end) * rest / (n * m)), rel=1e-6)
        assert low <= seen <= high
        backwards = compare_runs.improvement_interval(1 - seen, m, n)
        assert (1 - backwards[1], 1 - backwards[0]) == pytest.approx((low, high))
    assert compare_runs.improvement_interval(1.0, 5, 5) == (pytest.approx(0.643, abs=0.001), 1.0)


SCORES = [
    [0.878, 0.208, -0.029, -0.57],
    [0.459, 1.099, 0.613, 0.805],
    [1.009, 0.247, 1.661, 0.249],
    [0.749, 1.696, 0.554, 0.646],
    [0.395, 0.734, -0.251, 0.341],
    [1.278, 0.685, 0.504, 0.749],
]
"""of 6 runs in 4 environments; what rliable 1.2.0 makes of them stands in the tests"""


def test_aggregates_are_those_of_rliable():
    """Intervals of its 50,000 resamples; the optimality gap is 1 less the mean of at most 1."""
    columns = list(np.array(SCORES).T)
    found = compare_runs.bootstrapped(columns, compare_runs.iqm)
    assert found[0] == pytest.approx(0.60283333)
    assert found[1:] == pytest.approx((0.43516458, 0.77442083), abs=0.01)
    found = compare_runs.bootstrapped(columns, lambda scores: 1 - np.minimum(scores, 1).mean(-1))
    assert found[0] == pytest.approx(0.45975)
    assert found[1:] == pytest.approx((0.31749896, 0.61266667), abs=0.01)


def test_performance_profile_is_that_of_rliable():
    levels, columns = np.array([0.0, 0.25, 0.5, 0.75, 1.0]), list(np.array(SCORES).T)
    shares, low, high = compare_runs.bootstrapped(
        columns, lambda x: (x[..., None, :] > levels[:, None]).mean(-1), compare_runs.RESAMPLES_OF_CURVES
    )
    assert shares == pytest.approx([0.875, 0.75, 0.625, 0.29166667, 0.20833333])
    # A run is 1 of 24, and so may the ends of intervals of 2,000 and 20,000 resamples differ.
    assert low == pytest.approx([0.75, 0.58333333, 0.41666667, 0.125, 0.08333333], abs=0.0417)
    assert high == pytest.approx([1.0, 0.91666667, 0.79166667, 0.45833333, 0.375], abs=0.0417)


def test_sample_efficiency_is_that_of_rliable():
    """Three points of each run's curve: 0.5 below, 0.2 below times 0.5 to 1.5 by run, and the score."""
    scores = np.array(SCORES)
    curves = np.stack([scores - 0.5, (scores - 0.2) * np.linspace(0.5, 1.5, 6)[:, None], scores], axis=-1)
    middle, low, high = compare_runs.interquartile_curve(list(curves.transpose(1, 0, 2)))
    assert middle == pytest.approx([0.10283333, 0.41109167, 0.60283333])
    assert low == pytest.approx([-0.06458542, 0.22780792, 0.43258125], abs=0.02)
    assert high == pytest.approx([0.27233333, 0.58505021, 0.77342083], abs=0.02)


def test_resamples_stay_within_environments():
    """Of 1 and 2 either may stand in the first place, and 7 in the last alone."""
    columns = [np.array([1.0, 2.0, 2.0, 1.0, 2.0]), np.full(5, 7.0)]
    assert compare_runs.bootstrapped(columns, lambda scores: scores[..., 0]).tolist() == [1, 1, 2]
    assert compare_runs.bootstrapped(columns, lambda scores: scores[..., -1]).tolist() == [7, 7, 7]


@pytest.mark.parametrize(("sizes", "shown"), [((4, 9), False), ((5, 5), True), ((7,), False), ((8,), True)])
def test_a_bootstrap_of_few_runs_has_no_interval(sizes, shown):
    """Its 95 % interval would hold the truth in 75 (of 3 runs) to 90 of 100 tables."""
    columns = [np.arange(size, dtype=float) for size in sizes]
    middle, *ends = compare_runs.bootstrapped(columns, lambda scores: scores.mean(-1))
    assert middle == np.concatenate(columns).mean()
    assert np.isfinite(ends).tolist() == [shown, shown]


def test_grid_goes_on_over_the_others():
    """Curves over 0 to 100 and 40 to 200: from 40 to 100 both have data."""
    one = (np.array([0, 100]), np.array([0.0, 100.0]))
    other = (np.array([40, 70, 200]), np.array([5.0, 8.0, 8.0]))
    grid, values = compare_runs.on_grid([one, other], 201)
    assert grid.tolist() == list(range(201))
    assert values[0, :101] == pytest.approx(grid[:101])
    assert (values[1, 40], values[1, 55], values[1, 200]) == (5, 6.5, 8)
    assert np.isnan(values).sum(1).tolist() == [100, 40]
    median, low, high = compare_runs.median_band(values)
    assert (median[20], low[70], median[70], high[70], median[150]) == (20, 8, 39, 70, 8)


def test_grid_ends_where_runs_end_that_end_together():
    """At 97 to 100 steps; the last few points of the longest alone would be no group's."""
    curves = [(np.array([first, end]), np.zeros(2)) for first, end in ((0, 100), (3, 97), (1, 99), (0, 40))]
    grid, values = compare_runs.on_grid(curves)
    assert (grid[0], grid[-1]) == (3, 97)
    assert np.isfinite(values[:, -1]).tolist() == [True, True, True, False]


def test_grid_of_points_at_one_step():
    grid, values = compare_runs.on_grid([(np.array([0, 0, 10]), np.array([1.0, 3.0, 5.0]))])
    assert (values[0][0], values[0][-1]) == (2.0, 5.0)
    grid, values = compare_runs.on_grid([(np.array([7, 7]), np.array([1.0, 3.0]))])
    assert (grid.tolist(), values.tolist()) == ([7.0], [[2.0]])


def test_band_of_curves_apart():
    _, values = compare_runs.on_grid([(np.array([0, 10]), np.zeros(2)), (np.array([90, 100]), np.ones(2))], 101)
    median, low, high = compare_runs.median_band(values)
    assert (median[5], low[5], high[95]) == (0, 0, 1)
    assert np.isnan(median[11:90]).all()


def test_threshold_needs_a_full_window():
    """A lucky first episode is not the mean of three; a run shorter than the window has one mean."""
    run = make_run([9, 0, 0, 6, 6, 6], steps=[1, 2, 3, 4, 5, 6], seconds=[2, 4, 6, 8, 10, 12], window=3)
    assert compare_runs.first_reach(run, 4) == (5, 10)
    assert compare_runs.first_reach(run, 7) == (np.inf, np.inf)
    assert compare_runs.first_reach(make_run([9, 0, 0], window=99), 3) == (2, 2)
    assert compare_runs.first_reach(make_run([9, 0, 0]), 9) == (0, 0)


def test_threshold_that_is_reached_exactly():
    """Differences of sums of floats lose the last digits, and event files hold float32, where 0.9 is 0.89999998."""
    values = [-0.1, 20.7, 148.3, 311.156, 10.1]
    assert compare_runs.first_reach(make_run(values), 311.156)[0] == 3
    assert compare_runs.first_reach(make_run([0.5, np.float32(0.9)]), 0.9)[0] == 1
    assert compare_runs.first_reach(make_run([0.1] * 7, window=3), 0.1)[0] == 2
    assert compare_runs.first_reach(make_run([499.99]), 500)[0] == np.inf
    assert compare_runs.first_reach(make_run([1.0, 3.0], window=10**20), 2)[0] == 1


# Tables


def test_runs_that_never_reach_a_threshold_count_as_infinite():
    """2 of 3 reach it, after 20 and 30 steps: the median of 20, 30 and never is 30, and its interval has no end."""
    runs = [make_run([0, 9, 9], [0, end, 40], [0, end / 10, 4]) for end in (20, 30)]
    row = row_of([*runs, make_run([0, 0], [0, 40])], threshold=9)
    assert (row["reached"], row["steps_to_threshold"], row["seconds_to_threshold"]) == (2, 30, 3)
    shown = table_of([row], threshold=9)
    assert shown["reached 9 (95 %)"] == ["2 of 3 (21% to 94%)"]
    assert shown["median steps to 9"] == ["30 (20 to never)"]
    assert shown["median time to 9"] == ["3.0 seconds (2.0 seconds to never)"]
    row = row_of([runs[0], make_run([0, 0], [0, 40])], threshold=9)
    assert table_of([row], threshold=9)["median steps to 9"] == ["never (20 to never)"]


def test_row_of_few_runs():
    runs = [make_run([0, value, value], [0, 90, 100], [0, 9, 12.5]) for value in (4, 8, 12)]
    row = row_of(runs)
    assert (row["runs"], row["median"]) == (3, 8)
    assert (row["median_low"], row["median_high"], row["confidence"], row["iqm"]) == (4, 12, None, None)
    assert row["steps_per_second"] == 8
    assert table_of([row])["median (its interval)"] == ["8 (4 to 12, min to max)"]
    assert table_of([row_of(runs[:1])])["median (its interval)"] == ["4"]


def test_row_of_five_and_of_eight_runs():
    """Where 30 % of seeds fail no interval is 500 to 500."""
    five = row_of([make_run([score]) for score in (500, 500, 500, 500, 20)])
    assert (five["median_low"], five["median_high"], five["confidence"]) == (20, 500, 0.9375)
    eight = row_of([make_run([score]) for score in (1, 2, 3, 4, 5, 6, 7, 100)])
    # Two of eight go at each end.
    assert eight["iqm"] == 4.5
    shown = table_of([five, eight])
    assert shown["median (its interval)"] == ["500.0 (20 to 500.0, 93.8 %)", "4.5 (2 to 7, 93.0 %)"]
    assert shown["IQM (95 %)"][0] == ""
    assert shown["IQM (95 %)"][1].startswith("4.5 (")


def test_speed_of_the_end_of_a_run():
    """10,000 steps in 100 s, the first million lies in a file that is gone."""
    assert row_of([make_run([1, 1], [1_000_000, 1_010_000], [0, 100])])["steps_per_second"] == 100


def test_what_breaks_a_table_is_taken_out():
    lines = [["environment", "group"], ["Env-v0", "a|b\nc"]]
    table = compare_runs.markdown_table(lines)
    assert table.splitlines()[2] == r"| Env-v0      | a\|b c |"


def test_latex():
    table = compare_runs.latex_table([["group", "share"], ["a_b $\\x", "5 %"]])
    assert table.splitlines() == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"group & share \\",
        r"\midrule",
        r"a\_b \$\textbackslash{}x & 5 \% \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


# Verdicts


def test_sentences():
    (clear,) = compare_runs.compare(groups_of({"bad": [1, 2, 3, 4, 5], "good": [6, 7, 8, 9, 10]}), DEFAULTS)
    assert clear.sentence() == (
        "Env-v0: good scores higher than bad (p = 0.0079, 5 against 5 runs). A run of good scores higher in 100% of "
        "pairs, ties counted half (95 % interval 64% to 100%)."
    )
    (close,) = compare_runs.compare(groups_of({"a": [1, 2, 3, 4, 6], "b": [1.5, 2.5, 3.5, 4.5, 5]}), DEFAULTS)
    # b wins 5, 4, 3, 2 and 0 of its 25 pairs less: 14.
    assert close.sentence().startswith("Env-v0: no difference shown between b and a (p = 0.84, 5 against 5 runs)")
    assert "scores higher in 56% of pairs" in close.sentence()
    (single,) = compare_runs.compare(groups_of({"a": [1], "b": [2, 3]}), DEFAULTS)
    assert single.sentence() == (
        "Env-v0: no verdict on b and a: 2 against 1 runs can give none, however they score; 4 of each could. "
        "A run of b scores higher in 100% of pairs, ties counted half."
    )


def test_three_against_three_never_give_a_verdict():
    (few,) = compare_runs.compare(groups_of({"bad": [1, 2, 3], "good": [6, 7, 8]}), DEFAULTS)
    assert "no verdict on good and bad: 3 against 3 runs can give none" in few.sentence()
    # Over three pairs 4 against 4 has 3 x 0.029 at best, 5 against 5 has 3 x 0.0079.
    verdicts = compare_runs.compare(
        groups_of({name: range(i, i + 4) for i, name in ((0, "a"), (9, "b"), (19, "c"))}), DEFAULTS
    )
    assert [verdict.needed for verdict in verdicts] == [5, 5, 5]
    verdicts = compare_runs.compare(
        groups_of({name: range(i, i + 5) for i, name in ((0, "a"), (9, "b"), (19, "c"))}), DEFAULTS
    )
    assert [verdict.needed for verdict in verdicts] == [None] * 3
    assert [verdict.adjusted for verdict in verdicts] == pytest.approx([3 * 2 / 252] * 3)


def test_a_difference_that_is_none_after_the_correction():
    """U = 2 of five against five: p = 2 * 4 / 252 = 0.032, which three pairs make 0.095."""
    scores = {"a": [1, 2, 3, 4, 7], "b": [5, 6, 8, 9, 10], "c": [1.5, 4.5, 5.5, 7.5, 9.5]}
    verdict, *_ = compare_runs.compare(groups_of(scores), DEFAULTS)
    assert (verdict.p, verdict.adjusted) == pytest.approx((8 / 252, 24 / 252))
    assert "no difference shown between b and a (p = 0.095" in verdict.sentence()


def test_baseline():
    groups = groups_of({name: range(i, i + 4) for i, name in ((0, "a"), (9, "b"), (19, "c"))})
    verdicts = compare_runs.compare(groups, compare_runs.Args(("runs",), baseline="b"))
    assert [(verdict.better, verdict.worse) for verdict in verdicts] == [("b", "a"), ("c", "b")]
    with pytest.raises(compare_runs.UsageError, match="--baseline d: no group has this name; there are a, b, c"):
        compare_runs.compare(groups, compare_runs.Args(("runs",), baseline="d"))


def test_only_groups_of_one_environment_are_compared():
    groups = groups_of({"a": [1, 2]}) + groups_of({"b": [1, 2]}, env_id="Other-v0")
    assert compare_runs.compare(groups, DEFAULTS) == []


def test_verdict_over_environments():
    """3 against 3 in two environments whose returns differ by a factor of 1000: 2 of 400 ways are as far apart."""
    runs = [
        make_run([scale * (score + 5 * (name == "good"))], env_id=env, exp_name=name, seed=str(score))
        for env, scale in (("A-v0", 1.0), ("B-v0", 1000.0))
        for name in ("bad", "good")
        for score in (1, 2, 3)
    ]
    (verdict,) = compare_runs.compare(compare_runs.group_runs(runs, ["exp_name"]), DEFAULTS)
    assert verdict.p == pytest.approx(2 / 400)
    assert verdict.sentence().startswith("A-v0, B-v0: good scores higher than bad (p = 0.005, 3 against 3 runs)")
    assert verdict.interval is None


def test_an_environment_counts_by_its_runs():
    """Of 10 x 10 + 1 + 1 pairs new scores higher in 100; the means of the environments would say 1 of 3."""
    runs = [
        make_run([score + 100 * (name == winner)], env_id=env, exp_name=name, seed=str(score))
        for env, winner, count in (("A-v0", "new", 10), ("B-v0", "old", 1), ("C-v0", "old", 1))
        for name in ("old", "new")
        for score in range(count)
    ]
    (verdict,) = compare_runs.compare(compare_runs.group_runs(runs, ["exp_name"]), DEFAULTS)
    assert (verdict.better, verdict.probability) == ("new", pytest.approx(100 / 102))


def test_different_budgets_are_told():
    runs = [
        make_run([1, 1], [0, end], exp_name=name, seed=str(seed))
        for name, end in (("a", 20_000), ("b", 100_000))
        for seed in range(5)
    ]
    (verdict,) = compare_runs.compare(compare_runs.group_runs(runs, ["exp_name"]), DEFAULTS)
    assert verdict.sentence().endswith(
        "But a ends at step 20,000 and b ends at step 100,000, each scored at its own end; "
        "--at-step 20000 compares them at one."
    )


def test_at_step(tmp_path, capsys):
    """Curves, scores and thresholds end there; a run that begins later has nothing to compare."""
    write_run(tmp_path / "long", [(step, step / 10, step) for step in range(0, 101, 10)])
    write_run(tmp_path / "late", [(70, 7.0, 1.0)])
    (run,) = read(tmp_path, at_step=50, smooth=1)
    assert run.curve.steps[-1] == 50
    row = row_of([run], threshold=60)
    assert (row["median"], row["reached"]) == (50, 0)
    assert f"note: {tmp_path / 'late'} has no finite point of" in capsys.readouterr().err


def test_means_of_fewer_points_are_told():
    """A curve that rises by 1 an episode: of 30 the last mean is of all, of 300 it is of 100."""
    runs = [
        make_run(range(n), window=100, smoothing="means of 100 episodes", exp_name=name, seed=str(seed))
        for name, n in (("a", 30), ("b", 300))
        for seed in range(5)
    ]
    groups = compare_runs.group_runs(runs, ["exp_name"])
    (verdict,) = compare_runs.compare(groups, DEFAULTS)
    assert "But b ends at step 299 and a ends at step 29, each" in verdict.sentence()
    assert verdict.sentence().endswith("; not all points are means of 100 episodes: a run has 30, another 100 or more.")
    assert compare_runs.notes(groups) == []


def test_a_crashed_run_is_told():
    ends = (100_000, 100_000, 99_000, 100_000, 6_000)
    runs = [
        make_run([1, 1], [0, end], exp_name=name, seed=str(i))
        for name in "ab"
        for i, end in enumerate(ends)
        if name == "a" or end > 6000
    ]
    groups = compare_runs.group_runs(runs, ["exp_name"])
    (verdict,) = compare_runs.compare(groups, DEFAULTS)
    told = "1 of 5 runs of a end at step 6,000, not at 100,000"
    assert verdict.sentence().endswith(f"But {told}.")
    assert f"Env-v0 a: {told}" in compare_runs.notes(groups)
    figure = compare_runs.draw_curves(groups, DEFAULTS)
    a, b = figure.axes[0].lines
    # In thousands of steps.
    assert (a.get_xdata()[-1], b.get_xdata()[-1]) == (99, 99)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["a (5 runs, 4 at the end)", "b (4 runs)"]


def test_mixed_machines_and_versions_are_told(tmp_path):
    for i, (device, version) in enumerate((("cpu", "2.1"), ("cuda", "2.1"))):
        folder = write_run(tmp_path / str(i), constant(1.0), exp_name=f"ppo{i}")
        content = json.loads((folder / "args.json").read_text())
        content |= {"device": device, "git_commit": None, "versions": {"torch": version}}
        (folder / "args.json").write_text(json.dumps(content))
    (verdict,) = compare_runs.compare(compare_runs.group_runs(read(tmp_path), ["exp_name"]), DEFAULTS)
    assert verdict.caveats == ["the runs were not made with the same (device cpu, cuda)"]
    # Nothing is told of a third run, so nothing is said.
    write_events(tmp_path / "Env-v0__other__1__1", constant(1.0))
    verdicts = compare_runs.compare(compare_runs.group_runs(read(tmp_path), ["exp_name"]), DEFAULTS)
    assert [len(verdict.caveats) for verdict in verdicts] == [0, 0, 1]


@pytest.mark.parametrize("name", ["evaluations.npz", "0.monitor.csv", "progress.csv", "scalars/eval/reward.csv"])
@pytest.mark.parametrize("content", ["", "no,table\n1", '#{"t_start": 1}\nr,l\n1,2\n'])
def test_damaged_files_of_other_programs(tmp_path, capsys, name, content):
    """They are named, and what else is in the folder is used."""
    folder = write_events(tmp_path / "PPO_1", [(1, 1.0, 2.0, "rollout/ep_rew_mean")])
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    (run,) = read(tmp_path)
    assert points_of(run) == [(1, 1.0, 2.0)]
    assert f"note: {path} " in capsys.readouterr().err


def test_a_seed_twice():
    runs = [make_run([1, 1], [0, 100], seed=seed) for seed in ("1", "1", "2")]
    assert compare_runs.notes([compare_runs.Group("ppo", runs)]) == [
        "Env-v0 ppo: seed 1 more than once; such runs are no independent samples"
    ]


def two_groups(tmp_path):
    for seed in (1, 2, 3):
        write_run(tmp_path / "runs" / f"ppo{seed}", constant(10.0 * seed), seed=seed)
        write_run(tmp_path / "runs" / f"dqn{seed}", constant(1.0 * seed, last=90 + seed), seed=seed, exp_name="dqn")
    return tmp_path / "runs"


def test_csv_parses_back(tmp_path, monkeypatch, capsys):
    out = tmp_path / "made" / "table.csv"
    command_line(compare_runs, monkeypatch, str(two_groups(tmp_path)), "--threshold", "25", "--out", str(out))
    assert f"written: {out}, {out.parent / 'table_runs.csv'}" in capsys.readouterr().out
    with open(out, newline="") as file:
        dqn, ppo = csv.DictReader(file)
    assert (ppo["environment"], ppo["group"], ppo["runs"]) == ("Env-v0", "ppo", "3")
    assert [float(ppo[f"median{end}"]) for end in ("", "_low", "_high")] == [20.0, 10.0, 30.0]
    assert (ppo["confidence"], ppo["iqm"]) == ("", "")
    # The window of 100 episodes is the whole run of 11.
    assert (ppo["reached"], ppo["steps_to_threshold"], ppo["steps_to_threshold_low"]) == ("1", "inf", "100")
    assert (dqn["reached"], dqn["steps_to_threshold"]) == ("0", "inf")
    assert float(ppo["steps_per_second"]) == 10
    with open(out.parent / "table_runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["group"], row["seed"], row["score"]) for row in rows[3:]] == [
        ("ppo", str(i), str(10 * i)) for i in (1, 2, 3)
    ]
    assert rows[5]["steps_to_threshold"] == "100"
    assert (rows[0]["smoothing"], rows[0]["last_step"]) == ("means of 100 episodes", "90")
    assert rows[0]["path"] == str(tmp_path / "runs" / "dqn1")


def test_markdown_parses_back(tmp_path, monkeypatch, capsys):
    out = tmp_path / "table.md"
    command_line(compare_runs, monkeypatch, str(two_groups(tmp_path)), "--out", str(out), "--smooth", "1")
    shown = capsys.readouterr().out
    lines = out.read_text().splitlines()
    header, rule, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    assert all(line in shown for line in lines)
    assert header == ["environment", "group", "runs", "median (its interval)", "steps/s"]
    assert [set(cell) <= {"-", ":"} for cell in rule] == [True] * 5
    assert [row[:4] for row in rows] == [
        ["Env-v0", "dqn", "3", "2 (1 to 3, min to max)"],
        ["Env-v0", "ppo", "3", "20 (10 to 30, min to max)"],
    ]
    assert "6 runs, grouped by env_id, exp_name; metric: return, points are episodes." in lines
    assert any(line.startswith("Env-v0: no verdict on ppo and dqn") for line in lines)


def test_latex_file(tmp_path, monkeypatch):
    out = tmp_path / "table.tex"
    command_line(compare_runs, monkeypatch, str(two_groups(tmp_path)), "--out", str(out))
    lines = out.read_text().splitlines()
    assert lines[0] == r"\begin{tabular}{llrrr}"
    assert r"Env-v0 & ppo & 3 & 20 (10 to 30, min to max) & 10 \\" in lines
    assert all(line.startswith("% ") for line in lines[lines.index(r"\end{tabular}") + 2 :: 2])


# Over environments


def normalised_runs(tmp_path):
    """SCORES as runs of two scripts in games of two spellings and in other tasks; the other script scores less."""
    file = tmp_path / "references.csv"
    file.write_text("env_id,low,high,source\nPong,-20,20,x\nBreakout,0,100,x\nA-v1,1,2,x\nA,7,8,x\nB,-1,0,x\n")
    names = {"PongNoFrameskip-v4": (-20, 20), "ALE/Breakout-v5": (0, 100), "A-v1": (1, 2), "B-v3": (-1, 0)}
    runs = [
        make_run([low + (score - less) * (high - low)] * 2, [0, 10], env_id=env, exp_name=name, seed=str(seed))
        for name, less in (("good", 0.0), ("bad", 0.3))
        for seed, scores in enumerate(SCORES)
        for score, (env, (low, high)) in zip(scores, names.items(), strict=True)
    ]
    return runs, compare_runs.Args(("runs",), normalise=file, threshold=1.0)


def test_aggregates_of_normalised_scores(tmp_path):
    runs, args = normalised_runs(tmp_path)
    groups = compare_runs.group_runs(runs, ["exp_name"])
    (bad, good), (header, *lines) = compare_runs.aggregate(groups, args)
    assert (good["group"], good["environments"], good["runs"]) == ("good", 4, 24)
    assert (good["iqm"], good["optimality_gap"]) == pytest.approx((0.60283333, 0.45975))
    assert bad["iqm"] == pytest.approx(0.30283333)
    assert header[3:] == ["IQM, normalised (95 %)", "optimality gap (95 %)"]
    assert lines[1][3].startswith("0.603 (0.4")


def test_raw_returns_of_environments_are_never_averaged(tmp_path):
    """A group of four environments has four rows."""
    runs, args = normalised_runs(tmp_path)
    (group,) = compare_runs.group_runs(runs, ["seed"])[:1]
    rows = [compare_runs.summarise(group, env, args) for env in group.environments]
    assert [(row["environment"], row["runs"]) for row in rows] == [
        ("A-v1", 2),
        ("ALE/Breakout-v5", 2),
        ("B-v3", 2),
        ("PongNoFrameskip-v4", 2),
    ]
    assert rows[1]["median"] == pytest.approx(100 * (0.208 - 0.15))


def test_normalise_on_the_command_line(tmp_path, monkeypatch, capsys):
    for env in ("CartPole-v1", "Pendulum-v1"):
        for seed in (1, 2):
            write_run(tmp_path / f"{env}{seed}", constant(100.0 * seed), env_id=env, seed=seed)
    out = tmp_path / "table.csv"
    flags = ("--normalise", str(ROOT / "benchmarks" / "normalise.csv"), "--out", str(out))
    command_line(compare_runs, monkeypatch, str(tmp_path), *flags)
    shown = capsys.readouterr().out
    assert "| ppo   |            2 |    4 |" in shown
    assert "4 runs, grouped by exp_name;" in shown
    with open(tmp_path / "table_all.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["environments"] == "2"
    (tmp_path / "bad.csv").write_text("env_id,low,high\nPendulum-v1,0,1\n")
    status, text = failed(compare_runs, monkeypatch, capsys, str(tmp_path), "--normalise", str(tmp_path / "bad.csv"))
    assert status == 2
    assert text == f"error: --normalise {tmp_path / 'bad.csv'}: no row for CartPole-v1, nor for CartPole\n"
    (tmp_path / "bad.csv").write_text("env_id,low,high\nPendulum-v1,1,0\n")
    status, text = failed(compare_runs, monkeypatch, capsys, str(tmp_path), "--normalise", str(tmp_path / "bad.csv"))
    assert "no table with columns env_id, low, high (each low must be below its high)" in text


def test_one_run_of_an_environment_gives_no_interval_of_an_aggregate(tmp_path, monkeypatch, capsys):
    for name, env in (("ppo", "CartPole-v1"), ("ppo", "Pendulum-v1"), ("rpo", "Pendulum-v1")):
        write_run(tmp_path / f"{name}{env}", constant(100.0), env_id=env, exp_name=name)
    out, references = tmp_path / "table.csv", tmp_path / "references.csv"
    references.write_text("env_id,low,high\nPendulum-v1,0,200\nCartPole-v1,0,200\n")
    command_line(compare_runs, monkeypatch, str(tmp_path), "--normalise", str(references), "--out", str(out))
    shown = capsys.readouterr().out
    assert re.search(r"\| ppo +\| +2 \| +2 \| +0.500 \| +0.500 \|", shown)
    assert "note: the groups are over different environments, so their normalised scores are not comparable" in shown
    with open(tmp_path / "table_all.csv", newline="") as file:
        assert [(row["iqm"], row["iqm_low"], row["iqm_high"]) for row in csv.DictReader(file)] == [("0.5", "", "")] * 2


def test_references_that_ship():
    """Figures of the papers: Pong and Breakout of Mnih et al. 2015, extended data table 2; HalfCheetah of D4RL."""
    references = compare_runs.read_references(ROOT / "benchmarks" / "normalise.csv")
    assert references["Pong"] == (-20.7, 14.6)
    assert references["Breakout"] == (1.7, 30.5)
    assert references["HalfCheetah"] == (-280.178953, 12135.0)
    assert len(references) >= 57 + 4


# Pictures


def test_a_pair_that_was_not_tested_is_not_drawn(tmp_path):
    """A cross would say that the test finds no difference."""
    runs = [make_run([1, 2], exp_name=name, smoothing=name) for name in ("episodes", "evaluations")]
    groups = compare_runs.group_runs(runs, ["exp_name"])
    args = compare_runs.Args(("runs",), pictures=tmp_path)
    (verdict,) = compare_runs.compare(groups, args)
    assert verdict.p is None
    assert compare_runs.write_pictures(groups, [verdict], args) == [tmp_path / "curves.png"]


def test_curves_are_medians_with_bands_within_the_runs():
    """Five runs: the band is from the least to the greatest, a bootstrap of means would be narrower."""
    values = [[1, 3], [2, 4], [3, 5], [4, 6], [90, 100]]
    runs = [make_run(own, [0, 2000], exp_name="a", seed=str(i)) for i, own in enumerate(values)]
    runs += [make_run([7, 7], [0, 3000], exp_name="b")]
    figure = compare_runs.draw_curves(compare_runs.group_runs(runs, ["env_id", "exp_name"]), DEFAULTS)
    (axes,) = figure.axes
    one, other = axes.lines
    x, y = one.get_data()
    # In thousands of steps.
    assert (x[0], x[-1], y[0], y[-1]) == (0, 2, 3, 5)
    assert other.get_xdata()[-1] == 3
    # One run has no band.
    (band,) = axes.collections
    assert band.get_paths()[0].get_extents().extents.tolist() == [0, 1, 2, 100]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a (5 runs)", "b (1 run)"]
    assert (axes.get_xlabel(), axes.get_title()) == ("environment steps, thousands", "Env-v0")
    assert figure.get_supylabel() == "return: episodes"
    assert one.get_linestyle() != other.get_linestyle()
    assert one.get_marker() != other.get_marker()
    assert one.get_color() != other.get_color()


def test_a_panel_for_each_environment():
    runs = [make_run([1, 2], env_id=f"E{i}-v0", exp_name=name) for i in (1, 2, 10, 3) for name in "ab"]
    figure = compare_runs.draw_curves(compare_runs.group_runs(runs, ["env_id", "exp_name"]), DEFAULTS)
    assert [axes.get_title() for axes in figure.axes] == ["E1-v0", "E2-v0", "E3-v0", "E10-v0"]
    assert len(figure.legends[0].get_texts()) == 2
    assert figure.get_figwidth() == 6.5


@pytest.mark.parametrize("width", [3.3, 6.5])
def test_long_names_leave_room_for_the_curves(tmp_path, width):
    """Five arguments differ: the legend below them wraps and lies on no panel and within the picture."""
    differing = {f"some_argument_{i}": "0.123456" for i in range(5)}
    runs = [make_run([1, 2], **differing), make_run([1, 2], **dict.fromkeys(differing, "9"))]
    args = compare_runs.Args(("runs",), width=width)
    with matplotlib.rc_context(compare_runs.LOOK):
        figure = compare_runs.draw_curves(compare_runs.group_runs(runs, ["exp_name", *differing]), args)
        figure.savefig(tmp_path / "picture.png", dpi=100)
        renderer = FigureCanvasAgg(figure).get_renderer()
        panel, legend = figure.axes[0].get_window_extent(renderer), figure.legends[0].get_window_extent(renderer)
    assert legend.y1 <= panel.y0
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1
    assert panel.width >= 0.6 * figure.bbox.width
    assert panel.height >= 0.25 * figure.bbox.height


def test_threshold_picture():
    runs = [make_run([0, value], [0, 60], [0, 240]) for value in (5, 9, 9)]
    args = compare_runs.Args(("runs",), threshold=7)
    figure = compare_runs.draw_threshold([compare_runs.Group("ppo", runs)], args)
    steps, seconds = figure.axes
    assert [line.get_xdata().tolist() for line in steps.lines] == [[0.06, 0.06], [0.06, 0.06]]
    assert seconds.lines[0].get_xdata().tolist() == [4.0, 4.0]
    assert seconds.get_xlabel() == "wall time, minutes"
    assert [label.get_text() for label in steps.get_yticklabels()] == ["Env-v0 ppo\n2 of 3 runs"]
    # Most runs never reach it: no bar.
    figure = compare_runs.draw_threshold([compare_runs.Group("ppo", [*runs[:2], runs[0]])], args)
    assert len(figure.axes[0].lines) == 1


def test_improvement_picture():
    verdicts = compare_runs.compare(groups_of({"a": range(5), "b": range(9, 14), "c": [6, 7]}), DEFAULTS)
    (axes,) = compare_runs.draw_improvement(verdicts, DEFAULTS).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"Env-v0: {pair}" for pair in ("b over a", "c over a", "b over c")]
    # The line at a half, three marks, and an interval for five against five runs alone.
    assert len(axes.lines) == 1 + 3 + 1


def test_aggregates_picture(tmp_path):
    runs, args = normalised_runs(tmp_path)
    figure = compare_runs.draw_aggregates(compare_runs.group_runs(runs, ["exp_name"]), args)
    profile, efficiency = figure.axes
    _, good = profile.lines
    # At level 0: 21 of 24 scores are above.
    assert good.get_ydata()[0] == pytest.approx(0.875)
    assert efficiency.lines[1].get_ydata() == pytest.approx([0.60283333] * 50)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "bad (4 environments, 24 runs)",
        "good (4 environments, 24 runs)",
    ]


def test_names_that_matplotlib_would_hide_or_set_as_mathematics(tmp_path):
    runs = [make_run([1, 2], exp_name=name) for name in ("_new", r"a$\foo{$b")]
    figure = compare_runs.draw_curves(compare_runs.group_runs(runs, ["exp_name"]), DEFAULTS)
    figure.savefig(tmp_path / "picture.png")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [" _new (1 run)", r"a\$\foo{\$b (1 run)"]


def test_too_many_pairs_for_a_picture(tmp_path, capsys):
    groups = groups_of({str(i): [i] for i in range(12)})
    args = compare_runs.Args(("runs",), pictures=tmp_path)
    written = compare_runs.write_pictures(groups, compare_runs.compare(groups, args), args)
    assert [path.name for path in written] == ["curves.png"]
    assert "66 pairs of groups are too many for a picture" in capsys.readouterr().err


def test_styles_differ():
    assert len({tuple(compare_runs.style(i).values()) for i in range(140)}) == 140


@pytest.mark.parametrize(("form", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures_are_written(tmp_path, monkeypatch, capsys, form, magic):
    folder = tmp_path / "new" / "pictures"
    flags = ("--pictures", str(folder), "--threshold", "15", "--x", "time", "--format", form, "--width", "4")
    command_line(compare_runs, monkeypatch, str(two_groups(tmp_path)), *flags)
    names = [f"{kind}.{form}" for kind in ("curves", "improvement", "threshold")]
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        assert (folder / name).read_bytes().startswith(magic)
    if form == "png":
        # 4 inches at 300 dots.
        assert imread(folder / "curves.png").shape[1] == 1200
    assert f"curves.{form}" in capsys.readouterr().out


# Command line


def test_errors(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run", constant(1.0), gamma=0.9)
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "nothing").mkdir()

    def says(*flags):
        status, text = failed(compare_runs, monkeypatch, capsys, *map(str, flags))
        assert status == 2
        assert text.startswith("error: ")
        assert text.count("\n") == 1
        return text

    assert says(tmp_path / "typo") == f"error: {tmp_path}/typo: no run found; there is nothing of this name\n"
    assert "nothing: no run found; a run's folder holds an event file" in says(run, tmp_path / "nothing")
    text = says(run, "--metric", "eval")
    assert "--metric eval (eval/return_mean or eval/mean_reward): no run has it" in text
    assert "charts/episodic_return, other" in text
    assert "--metric losses/typo: no run has it" in says(run, "--metric", "losses/typo")
    text = says(run, "--group-by", "env_id", "typo")
    assert "--group-by typo: no run has this argument; they have env_id, exp_name, folder, gamma, program, seed" in text
    assert "--out table.txt: not .csv, .md or .tex" in says(run, "--out", "table.txt")
    assert f"--out {file}/table.csv: no folder that can be written to (File exists)" in says(
        run, "--out", file / "table.csv"
    )
    assert f"--pictures {file}/pictures: no folder that can be written to" in says(run, "--pictures", file / "pictures")
    assert "table.md" in says(run, "--out", (tmp_path / "table.md").mkdir() or tmp_path / "table.md")
    assert "--last-fraction 0.0 must be above 0" in says(run, "--last-fraction", "0")
    assert "--smooth 0 must be at least 1" in says(run, "--smooth", "0")
    assert "--threshold nan must be a finite number" in says(run, "--threshold", "nan")
    assert "PATH: at least one is needed" in says("--x", "time")
    assert "--width 0.5 must be 1 to 100 inches" in says(run, "--width", "0.5")
    assert "--label ( is no regular expression" in says(run, "--label", "(")
    assert "--label a+ needs a named group" in says(run, "--label", "a+")
    assert "there are ppo" in says(run, "--baseline", "typo")


def test_only_empty_files(tmp_path, monkeypatch, capsys):
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_info:
        compare_runs.main()
    assert exit_info.value.code == 2
    note, error = capsys.readouterr().err.splitlines()
    assert note.endswith("events.out.tfevents.1 is empty")
    assert error == f"error: {tmp_path}: no run found that can be read"


def test_a_run_whose_files_hold_nothing_is_named(tmp_path, capsys):
    write_run(tmp_path / "good", constant(1.0))
    monitor = tmp_path / "idle" / "monitor.csv"
    monitor.parent.mkdir()
    monitor.write_text('#{"t_start": 1700000000.0, "env_id": "Env-v0"}\nr,l,t\n')
    assert len(read(tmp_path)) == 1
    assert f"note: {monitor.parent} has no finite point of" in capsys.readouterr().err


def test_a_path_without_runs_makes_no_folder(tmp_path, monkeypatch):
    words = [tmp_path / "nothing", "--out", tmp_path / "new" / "t.csv", "--pictures", tmp_path / "pictures"]
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", *map(str, words)])
    with pytest.raises(SystemExit):
        compare_runs.main()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", ["csv", "md"])
@pytest.mark.skipif(os.name == "nt", reason="names are text there")
def test_a_name_that_is_no_text_is_written_with_a_question_mark(tmp_path, monkeypatch, ending):
    folder = tmp_path / os.fsdecode(b"b\xff")
    for seed in (1, 2):
        write_events(tmp_path / "text" / f"PPO_{seed}", constant(1.0))
    (tmp_path / "text").rename(folder)
    write_events(tmp_path / "other" / "PPO_1", constant(2.0))
    command_line(compare_runs, monkeypatch, str(tmp_path), "--out", str(tmp_path / f"t.{ending}"))
    assert "b?" in (tmp_path / f"t.{ending}").read_text(encoding="utf-8")


def test_run_without_the_metric_is_named(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "good", constant(1.0))
    write_run(tmp_path / "young", [])
    command_line(compare_runs, monkeypatch, str(tmp_path))
    shown = capsys.readouterr()
    lack = "has no finite point of charts/episodic_return or rollout/ep_rew_mean and is left out"
    expected = f"note: {tmp_path / 'young'} {lack}\n"
    assert shown.err == expected
    assert "1 run, grouped by" in shown.out


def test_real_training(tmp_path, monkeypatch, capsys):
    """Real runs, with their args.json, and the command line as a user gives it."""
    for seed in ("1", "2"):
        flags = ("--total-timesteps=4096", "--update-epochs=1", "--no-progress", "--run-dir", str(tmp_path))
        command_line(ppo_continuous, monkeypatch, *flags, "--seed", seed)
    command = [sys.executable, "-W", "error", "compare_runs.py", str(tmp_path / "Pendulum-v1__*")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "| Pendulum-v1 | ppo_continuous |    2 |" in done.stdout
    assert "2 runs, grouped by env_id, exp_name; metric: return, points are means of 100 episodes." in done.stdout
    capsys.readouterr()
    for metric in ("eval", "losses/value_loss"):
        command_line(compare_runs, monkeypatch, str(tmp_path), "--metric", metric)
        assert "| Pendulum-v1 | ppo_continuous |    2 |" in capsys.readouterr().out
    # 16 environments of 200 steps each end together: 16 episodes at step 3200.
    (one, _) = read(tmp_path)
    assert one.curve.steps.tolist() == [3200] * 16

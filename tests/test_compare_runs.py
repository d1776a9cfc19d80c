"""compare_runs.py: reading, grouping, statistics, tables, pictures and messages, against numbers worked out by hand."""

import csv
import json
import subprocess
import sys
import time
from unittest.mock import patch

import matplotlib
import numpy as np
import pytest
from conftest import ROOT
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


def make_run(values, steps=None, seconds=None, window=1, **keys):
    """A run as the reader returns it."""
    steps = np.arange(len(values)) if steps is None else np.array(steps)
    seconds = steps.astype(float) if seconds is None else np.array(seconds, float)
    keys = {"env_id": "Env-v0", "exp_name": "ppo", "seed": "1", **keys}
    return compare_runs.Run("run", keys, compare_runs.Curve(steps, seconds, np.array(values, float)), window)


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
            == f"note: {path} ends within a record, still being written or cut; what is before counts\n"
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
    assert lines[1].startswith(f"note: {foreign} is damaged at byte 0")
    assert lines[2].startswith(f"note: {path} is damaged at byte ")


def test_damaged_event(tmp_path, capsys):
    """A record of whole length whose content is none: what stands before it is used."""
    path = event_file(write_run(tmp_path / "run", constant(1.0)))
    data = path.read_bytes()
    at = data.index(EPISODES.encode())
    path.write_bytes(data[: at - 4] + b"\xff" * 4 + data[at:])
    assert compare_runs.read_event_file(path, (EPISODES,)).points == {}
    assert capsys.readouterr().err == f"note: {path} is damaged; what is before counts\n"


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
    assert compare_runs.read_event_file(path, (EPISODES,)).points == {}
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
    assert (group.environment, len(group.runs)) == ("Env-v0", 2)


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
        ("", "has no row of a curve"),
        ("seed,tag,step,wall_time,value\n", "has no row of a curve"),
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
        ("dqn learning_rate=0.3", 2),
        ("ppo learning_rate=0.1", 2),
        ("ppo learning_rate=0.2", 2),
    ]
    groups = compare_runs.group_runs(runs, ["learning_rate"])
    assert [group.name for group in groups] == ["learning_rate=0.1", "learning_rate=0.2", "learning_rate=0.3"]
    groups = compare_runs.group_runs(runs, ["buffer"])
    assert [(group.name, len(group.runs)) for group in groups] == [("buffer=9", 2), ("buffer=none", 4)]
    assert [group.name for group in compare_runs.group_runs(runs, ["env_id"])] == ["all runs"]


# Statistics


def test_trailing_mean():
    values = np.array([1.0, 2.0, 3.0, 6.0])
    assert compare_runs.trailing_mean(values, 2).tolist() == [1.0, 1.5, 2.5, 4.5]
    assert compare_runs.trailing_mean(values, 9).tolist() == [1.0, 1.5, 2.0, 3.0]
    assert compare_runs.trailing_mean(values, 1).tolist() == values.tolist()


def test_final_score():
    x = np.array([0, 50, 90, 100])
    values = np.array([1.0, 2.0, 3.0, 5.0])
    assert compare_runs.final_score(x, values, 0.1) == 4.0
    assert compare_runs.final_score(x, values, 0.09) == 5.0
    assert compare_runs.final_score(x, values, 1.0) == 2.75
    # The range begins at the run's first point.
    assert compare_runs.final_score(x + 1000, values, 0.1) == 4.0


@pytest.mark.parametrize(
    ("scores", "middle"),
    [
        ([1, 2, 3, 100], 2.5),  # one of four goes at each end
        ([0, 10, 20, 30, 1000], 20.0),  # a quarter of five is one
        ([5, 1, 2, 7, 3, 4, 100, -50], 3.5),  # two of eight: 2, 3, 4, 5 stay
        ([1, 2, 6], 3.0),  # a quarter of three is none
        ([4], 4.0),
    ],
)
def test_interquartile_mean_by_hand(scores, middle):
    scores = np.array(scores, float)
    assert compare_runs.interquartile_mean(scores, np.zeros(len(scores), int))[0] == middle


def test_interval_against_scipy():
    scores = np.random.default_rng(1).normal(100, 20, size=10)
    middle, low, high = compare_runs.interquartile_mean(scores, np.zeros(10, int))
    expected = stats.bootstrap(
        (scores,),
        lambda x, axis: stats.trim_mean(x, 0.25, axis=axis),
        n_resamples=10_000,
        method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval
    assert middle == stats.trim_mean(scores, 0.25)
    # Two bootstraps of 10,000 resamples differ in their third digit.
    assert low == pytest.approx(expected.low, abs=0.6)
    assert high == pytest.approx(expected.high, abs=0.6)
    assert high - low > 10
    assert compare_runs.interquartile_mean(scores, np.zeros(10, int)) == (middle, low, high)


def test_interval_of_two_runs_by_hand():
    """Resamples of 0 and 1 have the means 0, 1/2, 1 with probability 1/4, 1/2, 1/4: the 95 % interval is all."""
    assert compare_runs.interquartile_mean(np.array([0.0, 1.0]), np.zeros(2, int)) == (0.5, 0.0, 1.0)


def test_strata():
    """Each environment is resampled among its own runs: equal scores in each leave nothing to chance."""
    scores, strata = np.array([0.0, 100.0, 0.0, 100.0]), np.array([0, 1, 0, 1])
    assert compare_runs.interquartile_mean(scores, strata) == (50.0, 50.0, 50.0)
    assert compare_runs.interquartile_mean(scores, np.zeros(4, int))[1:] == (0.0, 100.0)
    indices = compare_runs.resampled(strata, np.random.default_rng(0))
    assert (strata[indices] == strata).all()
    counts = compare_runs.resampled_counts(strata, np.random.default_rng(0))
    assert (counts[:, strata == 0].sum(1) == 2).all()
    assert counts[7].tolist() == np.bincount(indices[7], minlength=4).tolist()


def test_one_seed_has_no_interval():
    assert compare_runs.interquartile_mean(np.array([3.0]), np.zeros(1, int)) == (3.0, None, None)
    # Two environments of one run each say nothing about spread either.
    assert compare_runs.interquartile_mean(np.array([3.0, 5.0]), np.array([0, 1])) == (4.0, None, None)


def test_improvement_by_hand():
    """Of the pairs (2, 1), (2, 2), (2, 9), (4, 1), (4, 2), (4, 9) three are won and one is a tie: 3.5 of 6."""
    x, y = np.array([2.0, 4.0]), np.array([1.0, 2.0, 9.0])
    probability, low, high = compare_runs.improvement([(x, y)])
    assert probability == pytest.approx(3.5 / 6)
    assert probability == pytest.approx(stats.mannwhitneyu(x, y).statistic / 6)
    assert 0 <= low < probability < high <= 1
    backwards = compare_runs.improvement([(y, x)])
    assert backwards[0] == pytest.approx(1 - probability)
    # The mean over environments: won always, and never.
    assert compare_runs.improvement([(x, x - 9), (x, x + 9)]) == (0.5, 0.5, 0.5)
    assert compare_runs.improvement([(x[:1], y)])[1:] == (None, None)


def test_improvement_interval_against_a_plain_bootstrap():
    rng = np.random.default_rng(3)
    x, y = rng.normal(0.5, 1, size=6), rng.normal(0, 1, size=7)
    shares = []
    for _ in range(4000):
        one, other = rng.choice(x, 6), rng.choice(y, 7)
        shares.append(np.mean((one[:, None] > other) + 0.5 * (one[:, None] == other)))
    _, low, high = compare_runs.improvement([(x, y)])
    assert (low, high) == pytest.approx(np.percentile(shares, (2.5, 97.5)), abs=0.03)


def test_grid_does_not_extrapolate():
    """Curves over 0 to 100 and 40 to 200 have 40 to 100 in common."""
    one = (np.array([0, 100]), np.array([0.0, 100.0]))
    other = (np.array([40, 70, 200]), np.array([5.0, 8.0, 8.0]))
    grid, values = compare_runs.on_grid([one, other])
    assert (grid[0], grid[-1]) == (40, 100)
    assert values[0] == pytest.approx(grid)
    assert values[1][0] == 5
    assert values[1][np.argmin(abs(grid - 55))] == pytest.approx(6.5, abs=0.02)
    assert values[1][-1] == 8


def test_grid_of_points_at_one_step():
    grid, values = compare_runs.on_grid([(np.array([0, 0, 10]), np.array([1.0, 3.0, 5.0]))])
    assert (values[0][0], values[0][-1]) == (2.0, 5.0)
    grid, values = compare_runs.on_grid([(np.array([7, 7]), np.array([1.0, 3.0]))])
    assert (grid.tolist(), values.tolist()) == ([7.0], [[2.0]])


def test_grid_of_curves_apart():
    grid, values = compare_runs.on_grid([(np.array([0, 1]), np.zeros(2)), (np.array([2, 3]), np.zeros(2))])
    assert (len(grid), values.shape) == (0, (2, 0))


def test_mean_band():
    values = np.array([[0.0, 5.0], [1.0, 5.0]])
    low, high = compare_runs.mean_band(values, np.zeros(2, int))
    assert (low.tolist(), high.tolist()) == ([0.0, 5.0], [1.0, 5.0])
    assert compare_runs.mean_band(values, np.array([0, 1])) is None


def test_threshold_needs_a_full_window():
    """A lucky first episode is not the mean of three; a run shorter than the window has one mean."""
    run = make_run([9, 0, 0, 6, 6, 6], steps=[1, 2, 3, 4, 5, 6], seconds=[1, 2, 3, 4, 5, 6], window=3)
    assert compare_runs.first_reach(run, 4) == 4
    assert compare_runs.first_reach(run, 7) is None
    assert compare_runs.first_reach(make_run([9, 0, 0], window=99), 3) == 2
    assert compare_runs.first_reach(make_run([9, 0, 0]), 9) == 0


def test_threshold_that_is_reached_exactly():
    """Differences of sums of floats lose the last digits, and event files hold float32, where 0.9 is 0.89999998."""
    values = [-0.1, 20.7, 148.3, 311.156, 10.1]
    assert compare_runs.first_reach(make_run(values), 311.156) == 3
    assert compare_runs.first_reach(make_run([0.5, np.float32(0.9)]), 0.9) == 1
    assert compare_runs.first_reach(make_run([0.1] * 7, window=3), 0.1) == 2
    assert compare_runs.first_reach(make_run([499.99]), 500) is None
    assert compare_runs.first_reach(make_run([1.0, 3.0], window=10**20), 2) == 1


# Tables


def test_summary():
    runs = [make_run([0, 0, value, value], [0, 10, 20, 40], [0, 1, 2, 5]) for value in (4, 8, 12, 16)]
    args = compare_runs.Args(("runs",), threshold=10)
    row = compare_runs.summarise(compare_runs.Group("ppo", runs), args)
    assert (row.seeds, row.final_mean, row.iqm) == (4, 10.0, 10.0)
    assert 4 <= row.iqm_low < 10 < row.iqm_high <= 16
    assert (row.reached, row.steps_to_threshold, row.seconds_to_threshold, row.steps_per_second) == (2, 20, 2, 8)
    table = compare_runs.markdown_table([row], args)
    assert "20 (2 of 4)" in table
    assert "2.0 seconds (2 of 4)" in table
    row = compare_runs.summarise(compare_runs.Group("ppo", runs), compare_runs.Args(("runs",), threshold=99))
    assert (row.reached, row.steps_to_threshold) == (0, None)
    assert "never (0 of 4)" in compare_runs.markdown_table([row], args)


def test_one_seed_is_called_so():
    (group,) = groups_of({"ppo": [3.0]})
    assert "one seed" in compare_runs.markdown_table([compare_runs.summarise(group, DEFAULTS)], DEFAULTS)


def test_one_seed_in_one_of_two_environments():
    runs = [make_run([score], seed=str(score)) for score in (1, 2)] + [make_run([3], env_id="Other-v0")]
    (line,) = compare_runs.markdown_table(
        [compare_runs.summarise(compare_runs.Group("ppo", runs), DEFAULTS)], DEFAULTS
    ).splitlines()[2:]
    assert "an environment has one seed" in line


def test_speed_of_the_end_of_a_run():
    """10,000 steps in 100 s, the first million lies in a file that is gone."""
    run = make_run([1, 1], [1_000_000, 1_010_000], [0, 100])
    assert compare_runs.summarise(compare_runs.Group("ppo", [run]), DEFAULTS).steps_per_second == 100


def test_what_breaks_a_table_is_taken_out():
    run = make_run([1], env_id=", ".join(f"Env{i}-v0" for i in range(5)))
    table = compare_runs.markdown_table(
        [compare_runs.summarise(compare_runs.Group("a|b\nc", [run]), DEFAULTS)], DEFAULTS
    )
    assert len(table.splitlines()) == 3
    assert r"| a\|b c |" in table
    assert "| Env0-v0, Env1-v0, Env2-v0 and 2 more |" in table


def test_ties_are_told():
    """Of nine pairs b wins three and six are ties, which count half: 6 / 9. Of four, two are ties, each wins one."""
    (verdict,) = compare_runs.compare(groups_of({"a": [1, 5, 5], "b": [5, 5, 5]}), DEFAULTS)
    assert (verdict.better, verdict.probability, verdict.ties) == ("b", pytest.approx(6 / 9), pytest.approx(6 / 9))
    assert "in 67% of pairs, a tie counted as half (67% are ties) (95 % interval" in verdict.sentence()
    (even,) = compare_runs.compare(groups_of({"a": [1, 2], "b": [1, 2]}), DEFAULTS)
    assert "each scores higher in half of all pairs of runs, a tie counted as half (50% are ties)" in even.sentence()
    (same,) = compare_runs.compare(groups_of({"a": [5, 5], "b": [5, 5]}), DEFAULTS)
    assert same.sentence() == "Env-v0: a and b score the same in all pairs of runs."


def test_sentences():
    (clear,) = compare_runs.compare(groups_of({"bad": [1, 2, 3, 4, 5], "good": [6, 7, 8, 9, 10]}), DEFAULTS)
    assert clear.sentence() == (
        "Env-v0: a run of good scores higher than one of bad in 100% of pairs (95 % interval 100% to 100%), "
        "which is more than chance."
    )
    (few,) = compare_runs.compare(groups_of({"bad": [1, 2, 3], "good": [6, 7, 8]}), DEFAULTS)
    assert "Few seeds (3 and 3): two equal groups would be parted wholly in 0.1 of cases" in few.sentence()
    (close,) = compare_runs.compare(groups_of({"a": [1, 2, 3, 4, 6], "b": [1.5, 2.5, 3.5, 4.5, 5]}), DEFAULTS)
    assert "which may be chance" in close.sentence()
    (single,) = compare_runs.compare(groups_of({"a": [1], "b": [2, 3]}), DEFAULTS)
    assert "a run of b scores higher than one of a in 100% of pairs" in single.sentence()
    assert "nobody can say how sure" in single.sentence()
    (equal,) = compare_runs.compare(groups_of({"a": [1, 2], "b": [1, 2]}), DEFAULTS)
    assert "neither a nor b is better" in equal.sentence()


def test_only_groups_of_one_environment_are_compared():
    groups = groups_of({"a": [1, 2]}) + groups_of({"b": [1, 2]}, env_id="Other-v0")
    assert compare_runs.compare(groups, DEFAULTS) == []


def test_notes():
    runs = [make_run([1, 1], [0, end], seed=seed) for end, seed in ((100, "1"), (50, "1"), (100, "2"))]
    runs.append(make_run([1, 1], [0, 100], seed="1", env_id="Other-v0"))
    text = "\n".join(compare_runs.notes([compare_runs.Group("ppo", runs[:3]), compare_runs.Group("ppo", runs)]))
    assert "Env-v0 ppo: seed 1 more than once" in text
    assert "Env-v0 ppo: runs end at 50 to 100 steps" in text
    assert "Env-v0 ppo: fewer than 5 seeds" in text
    assert "Env-v0, Other-v0 ppo: returns of different environments are not normalised" in text


def two_groups(tmp_path):
    for seed in (1, 2, 3):
        write_run(tmp_path / "runs" / f"ppo{seed}", constant(10.0 * seed), seed=seed)
        write_run(tmp_path / "runs" / f"dqn{seed}", constant(1.0 * seed, last=90 + seed), seed=seed, exp_name="dqn")
    return tmp_path / "runs"


def test_csv_parses_back(tmp_path, monkeypatch, capsys):
    out = tmp_path / "made" / "table.csv"
    command_line(compare_runs, monkeypatch, str(two_groups(tmp_path)), "--threshold", "25", "--out", str(out))
    assert f"written: {out}" in capsys.readouterr().out
    with open(out, newline="") as file:
        dqn, ppo = csv.DictReader(file)
    assert (ppo["environment"], ppo["group"], ppo["seeds"]) == ("Env-v0", "ppo", "3")
    assert (float(ppo["final_mean"]), float(ppo["iqm"])) == (20.0, 20.0)
    assert 10 <= float(ppo["iqm_low"]) < 20 < float(ppo["iqm_high"]) <= 30
    # The window of 100 episodes is the whole run of 11.
    assert (ppo["reached"], float(ppo["steps_to_threshold"]), float(ppo["seconds_to_threshold"])) == ("1", 100, 10)
    assert (dqn["reached"], dqn["steps_to_threshold"]) == ("0", "")
    assert float(ppo["steps_per_second"]) == 10


def test_markdown_parses_back(tmp_path, monkeypatch, capsys):
    out = tmp_path / "table.md"
    command_line(compare_runs, monkeypatch, str(two_groups(tmp_path)), "--out", str(out), "--smooth", "1")
    shown = capsys.readouterr().out
    lines = out.read_text().splitlines()
    header, rule, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    assert all(line in shown for line in lines)
    assert header == ["environment", "group", "seeds", "final mean", "IQM", "95 % interval of the IQM", "steps/s"]
    assert [set(cell) <= {"-", ":"} for cell in rule] == [True] * 7
    assert [row[:5] for row in rows] == [["Env-v0", "dqn", "3", "2", "2"], ["Env-v0", "ppo", "3", "20", "20"]]
    assert "6 runs, grouped by env_id, exp_name; metric: return." in lines
    assert any(line.startswith("Env-v0: a run of ppo scores higher than one of dqn in 100% of pairs") for line in lines)


# Pictures


def test_curves_end_where_the_first_run_ends():
    runs = [make_run([1, 3], [0, 2000], exp_name="a"), make_run([3, 5], [500, 1000], exp_name="a", seed="2")]
    runs += [make_run([7, 7], [0, 3000], exp_name="b")]
    figure = compare_runs.draw_curves(compare_runs.group_runs(runs, ["env_id", "exp_name"]), DEFAULTS)
    (axes,) = figure.axes
    one, other = axes.lines
    x, y = one.get_data()
    # In thousands of steps.
    assert (x[0], x[-1]) == (0.5, 1.0)
    assert (y[0], y[-1]) == pytest.approx(((1.5 + 3) / 2, (2 + 5) / 2))
    assert other.get_xdata()[-1] == 3.0
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a, 2 seeds", "b, one seed"]
    # One seed has no band.
    assert len(axes.collections) == 1
    assert (axes.get_xlabel(), figure.get_suptitle()) == ("environment steps, thousands", "Env-v0")
    assert one.get_linestyle() != other.get_linestyle()
    assert one.get_marker() != other.get_marker()
    assert one.get_color() != other.get_color()


def test_curve_of_runs_without_common_range(capsys):
    runs = [make_run([1, 2], [0, 10]), make_run([1, 2], [20, 30], seed="2")]
    figure = compare_runs.draw_curves([compare_runs.Group("ppo", runs)], DEFAULTS)
    assert len(figure.axes[0].lines) == 0
    assert "no range of x in common" in capsys.readouterr().err


def test_threshold_picture():
    runs = [make_run([0, value], [0, 60], [0, 240]) for value in (5, 9)]
    args = compare_runs.Args(("runs",), threshold=7)
    figure = compare_runs.draw_threshold([compare_runs.Group("ppo", runs)], args)
    steps, seconds = figure.axes
    assert steps.lines[0].get_xdata().tolist() == [0.06]
    assert seconds.lines[0].get_xdata().tolist() == [4.0]
    assert seconds.get_xlabel() == "wall time, minutes"
    assert [label.get_text() for label in steps.get_yticklabels()] == ["ppo\n1 of 2 runs"]


def test_improvement_picture():
    verdicts = compare_runs.compare(groups_of({"a": [1, 2], "b": [3, 4], "c": [5, 6]}), DEFAULTS)
    (axes,) = compare_runs.draw_improvement(verdicts).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["b\nover a", "c\nover a", "c\nover b"]
    assert len(axes.lines) == 1 + 2 * 3


def test_names_that_matplotlib_would_hide_or_set_as_mathematics(tmp_path):
    runs = [make_run([1, 2], exp_name=name) for name in ("_new", r"a$\foo{$b")]
    figure = compare_runs.draw_curves(compare_runs.group_runs(runs, ["exp_name"]), DEFAULTS)
    figure.savefig(tmp_path / "picture.png")
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == [" _new, one seed", r"a\$\foo{\$b, one seed"]


def test_no_picture_replaces_another(tmp_path, capsys):
    """Names alike in ASCII, one longer than a file's may be, and groups that share one environment of two."""
    args = compare_runs.Args(("runs",), pictures=tmp_path)
    names = ("\u00e9-v1", "\u00e8-v1", "E" * 300)
    groups = [compare_runs.Group("ppo", [make_run([1, 2], env_id=name)]) for name in names]
    compare_runs.write_pictures(groups, [], args)
    expected = ["curves__--v1-2.png", "curves__--v1.png", f"curves__{'E' * 142}.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected
    runs = {name: [make_run([1], env_id=env) for env in ("X-v0", f"{name}-v0")] for name in ("A", "B")}
    groups = [compare_runs.Group(name, own) for name, own in runs.items()]
    written = compare_runs.write_pictures(groups, compare_runs.compare(groups, args), args)
    assert [path.name for path in written] == [
        "curves__A-v0-X-v0.png",
        "curves__B-v0-X-v0.png",
        "improvement__X-v0.png",
    ]
    many = compare_runs.compare(groups_of({str(i): [i] for i in range(12)}), args)
    assert len(many) == 66
    assert compare_runs.write_pictures([], many, args) == []
    assert "66 pairs of groups are too many for a picture" in capsys.readouterr().err


def test_styles_differ():
    assert len({tuple(compare_runs.style(i).values()) for i in range(140)}) == 140


def test_pictures_are_written(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "new" / "pictures"
    flags = ("--pictures", str(folder), "--threshold", "15", "--x", "time", "--format")
    with matplotlib.rc_context():
        command_line(compare_runs, monkeypatch, str(two_groups(tmp_path)), *flags, "png")
        command_line(compare_runs, monkeypatch, str(tmp_path / "runs"), *flags, "svg")
    kinds = ("curves", "improvement", "threshold")
    assert sorted(path.name for path in folder.iterdir()) == [f"{k}__Env-v0.{f}" for k in kinds for f in ("png", "svg")]
    assert (folder / "curves__Env-v0.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (folder / "curves__Env-v0.svg").read_text()
    assert "curves__Env-v0.svg" in capsys.readouterr().out


# Command line


def test_errors(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run", constant(1.0), gamma=0.9)
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "nothing").mkdir()

    def says(*flags):
        status, text = failed(compare_runs, monkeypatch, capsys, *map(str, flags))
        assert status == 2
        return text

    assert says(tmp_path / "typo") == f"error: {tmp_path}/typo: no run found; there is nothing of this name\n"
    assert "nothing: no run found; a run's folder holds an event file" in says(run, tmp_path / "nothing")
    text = says(run, "--metric", "eval")
    assert "--metric eval (eval/return_mean or eval/mean_reward): no run has it" in text
    assert "charts/episodic_return, other" in text
    assert "--metric losses/typo: no run has it" in says(run, "--metric", "losses/typo")
    text = says(run, "--group-by", "env_id", "typo")
    assert "--group-by typo: no run has this argument; they have env_id, exp_name, folder, gamma, seed" in text
    assert "--out table.txt: the name must end in .csv or .md" in says(run, "--out", "table.txt")
    assert f"{file} is no folder that can be written to" in says(run, "--out", file / "table.csv")
    assert f"{file} is no folder that can be written to" in says(run, "--pictures", file / "pictures")
    assert "table.md" in says(run, "--out", (tmp_path / "table.md").mkdir() or tmp_path / "table.md")
    assert "--last-fraction 0.0 must be above 0" in says(run, "--last-fraction", "0")
    assert "--smooth 0 must be at least 1" in says(run, "--smooth", "0")
    assert "--threshold nan must be a finite number" in says(run, "--threshold", "nan")
    assert "PATH: at least one is needed" in says("--x", "time")


def test_only_empty_files(tmp_path, monkeypatch, capsys):
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_info:
        compare_runs.main()
    assert exit_info.value.code == 2
    note, error = capsys.readouterr().err.splitlines()
    assert note.endswith("events.out.tfevents.1 is empty")
    assert error == f"error: {tmp_path}: no run found that can be read"


def test_missing_matplotlib(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run", constant(1.0))
    # Where a module's entry is None, Python takes it for missing.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, text = failed(compare_runs, monkeypatch, capsys, str(run), "--pictures", str(tmp_path))
    assert (status, text) == (2, "error: --pictures needs a package that is missing: pip install matplotlib\n")


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
        flags = ("--total-timesteps=4096", "--eval-episodes=1", "--no-progress", "--run-dir", str(tmp_path))
        command_line(ppo_continuous, monkeypatch, *flags, "--seed", seed)
    command = [sys.executable, "-W", "error", "compare_runs.py", str(tmp_path / "Pendulum-v1__*")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "| Pendulum-v1 | ppo_continuous |     2 |" in done.stdout
    assert "2 runs, grouped by env_id, exp_name; metric: return." in done.stdout
    capsys.readouterr()
    for metric in ("eval", "losses/value_loss"):
        command_line(compare_runs, monkeypatch, str(tmp_path), "--metric", metric)
        assert "| Pendulum-v1 | ppo_continuous |     2 |" in capsys.readouterr().out
    # 16 environments of 200 steps each end together: 16 episodes at step 3200.
    (one, _) = read(tmp_path)
    assert one.curve.steps.tolist() == [3200] * 16

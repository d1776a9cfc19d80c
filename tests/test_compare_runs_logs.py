"""compare_runs.py on small logs that other programs wrote, tests/logs/: all of CartPole-v1, a few thousand steps.

Versions: Stable-Baselines3 2.9.2, rl_zoo3 2.9.2, TensorBoard 2.21, CleanRL fe8d8a0, RLlib (ray) 2.60, skrl 2.1.1,
torchrl 0.14.1, tianshou 2.0.1. Their files are as they were written, but for the host in the names of event files and
for what was left out: models, logs of the console, command lines. The files in wandb/ were written by hand, in the
columns that the documentation and exports in public repositories have: no file from the site was tried.

The values stand in the files; those of event files were read by TensorBoard's EventAccumulator.
"""

import glob
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from short_runs import command_line
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_compare_runs import write_run

import compare_runs

LOGS = Path(__file__).parent / "logs"
ENV = "CartPole-v1"
UNKNOWN = compare_runs.UNKNOWN

# Of each pattern under tests/logs/ and metric, the runs: environment, experiment, seed, number of points, first and
# last point as (step, value).
RUNS = {
    ("stable_baselines3/tensorboard", "return"): [
        (UNKNOWN, "DQN", "1", 20, (157, 15.699999809265137), (1961, 9.5600004196167)),
        (UNKNOWN, "PPO", "1", 8, (512, 23.4761905670166), (4096, 39.4900016784668)),
        (UNKNOWN, "PPO", "2", 8, (512, 20.41666603088379), (4096, 40.13999938964844)),
    ],
    ("stable_baselines3/tensorboard", "eval"): [
        (UNKNOWN, "PPO", "1", 2, (2048, 81.80000305175781), (4096, 189.60000610351562)),
        (UNKNOWN, "PPO", "2", 2, (2048, 73.80000305175781), (4096, 481.20001220703125)),
    ],
    # The environment is told by the first line of monitor.csv.
    ("stable_baselines3/files", "return"): [
        (ENV, "A2C", "1", 90, (11, 11.0), (2893, 83.0)),
        (ENV, "A2C", "2", 72, (15, 15.0), (2914, 107.0)),
    ],
    ("stable_baselines3/files", "eval"): [
        (ENV, "A2C", "1", 2, (1500, 270.2), (3000, 369.6)),
        (ENV, "A2C", "2", 2, (1500, 45.2), (3000, 216.2)),
    ],
    ("stable_baselines3/files", "rollout/ep_rew_mean"): [
        (ENV, "A2C", "1", 10, (300, 24.09090909090909), (3000, 32.144444444444446)),
        (ENV, "A2C", "2", 10, (300, 28.22222222222222), (3000, 40.47222222222222)),
    ],
    # The zoo counts runs in the names of folders: the seed of CartPole-v1_2, 7, is told by its args.yml.
    ("rl_zoo3/logs", "return"): [
        (ENV, "a2c", "1", 90, (11, 11.0), (2893, 83.0)),
        (ENV, "ppo", "1", 139, (12, 12.0), (3061, 9.0)),
        (ENV, "ppo", "7", 112, (11, 11.0), (3055, 22.0)),
    ],
    ("rl_zoo3/logs", "eval"): [
        (ENV, "a2c", "1", 2, (1500, 263.0), (3000, 490.4)),
        (ENV, "ppo", "1", 2, (1500, 14.0), (3000, 19.2)),
        (ENV, "ppo", "7", 2, (1500, 21.2), (3000, 26.6)),
    ],
    ("rl_zoo3/tb", "return"): [
        (ENV, "A2C", "1", 6, (500, 23.33333396911621), (3000, 32.14444351196289)),
        (ENV, "PPO", "1", 12, (256, 24.66666603088379), (3072, 19.75)),
        (ENV, "PPO", "2", 12, (256, 16.08333396911621), (3072, 28.6200008392334)),
    ],
    ("tensorboard_csv/run-[DP]*.csv", "return"): [
        (UNKNOWN, "DQN", "1", 20, (157, 15.699999809265137), (1961, 9.5600004196167)),
        (UNKNOWN, "PPO", "1", 8, (512, 23.4761905670166), (4096, 39.4900016784668)),
        (UNKNOWN, "PPO", "2", 8, (512, 20.41666603088379), (4096, 40.13999938964844)),
    ],
    ("tensorboard_csv/run-PPO_1*.csv", "eval"): [
        (UNKNOWN, "PPO", "1", 2, (2048, 81.80000305175781), (4096, 189.60000610351562))
    ],
    ("tensorboard_csv/run-Cart*.csv", "return"): [(ENV, "ppo", "1", 113, (60, 15.0), (3072, 10.0))],
    ("wandb/CartPole*.csv", "return"): [
        (ENV, "ppo", "1", 3, (60, 15.0), (560, 26.0)),
        (ENV, "ppo", "2", 2, (88, 22.0), (108, 21.5)),
    ],
    ("wandb/*T12_00*.csv", "return"): [
        (ENV, "ppo", "1", 3, (60, 15.0), (160, 26.0)),
        (ENV, "ppo", "2", 3, (88, 22.0), (204, 51.0)),
    ],
    ("wandb/*T12_05*.csv", "eval"): [(UNKNOWN, "serene-bush-7", UNKNOWN, 3, (0, 9.5), (2, 31.75))],
    ("cleanrl", "return"): [
        (ENV, "dqn", "1", 23, (28, 29.0), (1461, 39.0)),
        (ENV, "ppo", "1", 113, (60, 15.0), (3072, 10.0)),
        (ENV, "ppo", "2", 117, (76, 19.0), (3064, 36.0)),
    ],
    ("tianshou", "return"): [
        (ENV, "PPOExperiment", "42", 2, (1000, 42.45454406738281), (2000, 20.909090042114258)),
        (ENV, "PPOExperiment", "43", 2, (1000, 17.34482765197754), (2000, 21.08333396911621)),
        (ENV, "dqn", "0", 2, (1000, 11.0), (2000, 10.736842155456543)),
        (ENV, "dqn", "1", 2, (1000, 10.210526466369629), (2000, 10.777777671813965)),
    ],
    ("tianshou", "eval"): [
        (ENV, "PPOExperiment", "42", 3, (0, 33.0), (2000, 35.599998474121094)),
        (ENV, "PPOExperiment", "43", 3, (0, 22.799999237060547), (2000, 26.399999618530273)),
        (ENV, "dqn", "0", 3, (0, 9.199999809265137), (2000, 9.199999809265137)),
        (ENV, "dqn", "1", 3, (0, 9.800000190734863), (2000, 9.399999618530273)),
    ],
    # Nothing tells a seed.
    ("skrl", "return"): [
        (UNKNOWN, "DQN", UNKNOWN, 6, (250, 9.374730110168457), (1500, 9.825486183166504)),
        (UNKNOWN, "PPO", UNKNOWN, 6, (250, 18.250328063964844), (1500, 35.03305435180664)),
        (UNKNOWN, "PPO", UNKNOWN, 6, (250, 23.325695037841797), (1500, 33.37831115722656)),
    ],
    ("rllib/ppo", "return"): [
        (ENV, "PPO", "1", 4, (1000, 21.304347826086957), (4000, 43.5)),
        (ENV, "PPO", "2", 4, (1000, 22.545454545454547), (4000, 52.36842105263158)),
    ],
    # The step of its event files is the iteration.
    ("rllib/dqn", "return"): [(ENV, "DQN", "unknown", 1, (1000, 23.5), (1000, 23.5))],
    ("torchrl/outputs/*/03*", "return"): [
        (ENV, "DQN_CartPole", UNKNOWN, 15, (200, 19.44444465637207), (3000, 9.428571701049805))
    ],
    ("torchrl/outputs/*/03*", "eval"): [(ENV, "DQN_CartPole", UNKNOWN, 2, (1200, 9.0), (2200, 9.0))],
    # Its own CSV logger: scalars/TAG.csv without a header.
    ("torchrl/outputs/*/04*", "return"): [(ENV, "DQN_CartPole", UNKNOWN, 15, (200, 24.625), (3000, 9.571428298950195))],
    ("torchrl/outputs/*/04*", "eval"): [
        (ENV, "DQN_CartPole", UNKNOWN, 2, (1200, 10.333333015441895), (2200, 9.333333015441895))
    ],
}


def read(pattern, **args):
    return compare_runs.read_runs(compare_runs.Args((str(LOGS / pattern),), **args))


def sizes_of(runs):
    """Number of runs in each group, by the group's name, where the user says nothing of groups."""
    return {group.name: len(group.runs) for group in compare_runs.group_runs(runs, compare_runs.differing_keys(runs))}


@pytest.mark.parametrize(("pattern", "metric"), RUNS)
def test_runs_of_each_program(pattern, metric):
    rows = []
    for run in read(pattern, metric=metric):
        points = list(zip(run.curve.steps.tolist(), run.curve.values.tolist(), strict=True))
        keys = (run.keys["env_id"], run.keys["exp_name"], run.keys["seed"])
        rows.append((*keys, len(points), points[0], points[-1]))
    assert sorted(rows) == RUNS[pattern, metric]


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        ("stable_baselines3/tensorboard", {"DQN": 1, "PPO": 2}),
        ("stable_baselines3/files", {"A2C": 2}),
        ("rl_zoo3/logs", {"a2c": 1, "ppo": 2}),
        ("rl_zoo3/tb", {"A2C": 1, "PPO": 2}),
        ("tensorboard_csv/run-[DP]*.csv", {"DQN": 1, "PPO": 2}),
        ("wandb/CartPole*.csv", {"ppo": 2}),
        ("wandb/*T12_00*.csv", {"ppo": 2}),
        ("cleanrl", {"dqn": 1, "ppo": 2}),
        ("tianshou", {"PPOExperiment": 2, "dqn": 2}),
        ("skrl", {"DQN": 1, "PPO": 2}),
        ("rllib/ppo", {"PPO": 2}),
        ("torchrl", {"DQN_CartPole": 2}),
    ],
)
def test_seeds_form_a_group_and_algorithms_do_not(pattern, sizes):
    assert sizes_of(read(pattern)) == sizes


@pytest.mark.parametrize(
    ("pattern", "metric", "program"),
    [
        ("stable_baselines3/tensorboard", "return", "Stable-Baselines3"),
        ("stable_baselines3/tensorboard", "eval", "Stable-Baselines3"),
        ("stable_baselines3/files", "return", "Stable-Baselines3"),
        ("rl_zoo3", "return", "Stable-Baselines3"),
        ("cleanrl", "return", "CleanRL"),
        ("tianshou", "return", "tianshou"),
        ("tianshou", "eval", "tianshou"),
        ("skrl", "return", "skrl"),
        ("rllib", "return", "RLlib"),
        ("torchrl", "return", "torchrl"),
        ("torchrl", "eval", "torchrl"),
        ("wandb/CartPole*.csv", "return", UNKNOWN),
    ],
)
def test_program(pattern, metric, program):
    assert {run.keys["program"] for run in read(pattern, metric=metric)} == {program}


@pytest.mark.parametrize(
    ("pattern", "exp_name", "program"),
    [("cleanrl/*ppo*", "ppo", "CleanRL"), ("rl_zoo3/tb/*/PPO*", "PPO", "Stable-Baselines3")],
)
def test_runs_of_two_programs_with_one_name_are_two_groups(tmp_path, pattern, exp_name, program):
    """Single episodes and means of 100 come to one smoothing, so that nothing else would part them."""
    points = [(step, step / 100, 20.0) for step in range(0, 3001, 20)]
    for seed in (1, 2):
        write_run(tmp_path / f"{seed}", points, env_id=ENV, exp_name=exp_name, seed=seed, run_dir="runs")
    runs = compare_runs.read_runs(compare_runs.Args((str(tmp_path), str(LOGS / pattern))))
    assert sizes_of(runs) == {"program=onefile-rl": 2, f"program={program}": 2}


def test_unknown_environments_in_two_folders_are_two_groups():
    """PPO_1 of one folder is not of the same task as PPO_1 of another, for all that is known."""
    patterns = [str(LOGS / pattern) for pattern in ("stable_baselines3/tensorboard", "tensorboard_csv/run-PPO_1*.csv")]
    runs = compare_runs.read_runs(compare_runs.Args(tuple(patterns)))
    assert sorted(sizes_of(runs).values()) == [1, 1, 2]


def test_event_files_point_for_point():
    """All points of all event files here whose steps are environment steps, against TensorBoard's own reader."""
    compared = 0
    for path in sorted(LOGS.glob("[!r]*/**/*tfevents*")):
        own = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        for tag in {"charts/episodic_return", "rollout/ep_rew_mean", "test/returns_stat/mean"} & set(
            own.Tags()["scalars"]
        ):
            (run,) = read(path, metric=tag)
            assert run.curve.steps.tolist() == [event.step for event in own.Scalars(tag)]
            assert run.curve.values.tolist() == [event.value for event in own.Scalars(tag)]
            started = run.curve.seconds + own.FirstEventTimestamp()
            assert started == pytest.approx([event.wall_time for event in own.Scalars(tag)], abs=1e-5)
            compared += 1
    # 3 of Stable-Baselines3, 3 of CleanRL, 4 of tianshou.
    assert compared == 10


def test_monitors_of_two_environments_are_one_curve():
    """The episodes of both in the order of their ends; the times count from the start of the first environment."""
    one, _ = read("stable_baselines3/files")
    assert one.curve.steps[:4].tolist() == [11, 11 + 15, 26 + 29, 55 + 9]
    assert one.curve.values[:4].tolist() == [11.0, 15.0, 29.0, 9.0]
    # The second started 0.0004476 s after the first.
    expected = [0.024606, 0.047572, 0.048298 + 1795924035.0780404 - 1795924035.0775926, 0.056943]
    assert one.curve.seconds[:4] == pytest.approx(expected, abs=1e-5)


def test_one_training_logged_twice_comes_to_one_number():
    """Single episodes under a window of 100 end where Stable-Baselines3's own mean of 100 does."""
    episodes, means = read("rl_zoo3/logs/ppo"), read("rl_zoo3/tb/*/PPO*")
    assert [run.smoothed[-1] for run in episodes] == pytest.approx([19.75, 28.62], rel=1e-6)
    assert [run.smoothed[-1] for run in means] == pytest.approx([19.75, 28.62], rel=1e-6)
    assert {run.smoothing for run in episodes + means} == {"means of 100 episodes"}


def test_first_mean_of_a_hundred():
    """Ten episodes a point: the tenth point, at step 1005 = 100 episodes of 10.05 steps, is the first full one."""
    (run,) = read("stable_baselines3/tensorboard/DQN_1")
    assert (run.curve.steps[run.full], run.full) == (1005, 9)


def test_means_of_unknown_numbers_are_no_means_of_100():
    """RLlib's and skrl's windows are emptied at each point: 31 episodes are in RLlib's second."""
    (run, _) = read("rllib/ppo")
    assert run.curve.values[1] * 31 == pytest.approx(1003)
    for pattern in ("rllib/ppo", "skrl", "tianshou", "torchrl/outputs/*/03*"):
        assert all("100 episodes" not in run.smoothing for run in read(pattern))


def test_downloads_have_the_points_of_the_event_files():
    pairs = [
        ("stable_baselines3/tensorboard/PPO_2", "run-PPO_2-tag*"),
        ("rl_zoo3/tb/CartPole-v1/PPO_1", "run-tb_CartPole-v1_PPO_1-tag*"),
        ("cleanrl/*ppo__1*", "run-CartPole-v1__ppo__1__*"),
    ]
    for folder, file in pairs:
        (run,), (download,) = read(folder), read(f"tensorboard_csv/{file}")
        assert download.curve.steps.tolist() == run.curve.steps.tolist()
        assert download.curve.values.tolist() == run.curve.values.tolist()
        # The download does not tell when the run started.
        assert np.diff(download.curve.seconds) == pytest.approx(np.diff(run.curve.seconds), abs=1e-5)


def test_times():
    """progress.csv of RLlib has time_total_s, Weights & Biases' history _runtime."""
    (run, _) = read("rllib/ppo")
    assert run.curve.seconds[[0, -1]].tolist() == [0.963982105255127, 3.8328194618225098]
    (run, _) = read("wandb/CartPole*.csv")
    assert run.curve.seconds.tolist() == [2.5, 2.75, 4.0]


def test_skrl_counts_its_environments_as_one(monkeypatch, capsys):
    for pattern, told in (("skrl", True), ("cleanrl", False)):
        command_line(compare_runs, monkeypatch, str(LOGS / pattern))
        assert ("note: skrl counts a step of all its environments as one" in capsys.readouterr().out) is told


@pytest.mark.parametrize(
    ("columns", "steps", "seconds"),
    [
        # _timestamp is since 1970, _runtime since the start, which is before the first row.
        ("_step,_runtime,_timestamp,global_step", [10, 20], [2.5, 4.0]),
        ("_step,_timestamp,_runtime,global_step", [10, 20], [2.5, 4.0]),
        ("_step,_timestamp,global_step", [10, 20], [0.0, 1.5]),
        ("_runtime,_timestamp,global_step", [10, 20], [2.5, 4.0]),
        ("_step,_runtime,_timestamp", [3, 5], [2.5, 4.0]),
    ],
)
def test_columns_of_a_history(tmp_path, columns, steps, seconds):
    cells = {"_step": (3, 5), "_runtime": (2.5, 4), "_timestamp": (1.7e9 + 2.5, 1.7e9 + 4), "global_step": (10, 20)}
    names = [*columns.split(","), "charts/episodic_return"]
    rows = [",".join(str(cells.get(name, (1, 2))[i]) for name in names) for i in (0, 1)]
    (tmp_path / "history.csv").write_text("\n".join([",".join(names), *rows]) + "\n")
    (run,) = compare_runs.read_runs(compare_runs.Args((str(tmp_path / "history.csv"),)))
    assert run.curve.steps.tolist() == steps
    assert run.curve.seconds.tolist() == pytest.approx(seconds, abs=1e-5)
    assert run.curve.values.tolist() == [1.0, 2.0]


def test_points_at_one_step_keep_their_order(tmp_path):
    """Forty episodes that end at two steps, logged in turn: an unstable sort of so many deals them anew."""
    rows = [f"{10 + 10 * (i % 2)},{i},{i}" for i in range(40)]
    (tmp_path / "history.csv").write_text("\n".join(["global_step,_runtime,charts/episodic_return", *rows]) + "\n")
    (run,) = compare_runs.read_runs(compare_runs.Args((str(tmp_path / "history.csv"),)))
    assert run.curve.steps.tolist() == [10] * 20 + [20] * 20
    assert run.curve.values.tolist() == [*range(0, 40, 2), *range(1, 40, 2)]


def test_hyperparameters_and_settings():
    """CleanRL's text, RLlib's params.json, the zoo's args.yml."""
    assert {run.keys["learning_rate"] for run in read("cleanrl/*ppo*")} == {"0.00025"}
    assert {run.keys["lr"] for run in read("rllib/ppo")} == {"5e-05"}
    assert {run.keys["n_timesteps"] for run in read("rl_zoo3/logs")} == {"3000"}


@pytest.mark.parametrize(("pattern", "seed"), [("rllib/ppo/*seed=2*", "2"), ("rl_zoo3/logs/ppo/CartPole-v1_2", "7")])
def test_settings_tell_what_a_renamed_folder_does_not(tmp_path, pattern, seed):
    (folder,) = LOGS.glob(pattern)
    shutil.copytree(folder, tmp_path / "mine")
    (run,) = read(tmp_path)
    assert (run.keys["env_id"], run.keys["seed"]) == (ENV, seed)


def test_settings_with_parts_part_groups_too(tmp_path):
    shutil.copytree(LOGS / "rllib" / "ppo", tmp_path, dirs_exist_ok=True)
    (path,) = tmp_path.glob("*seed=2*/params.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"env_config": {"gravity": 5}}))
    groups = compare_runs.group_runs(read(tmp_path), ["env_config"])
    assert sorted(len(group.runs) for group in groups) == [1, 1]


def test_charts_of_weights_and_biases(capsys):
    """A mean over a group of runs is no run; the site's own count of steps is not the environment's."""
    runs = compare_runs.read_runs(compare_runs.Args(tuple(glob.glob(str(LOGS / "wandb" / "*T12_[01]0*.csv")))))
    assert [run.curve.values.tolist() for run in runs] == [[15.0, 27.0, 26.0], [22.0, 21.5, 51.0]]
    assert "Group: ppo" in capsys.readouterr().err
    read("wandb/*T12_05*.csv", metric="eval")
    assert "Step" in capsys.readouterr().err


def test_files_tell_nothing_of_the_machine_that_wrote_them():
    for path in LOGS.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [word for word in (b"/root", b"/home", b"/tmp", b"/Users", b":\\Users") if word in content]
            assert "tfevents" not in path.name or path.name.split(".")[4] == "host"

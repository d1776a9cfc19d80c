"""The speed_*.py: their reports of numbers made by hand, and a measurement of an instant of their programs."""

import csv
import importlib
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import measuring

DQN = {"buffer_size": 128, "untimed_steps": 64, "steps": 208, "threads": 1}


def speed_of(program, ours, peers, unit):
    """Returns 8 for our programs, 4 for the peer's and 2 for what learns nothing."""
    return {ours: 8.0, peers: 4.0}.get(program, 2.0) * unit


def atari(script, unit):
    sizes = [(1, program, 8) for program in script.PROGRAMS] + [(2, "ale", n) for n in script.SIZES]
    return [
        script.Measurement(table, 1, program, n, 1, "cpu", 4, 1.0, speed_of(program, "ale", "sb3", unit), 100.0, 0.0)
        for table, program, n in sizes
    ]


def continuous(script, unit):
    return [
        script.Measurement(env_id, 1, program, 16, 256, 1, 4, 1.0, speed_of(program, "sync", "sb3_sync", unit))
        for env_id in script.SIZES
        for program in script.PROGRAMS
    ]


def dqn(script, unit):
    trained = [
        script.Measurement("train", 1, x, 1, "cpu", 200, 50, 1.0, speed_of(x, "ours", "sb3", unit), 100.0, 0.0)
        for x in script.PROGRAMS
    ]
    times = {"sample_ms": 0.5, "sample_ms_90": 0.75, "growth_mib": 10.0}
    return trained + [script.Measurement("sample", 1, x, 1, "cpu", **times) for x in script.PROGRAMS]


@pytest.mark.parametrize(
    ("name", "measurements", "flags", "lines"),
    [
        (
            "speed_atari",
            atari,
            ["--rounds=2"],
            [
                "| ours, ale | 12 | 8 | 16 | 2.00 (2.00 to 2.00) |",
                "| environments alone, ale | 3 | 2 | 4 |  |",
                "ratio to reach: 1.6, measured: 2.00 (ours, ale): reached",
                "| 64 | 12 | 100 | no GPU |",
            ],
        ),
        (
            "speed_continuous",
            continuous,
            ["--rounds=2"],
            [
                "| ppo_continuous.py, sync | 12 | 8 | 16 | 2.00 (2.00 to 2.00) |",
                "- ratio to reach: 1.35, measured: 0.50 (ppo_continuous.py, sync, --compile): not reached",
                "- ppo_continuous.py, async to sync: 0.25 (0.25 to 0.25): async does not pay",
            ],
        ),
        (
            "speed_dqn",
            dqn,
            ["--rounds=2", "--sample-size=2000", "--buffer-size=4000"],
            [
                "| dqn_atari.py | 12 | 8 | 16 | 50 in 200 | 100 | no GPU |",
                "- steps/s, ratio to stable-baselines3 to reach: 1.5, measured: 2.00 (2.00 to 2.00): reached",
                # A frame of 84 x 84 and 17 bytes beside it; two stacks of 4 frames and 20 bytes.
                "| dqn_atari.py | 7,073 | 675 | 6,745 | 1.000 |",
                "| stable-baselines3 | 56,468 | 5,385 | 53,852 | 0.125 |",
                "| dqn_atari.py | CPU | 0.500 | 0.750 | 10 |",
            ],
        ),
    ],
)
def test_a_report_says_what_was_measured(monkeypatch, tmp_path, capsys, name, measurements, flags, lines):
    """Two rounds: 8 and 16 steps/s are ours, 4 and 8 the peer's; a ratio is taken within a round."""
    script, out = importlib.import_module(name), tmp_path / "report.md"
    made = measurements(script, 1) + measurements(script, 2)
    monkeypatch.setattr(script, "measure_all", lambda _: iter(made))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags, f"--out={out}"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    script.main()
    text = out.read_text()
    assert text in capsys.readouterr().out
    for line in [*lines, f"- Command: `python benchmarks/{name}.py {' '.join(flags)} --out=report.md`"]:
        assert line in text.splitlines(), line
    with open(tmp_path / "report.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["steps_per_second"] or 0) for row in rows] == [x.steps_per_second or 0 for x in made]


@pytest.mark.parametrize(
    ("name", "changes", "job", "wanted"),
    [
        ("speed_atari", {"iterations": 1, "threads": 1}, (1, 1, "ale", 2), {"iterations": 1, "num_envs": 2}),
        ("speed_atari", {"iterations": 1, "threads": 1}, (1, 1, "sb3", 2), {"iterations": 1, "num_envs": 2}),
        ("speed_atari", {"iterations": 1, "threads": 1}, (1, 1, "env_gymnasium", 2), {"iterations": 1, "num_envs": 2}),
        ("speed_continuous", {"iterations": 1}, ("Pendulum-v1", 1, "sync"), {"iterations": 1, "num_steps": 128}),
        ("speed_continuous", {"iterations": 1}, ("Pendulum-v1", 1, "sb3_sync"), {"iterations": 1, "num_steps": 128}),
        ("speed_continuous", {"iterations": 1}, ("Pendulum-v1", 1, "env_sync"), {"iterations": 1, "num_steps": 128}),
        # 128 steps fill the memory. Ours is timed from the first point of its log after 128 + 64, the peer from there.
        ("speed_dqn", DQN, ("train", 1, "ours"), {"steps": 200, "updates": 50}),
        ("speed_dqn", DQN, ("train", 1, "sb3"), {"steps": 208, "updates": 52}),
        ("speed_dqn", {"sample_size": 128}, ("sample", 1, "ours"), {"steps": None}),
    ],
)
def test_a_program_can_be_measured(name, changes, job, wanted):
    script = importlib.import_module(name)
    args = script.Args(**changes, **({} if name == "speed_continuous" else {"cuda": False}))
    measurement = measuring.in_own_process(script.measure, *job, args)
    assert {name: getattr(measurement, name) for name in wanted} == wanted
    assert (getattr(measurement, "sample_ms", None) or measurement.steps_per_second) > 0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("speed_atari", {"num_envs": 0}, "--num-envs 0: must be at least 1"),
        ("speed_continuous", {"rounds": 0}, "--rounds 0: must be at least 1"),
        ("speed_dqn", {"untimed_steps": 0}, "--untimed-steps 0: must be at least 1"),
        ("speed_dqn", {"out": ROOT / "README.csv"}, "must be a Markdown file in a folder that exists"),
        ("speed_atari", {"out": ROOT / "nothing" / "a.md"}, "must be a Markdown file in a folder that exists"),
    ],
)
def test_wrong_arguments_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        importlib.import_module(name).Args(**changes)

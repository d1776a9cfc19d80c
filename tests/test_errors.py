"""Wrong input through the command line: status 2, one message that says what would be right, nothing left behind."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from conftest import ROOT

import ppo_atari

# What a run would take if the input were right; a test's own flags come after and override these.
SMALL = [
    "--num-envs=2",
    "--num-steps=32",
    "--num-minibatches=2",
    "--update-epochs=2",
    "--total-timesteps=128",
    "--eval-episodes=2",
    "--threads=1",
    "--no-cuda",
    "--no-progress",
    "--env-id=small_envs:Ramp3Trunc-v0",
]


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """An empty working folder, and an import path that is restored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def run_main(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["ppo_atari.py", *SMALL, *flags])
    ppo_atari.main()


def refused(monkeypatch, capsys, *flags, status=2):
    """Runs the command line, which must fail; returns what it says on standard error as one line."""
    with pytest.raises(SystemExit) as exit_info:
        run_main(monkeypatch, *flags)
    captured = capsys.readouterr()
    assert exit_info.value.code == status
    assert "run folder" not in captured.out
    assert "Traceback" not in captured.err
    if captured.err.startswith("error: "):
        assert captured.err.count("\n") == 1, captured.err
        return captured.err
    return unboxed(captured.err)


def unboxed(text):
    """Returns as one line what the parser says in a box: the checks of numbers, which the class of arguments makes."""
    assert "--help" in text
    return re.sub(r"[│|\s]+", " ", text)


def box(*flags):
    return pytest.param(flags[:-1], flags[-1], id=" ".join(flags[:-1]))


# ----- Numbers -----
@pytest.mark.parametrize(("flags", "message"), [
    box("--gamma", "1.5", "--gamma 1.5 must be a finite number at least 0 and at most 1"),
    box("--gamma", "-0.1", "--gamma -0.1 must be a finite number at least 0 and at most 1"),
    box("--gamma", "nan", "--gamma nan must be a finite number at least 0 and at most 1"),
    box("--gae-lambda", "-1", "--gae-lambda -1.0 must be a finite number at least 0 and at most 1"),
    box("--gae-lambda", "1.01", "--gae-lambda 1.01 must be a finite number at least 0 and at most 1"),
    box("--learning-rate", "-0.001", "--learning-rate -0.001 must be a finite number above 0"),
    box("--learning-rate", "0", "--learning-rate 0.0 must be a finite number above 0"),
    box("--learning-rate", "inf", "--learning-rate inf must be a finite number above 0"),
    box("--learning-rate", "nan", "--learning-rate nan must be a finite number above 0"),
    box("--clip-coef", "0", "--clip-coef 0.0 must be a finite number above 0"),
    box("--max-grad-norm", "nan", "--max-grad-norm nan must be a finite number above 0"),
    box("--target-kl", "0", "--target-kl 0.0 must be a finite number above 0"),
    box("--target-kl", "-0.01", "--target-kl -0.01 must be a finite number above 0"),
    box("--ent-coef", "-0.5", "--ent-coef -0.5 must be a finite number at least 0"),
    box("--ent-coef", "inf", "--ent-coef inf must be a finite number at least 0"),
    box("--vf-coef", "nan", "--vf-coef nan must be a finite number at least 0"),
    box("--num-envs", "0", "--num-envs 0 must be a finite number at least 1"),
    box("--num-envs", "-2", "--num-envs -2 must be a finite number at least 1"),
    box("--num-steps", "0", "--num-steps 0 must be a finite number at least 1"),
    box("--num-minibatches", "0", "--num-minibatches 0 must be a finite number at least 1"),
    box("--update-epochs", "0", "--update-epochs 0 must be a finite number at least 1"),
    box("--eval-episodes", "0", "--eval-episodes 0 must be a finite number at least 1"),
    box("--threads", "-1", "--threads -1 must be a finite number at least 0"),
    box("--checkpoint-every", "-1", "--checkpoint-every -1 must be a finite number at least 0"),
    box("--eval-every", "-1", "--eval-every -1 must be a finite number at least 0"),
    box("--seed", "-1", "--seed -1 must be a finite number at least 0 and at most 2,000,000,000"),
    box("--seed", "3000000000", "--seed 3000000000 must be a finite number at least 0 and at most 2,000,000,000"),
    # 2 x 32 = 64 samples.
    box("--num-minibatches", "3", "--num-minibatches 3 must divide num_envs * num_steps = 64"),
    box("--num-minibatches", "128", "--num-minibatches 128 must divide num_envs * num_steps = 64"),
    box("--num-minibatches", "64", "--num-minibatches 64 leaves minibatches of one of the 64 samples"),
    box("--total-timesteps", "63", "--total-timesteps 63 must be at least num_envs * num_steps = 64, one iteration"),
    box("--total-timesteps", "0", "--total-timesteps 0 must be at least num_envs * num_steps = 64, one iteration"),
    box("--total-timesteps", "-5", "--total-timesteps -5 must be at least num_envs * num_steps = 64, one iteration"),
    # Of another kind than a number, or no flag at all: the parser's own words.
    box("--num-envs", "two", "--num-envs"),
    box("--num-envs", "1.5", "--num-envs"),
    box("--vector", "threads", "--vector"),
    box("--backend", "envpool", "--backend"),
    box("--no-such-flag", "3", "--no-such-flag"),
    box("--cuda", "False", "False"),
])  # fmt: skip
def test_a_wrong_value_is_refused(monkeypatch, capsys, tmp_path, flags, message):
    assert message in refused(monkeypatch, capsys, *flags)
    assert list(tmp_path.iterdir()) == []


def test_the_defaults_of_a_short_run_are_refused(monkeypatch, capsys, tmp_path):
    # By default 8 x 128 = 1024 samples are one iteration.
    monkeypatch.setattr(sys, "argv", ["ppo_atari.py", "--total-timesteps", "100"])
    with pytest.raises(SystemExit) as exit_info:
        ppo_atari.main()
    assert exit_info.value.code == 2
    text = unboxed(capsys.readouterr().err)
    assert "--total-timesteps 100 must be at least num_envs * num_steps = 1024, one iteration" in text
    assert list(tmp_path.iterdir()) == []


def test_minibatches_of_one_sample_are_allowed_where_nothing_is_normalised():
    args = ppo_atari.Args(num_envs=2, num_steps=4, num_minibatches=8, norm_adv=False, total_timesteps=8)
    assert args.minibatch_size == 1


@pytest.mark.parametrize("bound", [
    {"gamma": 0.0}, {"gamma": 1.0}, {"gae_lambda": 0.0}, {"gae_lambda": 1.0}, {"seed": 0}, {"seed": 2_000_000_000},
    {"ent_coef": 0.0}, {"vf_coef": 0.0}, {"checkpoint_every": 0}, {"eval_every": 0}, {"threads": 0},
    {"total_timesteps": 1024}, {"target_kl": None}, {"target_kl": 1e-9}, {"eval_episodes": 1}, {"update_epochs": 1},
], ids=str)  # fmt: skip
def test_values_on_the_border_are_allowed(bound):
    ((name, value),) = bound.items()
    assert getattr(ppo_atari.Args(**bound), name) == value


# ----- Environments -----
@pytest.mark.parametrize(("env_id", "parts"), [
    ("Pong", ["there is no environment of this id", "ALE/Pong-v5", "PongNoFrameskip-v4"]),
    ("ALE/Pong-v4", ["there is no environment of this id", "ALE/Pong-v5"]),
    ("pongnoframeskip-v4", ["there is no environment of this id", "PongNoFrameskip-v4"]),
    ("PongNoFrameskip-v5", ["there is no environment of this id", "PongNoFrameskip-v4"]),
    ("ALE/PongNoFrameskip-v4", ["there is no environment of this id", "PongNoFrameskip-v4"]),
    ("CartPole", ["there is no environment of this id", "CartPole-v1"]),
    ("small_envs:Ramp3Trunk-v0", ["there is no environment of this id", "Ramp3Trunc-v0"]),
    ("Foo-v0", ["there is no environment of this id"]),
    ("", ["there is no environment of this id"]),
    ("nomodule:X-v0", ["there is no module 'nomodule' on the import path"]),
    ("small_envs.nothing:X-v0", ["there is no module 'small_envs.nothing' on the import path"]),
    (":X-v0", ["there is no module ''"]),
    (".small_envs:X-v0", ["there is no module"]),
    ("Pong-v4", ["skips a random number of frames", "use PongNoFrameskip-v4 or ALE/Pong-v5"]),
    ("Pong-v0", ["skips a random number of frames", "use PongNoFrameskip-v4 or ALE/Pong-v5"]),
    ("CartPole-v1", ["this script wants images, uint8 of 2 or 3 axes, not Box(", "for vectors use ppo_cartpole.py"]),
    ("small_envs:Vector-v0", ["this script wants images", "for vectors use ppo_cartpole.py"]),
    ("FrozenLake-v1", ["this script wants images", "not Discrete(16)"]),
    ("Pendulum-v1", ["this script wants Discrete actions, not Box(", "for a Box use ppo_continuous.py"]),
    ("small_envs:RampSmall-v0", ["images (4, 20, 20) are too small, 36 x 36 is the least"]),
])  # fmt: skip
def test_an_environment_that_does_not_fit_is_refused(monkeypatch, capsys, tmp_path, env_id, parts):
    line = refused(monkeypatch, capsys, f"--env-id={env_id}")
    assert line.startswith(f"error: --env-id {env_id}")
    for part in parts:
        assert part in line
    assert list(tmp_path.iterdir()) == []


def test_wrong_spaces_are_refused_in_other_processes_too(monkeypatch, capsys, tmp_path):
    line = refused(monkeypatch, capsys, "--env-id=small_envs:RampSmall-v0", "--vector=async")
    assert line == "error: --env-id small_envs:RampSmall-v0: images (4, 20, 20) are too small, 36 x 36 is the least\n"
    assert list(tmp_path.iterdir()) == []


def test_ids_with_a_random_frame_skip_are_never_proposed(monkeypatch, capsys):
    line = refused(monkeypatch, capsys, "--env-id=Breakout")
    named = line.split("the nearest: ")[1].strip().split(", ")
    assert "BreakoutNoFrameskip-v4" in named
    assert not {"Breakout-v4", "Breakout-v0"} & set(named)


# ----- Memory and packages -----
def test_storage_larger_than_the_free_memory_is_refused(monkeypatch, capsys, tmp_path):
    """2 x 1,048,576 images of 36 x 36 bytes: 2,592 MiB = 2.53 GiB, and 2.5 GiB are free."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=int(2.5 * 2**30)))
    line = refused(monkeypatch, capsys, "--num-steps=1048576", "--total-timesteps=2097152")
    assert line == "error: the storage takes 2.53 GiB, more than the 2.50 GiB that are free on cpu\n"
    assert list(tmp_path.iterdir()) == []


def test_storage_larger_than_any_memory_is_refused(monkeypatch, capsys, tmp_path):
    """2 x 10^12 images of 1296 bytes are 2.6 petabytes."""
    line = refused(monkeypatch, capsys, "--num-steps=1000000000000", "--total-timesteps=2000000000000")
    assert line.startswith("error: the storage takes 2,413,988.11 GiB, more than the ")
    assert list(tmp_path.iterdir()) == []


def without(monkeypatch, *packages):
    """Lets the search for a package fail, as where it is not installed."""
    find_spec = ppo_atari.importlib.util.find_spec
    monkeypatch.setattr(
        ppo_atari.importlib.util, "find_spec", lambda name, *rest: None if name in packages else find_spec(name, *rest)
    )


@pytest.mark.parametrize(("flag", "module", "package"), [
    ("--track", "wandb", "wandb"),
    ("--capture-video", "imageio_ffmpeg", "imageio[ffmpeg]"),
])  # fmt: skip
def test_a_missing_package_is_named_with_its_install_command(monkeypatch, capsys, tmp_path, flag, module, package):
    without(monkeypatch, module)
    line = refused(monkeypatch, capsys, flag)
    assert line == f"error: {flag} needs a package that is missing: pip install {package}\n"
    assert list(tmp_path.iterdir()) == []


def test_wandb_is_imported_only_when_asked_for(tmp_path, monkeypatch):
    """A package of this name lies on the path, and importing it would end the run."""
    (tmp_path / "wandb.py").write_text("raise SystemExit('wandb was imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("wandb", None)
    run_main(monkeypatch, "--total-timesteps=64", "--run-dir=runs")
    assert (tmp_path / "runs").is_dir()
    with pytest.raises(SystemExit, match="wandb was imported"):
        run_main(monkeypatch, "--total-timesteps=64", "--run-dir=tracked", "--track")


# ----- Paths -----
@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_a_path_without_a_checkpoint_is_refused(monkeypatch, capsys, tmp_path, flag):
    (tmp_path / "empty").mkdir()
    assert refused(monkeypatch, capsys, flag, "empty") == (
        "error: empty: there is no checkpoint file here, 'latest.pt' is missing\n"
    )
    assert refused(monkeypatch, capsys, flag, "nowhere/x.pt") == (
        "error: nowhere/x.pt: there is no checkpoint file here, 'x.pt' is missing\n"
    )
    (tmp_path / "notes.txt").write_text("no checkpoint\n")
    assert refused(monkeypatch, capsys, f"{flag}=notes.txt").startswith("error: notes.txt: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "notes.txt"]


def test_resume_and_evaluate_exclude_each_other(monkeypatch, capsys, tmp_path):
    line = refused(monkeypatch, capsys, "--resume", "x", "--evaluate", "y")
    assert line == "error: --resume and --evaluate exclude each other\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("run_dir", ["file", "file/below"])
def test_a_file_in_the_way_of_the_run_folder_is_refused(monkeypatch, capsys, tmp_path, run_dir):
    (tmp_path / "file").write_text("in the way")
    line = refused(monkeypatch, capsys, f"--run-dir={run_dir}")
    assert line == f"error: --run-dir {run_dir}: {tmp_path / 'file'} is no folder that can be written to\n"
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no permission bits of folders")
@pytest.mark.parametrize("run_dir", ["locked", "locked/below"])
def test_a_folder_without_permission_is_refused(monkeypatch, capsys, tmp_path, run_dir):
    if os.geteuid() == 0:
        pytest.skip("the superuser may write everywhere")
    (tmp_path / "locked").mkdir(mode=0o500)
    line = refused(monkeypatch, capsys, f"--run-dir={run_dir}")
    assert line == f"error: --run-dir {run_dir}: {tmp_path / 'locked'} is no folder that can be written to\n"


def test_a_folder_that_cannot_be_made_is_refused(monkeypatch, capsys, tmp_path):
    """A name longer than file systems take: found only when the folder is made."""
    line = refused(monkeypatch, capsys, "--exp-name=" + "x" * 300)
    assert line.startswith("error: --run-dir runs: cannot make a folder there (")
    assert not list(tmp_path.glob("runs/*"))


# ----- In a process of its own -----
@pytest.mark.parametrize(("flags", "message"), [
    (["--env-id=Pong"], "error: --env-id Pong: there is no environment of this id; the nearest: ALE/Pong-v5, "),
    (["--env-id=Pong-v4"], "error: --env-id Pong-v4 skips a random number of frames; use PongNoFrameskip-v4 or ALE/"),
    (["--evaluate=nothing.pt"], "error: nothing.pt: there is no checkpoint file here, 'nothing.pt' is missing"),
    (["--env-id=small_envs:RightAction-v0", "--capture-video"], "error: --capture-video: small_envs:RightAction-v0 "),
])  # fmt: skip
def test_the_command_line_says_one_line(tmp_path, flags, message):
    command = [sys.executable, str(ROOT / "ppo_atari.py"), *SMALL, *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_users_module_beside_their_files_is_found(tmp_path):
    """The working folder is on the import path, although the script lies elsewhere."""
    (tmp_path / "my_games.py").write_text(
        "import gymnasium\nimport small_envs\ngymnasium.register('Mine-v0', entry_point=small_envs.Ramp)\n"
    )
    command = [sys.executable, str(ROOT / "ppo_atari.py"), *SMALL, "--env-id=my_games:Mine-v0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "eval: mean=3 std=0 min=3 max=3 episodes=2 mean_length=3" in done.stdout.splitlines()
    assert [path.name.split("__")[0] for path in (tmp_path / "runs").iterdir()] == ["my_games-Mine-v0"]

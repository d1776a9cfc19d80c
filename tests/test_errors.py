"""Wrong input through the command line: status 2, one message that says what would be right, nothing left behind."""

import dataclasses
import json
import os
import re
import sys
from types import SimpleNamespace

import gymnasium as gym
import psutil
import pytest
import small_envs
from short_runs import command_line, failed, flags_of, only_run, resume, small_run

import ppo_atari
import ppo_atari as script


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small_flags(*flags):
    """A command line with which the script trains for an instant, but for a test's own flags."""
    return [*flags_of(small_run("ppo_atari", "runs")[1]), *flags]


def refused(monkeypatch, capsys, *flags):
    """Runs the command line, which must be refused; returns what it says on standard error as one line."""
    status, line = failed(script, monkeypatch, capsys, *small_flags(*flags))
    assert status == 2
    return line


def box(*flags):
    return pytest.param(flags[:-1], flags[-1], id=" ".join(flags[:-1]))


# ----- Numbers -----
@pytest.mark.parametrize(("flags", "message"), [
    box("--gamma=1.5", "--gamma 1.5 must be between 0 and 1"),
    box("--gamma=-0.1", "--gamma -0.1 must be between 0 and 1"),
    box("--gamma=nan", "--gamma nan must be between 0 and 1"),
    box("--gae-lambda=1.01", "--gae-lambda 1.01 must be between 0 and 1"),
    box("--learning-rate=-0.001", "--learning-rate -0.001 must be between "),
    box("--learning-rate=0", "--learning-rate 0.0 must be between "),
    box("--learning-rate=3e4", "--learning-rate 30000.0 must be between 1e-12 and 1"),
    box("--learning-rate=inf", "--learning-rate inf must be between "),
    box("--learning-rate=nan", "--learning-rate nan must be between "),
    box("--clip-coef=0", "--clip-coef 0.0 must be between "),
    box("--max-grad-norm=0", "--max-grad-norm 0.0 must be between "),
    box("--max-grad-norm=nan", "--max-grad-norm nan must be between "),
    box("--target-kl=0", "--target-kl 0.0 must be between "),
    box("--target-kl=-0.01", "--target-kl -0.01 must be between "),
    box("--ent-coef=-0.5", "--ent-coef -0.5 must be between 0 and inf"),
    box("--ent-coef=inf", "--ent-coef inf must be between 0 and inf"),
    box("--vf-coef=nan", "--vf-coef nan must be between 0 and inf"),
    box("--num-envs=0", "--num-envs 0 must be between 1 and 10,000"),
    box("--num-envs=10000000", "--num-envs 10000000 must be between 1 and 10,000"),
    box("--num-steps=0", "--num-steps 0 must be between 1 and inf"),
    box("--num-minibatches=0", "--num-minibatches 0 must be between 1 and inf"),
    box("--update-epochs=0", "--update-epochs 0 must be between 1 and inf"),
    box("--eval-episodes=0", "--eval-episodes 0 must be between 1 and inf"),
    box("--threads=-1", "--threads -1 must be between 0 and 1,024"),
    box("--checkpoint-every=-1", "--checkpoint-every -1 must be between 0 and inf"),
    box("--eval-every=-1", "--eval-every -1 must be between 0 and inf"),
    box("--seed=-1", "--seed -1 must be between 0 and 2,000,000,000"),
    box("--seed=3000000000", "--seed 3000000000 must be between 0 and 2,000,000,000"),
    # 2 x 32 = 64 samples.
    box("--num-minibatches=3", "--num-minibatches 3 must divide 64 = N * T"),
    box("--num-minibatches=128", "--num-minibatches 128 must divide 64 = N * T"),
    box("--num-minibatches=64", "--num-minibatches 64 must divide 64 = N * T into parts > 1"),
    box("--no-norm-adv", "--num-minibatches=64", "must divide 64 = N * T into parts > 1"),
    box("--total-timesteps=63", "--total-timesteps 63 must be between 64 and inf"),
    # Of another kind than a number, or no flag at all: the parser's own words.
    box("--num-envs=two", "--num-envs"),
    box("--num-envs=1.5", "--num-envs"),
    box("--vector=threads", "--vector"),
    box("--no-such-flag=3", "--no-such-flag"),
    box("--cuda", "False", "False"),
])  # fmt: skip
def test_a_wrong_value_is_refused_before_an_environment_is_made(monkeypatch, capsys, tmp_path, flags, message):
    monkeypatch.setattr(script, "make_envs", lambda *_: pytest.fail("an environment was made"))
    assert message in refused(monkeypatch, capsys, *flags)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bound", [
    {"gamma": 0.0}, {"gamma": 1.0}, {"gae_lambda": 0.0}, {"gae_lambda": 1.0}, {"seed": 0}, {"seed": 2_000_000_000},
    {"ent_coef": 0.0}, {"vf_coef": 0.0}, {"checkpoint_every": 0}, {"eval_every": 0}, {"threads": 0},
    {"total_timesteps": 1024}, {"target_kl": None}, {"target_kl": 1e-9}, {"eval_episodes": 1}, {"update_epochs": 1},
    {"num_minibatches": 512}, {"num_envs": 10_000, "total_timesteps": 1_280_000},
], ids=str)  # fmt: skip
def test_values_on_the_border_are_allowed(bound):
    script.Args(**bound).check()


# ----- Environments -----
class Broken(gym.Env):
    """Cannot be made."""

    def __init__(self):
        raise TypeError("first line\nthe argument 'map_name' is missing")


class Drawing(small_envs.Ramp):
    """Draws what it is told: "none", "list" or "float"."""

    def __init__(self, what, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.what = what

    def render(self):
        frame = super().render()
        return {"none": None, "list": [frame], "number": 1.0}[self.what]


gym.register("Broken-v0", entry_point=Broken)
for what in ("none", "list", "number"):
    gym.register(f"Draws-{what}-v0", entry_point=Drawing, kwargs={"what": what}, disable_env_checker=True)


def test_ids_with_a_random_frame_skip_are_never_proposed(monkeypatch, capsys):
    line = refused(monkeypatch, capsys, "--env-id=Breakout")
    named = line.split("the nearest ids: ")[1].split("; ")[0].split(", ")
    assert "BreakoutNoFrameskip-v4" in named
    assert not {"Breakout-v4", "Breakout-v0"} & set(named)


@pytest.mark.parametrize(("env_id", "parts"), [
    ("Pong", ["gymnasium has no 'Pong'; the nearest ids: ", "ALE/Pong-v5", "PongNoFrameskip-v4"]),
    ("pongnoframeskip-v4", ["gymnasium has no '", "PongNoFrameskip-v4"]),
    ("CartPole", ["gymnasium has no '", "CartPole-v1"]),
    ("small_envs:Ramp3Trunk-v0", ["gymnasium has no 'Ramp3Trunk-v0'", "Ramp3Trunc-v0"]),
    ("io:Reward-v1", ["gymnasium has no 'Reward-v1'"]),
    ("Foo-v0", ["gymnasium has no '"]),
    ("", ["gymnasium has no '"]),
    (":X-v0", ["gymnasium has no '"]),
    ("nomodule:X-v0", ["No module named 'nomodule'"]),
    ("small_envs.nothing:X-v0", ["No module named 'small_envs.nothing'"]),
    (".small_envs:X-v0", ["relative import"]),
    ("Pong-v4", ["skips frames at random", "use PongNoFrameskip-v4 or ALE/Pong-v5"]),
    ("CartPole-v1", ["has Box (4,) float32 and Discrete () int64", "ppo_cartpole.py takes vectors and Discrete"]),
    ("Pendulum-v1", ["has Box (3,) float32 and Box (1,) float32", "ppo_continuous.py vectors and Box"]),
    ("FrozenLake-v1", ["has Discrete () int64 and Discrete () int64", "envs/README.md"]),
    ("small_envs:RampSmall-v0", ["has Box (4, 20, 20) uint8", "uint8 images from 36 x 36 on"]),
    ("Broken-v0", ["cannot be used: TypeError: first line the argument 'map_name' is missing"]),
])  # fmt: skip
def test_an_environment_that_does_not_fit_is_refused(monkeypatch, capsys, tmp_path, env_id, parts):
    line = refused(monkeypatch, capsys, f"--env-id={env_id}")
    assert line.startswith("error: --env-id ")
    for part in [env_id.rpartition(":")[2], *parts]:
        assert part in line
    assert list(tmp_path.iterdir()) == []


def test_wrong_spaces_are_refused_in_other_processes_too(monkeypatch, capsys, tmp_path):
    line = refused(monkeypatch, capsys, "--env-id=small_envs:RampSmall-v0", "--vector=async")
    assert line.startswith(
        "error: --env-id small_envs:RampSmall-v0 with --env-kwargs {} cannot be used: it has Box (4, 20, 20) uint8"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keywords", ["{", "[1]", "[]", "3", '{"no_such": 1}'])
def test_keywords_that_the_environment_does_not_take_are_refused(monkeypatch, capsys, tmp_path, keywords):
    line = refused(monkeypatch, capsys, f"--env-kwargs={keywords}")
    assert line.startswith("error: --env-")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keywords", ["[]", "0", '{"full_action_space": true}'])
def test_keywords_that_ale_py_does_not_take_are_refused(monkeypatch, capsys, tmp_path, keywords):
    line = refused(monkeypatch, capsys, "--env-id=PongNoFrameskip-v4", f"--env-kwargs={keywords}")
    assert line.endswith(": --env-kwargs, and ids with a time limit of their own, need --backend gymnasium\n")


@pytest.mark.parametrize("env_id", ["Draws-none-v0", "Draws-list-v0", "Draws-number-v0", "small_envs:RightAction-v0"])
def test_an_environment_that_draws_no_pictures_is_refused_before_training(monkeypatch, capsys, tmp_path, env_id):
    """After hours of training it would be too late to say so."""
    monkeypatch.setattr(script, "evaluate", lambda *_: pytest.fail("it was found after training"))
    line = refused(monkeypatch, capsys, f"--env-id={env_id}", "--capture-video")
    assert line.startswith(f"error: --env-id {env_id} with --env-kwargs {{}} cannot be used: ")
    assert list(tmp_path.iterdir()) == []


class Mute(small_envs.Ramp):
    """It draws nothing, and says no more of it than gymnasium's own render does."""

    def render(self):
        raise NotImplementedError


class Goalless(small_envs.Ramp):
    """It has a bug at its start, of which python says no more than a word."""

    def reset(self, *, seed=None, options=None):
        return {}["goal"]


gym.register("Mute-v0", entry_point=Mute, disable_env_checker=True)
gym.register("Goalless-v0", entry_point=Goalless, disable_env_checker=True)


def test_an_error_of_an_environment_has_a_name(monkeypatch, capsys, tmp_path):
    for name, flag, error in (
        ("Mute", "--capture-video", "NotImplementedError:"),
        ("Goalless", "--seed=1", "KeyError: 'goal'"),
    ):
        line = refused(monkeypatch, capsys, f"--env-id={name}-v0", flag)
        assert line == f"error: --env-id {name}-v0 with --env-kwargs {{}} cannot be used: {error}\n"


# ----- Memory and packages -----
def test_storage_larger_than_the_free_memory_is_refused(monkeypatch, capsys, tmp_path):
    """2 x 1,048,576 images of 36 x 36 bytes: 2,592 MiB, and 2,560 are free."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=int(2.5 * 2**30)))
    line = refused(monkeypatch, capsys, "--num-steps=1048576", "--total-timesteps=2097152")
    assert line == "error: storage: 2,592.0 MiB; free on cpu: 2,560.0 MiB; lower --num-steps\n"
    assert list(tmp_path.iterdir()) == []


def test_storage_larger_than_any_memory_is_refused(monkeypatch, capsys, tmp_path):
    """2 x 10^12 images of 1296 bytes are 2.6 petabytes."""
    line = refused(monkeypatch, capsys, "--num-steps=1000000000000", "--total-timesteps=2000000000000")
    assert line.startswith("error: storage: 2,471,923,828.1 MiB; ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("flag", "package"), [("--track", "wandb"), ("--plot", "matplotlib")])
def test_a_missing_package_is_named_with_its_install_command(monkeypatch, capsys, tmp_path, flag, package):
    """The search for it fails, as where it is not installed."""
    find_spec = script.importlib.util.find_spec
    missing = lambda name, *rest: None if name == package else find_spec(name, *rest)  # noqa: E731
    monkeypatch.setattr(script.importlib.util, "find_spec", missing)
    line = refused(monkeypatch, capsys, flag)
    assert line == f"error: --track, --plot: a package is missing: pip install {package}\n"
    assert list(tmp_path.iterdir()) == []


FAKE_WANDB = """
import json

def init(**names):
    if names["project"] == "refused":
        raise RuntimeError("api_key not configured (no-tty).\\nwandb login")
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps(names) + "\\n")
"""


def test_a_resumed_run_goes_on_under_its_id_on_weights_and_biases(tmp_path, monkeypatch):
    """A package of that name lies on the path and writes down what it is called with; only --track imports it."""
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    command_line(script, monkeypatch, *small_flags("--total-timesteps=64", "--run-dir=quiet"))
    assert "wandb" not in sys.modules
    names = ("--wandb-project-name=plates", "--wandb-entity=team", "--exp-name=with space")
    command_line(script, monkeypatch, *small_flags("--total-timesteps=64", "--track", *names))
    folder = only_run("runs")
    # What the site takes for an id: no spaces or slashes.
    resume(script, monkeypatch, folder, "--track", "--total-timesteps=128")
    first, second = map(json.loads, (tmp_path / "calls.jsonl").read_text().splitlines())
    monkeypatch.delitem(sys.modules, "wandb")
    assert first["id"] == second["id"] == folder.name
    assert " " not in first["id"]
    assert (first["project"], first["entity"], first["name"]) == ("plates", "team", folder.name)
    assert first["resume"] == second["resume"] == "allow"
    assert first["sync_tensorboard"]
    assert first["config"]["total_timesteps"] == 64


def test_weights_and_biases_without_a_login_is_one_line_and_no_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    line = refused(monkeypatch, capsys, "--track", "--wandb-project-name=refused")
    monkeypatch.delitem(sys.modules, "wandb")
    assert line == "error: --run-dir runs --track: api_key not configured (no-tty). wandb login\n"
    assert not (tmp_path / "runs").exists()


# ----- Paths -----
@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
@pytest.mark.parametrize("path", ["", "empty", "nowhere/x.pt", "notes.txt", "x" * 300])
def test_a_path_without_a_checkpoint_is_refused(monkeypatch, capsys, tmp_path, flag, path):
    """An empty path is what an unset variable of the shell leaves."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no checkpoint\n")
    line = refused(monkeypatch, capsys, f"{flag}={path}")
    assert line.startswith(f"error: {path}: no checkpoint that fits: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "notes.txt"]


@pytest.mark.parametrize("run_dir", ["file", "file/below", "x" * 300])
def test_a_run_folder_that_cannot_be_made_is_refused(monkeypatch, capsys, tmp_path, run_dir):
    (tmp_path / "file").write_text("in the way")
    line = refused(monkeypatch, capsys, f"--run-dir={run_dir}")
    assert line.startswith(f"error: --run-dir {run_dir}: [Errno ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_permission_is_refused(monkeypatch, capsys, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert refused(monkeypatch, capsys, "--run-dir=locked").startswith("error: --run-dir locked: ")


@pytest.mark.parametrize("flag", ["--run-dir", "--exp-name", "--wandb-entity"])
def test_a_name_that_is_not_utf8_is_refused(monkeypatch, capsys, tmp_path, flag):
    """As python gets the byte 255 from the command line."""
    sys.stderr.reconfigure(errors="backslashreplace")  # as it is outside of the tests
    line = refused(monkeypatch, capsys, f"{flag}=z\udcff")
    assert re.search(r"'utf-8' codec can't encode character '\\udcff' in position \d+: surrogates not allowed\n$", line)
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_without_the_letters_of_a_folder_gets_question_marks(monkeypatch, tmp_path):
    with open(tmp_path / "out", "w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        command_line(script, monkeypatch, *small_flags("--run-dir=fünf", "--total-timesteps=64"))
    (folder,) = (tmp_path / "fünf").iterdir()
    assert f"run folder: f?nf/{folder.name}\n" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("name", ["a/b", "../up", "a:b", "a\\b"])
def test_a_name_with_slashes_makes_one_folder(monkeypatch, tmp_path, name):
    command_line(script, monkeypatch, *small_flags(f"--exp-name={name}", "--total-timesteps=64"))
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    plain = {"a/b": "a-b", "../up": "..-up", "a:b": "a-b", "a\\b": "a-b"}[name]
    assert only_run("runs").name.startswith(f"small_envs-Ramp3Trunc-v0__{plain}__1__")


@pytest.mark.parametrize("name", ["update_epochs", "num_minibatches", "eval_episodes"])
def test_a_limit_that_equals_another_hides_none(name):
    """With a batch of one sample total_timesteps has the limits of the sizes, 1 to infinity."""
    args = ppo_atari.Args(num_envs=1, num_steps=1, num_minibatches=1, norm_adv=False, total_timesteps=1)
    with pytest.raises(ppo_atari.UsageError, match=f"--{name.replace('_', '-')} 0 must be between 1 and inf"):
        dataclasses.replace(args, **{name: 0}).check()

"""A script can be imported without any effect, and its command line explains itself."""

import dataclasses
import importlib
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

SCRIPTS = [path.stem for path in sorted(ROOT.glob("*.py"))]
TRAINING = [name for name in SCRIPTS if name != "compare_runs"]
assert "ppo_atari" in TRAINING

# Warnings of other packages at import, as -W options, each with the package and version that gives it. None today.
EXEMPT: list[str] = []

# Run in a fresh interpreter: what an import may change but must not, before and after it.
IMPORT = """
import importlib, multiprocessing, os, random, signal, sys, threading
import numpy as np
import torch

def state():
    return {
        "random": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "torch's seed": torch.initial_seed(),
        "CUDA": torch.cuda.is_initialized(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch's threads": torch.get_num_threads(),
        "type of numbers": torch.get_default_dtype(),
        "signals": [str(signal.getsignal(x)) for x in (signal.SIGINT, signal.SIGTERM)],
        "processes": multiprocessing.active_children(),
        "search path": list(sys.path),
        "arguments": list(sys.argv),
        "folder": os.getcwd(),
        "Bullet servers": len(getattr(sys.modules.get("pybullet"), "getConnectionInfo", dict)()),
    }

random.seed(1)
np.random.seed(1)
torch.manual_seed(1)
before = state()
script = importlib.import_module(sys.argv[1])
after = state()
changed = [name for name in before if before[name] != after[name]]
assert not changed, f"the import changed {changed}"
assert callable(script.main)
"""


def run(folder, *arguments, **variables):
    """Runs python in an empty folder; returns the finished process after a check that no file appeared there."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Without colours and of one width, however the tests themselves are run.
    plain = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-W", "error", *(option for rule in EXEMPT for option in ("-W", rule)), *arguments]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **plain, **variables}, capture_output=True, text=True, timeout=120
    )
    assert list(folder.iterdir()) == []
    return done


def words(text):
    """The text without frames and line breaks."""
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", text).split())


@pytest.fixture(scope="module")
def help_text(tmp_path_factory):
    """Returns a function that gives the --help of a script, which is run once."""
    texts = {}

    def get(script):
        if script not in texts:
            done = run(tmp_path_factory.mktemp("empty"), str(ROOT / f"{script}.py"), "--help", PYTHONHASHSEED="1")
            assert (done.returncode, done.stderr) == (0, "")
            texts[script] = done.stdout
        return texts[script]

    return get


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_import_has_no_effect(tmp_path, script):
    done = run(tmp_path, "-c", IMPORT, script)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_the_same_each_time(tmp_path, help_text, script):
    done = run(tmp_path, str(ROOT / f"{script}.py"), "--help", PYTHONHASHSEED="2")
    assert done.stdout == help_text(script)
    assert done.returncode == 0


@pytest.mark.parametrize("script", TRAINING)
def test_help_explains_every_argument(help_text, script):
    module = importlib.import_module(script)
    text = words(help_text(script))
    assert words(module.Args.__doc__) in text
    fields = dataclasses.fields(module.Args)
    assert len(fields) > 20
    source = (ROOT / f"{script}.py").read_text()
    for field in fields:
        flag = "--" + field.name.replace("_", "-")
        explanation = re.search(rf'^    {field.name}: .*\n    """((?:.|\n)*?)"""$', source, re.MULTILINE)
        assert explanation, f"no help text for {field.name}"
        assert len(explanation[1]) > 10, field.name
        # The flag comes first, then what it takes, then the explanation, then the default.
        negation = f", --no-{flag[2:]}" if field.type in (bool, "bool") else " "
        shown = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        default = re.escape(f"(default: {shown}")
        pattern = f"{re.escape(flag + negation)}.*? ?{re.escape(words(explanation[1]))} {default}"
        assert re.search(pattern, text), f"{flag} is not explained as {explanation[1]!r}"
    # Nothing but the fields: derived sizes are no flags.
    flags = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", text)) - {"--help"}
    names = {field.name.replace("_", "-") for field in fields}
    switches = {f"no-{field.name.replace('_', '-')}" for field in fields if field.type in (bool, "bool")}
    assert flags == {f"--{name}" for name in names | switches}


@pytest.mark.parametrize("script", TRAINING)
def test_switches_are_pairs_of_flags(script):
    module = importlib.import_module(script)
    assert module.parse_args([]).cuda is True
    assert module.parse_args(["--cuda"]).cuda is True
    assert module.parse_args(["--no-cuda"]).cuda is False
    # The underscore that the field has is taken too.
    assert module.parse_args(["--no-torch_deterministic"]).torch_deterministic is False


@pytest.mark.parametrize("script", TRAINING)
def test_a_value_behind_a_switch_is_refused(tmp_path, script):
    done = run(tmp_path, str(ROOT / f"{script}.py"), "--cuda", "False")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Unrecognized options: False" in words(done.stderr)
    assert "Traceback" not in done.stderr

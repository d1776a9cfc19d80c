"""A script can be imported without any effect, and its command line explains itself."""

import dataclasses
import functools
import importlib
import os
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT
from sync_copies import SCRIPTS, WITH_RAY
from test_scripts_agree import args_fields

TRAINING = [*SCRIPTS, *WITH_RAY]

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
# Then what `python SCRIPT.py --help` does.
sys.argv[1:] = ["--help"]
script.main()
"""


def run(folder, *arguments):
    """Runs python in an empty folder; returns the finished process after a check that no file appeared there."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Without colours and of one width, however the tests themselves are run.
    plain = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-W", "error", *arguments]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **plain}, capture_output=True, text=True, timeout=120)
    assert list(folder.iterdir()) == []
    return done


def words(text):
    """The text without frames and line breaks."""
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", text).split())


@functools.cache
def help_text(script, folder):
    """Returns the --help of a script, imported by a fresh interpreter."""
    done = run(folder, "-c", IMPORT, script.removesuffix(".py"))
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("empty")


def test_compare_runs_explains_itself(folder):
    assert help_text("compare_runs.py", folder).startswith("usage: ")


def test_the_file_as_a_command_says_the_same(folder):
    done = run(folder, str(ROOT / "ppo_atari.py"), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.replace(f"usage: {ROOT / 'ppo_atari.py'} ", "usage: -c ") == help_text("ppo_atari.py", folder)


@pytest.mark.parametrize("script", TRAINING)
def test_an_import_has_no_effect_and_help_explains_every_argument(folder, script):
    module = importlib.import_module(script.removesuffix(".py"))
    help_of_it = help_text(script, folder)
    assert help_of_it.startswith("usage: ")  # nothing stands before it
    text = words(help_of_it)
    assert words(module.Args.__doc__) in text
    fields, helps = dataclasses.fields(module.Args), args_fields(ROOT / script)
    assert len(fields) > 20
    for field in fields:
        flag, explanation = "--" + field.name.replace("_", "-"), helps[field.name][1].removeprefix("# ")
        # The flag comes first, then what it takes, then the explanation, then the default.
        negation = f", --no-{flag[2:]}" if field.type in (bool, "bool") else " "
        shown = field.default if isinstance(field.default, tuple) else [field.default]
        default = re.escape(f"(default: {shlex.join(map(str, shown))}")
        pattern = f"{re.escape(flag + negation)}.*? ?{re.escape(words(explanation))} {default}"
        assert re.search(pattern, text), f"{flag} is not explained as {explanation!r}"
    # Nothing but the fields: derived sizes are no flags.
    flags = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", text)) - {"--help"}
    names = {field.name.replace("_", "-") for field in fields}
    switches = {f"no-{field.name.replace('_', '-')}" for field in fields if field.type in (bool, "bool")}
    assert flags == {f"--{name}" for name in names | switches}

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

# Run in a fresh interpreter, for one script after the other: what an import must not change, before and after it.
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
names, sys.argv[1:] = sys.argv[1:], ["--help"]
for name in names:
    before = state()
    script = importlib.import_module(name)
    after = state()
    changed = [key for key in before if before[key] != after[key]]
    assert not changed, f"the import of {name} changed {changed}"
    # Then what `python SCRIPT.py --help` does.
    try:
        script.main()
    except SystemExit as end:
        assert end.code == 0
    print("END", name)
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
def help_texts(folder):
    """Returns the --help of each script, by its name, after all were imported by a fresh interpreter."""
    names = [script.removesuffix(".py") for script in [*TRAINING, "compare_runs.py"]]
    done = run(folder, "-c", IMPORT, *names)
    assert (done.stderr, done.returncode) == ("", 0)
    *texts, nothing = re.split(r"^END \w+\n", done.stdout, flags=re.MULTILINE)
    assert nothing == ""
    return dict(zip(names, texts, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("empty")


def test_compare_runs_explains_itself(folder):
    assert help_texts(folder)["compare_runs"].startswith("usage: ")


@pytest.mark.parametrize("script", TRAINING)
def test_an_import_has_no_effect_and_help_explains_every_argument(folder, script):
    name = script.removesuffix(".py")
    module, help_of_it = importlib.import_module(name), help_texts(folder)[name]
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

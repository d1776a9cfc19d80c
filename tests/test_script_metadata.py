"""Each script's first lines (PEP 723) say what it needs, so that `uv run` starts a copy of it in an empty folder."""

import ast
import re
import sys
import tomllib

import pytest
from conftest import ROOT
from sync_copies import SCRIPTS, WITH_RAY

ALSO = {"imageio": ["imageio-ffmpeg"], "stable_baselines3": ["opencv-python-headless"], "envs": ["pybullet"]}
"""what is needed beside a package that is imported, and is not imported itself"""
DISTRIBUTIONS = {
    "ale_py": "ale-py",
    "cv2": "opencv-python-headless",
    "pygame": "pygame-ce",
    "stable_baselines3": "stable-baselines3",
    "google": "tensorboard",
    "envs": "pybullet",
}


def requirements():
    """Returns the lines of requirements.txt and requirements-ray.txt without comments, by name."""
    found = {}
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("requirements.txt", "requirements-ray.txt")]
    for line in "".join(texts).splitlines():
        spec = line.split("#")[0].strip()
        if spec:
            found.setdefault(re.match(r"[\w-]+", spec)[0], []).append(spec)
    return found


def metadata(path):
    """Returns what the block at the top of a script holds, read as the standard says."""
    block = re.match(r"# /// script\n((?:#(?: .*)?\n)+?)# ///\n", path.read_text(encoding="utf-8"))
    return tomllib.loads("".join(line[2:] + "\n" for line in block[1].splitlines()))


def imported(path):
    """Returns the packages that a script imports, the standard library's apart."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names |= {alias.name.split(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
        names |= {node.module.split(".")[0]} if isinstance(node, ast.ImportFrom) else set()
    # The package of SummaryWriter is torch's in name only; wandb is asked for by --track.
    names |= {"tensorboard"} if "torch" in names else set()
    return names - set(sys.stdlib_module_names) - {"wandb"}


@pytest.mark.parametrize("name", [*SCRIPTS, *WITH_RAY, "compare_runs.py"])
def test_a_script_names_what_it_needs_with_the_bounds_of_requirements(name):
    needed = {DISTRIBUTIONS.get(x, x) for x in imported(ROOT / name)}
    needed |= {more for x in imported(ROOT / name) for more in ALSO.get(x, [])}
    block, bounds = metadata(ROOT / name), requirements()
    assert block["requires-python"] == ">=3.11"
    names = {re.match(r"[\w-]+", spec)[0] for spec in block["dependencies"]}
    # What draws or simulates an environment is not imported by the script.
    assert names - ({"pygame-ce", "box2d", "pybullet-arm64"} - needed) == needed
    assert ("pybullet" in names) == ("pybullet-arm64" in names)
    assert sorted(block["dependencies"]) == sorted(spec for x in names for spec in bounds[x])


def test_a_block_is_read_as_the_standard_says(tmp_path):
    (tmp_path / "a.py").write_text(
        '# /// script\n# dependencies = [\n#     "x>=1",  # why\n#\n# ]\n# ///\n"""Doc."""\n'
    )
    assert metadata(tmp_path / "a.py") == {"dependencies": ["x>=1"]}

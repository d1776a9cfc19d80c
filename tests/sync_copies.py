"""Carries a change of shared text from one training script into the others, which hold copies of it.

Run:   python tests/sync_copies.py compute_gae --from ppo_cartpole.py
       python tests/sync_copies.py Bookkeeping
       python tests/sync_copies.py
NAME is a function, a class or a constant, with its decorators, its docstring and the comments right above it, or a
section: Evaluation or Bookkeeping. Without NAME everything that differs is written. What is written is shown. Imports
are left as they are; ruff tells which ones are missing.
Copies of your own: the environment variable ALSO names scripts beside these, parted by spaces, to be compared and
written too: ALSO=ppo_impala.py python -m pytest tests/test_scripts_agree.py
"""

import argparse
import ast
import difflib
import functools
import itertools
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [
    *("ppo_atari.py", "a2c_atari.py", "dqn_atari.py", "ppo_cartpole.py", "ppo_continuous.py", "rpo_continuous.py"),
    *("dqn_cartpole_vec.py", "dqn_cartpole_pixels.py", "dqn_balancing_plate.py", "reinforce_bullet_cartpole.py"),
]
"""by name, so that a file of a user's beside them breaks nothing"""
WITH_RAY = ["ppo_atari_ray.py"]
"""compared too; it trains in tests/test_ray.py, since Ray need not be there"""
SECTIONS = ("Evaluation", "Bookkeeping")
"""those that are equal as a whole"""
OWN = {"Args", "minibatch_loss", "train", "make_env", "make_envs", "Agent"}
"""names of what each script has for itself"""
VECTORS = ("dqn_cartpole_vec.py", "dqn_balancing_plate.py")
ALLOWED = {
    "ReplayBuffer": (("dqn_atari.py", "dqn_cartpole_pixels.py"), "images are held as single frames, vectors whole"),
    "td_targets": (VECTORS, "values of an epsilon-greedy policy, too: those of the best actions unlearn CartPole"),
    "q_learning_loss": (VECTORS, "gives td_targets its epsilon"),
}
"""name: the scripts that share a text of their own under it, and why"""


def scripts(folder: Path) -> list[Path]:
    """Returns the paths of the scripts, and of those that ALSO names."""
    return [folder / name for name in [*SCRIPTS, *WITH_RAY, *os.environ.get("ALSO", "").split()]]


def names_of(node: ast.stmt) -> list[str]:
    """Returns what a statement at the top level defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def shared_pieces(path: Path) -> dict[str, slice]:
    """Returns which lines of a script hold each name that others may have too, and each of the sections.

    A name in ALLOWED is called "NAME apart" in the scripts that have their own text for it.
    """
    pieces = {name: x for name, x in all_pieces(path.read_text(encoding="utf-8")).items() if name not in OWN}
    own = path.name if path.name in SCRIPTS else copied_from(path.read_text(encoding="utf-8"))
    apart = {name for name in pieces if own in ALLOWED.get(name, ((), ""))[0]}
    return {f"{name} apart" if name in apart else name: piece for name, piece in pieces.items()}


@functools.cache
def copied_from(text: str) -> str:
    """Returns the script that has the most lines in common with a text."""
    lines = set(text.splitlines())
    return max(SCRIPTS, key=lambda name: len(lines & set((ROOT / name).read_text(encoding="utf-8").splitlines())))


@functools.cache
def all_pieces(text: str) -> dict[str, slice]:
    """Returns which lines of a text hold each name, and each of the sections."""
    lines, body = text.splitlines(), ast.parse(text).body
    pieces = {}
    for node, following in itertools.zip_longest(body, body[1:]):
        first = min(x.lineno for x in (node, *getattr(node, "decorator_list", []))) - 1
        while lines[first - 1].startswith("#") and not lines[first - 1].startswith("# -----"):
            first -= 1
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        piece = slice(first, (following if is_text and not hasattr(node, "body") else node).end_lineno)
        pieces |= dict.fromkeys(names_of(node), piece)
    banners = [*(i for i, line in enumerate(lines) if line.startswith("# -----")), len(lines)]
    sections = {lines[i].strip("# -"): slice(i, end) for i, end in itertools.pairwise(banners)}
    return pieces | {name: piece for name, piece in sections.items() if name in SECTIONS}


def text_of(path: Path, name: str) -> list[str]:
    """Returns the lines of a name, without the blank ones at a section's end."""
    return "\n".join(path.read_text(encoding="utf-8").splitlines()[shared_pieces(path)[name]]).rstrip().split("\n")


def shared_names(paths: list[Path]) -> dict[str, list[Path]]:
    """Returns each name that two scripts have and the scripts that have it, sections first."""
    names = {name: [] for name in SECTIONS}
    for path in paths:
        for name in shared_pieces(path):
            names.setdefault(name, []).append(path)
    return {name: holders for name, holders in names.items() if len(holders) > 1}


def difference(name: str, one: Path, other: Path) -> str:
    """Returns what would have to be changed in the first one to have the text of the other; empty if nothing."""
    lines = difflib.unified_diff(text_of(one, name), text_of(other, name), str(one), str(other), lineterm="", n=1)
    return "\n".join(lines)


def write(name: str, source: Path, path: Path) -> None:
    """Puts the text of a name in place of the one that a script has."""
    piece, lines = shared_pieces(path)[name], path.read_text(encoding="utf-8").splitlines()
    blank = [""] * (len("\n".join(lines[piece])) - len("\n".join(lines[piece]).rstrip("\n")))
    lines[piece] = [*text_of(source, name), *blank]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def sync(paths: list[Path], wanted: str | None = None, source_name: str | None = None) -> str:
    """Writes a name, or all, from the source into the scripts that have it, and returns what was changed."""
    changes = []
    for name in shared_names(paths) if wanted is None else [wanted]:
        # Anew for each: a section may have brought names or taken them away.
        holders = shared_names(paths).get(name, [])
        source = next((path for path in holders if path.name == source_name), None)
        if wanted is not None and (not holders or (source_name and not source)):
            raise KeyError(source_name if holders else name)
        for path in holders:
            change = difference(name, path, source or holders[0])
            if change:
                changes.append(change)
                write(name, source or holders[0], path)
    return "\n".join(changes)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", metavar="NAME", help="what to write; left out: all")
    parser.add_argument("--from", dest="source", metavar="SCRIPT", help="where it is right; else the first that has it")
    args = parser.parse_args()
    try:
        print(sync(scripts(ROOT), args.name, args.source) or "nothing differs")
    except KeyError as error:
        sys.exit(f"error: {error} is no name that scripts share, or no script that has it")


if __name__ == "__main__":
    main()

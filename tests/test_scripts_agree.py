"""Scripts are copies of each other where they do the same: what has the same name has the same text."""

import ast
import itertools
import re
import shutil

import pytest
from conftest import ROOT

BANNERS = ["Arguments", "Environment", "Networks", "Storage", "Math", "Evaluation", "Training", "Bookkeeping"]
BANNER = re.compile(r"^# ----- (.*) -----$", re.MULTILINE)

# What differs by design: arguments, the training loop, the environment's wrappers, and the networks.
OWN = {"Args", "train", "make_env", "Agent", "QNetwork", "Policy", "Actor", "Critic"}
# Further names that may differ, each with the reason.
ALLOWED = {
    "check_spaces": "each script says which observations and actions it takes, and which script takes the others",
    "describe_envs": "Atari has facts to tell that an id does not",
    "make_agent": "hands the networks, which differ, their arguments",
    "make_envs": "Atari has two ways to make them",
    "ReplayBuffer": "images are held as single frames, vectors whole",
    "quality": "plates are told apart by the distance of the ball too",
}


def has_args(path):
    return any(isinstance(node, ast.ClassDef) and node.name == "Args" for node in ast.parse(path.read_text()).body)


SCRIPTS = sorted(path for path in ROOT.glob("*.py") if path.name != "compare_runs.py" and has_args(path))


def lines_of(text, node):
    """Whole lines, from the first decorator on, so that comments in and behind the code count."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return "\n".join(text.split("\n")[first - 1 : node.end_lineno])


def shared_texts(path):
    """Texts by name of top-level functions and classes, and of the constants of Bookkeeping."""
    text = path.read_text()
    bookkeeping = text[: text.index("# ----- Bookkeeping -----")].count("\n") + 1
    texts = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.lineno > bookkeeping:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [ast.unparse(target) for target in targets]
        else:
            continue
        texts |= {name: lines_of(text, node) for name in names if name not in OWN | ALLOWED.keys()}
    return texts


def args_fields(path):
    """Type and help text of each field of Args by name, in order."""
    (args,) = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == "Args"
    ]
    fields = {}
    for node, following in itertools.pairwise([*args.body, None]):
        if not isinstance(node, ast.AnnAssign):
            continue
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        fields[node.target.id] = (ast.unparse(node.annotation), following.value.value if is_text else None)
    return fields


def disagreements(paths):
    """Says, a line each, which two scripts disagree on what."""
    found = []
    read = [(path.name, shared_texts(path), args_fields(path)) for path in paths]
    for (first, texts, fields), (second, others, other_fields) in itertools.combinations(read, 2):
        pair = f"{first} and {second}"
        found += [f"{pair}: {name}" for name in texts.keys() & others.keys() if texts[name] != others[name]]
        common = [name for name in fields if name in other_fields]
        for name in common:
            for what, own, other in zip(("type", "help"), fields[name], other_fields[name], strict=True):
                if own != other:
                    found.append(f"{pair}: {what} of Args.{name}")
        if common != [name for name in other_fields if name in fields]:
            found.append(f"{pair}: order of Args")
    return sorted(found)


def banner_faults(path):
    text = path.read_text()
    banners = BANNER.findall(text)
    faults = [f"{path.name}: no banner is called {banner}" for banner in banners if banner not in BANNERS]
    if banners != [banner for banner in BANNERS if banner in banners]:
        faults.append(f"{path.name}: banners out of order: {banners}")
    # Everything that looks like a banner, indented or of another length, must be one.
    alike = [line for line in text.split("\n") if re.match(r"\s*# ?--", line)]
    return faults + [f"{path.name}: no banner: {line!r}" for line in alike if not BANNER.fullmatch(line)]


def imported_modules(path):
    """First parts of the names of all modules that are imported, in functions too."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." if node.level else node.module.split(".")[0])
    return modules


def test_scripts_agree():
    assert [path.name for path in SCRIPTS].count("ppo_atari.py") == 1
    assert disagreements(SCRIPTS) == []
    # An allowed difference that is none any more is to be taken off the list.
    texts = [path.read_text() for path in SCRIPTS]
    for name, reason in ALLOWED.items():
        holders = [text for text in texts if re.search(rf"^(class |def |){name}\b", text, re.MULTILINE)]
        assert reason, f"{name} is allowed to differ without a reason"
        assert len(holders) >= 2, f"{name} is in fewer than two scripts"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_banners(path):
    assert BANNER.findall(path.read_text()), "no banner at all"
    assert banner_faults(path) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_stands_alone(path):
    others = {other.stem for other in ROOT.glob("*.py")} | {"tests", "."}
    assert imported_modules(path) & others == set()


# The checks above find what they look for: each is shown a copy of a script with one small change.


def changed_copy(tmp_path, old, new):
    """ppo_atari.py beside a copy of it, in which one place is changed."""
    original = shutil.copy(ROOT / "ppo_atari.py", tmp_path / "ppo_atari.py")
    text = original.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in ppo_atari.py, choose another place"
    copy = tmp_path / "other.py"
    copy.write_text(text.replace(old, new))
    return [copy, original]


def test_an_identical_copy_agrees(tmp_path):
    paths = changed_copy(tmp_path, "def crossed(", "def crossed(")
    assert disagreements(paths) == []
    assert "crossed" in shared_texts(paths[0])
    assert args_fields(paths[0])["seed"][0] == "int"


@pytest.mark.parametrize(
    ("old", "new", "reported"),
    [
        # the body of a function
        ("return every > 0 and", "return every > 1 and", "crossed"),
        # a comment in a function
        ("nothing: no script reads unset memory.", "nothing; no script reads unset memory.", "prepare"),
        # a comment behind the last line of a function
        ("// every > before // every\n", "// every > before // every  # hm\n", "crossed"),
        # a docstring
        ("Says whether a multiple of", "Says whether a multiple Of", "crossed"),
        # a decorator
        ("@contextmanager\n", "@contextmanager  # now\n", "closing_envs"),
        # a default in a signature
        ("std: float = 2**0.5", "std: float = 2**0.6", "layer_init"),
        # a method of a class
        ("raise Interrupted(128 + self.signum)\n", "raise Interrupted(129 + self.signum)\n", "StopSignal"),
        # constants of Bookkeeping
        ("FORMAT_VERSION = 1\n", "FORMAT_VERSION = 2\n", "FORMAT_VERSION"),
        ('NOT_STORED = ("resume", ', 'NOT_STORED = ("Resume", ', "NOT_STORED"),
        # the help of an argument
        ("longest gradient; longer ones", "longest gradient, longer ones", "help of Args.max_grad_norm"),
        # a help text that is left out
        (
            '    max_grad_norm: float = 0.5\n    """',
            '    max_grad_norm: float = 0.5\n    f"""',
            "help of Args.max_grad_norm",
        ),
        # the type of an argument
        ("target_kl: float | None = None", "target_kl: float = None", "type of Args.target_kl"),
    ],
)
def test_one_changed_character_is_reported(tmp_path, old, new, reported):
    assert disagreements(changed_copy(tmp_path, old, new)) == [f"other.py and ppo_atari.py: {reported}"]


def test_another_order_of_arguments_is_reported(tmp_path):
    field = '    gamma: float = 0.99\n    """discount of a reward one step later"""\n'
    paths = changed_copy(tmp_path, field, "")
    paths[0].write_text(paths[0].read_text().replace("    seed: int", f"{field}    seed: int", 1))
    assert disagreements(paths) == ["other.py and ppo_atari.py: order of Args"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # a default, an argument less, and what a script has for itself
        ("gamma: float = 0.99", "gamma: float = 0.98"),
        ('    gamma: float = 0.99\n    """discount of a reward one step later"""\n', ""),
        ("# Collect T steps from each of the N environments.", "# Collect."),
        ("# A small gain starts the policy near uniform, so that early actions explore.", "# Explore."),
        ("def crossed(", "def crossed_twice("),
    ],
)
def test_what_may_differ_is_not_reported(tmp_path, old, new):
    assert disagreements(changed_copy(tmp_path, old, new)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# ----- Math -----", "# ----- Maths -----"),
        ("# ----- Math -----", "    # ----- Math -----"),
        ("# ----- Math -----", "# ---- Math ----"),
        ("# ----- Math -----", "# ----- Networks -----"),
        ("# ----- Storage -----", "# ----- Evaluation -----"),
    ],
)
def test_a_wrong_banner_is_reported(tmp_path, old, new):
    assert banner_faults(changed_copy(tmp_path, old, new)[0]) != []


def test_a_section_may_be_left_out(tmp_path):
    assert banner_faults(changed_copy(tmp_path, "# ----- Storage -----\n", "")[0]) == []


def test_imports_are_found_wherever_they_are(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import a.b\nfrom c.d import e\n\n\ndef f():\n    import g as h\n    from . import i\n")
    assert imported_modules(path) == {"a", "c", "g", "."}

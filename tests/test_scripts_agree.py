"""Scripts are copies of each other where they do the same: what has the same name has the same text."""

import ast
import difflib
import re
import shutil

import pytest
from conftest import ROOT
from sync_copies import (
    ALLOWED,
    SCRIPTS,
    SECTIONS,
    WITH_RAY,
    difference,
    scripts,
    shared_names,
    shared_pieces,
    sync,
    text_of,
)

BANNERS = ["Arguments", "Environment", "Networks", "Storage", "Math", "Evaluation", "Training", "Bookkeeping"]
BANNER = re.compile(r"^# ----- (.*) -----$", re.MULTILINE)
PATHS = scripts(ROOT)
every_script = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)


def disagreements(paths):
    """Says, a line each, which two scripts have different texts, and what mends it."""
    return [
        f"{holders[0].name} and {path.name}: {name}; python tests/sync_copies.py {name} --from the one that is right"
        for name, holders in shared_names(paths).items()
        for path in holders[1:]
        if difference(name, holders[0], path)
    ]


def args_fields(path):
    """Type and help text of each field of Args by name, in order."""
    text = path.read_text(encoding="utf-8")
    (args,) = [x for x in ast.parse(text).body if isinstance(x, ast.ClassDef) and x.name == "Args"]
    fields = {}
    for node in args.body:
        if isinstance(node, ast.AnnAssign):
            comment = text.splitlines()[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
            fields[node.target.id] = ast.unparse(node.annotation), comment.strip()
    return fields


def disagreements_of_args(paths):
    """Says, a line each, which two scripts disagree on what of their arguments."""
    found = []
    fields = {path: args_fields(path) for path in paths}
    for i, one in enumerate(paths):
        for other in paths[i + 1 :]:
            common = [name for name in fields[one] if name in fields[other]]
            pair = f"{one.name} and {other.name}"
            found += [f"{pair}: Args.{name}" for name in common if fields[one][name] != fields[other][name]]
            if common != [name for name in fields[other] if name in fields[one]]:
                found.append(f"{pair}: order of Args")
    return found


def banner_faults(path):
    text = path.read_text(encoding="utf-8")
    banners = BANNER.findall(text)
    faults = [] if banners == [x for x in BANNERS if x in banners] else [f"order of the banners {banners}"]
    # Only the storage may be no class of its own.
    faults += [f"no {banner}" for banner in BANNERS if banner not in (*banners, "Storage")]
    # Everything that looks like a banner, indented or of another length, must be one.
    alike = [line for line in text.split("\n") if re.match(r"\s*# ?--", line)]
    return faults + [f"no banner: {line!r}" for line in alike if not BANNER.fullmatch(line)]


def imported_modules(path):
    """First parts of the names of all modules that are imported, in functions too."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." if node.level else node.module.split(".")[0])
    return modules


def test_what_has_the_same_name_has_the_same_text():
    assert disagreements(PATHS) == []


def test_the_sections_are_in_every_script():
    names = shared_names(PATHS)
    assert [names[section] for section in SECTIONS] == [PATHS, PATHS]
    assert {"find_spec", "WholeEpisodes"} <= {name for name, holders in names.items() if holders == PATHS}


def test_evaluation_and_bookkeeping_have_at_most_300_lines():
    """But for the picture of --plot: its function, and the two lines that call it."""
    text = (ROOT / "ppo_cartpole.py").read_text(encoding="utf-8")
    lines = text[text.index("# ----- Evaluation") : text.index("# ----- Training")].rstrip().count("\n") + 1
    lines += text[text.index("# ----- Bookkeeping") :].count("\n")
    picture = text[text.index("def plot_returns") : text.index("def load_checkpoint")].count("\n")
    assert lines - picture - text.count("plot_returns(self.folder)") * 2 <= 300


@pytest.mark.parametrize("name", ALLOWED)
def test_an_allowed_difference_is_one(name):
    own, reason = ALLOWED[name]
    assert reason
    holders = shared_names(PATHS)
    assert [path.name for path in holders[f"{name} apart"] if path.name in SCRIPTS] == list(own)  # and ALSO's copies
    assert text_of(ROOT / own[0], f"{name} apart") != text_of(holders[name][0], name)


def test_arguments_of_the_same_name_have_the_same_help():
    assert disagreements_of_args(PATHS) == []


@every_script
def test_every_argument_has_its_help_behind_it(path):
    assert [name for name, (_, comment) in args_fields(path).items() if not re.match("# .{10}", comment)] == []


@every_script
def test_banners(path):
    assert banner_faults(path) == []


@every_script
def test_a_script_stands_alone(path):
    others = {other.stem for other in ROOT.glob("*.py")} | {"tests", "."}
    assert imported_modules(path) & others == set()


def test_rpo_is_ppo_but_for_57_lines():
    texts = [(ROOT / f"{name}_continuous.py").read_text(encoding="utf-8").splitlines() for name in ("ppo", "rpo")]
    changes = [x for x in difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes() if x[0] != "equal"]
    assert 2 <= sum(i2 - i1 + j2 - j1 for _, i1, i2, j1, j2 in changes) <= 57


def test_ppo_atari_ray_is_ppo_atari_but_for_350_lines():
    texts = [(ROOT / f"{name}.py").read_text(encoding="utf-8").splitlines() for name in ("ppo_atari", "ppo_atari_ray")]
    changes = [x for x in difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes() if x[0] != "equal"]
    assert 2 <= sum(i2 - i1 + j2 - j1 for _, i1, i2, j1, j2 in changes) <= 350


# The checks above find what they look for: each is shown a copy of a script with one small change.


def changed_copy(folder, old, new):
    """ppo_atari.py and a copy of it, in which one place is changed."""
    original = shutil.copy(ROOT / "ppo_atari.py", folder / "ppo_atari.py")
    text = original.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in ppo_atari.py, choose another place"
    copy = folder / "other.py"
    copy.write_text(text.replace(old, new), encoding="utf-8")
    return [original, copy]


def names_in(found):
    return {re.fullmatch(r"ppo_atari.py and other.py: (\w+); python tests/sync_copies.py \1 .*", x)[1] for x in found}


@pytest.mark.parametrize(
    ("old", "new", "reported"),
    [
        # the body of a function, and a comment behind its last line
        ("return every > 0 and", "return every > 1 and", {"crossed", "Bookkeeping"}),
        ("// every > before // every\n", "// every > before // every  # hm\n", {"crossed", "Bookkeeping"}),
        # a docstring
        ("Says whether a multiple of", "Says whether a multiple Of", {"crossed", "Bookkeeping"}),
        # a decorator, a comment above, a default in a signature, a method
        ("@torch.no_grad()\n", "@torch.no_grad()  # now\n", {"evaluate", "Evaluation"}),
        ("def policy_loss(", "# hm\ndef policy_loss(", {"policy_loss"}),
        ("std: float = 2**0.5", "std: float = 2**0.6", {"layer_init"}),
        ("return obs, reward, terminated, truncated, {}", "return obs, reward, True, truncated, {}", {"WholeEpisodes"}),
        # a constant, and the text below it
        ("EVAL_MAX_STEPS = 27_000", "EVAL_MAX_STEPS = 27_001", {"EVAL_MAX_STEPS", "Evaluation"}),
        ("longest episode without", "longest episode Without", {"EVAL_MAX_STEPS", "Evaluation"}),
        # what has no name in a section
        ('if __name__ == "__main__":', 'if __name__ == "__main__":  # hm', {"Bookkeeping"}),
    ],
)
def test_one_changed_character_is_reported_and_put_right(tmp_path, old, new, reported):
    paths = changed_copy(tmp_path, old, new)
    assert names_in(disagreements(paths)) == reported
    right, wrong = (path.read_text() for path in paths)
    for name in reported:
        paths[1].write_text(wrong)
        assert sync(paths, name) != ""
        assert [path.read_text() for path in paths] == [right, right]
        # From the other one, which is right where it is called so.
        paths[1].write_text(wrong)
        sync(paths, name, "other.py")
        assert [path.read_text() for path in paths] == [wrong, wrong]
        paths[0].write_text(right)
    assert sync(paths) != ""
    assert [path.read_text() for path in paths] == [right, right]
    assert sync(paths) == ""


def test_what_differs_is_shown(tmp_path):
    one, other = changed_copy(tmp_path, "return every > 0 and", "return every > 1 and")
    shown = sync([one, other], "crossed").splitlines()
    assert shown[:2] == [f"--- {other}", f"+++ {one}"]
    rest = "and after // every > before // every"
    assert shown[4:] == [f"-    return every > 1 {rest}", f"+    return every > 0 {rest}"]


def test_a_name_that_is_not_shared_is_refused(tmp_path):
    paths = changed_copy(tmp_path, "def crossed(", "def crossed_twice(")
    before = [path.read_text() for path in paths]
    for names in (("crossed",), ("crossed_twice",), ("Args",), ("policy_loss", "third.py")):
        with pytest.raises(KeyError):
            sync(paths, *names)
    assert [path.read_text() for path in paths] == before


@pytest.mark.parametrize(
    ("old", "new", "reported"),
    [
        ("all weights; longer ones", "all weights, longer ones", "Args.max_grad_norm"),
        (
            "  # largest norm of the gradient of all weights; longer ones are scaled down to it",
            "",
            "Args.max_grad_norm",
        ),
        ("target_kl: float | None = None", "target_kl: float = None", "Args.target_kl"),
        ("    gamma: float = 0.99  # discount of a reward one step later\n", "", None),
        ("gamma: float = 0.99", "gamma: float = 0.98", None),
    ],
)
def test_a_changed_argument_is_reported(tmp_path, old, new, reported):
    paths = changed_copy(tmp_path, old, new)
    assert disagreements_of_args(paths) == ([f"ppo_atari.py and other.py: {reported}"] if reported else [])
    assert disagreements(paths) == []


def test_another_order_of_arguments_is_reported(tmp_path):
    field = "    gamma: float = 0.99  # discount of a reward one step later\n"
    paths = changed_copy(tmp_path, field, "")
    paths[1].write_text(paths[1].read_text().replace("    seed: int", f"{field}    seed: int", 1))
    assert disagreements_of_args(paths) == ["ppo_atari.py and other.py: order of Args"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# Collect T steps from each of the N environments.", "# Collect."),
        ("# A small gain starts the policy near uniform, so that early actions explore.", "# Explore."),
        ("def policy_loss(", "def surrogate_loss("),
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
        ("# ----- Math -----\n", ""),
    ],
)
def test_a_wrong_banner_is_reported(tmp_path, old, new):
    assert banner_faults(changed_copy(tmp_path, old, new)[1]) != []


def test_imports_are_found_wherever_they_are(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import a.b\nfrom c.d import e\n\n\ndef f():\n    import g as h\n    from . import i\n")
    assert imported_modules(path) == {"a", "c", "g", "."}


@every_script
def test_a_users_copy_is_compared_as_the_script_that_it_was_made_from(tmp_path, path):
    text = path.read_text(encoding="utf-8").replace("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=True)")
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    assert list(shared_pieces(tmp_path / "mine.py")) == list(shared_pieces(path))


def test_a_file_of_a_users_is_compared_only_where_it_is_named(monkeypatch):
    monkeypatch.setenv("ALSO", "ppo_impala.py ppo_other.py")
    assert scripts(ROOT)[len([*SCRIPTS, *WITH_RAY]) :] == [ROOT / "ppo_impala.py", ROOT / "ppo_other.py"]
    monkeypatch.delenv("ALSO")
    assert len(scripts(ROOT)) == len([*SCRIPTS, *WITH_RAY])

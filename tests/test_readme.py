"""README.md: every script is in it, every command in it parses, and what it names exists."""

import importlib
import re
import shlex

import pytest
import tyro
from conftest import ROOT
from sync_copies import SCRIPTS as WITHOUT_RAY
from sync_copies import WITH_RAY

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
TRAINING = [*WITHOUT_RAY, *WITH_RAY]
SCRIPTS = [*TRAINING, "compare_runs.py"]


def code_of(text):
    """Returns the lines of code in a text: of fenced and of indented blocks, and between backquotes."""
    lines, in_fence = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            in_fence = not in_fence
        elif in_fence or line.startswith("    "):
            lines.append(line.strip())
        else:
            lines += re.findall(r"`([^`]+)`", line)
    return "\n".join(lines).replace("\\\n", " ").splitlines()


def commands_of(text):
    """Returns (script, flags) of every call of a script at the top of the repository."""
    commands = []
    for line in code_of(text):
        # Up to the end of a shell command; the value of a shell's variable stands for a number.
        for script, rest in re.findall(r"\bpython3? (\w+\.py)([^;&|<>#`)]*)", line):
            commands.append((script, shlex.split(re.sub(r"\$\{?\w+\}?", "1", rest))))
    return commands


COMMANDS = commands_of(TEXT)
COPIES = {copy: script for script, copy in re.findall(r"^cp (\w+\.py) (\w+\.py)$", TEXT, re.MULTILINE)}
"""scripts that the page tells to make, and of which each is a copy"""


def test_commands_are_found_in_all_kinds_of_code():
    text = """`python a.py --x 1` and python not_code.py

    cd x && python b.py --resume runs/NAME   # go on
    for s in 1 2; do python c.py --seed $s --name "two words"; done

```
python3 d.py --long \\
    --flag > log.txt
python -m pytest
```
"""
    assert commands_of(text) == [
        ("a.py", ["--x", "1"]),
        ("b.py", ["--resume", "runs/NAME"]),
        ("c.py", ["--seed", "1", "--name", "two words"]),
        ("d.py", ["--long", "--flag"]),
    ]


def test_it_is_finished():
    assert not [line for line in TEXT.splitlines() if "@@" in line]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_a_row_in_the_table(script):
    rows = [line for line in TEXT.splitlines() if line.startswith(f"| `{script}` |")]
    assert len(rows) == 1
    assert f"python {script}" in rows[0]


def test_there_is_a_command_to_check():
    assert {script for script, _ in COMMANDS} >= set(SCRIPTS)


@pytest.mark.parametrize(("script", "flags"), COMMANDS, ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_every_command_parses(script, flags, capsys):
    script = COPIES.get(script, script)
    assert script in SCRIPTS
    if "--help" in flags:
        assert flags == ["--help"]
        return
    # The run that a command goes on with or evaluates is a placeholder: the rest has to parse over the defaults.
    for flag in ("--resume", "--evaluate"):
        if flag in flags:
            at = flags.index(flag)
            assert not flags[at + 1].startswith("-")
            flags = [*flags[:at], *flags[at + 2 :]]
    module = importlib.import_module(script.removesuffix(".py"))
    try:
        args = tyro.cli(module.Args, args=flags)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    if script in TRAINING:
        args.check()
    if "--env-id" in flags:
        assert args.env_id == flags[flags.index("--env-id") + 1]


def test_the_tests_are_started_as_the_checks_start_them():
    assert any("python -m pytest" in line for line in code_of(TEXT))
    assert "python -m pytest" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_every_row_of_the_results_has_its_agent_and_every_agent_its_row():
    section = TEXT.split("\n## Results\n")[1]
    table = section[section.index("|") :].split("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()][2:]
    cells = [(re.search(r"(\w+)[.]py", script)[1], task.strip()) for task, script, *_ in rows]
    named = {f"{script}__{task}.pt" for script, task in cells}
    assert len(named) == len(rows)
    assert named == {path.name for path in (ROOT / "benchmarks" / "agents").glob("*.pt")}


def test_the_first_experiment_changes_a_line_that_the_script_has():
    text = (ROOT / "ppo_cartpole.py").read_text(encoding="utf-8")
    body = text.split("def policy_loss(")[1].split("\n\n\n")[0]
    assert COPIES == {"ppo_noclip.py": "ppo_cartpole.py"}
    # One line returns, of the names that the page's line uses.
    assert len(re.findall(r"^    return -.*ratio \* advantages", body, re.MULTILINE)) == body.count("return ") == 1


def test_it_is_short_and_every_block_of_code_has_its_language():
    lines = TEXT.splitlines()
    assert len(lines) <= 220
    fences = [line for line in lines if line.startswith("```")]
    assert len(fences) % 2 == 0
    assert set(fences[::2]) <= {"```sh", "```powershell", "```text"}
    assert set(fences[1::2]) == {"```"}
    assert not [line for line in lines if line.startswith("    ")]


def test_sections_that_are_linked_exist():
    links = re.findall(r"\]\(([\w./-]+\.md)#([\w-]+)\)", TEXT)
    assert links
    for path, anchor in links:
        titles = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_paths_of_the_repository_that_are_named_exist():
    named = {match.rstrip(".") for match in re.findall(r"\b(?:benchmarks|tests)/[\w./-]*", TEXT)}
    missing = [path for path in sorted(named) if not (ROOT / path).exists()]
    assert missing == []

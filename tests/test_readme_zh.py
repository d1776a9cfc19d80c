"""README.zh-CN.md says what README.md says: the same commands, figures in tables, and links, in the same order."""

import re

import pytest
from conftest import ROOT

ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))


def blocks(text):
    """Returns (language, lines without comments) of every fenced block."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(language, [re.sub(r"\s+#.*", "", line) for line in code.splitlines()]) for language, code in found]


def without_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def code(text):
    return sorted(re.findall(r"`([^`]+)`", without_blocks(text)))


def figures(text):
    """Returns the numbers of each cell of each row of a table, minus signs included."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    plain = [[re.sub(r"`[^`]*`|\]\([^)]*\)", "", cell) for cell in row] for row in rows]
    return [[sorted(re.findall(r"-?\d[\d.,]*\d|-?\d", cell)) for cell in row] for row in plain]


def links(text):
    other = {"README.md": "README", "README.zh-CN.md": "README"}
    found = re.findall(r'\]\(([^)]+)\)|src="([^"]+)"', text)
    return sorted(other.get(link, link) for pair in found for link in pair if link)


@pytest.mark.parametrize("part", [blocks, code, figures, links], ids=lambda part: part.__name__)
def test_both_languages_have_the_same(part):
    assert part(ENGLISH)
    assert part(CHINESE) == part(ENGLISH)


def test_both_have_the_same_sections():
    levels = [re.findall(r"^(#+) ", without_blocks(text), re.MULTILINE) for text in (ENGLISH, CHINESE)]
    assert levels[0] == levels[1]


def test_prose_is_chinese():
    # A line without code, links and names that still has six English words in a row was forgotten.
    prose = re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)|<img.*?>", "", without_blocks(CHINESE))
    assert re.findall(r"(?:[a-z]+ ){5}[a-z]+", prose) == []


def test_a_change_of_one_figure_command_or_link_is_found():
    assert figures("| a `b2` | -1.5, 20 |") == [[[], ["-1.5", "20"]]]
    assert blocks("```sh\npython a.py --x 1  # one\n```\n") == [("sh", ["python a.py --x 1"])]
    assert links('[a](b.md#c) <img src="d.png">') == ["b.md#c", "d.png"]
    assert code("`x` and `y`") == ["x", "y"]

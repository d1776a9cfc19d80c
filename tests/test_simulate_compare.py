"""The simulation of what compare_runs.py says, and its published table."""

import re
import sys

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import simulate_compare


def test_an_interval_covers_what_lies_within_it_or_on_its_end():
    assert simulate_compare.covered(np.array([[0.0, 1.0], [1.0, 2.0], [1.1, 2.0], [0.0, 0.9]]), 1.0) == 0.5


def test_t_intervals():
    """Mean 2, deviation 1, and 4.303 deviations of the mean of 3 on either side."""
    np.testing.assert_allclose(simulate_compare.t_intervals(np.array([[1.0, 2, 3]])), [[-0.484, 4.484]], atol=1e-3)


@pytest.mark.parametrize(
    ("groups", "verdict"),
    [
        # 2 / 252 by chance for 5 against 5; times three pairs 0.024.
        ([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], True),
        ([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]], True),
        ([[1, 3, 5, 7, 9], [2, 4, 6, 8, 10]], False),
        # 2 / 20 by chance for 3 against 3.
        ([[1, 2, 3], [4, 5, 6]], False),
    ],
)
def test_a_verdict_by_the_command_line_is_that_in_process(groups, verdict):
    scores = np.array(groups, dtype=float)
    assert simulate_compare.has_verdict(scores) is verdict
    assert simulate_compare.by_command_line(scores) is verdict


def test_the_table_that_was_published_keeps_what_is_promised():
    """Of the file alone: what makes it is tested below."""
    text = (ROOT / "benchmarks" / "simulate_compare.md").read_text()
    assert "2,000 samples a row" in text
    false_verdicts = text.split("## False verdicts")[1].split("## ")[0]
    shares = [float(share) for share in re.findall(r"([\d.]+)%", false_verdicts.split("|\n", 2)[2])]
    assert len(shares) == 12
    assert max(shares) <= 6.0
    assert float(re.search(r"a verdict in ([\d.]+)%", text)[1]) >= 90
    assert "the same answer in 100 of 100 tables" in text


def test_a_small_report_has_all_its_parts():
    text = simulate_compare.report(simulate_compare.Args(samples=8, command_lines=1))
    assert "8 samples a row" in text
    assert len(re.findall(r"^\| (?:normal|skewed|two peaks|ceiling) \| (?:3|5|8|10|20) \|", text, re.MULTILINE)) == 20
    assert "the same answer in 2 of 2 tables" in text

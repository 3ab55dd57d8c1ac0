"""The node that changes a past on its way to the present, cuts it, or does not read it, is named from the graph."""

from pathlib import Path

import pytest
from support.text_fixtures import load_all

from kvdoctor.diagnose.pipeline import step_test

FIXTURES = load_all()
UNREAD = 'no logit depends on {} and {} more: Einsum "{}" reads the new entries alone'
NAMED = {
    "past-ignored-unnamed": UNREAD.format("kv.1.k_in", 1, "scores1"),
    "past-ignored-looks-ahead": UNREAD.format("kv.0.k_in", 3, "scores0"),
    "present-rewrites-past-unnamed": 'between kv.1.k_in and kv.1.k_out: Mul "kv.1.k_out"',
    "present-rewrites-past-before": 'between kv.1.k_in and kv.1.k_out: Mul "halved1"',
    "present-rewrites-past-cut": 'between kv.0.k_in and kv.0.k_out: Slice "kv.0.k_out"',
    "new-entries-wrong-row": 'between kv.1.v_in and kv.1.v_out: Mul "kv.1.v_out"',
    "present-rewrites-past": 'between past_key_values.0.key and present.0.key: Mul "present.0.key"',
}


@pytest.mark.parametrize(("name", "words"), NAMED.items())
def test_the_node_is_named(name: str, words: str, tmp_path: Path) -> None:
    report = step_test(str(FIXTURES[name].write(tmp_path)))
    assert report.findings[0].evidence[0] == words


def test_what_a_cut_leaves_out_is_counted(tmp_path: Path) -> None:
    report = step_test(str(FIXTURES["present-rewrites-past-cut"].write(tmp_path)))
    (finding,) = report.findings
    assert finding.observed.startswith("kv.0.k_out holds the last 10 of 11 entries, without entry 0 of kv.0.k_in")
    assert "drops the oldest entries" in finding.cause

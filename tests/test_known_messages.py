"""`kvdoctor explain TEXT`: an error message is found, with the question that decides between its causes."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from support.famous_error import FIRST_TO_FAIL
from support.isolated import give_up
from support.sampling import first, sampled

from kvdoctor import step_test
from kvdoctor.cli.main import cli
from kvdoctor.report.known_messages import KnownMessage, find_messages, list_messages, read_page

ROOT = Path(__file__).parent.parent
RELEASES = ("1.16.3", "1.20.1", "1.23.2", "1.31.1")


def explain(text: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["explain", text])
    return done.exit_code, done.output


def emptied(text: str) -> list[KnownMessage]:
    """The rows that send the holder of a message to the repair of an emptied cross-attention cache."""
    return [row for row in find_messages(text) if "(KV203)" in row.answer]


def test_the_page_is_the_one_that_is_searched() -> None:
    assert (ROOT / "docs" / "faq.md").read_text(encoding="utf-8") == read_page()


def test_every_message_of_the_page_leads_to_its_rows() -> None:
    rows = list_messages()
    assert len(rows) >= 40
    for row in rows:
        for message in row.messages:
            assert row in find_messages(f"[ONNXRuntimeError] : 1 : FAIL : {message} (at some place)"), message


@pytest.mark.parametrize("name", sampled(FIRST_TO_FAIL, 4))
def test_the_message_of_an_emptied_cache_leads_to_its_repair(name: str) -> None:
    runs = step_test(str(ROOT / "fixtures" / "exports" / name)).runs
    (text,) = (run.error for run in runs if run.experiment == "plain-loop" and run.error)
    assert emptied(text), text


@pytest.mark.slow
@pytest.mark.parametrize("release", first([RELEASES[0], RELEASES[-1], *RELEASES[1:-1]], 2))
def test_the_message_of_each_release_leads_to_the_repair(release: str) -> None:
    for name in FIRST_TO_FAIL:
        target = f"onnxruntime=={release}"
        report = step_test(str(ROOT / "fixtures" / "exports" / name), targets=[target])
        if any(facts.not_run for facts in report.targets):
            give_up(f"{target} cannot be installed here")
        texts = [run.error for run in report.runs if run.target == target and run.experiment == "plain-loop"]
        assert any(texts), name
        assert all(emptied(text) for text in texts if text), texts


def test_a_message_is_answered_with_questions_and_commands() -> None:
    code, output = explain("matmul_helper.h:59 Compute MatMul  dimension mismatch")
    assert code == 0
    assert "encoder_attn" in output
    assert "kvdoctor re-export MODEL -o FIXED" in output
    assert explain("seqlens_k[2] = 17 is out of range")[0] == 0


def test_part_of_a_code_or_name_lists_the_checks() -> None:
    code, output = explain("KV31")
    assert code == 0
    assert all(line.startswith("KV31") for line in output.splitlines())
    assert "KV315  mask-not-offset" in output
    assert "cross-cache-emptied" in explain("emptied")[1]


def test_what_is_not_known_says_so() -> None:
    done = CliRunner().invoke(cli, ["explain", "quantum flux"])
    assert "no known error message is like 'quantum flux'" in str(done.exception)


def test_rows_of_one_message_repeat_it_and_nothing_of_one_another() -> None:
    seen = [row.seen for row in list_messages() if row.messages == ("Got invalid dimensions for input",)]
    assert [text.removeprefix("`Got invalid dimensions for input`") for text in seen] == [
        ", index 3",
        ", index 1",
        ", index 0 or 2",
    ]

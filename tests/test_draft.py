"""`--draft`: the vocabulary of another model, and how many of its tokens greedy decoding accepts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.isolated import EXPORTS, kvdoctor
from support.text_fixtures import load_all

from kvdoctor.diagnose.graded_models import find_other_token, read_tokens
from kvdoctor.report.sections.whole import expected_tokens


def run(*arguments: object) -> tuple[int, dict[str, Any]]:
    done = kvdoctor("step-test", *arguments, "--format", "json")
    return done.returncode, json.loads(done.stdout) if done.stdout else {"error": done.stderr}


def with_tokenizer(name: str, folder: Path, content: Any) -> Path:
    shutil.copytree(EXPORTS / name, folder)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return folder


def test_a_model_accepts_its_own_tokens() -> None:
    code, report = run(EXPORTS / "gpt2", "--draft", EXPORTS / "gpt2")
    (draft,) = report["drafts"]
    assert code == 0
    assert (draft["prompts"], draft["tokens"], draft["accepted"], draft["reason"]) == (4, 132, 132, None)
    assert report["arguments"]["draft"] == str(EXPORTS / "gpt2")


def test_another_model_accepts_fewer_from_the_prompt_given() -> None:
    code, report = run(EXPORTS / "gpt2", "--draft", EXPORTS / "llama-gqa", "--prompt-ids", "5,6,7")
    (draft,) = report["drafts"]
    assert code == 0, report["findings"]
    assert (draft["prompts"], draft["given"], draft["tokens"]) == (1, True, 33)
    assert draft["accepted"] < 20


def test_another_number_of_logits_is_an_error(tmp_path: Path) -> None:
    small = load_all()["decoder-only-healthy"].write(tmp_path)
    code, report = run(EXPORTS / "gpt2", "--draft", small)
    (finding,) = report["findings"]
    assert (code, finding["name"], finding["severity"]) == (1, "draft-vocabulary-differs", "error")
    assert finding["observed"] == "128 logits in the model, 16 in the draft"
    assert report["drafts"][0]["reason"]


def test_other_tokens_by_the_same_ids_are_an_error(tmp_path: Path) -> None:
    ours = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "</s>"}]}
    theirs = {"model": {"vocab": [["a", -1.0], ["c", -2.0]]}, "added_tokens": []}
    one, other = (with_tokenizer("gpt2", tmp_path / n, c) for n, c in (("one", ours), ("other", theirs)))
    code, report = run(one, "--draft", other)
    assert code == 1
    assert [f["observed"] for f in report["findings"]] == ["id 1 is 'b' in the model, 'c' in the draft"]


@pytest.mark.parametrize("content", ["{", "[]", "[" * 5000, {"model": {"vocab": 3}}, {"model": {"vocab": {"a": []}}}])
def test_a_tokenizer_of_another_form_is_not_compared(content: Any, tmp_path: Path) -> None:
    assert read_tokens(with_tokenizer("gpt2", tmp_path / "model", content)) is None


def test_the_first_other_token_is_found() -> None:
    assert find_other_token({"a": 0, "b": 1}, {"a": 0, "b": 1}) is None
    assert find_other_token({"a": 0, "b": 1}, {"a": 0}) == (1, "b", "")


def test_a_model_that_decodes_wrongly_is_not_compared(tmp_path: Path) -> None:
    faulty = load_all()["positions-not-offset"].write(tmp_path)
    code, report = run(faulty, "--draft", faulty)
    assert code == 1
    assert report["drafts"][0]["reason"] == "the loop of the model itself did not pass"
    assert any("the draft was not compared" in entry["reason"] for entry in report["not_checked"])


@pytest.mark.parametrize("path", ["nothing", "README.md"])
def test_what_is_no_draft_is_refused(path: str) -> None:
    code, report = run(EXPORTS / "gpt2", "--draft", path)
    assert code == 2, report


def test_tokens_of_a_call() -> None:
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.0, 4) == 1
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)

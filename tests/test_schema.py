"""Every document that is written fits the JSON Schema that ships with the package."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.command_line import run
from support.isolated import EXPORTS
from support.sampling import sampled

from kvdoctor.api import schemas


def run_json(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "--format", "json")
    assert done.returncode in (0, 1, 3), done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.parametrize("name", sorted(schemas()))
def test_schema_is_itself_valid(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schemas()[name])


@pytest.mark.parametrize("command", ["inspect", pytest.param("step-test", marks=pytest.mark.slow), "re-export"])
@pytest.mark.parametrize("model", sampled(["llama-gqa", "marian-4.46.3"], 2))
def test_report_fits(command: str, model: str, tmp_path: Path) -> None:
    more = ["-o", str(tmp_path / "out")] if command == "re-export" else []
    document = run_json(command, str(EXPORTS / model), *more)
    jsonschema.validate(document, schemas()["report"])
    assert document["schema"] == "kvdoctor/report/1"


def test_report_of_an_unreadable_file_fits(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    jsonschema.validate(run_json("step-test", str(tmp_path)), schemas()["report"])


@pytest.mark.slow
def test_gate_fits() -> None:
    document = run_json("gate", str(EXPORTS / "gpt2"), str(EXPORTS / "t5"))
    jsonschema.validate(document, schemas()["gate"])
    assert document["verdict"] == "unhealthy"


@pytest.mark.slow
def test_fix_report_beside_the_model_fits(tmp_path: Path) -> None:
    run_json("re-export", str(EXPORTS / "t5"), "-o", str(tmp_path / "out"))
    document = json.loads((tmp_path / "out" / "kvdoctor-report.json").read_text())
    jsonschema.validate(document, schemas()["report"])
    assert document["repair"]["changes"]


@pytest.mark.parametrize("text", ["KV203", "cross-cache-emptied", "KV31", "MatMul dimension mismatch", None])
def test_an_explanation_fits(text: str | None) -> None:
    document = run_json("explain", *([text] if text else []))
    jsonschema.validate(document, schemas()["explain"])
    assert bool(document["messages"]) == (text is not None and " " in text)
    codes = [check["code"] for check in document["checks"]]
    assert codes == sorted(codes)
    if text in ("KV203", "cross-cache-emptied"):
        assert [(check["code"], check["repairs"]) for check in document["checks"]] == [("KV203", ["pass-through"])]


def test_an_unknown_text_has_the_closest_and_no_explanation() -> None:
    document = run_json("explain", "bfloat tricks for my phone")
    jsonschema.validate(document, schemas()["explain"])
    assert document["closest"]
    assert not any(document[part] for part in ("checks", "messages", "issues", "names"))


def test_the_environment_fits_and_says_what_the_text_says() -> None:
    document = run_json("env")
    jsonschema.validate(document, schemas()["env"])
    head, *lines = run("env").stdout.splitlines()
    assert document["python"] in head
    assert [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines] == [
        (component["state"], component["text"]) for component in document["components"]
    ]


def test_contract_fits() -> None:
    jsonschema.validate(run_json("contract", str(EXPORTS / "marian-4.57.6")), schemas()["contract"])

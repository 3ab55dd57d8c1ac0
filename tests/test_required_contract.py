"""`diff CONTRACT MODEL`: a model is held to a contract file."""

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from support.isolated import EXPORTS, kvdoctor

from kvdoctor import diff


@pytest.fixture
def contract(tmp_path: Path) -> Path:
    file = tmp_path / "contract.json"
    file.write_text(kvdoctor("contract", EXPORTS / "gpt2", "--format", "json").stdout, encoding="utf-8")
    return file


def changed(contract: Path, change: Any) -> Path:
    document = json.loads(contract.read_text(encoding="utf-8"))
    change(document["stacks"]["decoder"])
    contract.write_text(json.dumps(document), encoding="utf-8")
    return contract


@pytest.mark.parametrize("name", ["marian-4.57.6", "gpt2"])
def test_a_model_fulfils_its_own_contract_whatever_its_faults(name: str, tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(kvdoctor("contract", EXPORTS / name, "--format", "json").stdout, encoding="utf-8")
    done = kvdoctor("diff", file, EXPORTS / name)
    assert done.returncode == 0
    assert "a contract" in done.stdout
    assert "graph" not in done.stdout.replace("graph_", "")
    assert diff(str(file), str(EXPORTS / name)).verdict == "equal"


def test_a_model_that_breaks_its_contract_fails(contract: Path) -> None:
    done = kvdoctor("diff", contract, EXPORTS / "llama-gqa")
    assert done.returncode == 1
    assert "contract broken: slot past_key_values.0.key and 3 more: size of kv_heads 4 -> 2" in done.stdout


@pytest.mark.parametrize("what", ["input", "output", "slot"])
def test_what_the_contract_requires_and_the_model_lacks(what: str, contract: Path) -> None:
    def drop(stack: dict[str, Any]) -> None:
        (graph,) = stack["graphs"].values()
        extra = {
            "name": "token_type_ids",
            "dtype": "int64",
            "shape": ["b", "s"],
            "role": "setting",
            "axes": [],
            "value": None,
        }
        if what == "slot":
            stack["slots"][0]["growth"] = "static"
        elif what == "input":
            graph["inputs"].append(extra)
        else:
            (logits,) = [port for port in graph["outputs"] if port["role"] == "logits"]
            logits["name"] = "scores"

    found = diff(str(changed(contract, drop)), str(EXPORTS / "gpt2"))
    assert (found.verdict, found.exit_code) == ("worse", 1)
    assert all(reason.startswith("contract broken") for reason in found.reasons)


def test_a_model_that_cannot_be_read_is_not_compared(contract: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model.onnx"
    broken.write_bytes(b"\x08\x08garbage")
    assert diff(str(contract), str(broken)).exit_code == 3


def test_an_extra_input_breaks_the_loop(contract: Path, tmp_path: Path) -> None:
    shutil.copytree(EXPORTS / "gpt2", tmp_path / "model")
    model = onnx.load(tmp_path / "model" / "model.onnx")
    model.graph.input.append(onnx.helper.make_tensor_value_info("more", onnx.TensorProto.FLOAT, [1]))
    onnx.save(model, tmp_path / "model" / "model.onnx")
    assert diff(str(contract), str(tmp_path / "model")).exit_code == 1


@pytest.mark.parametrize(
    "content",
    [
        '{"schema": "kvdoctor/contract/1"}',
        '{"schema": "kvdoctor/contract/1", "stacks": {"a": {}}}',
        '{"schema": "kvdoctor/contract/2", "stacks": {}}',
        '{"schema": 7}',
        "[" * 9999,
    ],
)
def test_a_damaged_contract_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "contract.json"
    file.write_text(content, encoding="utf-8")
    done = kvdoctor("diff", file, EXPORTS / "gpt2")
    assert done.returncode == 2
    assert "contract.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_contract_comes_first(contract: Path) -> None:
    done = kvdoctor("diff", EXPORTS / "gpt2", contract)
    assert done.returncode == 2
    assert "diff CONTRACT MODEL" in done.stderr

"""`step-test --contract FILE`: a contract that was written out, edited by hand, and given back."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.bad_contracts import edited
from support.bad_models import saved
from support.isolated import EXPORTS
from support.sampling import sampled, thinned
from support.text_fixtures import FOLDER, read

from kvdoctor.contract import CacheContract
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.errors import UsageError
from kvdoctor.options import Options
from kvdoctor.records import from_plain, to_plain
from kvdoctor.report.document import exit_code
from kvdoctor.report.json_format import render_contracts

DOCS = Path(__file__).parents[1] / "docs"
TEXTS = sorted(path.name.partition(".")[0] for path in FOLDER.glob("layout-*.onnxtxt"))


def written_out(model: Path) -> dict[str, Any]:
    return dict(json.loads(render_contracts(inspect(str(model)))))


def given_back(model: Path, document: Any, out: Path) -> Any:
    out.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return step_test(str(model), Options(consumer="held", contract=str(out)))


@pytest.mark.parametrize("name", sampled(TEXTS, 2))
def test_every_contract_can_be_written_out_and_read_back(name: str, tmp_path: Path) -> None:
    for stack in inspect(str(read(FOLDER / f"{name}.onnxtxt").write(tmp_path))).stacks:
        assert from_plain(CacheContract, json.loads(json.dumps(to_plain(stack.contract)))) == stack.contract


@pytest.mark.parametrize("name", sampled(["gpt2", "marian-4.57.6", "whisper"], 3))
def test_a_contract_given_back_changes_nothing(name: str, tmp_path: Path) -> None:
    plain = step_test(str(EXPORTS / name), Options(consumer="held"))
    given = given_back(EXPORTS / name, written_out(EXPORTS / name), tmp_path / "contract.json")
    assert (given.verdict, given.findings) == (plain.verdict, plain.findings)
    assert [(run.experiment, run.outcome) for run in given.runs] == [(r.experiment, r.outcome) for r in plain.runs]


def test_what_cannot_be_read_can_be_said(tmp_path: Path) -> None:
    """An input that no run decides, since a call takes one token: an option says it, or its role in a contract."""
    ports = ("int64[batch, 1] input_ids,", "int64[batch, 1] input_ids,\n  float gain,")
    head = ("last = MatMul (x2, w_logits)", "plain = MatMul (x2, w_logits)\n  last = Mul (plain, gain)")
    model = saved(edited("layout-mamba-states-healthy", ports, head), tmp_path / "model")
    unread = step_test(str(model))
    (reason,) = (entry.reason for entry in unread.not_checked if entry.essential)
    assert (unread.verdict, "--feed gain=VALUE" in reason) == ("incomplete", True)
    for page in ("contract.md",):
        text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
        assert f"decode steps (KV2-KV3) (decoder): {reason}" in text
    given = step_test(str(model), Options(feed={"gain": 1.5}))
    assert (given.verdict, exit_code(given, "error")) == ("healthy", 0)
    document = written_out(model)
    (unknown,) = (p for p in document["stacks"]["decoder"]["graphs"]["decoder"]["inputs"] if p["name"] == "gain")
    unknown |= {"role": "setting", "value": 1.5}
    assert given_back(model, document, tmp_path / "contract.json").verdict == "healthy"


def test_a_wrong_contract_is_held_against_the_runs(tmp_path: Path) -> None:
    """Who says that a growing cache must be held is at fault, and not the model."""
    document = written_out(EXPORTS / "gpt2")
    for slot in document["stacks"]["decoder"]["slots"]:
        slot["carry"] = "hold"
    with pytest.raises(UsageError, match=r"by this one: KV301 .* carry: hold, not feed-back"):
        given_back(EXPORTS / "gpt2", document, tmp_path / "contract.json")


@pytest.mark.slow
def test_a_stack_of_another_name_is_built_from_the_files(tmp_path: Path) -> None:
    document = written_out(EXPORTS / "whisper")
    document["stacks"] = {"mine": document["stacks"]["pair"]}
    report = given_back(EXPORTS / "whisper", document, tmp_path / "contract.json")
    assert [stack.name for stack in report.stacks] == ["merged", "pair", "mine"]
    assert report.verdict == "healthy"


def stack(document: Any) -> Any:
    return document["stacks"]["decoder"]


def first_input(document: Any) -> Any:
    return stack(document)["graphs"]["decoder"]["inputs"][0]


def first_slot(document: Any) -> Any:
    return stack(document)["slots"][0]


Edit = Callable[[dict[str, Any]], object]
BAD: dict[str, tuple[Edit, str]] = {
    "another schema": (
        lambda d: d.update(schema="kvdoctor/contract/9"),
        "is not a document of schema kvdoctor/contract/1",
    ),
    "no stack": (lambda d: d.update(stacks={}), "has no stack"),
    "stack is a list": (lambda d: d.update(stacks={"decoder": []}), "has no stack"),
    "unknown field": (lambda d: stack(d).update(layot="x"), "unknown field 'layot'"),
    "unknown word": (lambda d: first_slot(d).update(carry="keep"), "slots[0].carry"),
    "another file": (lambda d: stack(d)["graphs"]["decoder"].update(file="../model.onnx"), "no readable"),
    "phase without graph": (lambda d: stack(d)["phases"]["decode"].update(graph="x"), "not under 'graphs'"),
    "no decode phase": (lambda d: stack(d)["phases"].pop("decode"), "phases must be prefill and decode"),
    "input left out": (lambda d: stack(d)["graphs"]["decoder"]["inputs"].pop(0), "'input_ids'"),
    "input made up": (lambda d: first_input(d).update(name="words"), "has no input 'words'"),
    "another type": (lambda d: first_input(d).update(dtype="float"), "is int64, not float"),
    "axes and sizes": (lambda d: first_slot(d)["axes"].pop(), "4 sizes and 3 axes"),
    "slot left out": (lambda d: stack(d)["slots"].pop(0), "without a slot"),
    "slot twice": (lambda d: stack(d)["slots"].append(first_slot(d)), "the past of two slots"),
    "another size": (
        lambda d: first_slot(d).update(shape=["batch_size", 10**12, "p", 8]),
        "where the graph declares 4",
    ),
    "two lengths": (
        lambda d: first_slot(d).update(axes=["batch", "past", "past", "head_dim"]),
        "two axes of the same meaning",
    ),
    "many codebooks": (lambda d: stack(d).update(codebooks=10**7), "codebooks is 10000000"),
    "no words": (lambda d: stack(d).update(vocabulary=0), "vocabulary is 0"),
    "branch without switch": (
        lambda d: stack(d).update(first_step="no-past-branch"),
        "an input has the role branch_switch",
    ),
    "no present": (
        lambda d: first_slot(d).update(present=None),
        "slot 'past_key_values.0.key' has no 'present'; write the output of a decode step that returns it",
    ),
    "nothing that fills a slot": (
        lambda d: first_slot(d).update(filled_by=None),
        "slot 'past_key_values.0.key' has no 'filled_by'; write the output of the first step that fills it",
    ),
    "no slots": (
        lambda d: stack(d).pop("slots"),
        "the contract has entries missing; write 'slots': one entry for each past input; an empty list",
    ),
    "a role that is none": (
        lambda d: first_input(d).update(role="constant"),
        "graphs.decoder.inputs[0].role: got 'constant', expected 'token_ids' or",
    ),
    "entries of a slot left out": (
        lambda d: [stack(d)["slots"][1].pop(entry) for entry in ("present", "carry")],
        "slots[1] ('past_key_values.0.value') has entries missing; write 'present': the output of a decode step",
    ),
    "axes of an output left out": (
        lambda d: stack(d)["graphs"]["decoder"]["outputs"][0].pop("axes"),
        "graphs.decoder.outputs[0] ('logits') has entries missing; write 'axes': what each size counts",
    ),
    "logits without a vocabulary": (
        lambda d: stack(d)["graphs"]["decoder"]["outputs"][0].update(axes=["fixed"] * 3),
        "they must have vocabulary",
    ),
    "lengths and widths exchanged": (
        lambda d: first_slot(d).update(axes=["batch", "past", "kv_heads", "head_dim"]),
        "has axes in another order",
    ),
    "present made up": (lambda d: first_slot(d).update(present="x"), "has the present 'x'"),
    "an input without axes": (lambda d: first_input(d).update(axes=[]), "2 sizes and 0 axes"),
    "axes turned": (lambda d: first_input(d).update(axes=["new", "batch"]), "must be batch, new"),
    "a length that the graph leaves open": (
        lambda d: first_input(d).update(shape=["batch_size", 7]),
        "where the graph declares 'sequence_length'",
    ),
    "no number": (lambda d: first_input(d).update(value=float("nan")), "NaN is not a JSON number"),
    "a layer beyond all": (lambda d: first_slot(d).update(layer=2**70), "layer is 118059"),
    "more words than logits": (lambda d: stack(d).update(vocabulary=10**6), "but the logits have"),
    "codebooks without rows": (lambda d: stack(d).update(codebooks=2), "no input has an axis"),
    "another slot type": (lambda d: first_slot(d).update(dtype="float16"), "is float, not float16"),
    "a state that grows": (
        lambda d: first_slot(d).update(kind="recurrent-state", growth="replace"),
        "has no axis past",
    ),
    "filled by nothing": (lambda d: first_slot(d).update(first="prefill"), "a graph of its own"),
    "shifted without end": (lambda d: first_slot(d).update(carry="shift"), "of fixed length"),
    "switched": (
        lambda d: stack(d)["phases"]["decode"].update(switch=True),
        "no input has the role branch_switch",
    ),
    "two graphs in one": (
        lambda d: stack(d).update(first_step="no-past-graph"),
        "prefill and decode use two graphs",
    ),
    "thousands": (lambda d: d.update(stacks={str(n): stack(d) for n in range(65)}), "has 65 stacks"),
    "filling made up": (lambda d: first_slot(d).update(filled_by="x"), "is filled by 'x'"),
}


@pytest.mark.parametrize("case", thinned(BAD, 3, 1))
def test_a_contract_that_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    edit, message = BAD[case]
    document = written_out(EXPORTS / "gpt2")
    edit(document)
    with pytest.raises(UsageError) as refused:
        given_back(EXPORTS / "gpt2", document, tmp_path / "contract.json")
    assert message in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '{"schema": "kvdoctor/contract/1"}', "[" * 5000])
def test_what_is_no_contract_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        given_back(EXPORTS / "gpt2", text, tmp_path / "contract.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        step_test(str(EXPORTS / "gpt2"), Options(contract=str(tmp_path / "none.json")))


def test_what_the_graph_proves_is_not_asked_of_the_file(tmp_path: Path) -> None:
    """Arithmetic that would hide a fault, and findings that nobody made."""
    document = written_out(EXPORTS / "gpt2")
    stack = document["stacks"]["decoder"]
    plain = given_back(EXPORTS / "gpt2", document, tmp_path / "plain.json")
    stack["exactness"] = "dynamic-quantization"
    stack["contradictions"] = [{"subject": "logits", "reason": "made up"}]
    stack["slots"][0] |= {"used_as": "value", "used_at": 9, "continues_as": "nothing", "takes_new": False}
    edited = given_back(EXPORTS / "gpt2", document, tmp_path / "contract.json")
    assert edited.stacks[0].contract == plain.stacks[0].contract
    assert edited.findings == plain.findings


def test_a_file_of_another_shell_is_read(tmp_path: Path) -> None:
    """PowerShell writes UTF-16, and marks it."""
    document = written_out(EXPORTS / "gpt2")
    (tmp_path / "contract.json").write_bytes(json.dumps(document).encode("utf-16"))
    report = step_test(str(EXPORTS / "gpt2"), Options(contract=str(tmp_path / "contract.json")))
    assert report.verdict == "healthy"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_no_contract(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a regular file"):
        step_test(str(EXPORTS / "gpt2"), Options(contract=str(tmp_path / "pipe")))

"""`kvdoctor diff`: whatever a loop written for A would have to be changed for is worse, and nothing else is."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support import command_line, text_fixtures
from support.command_line import Done
from support.isolated import EXPORTS

import kvdoctor
from kvdoctor.addons.comparison.contract_diff import compare_contracts
from kvdoctor.addons.comparison.document import ComparedModel, Difference, DiffReport, NotCompared, Outcomes, StackDiff
from kvdoctor.addons.comparison.pipeline import match_stacks
from kvdoctor.addons.comparison.report import render_markdown, render_text
from kvdoctor.addons.comparison.results_diff import compare_findings
from kvdoctor.api import schemas
from kvdoctor.contract import CacheContract, Port
from kvdoctor.report.document import Report
from kvdoctor.report.facts import StackFacts

ROOT = Path(__file__).parent.parent
GPT2, LLAMA, MARIAN = EXPORTS / "gpt2", EXPORTS / "llama-gqa", EXPORTS / "marian-4.46.3"


def run(*arguments: str | Path) -> Done:
    return command_line.run("diff", *arguments)


@pytest.fixture(scope="module")
def gpt2() -> CacheContract:
    contract = kvdoctor.inspect(GPT2).stacks[0].contract
    assert contract is not None
    return contract


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A decoder whose cross-attention cache is emptied, and the same without that fault."""
    folder = tmp_path_factory.mktemp("models")
    for name, text in (("sick", "cross-cache-emptied"), ("fixed", "merged-healthy")):
        text_fixtures.read(text_fixtures.FOLDER / f"{text}.onnxtxt").write(folder / name)
    return folder / "sick", folder / "fixed"


@pytest.fixture(scope="module")
def sick_and_fixed(models: tuple[Path, Path]) -> tuple[Path, Path]:
    """Reports of both."""
    reports = []
    for model in models:
        reports.append(model.with_suffix(".json"))
        reports[-1].write_text(json.dumps(kvdoctor.step_test(model).to_dict()))
    return reports[0], reports[1]


# --- the contract -----------------------------------------------------------------------------------------------------


def ports(contract: CacheContract, change: Callable[[Port], Port | None]) -> CacheContract:
    """The contract with its inputs and outputs changed; those that become None are left out."""

    def changed(given: tuple[Port, ...]) -> tuple[Port, ...]:
        return tuple(port for port in map(change, given) if port is not None)

    graphs = {
        name: replace(graph, inputs=changed(graph.inputs), outputs=changed(graph.outputs))
        for name, graph in contract.graphs.items()
    }
    return replace(contract, graphs=graphs)


def port_named(name: str, /, **values: Any) -> Callable[[CacheContract], CacheContract]:
    return lambda contract: ports(contract, lambda port: replace(port, **values) if port.name == name else port)


def without(name: str) -> Callable[[CacheContract], CacheContract]:
    return lambda contract: ports(contract, lambda port: None if port.name == name else port)


def slots(**values: Any) -> Callable[[CacheContract], CacheContract]:
    return lambda contract: replace(contract, slots=tuple(replace(slot, **values) for slot in contract.slots))


def slots_called(pattern: str) -> Callable[[CacheContract], CacheContract]:
    return lambda contract: replace(
        contract, slots=tuple(replace(slot, past=pattern.format(slot.layer, slot.part)) for slot in contract.slots)
    )


BREAKS: dict[str, tuple[Callable[[CacheContract], CacheContract], str, str]] = {
    "an input is gone": (without("attention_mask"), "input", ""),
    "the logits are gone": (without("logits"), "output", ""),
    "an input is renamed": (port_named("input_ids", name="ids"), "input", "name"),
    "an input has another type": (port_named("input_ids", dtype="int32"), "input", "dtype"),
    "an input has another part": (port_named("position_ids", role="cache_position"), "input", "role"),
    "an input takes one size": (port_named("input_ids", shape=(1, 1)), "input", "size of batch"),
    "an input has another rank": (port_named("input_ids", axes=("new",), shape=("s",)), "input", "rank"),
    "slots are renamed": (slots_called("past.{}.{}"), "slot", "past"),
    "slots have another type": (slots(dtype="float16"), "slot", "dtype"),
    "slots have another layout": (slots(axes=("batch", "past", "kv_heads", "head_dim")), "slot", "layout"),
    "slots have other sizes": (slots(shape=("batch", 2, "past", 8)), "slot", "size of kv_heads"),
    "slots are carried in another way": (slots(carry="append"), "slot", "carry"),
    "slots grow in another way": (slots(growth="delta"), "slot", "growth"),
    "slots begin in another way": (slots(first="dummy"), "slot", "first step"),
    "the first step is another": (lambda c: replace(c, first_step="no-past-branch"), "stack", "first step"),
    "a slot is gone": (lambda c: replace(c, slots=c.slots[1:]), "slot", ""),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_a_loop_relies_on_makes_it_worse_and_back(name: str, gpt2: CacheContract) -> None:
    change, what, field = BREAKS[name]
    other = change(gpt2)
    assert [(one.what, one.field) for one in compare_contracts(gpt2, other) if one.effect == "worse"][:1] == [
        (what, field)
    ]
    assert compare_contracts(gpt2, gpt2) == compare_contracts(other, other) == ()


HARMLESS: dict[str, Callable[[CacheContract], CacheContract]] = {
    "axes are called otherwise": port_named("input_ids", shape=("b", "s")),
    "the vocabulary is larger": lambda c: replace(port_named("logits", shape=("b", "s", 256))(c), vocabulary=256),
    "the arithmetic is coarser": lambda c: replace(c, exactness="dynamic-quantization"),
    "an output is new": lambda c: replace(
        c,
        graphs={
            name: replace(graph, outputs=(*graph.outputs, Port("attentions.0", "float", None, "auxiliary")))
            for name, graph in c.graphs.items()
        },
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_loop_can_see_is_told_and_is_no_worse(name: str, gpt2: CacheContract) -> None:
    assert {one.effect for one in compare_contracts(gpt2, HARMLESS[name](gpt2))} == {"neutral"}


def test_a_free_size_is_better_and_what_is_other_on_every_layer_is_told_once(gpt2: CacheContract) -> None:
    fixed = port_named("input_ids", shape=(1, "sequence_length"))(gpt2)
    assert [one.effect for one in compare_contracts(fixed, gpt2) if one.field == "size of batch"] == ["better"]
    (renamed,) = compare_contracts(gpt2, slots_called("past.{}.{}")(gpt2))
    assert renamed.subject == tuple(slot.past for slot in gpt2.slots)
    assert len(renamed.subject) == 4


def test_stacks_are_matched_by_name_then_by_layout_then_by_what_is_left() -> None:
    merged, pair = StackFacts("merged", "optimum-merged", (), None), StackFacts("pair", "optimum-pair", (), None)
    quantized = StackFacts("merged_q4", "optimum-merged", (), None)
    assert list(match_stacks((merged, pair), (pair, merged))) == [(merged, merged), (pair, pair)]
    assert list(match_stacks((merged,), (pair, quantized))) == [(merged, quantized), (None, pair)]
    assert list(match_stacks((merged,), (pair,))) == [(merged, pair)]
    assert list(match_stacks((merged, pair), (merged,))) == [(merged, merged), (pair, None)]


# --- whole diffs ------------------------------------------------------------------------------------------------------


def test_a_model_and_its_copy_under_another_name_are_equal(tmp_path: Path) -> None:
    shutil.copytree(GPT2, tmp_path / "renamed")
    done = run(GPT2, tmp_path / "renamed", "--agree", "bits", "--output", f"json={tmp_path / 'diff.json'}")
    assert (done.returncode, done.stderr) == (0, f"written: {tmp_path / 'diff.json'}\n")
    assert done.stdout.splitlines()[-1] == "equal"
    document = json.loads((tmp_path / "diff.json").read_text())
    jsonschema.validate(document, schemas()["diff"])
    (stack,) = document["stacks"]
    assert stack["logits"]["agree"] == "bits"
    assert not [*stack["contract"], *stack["graph"], *document["findings"], *document["reasons"]]
    assert all(run["a"] == run["b"] for run in stack["experiments"])
    assert len(stack["experiments"]) > 10


def test_the_repaired_copy_is_better_and_the_way_back_is_worse(sick_and_fixed: tuple[Path, Path]) -> None:
    sick, fixed = sick_and_fixed
    diff = kvdoctor.diff(sick, fixed)
    assert (diff.verdict, diff.exit_code) == ("better", 0)
    diff.raise_if_worse()
    assert "- gone         error[KV203] cross-cache-emptied" in kvdoctor.render(diff)
    assert "~ plain-loop   failed at step 2 -> passed" in kvdoctor.render(diff)
    assert kvdoctor.render(diff).splitlines()[-1].startswith("B is better: KV203 cross-cache-emptied is gone")
    jsonschema.validate(json.loads(json.dumps(diff.to_dict())), schemas()["diff"])

    diff = kvdoctor.diff(fixed, sick)
    assert (diff.verdict, diff.exit_code) == ("worse", 1)
    assert diff.reasons == ("parity lost: plain-loop passed -> failed at step 2", "new error KV203 cross-cache-emptied")
    with pytest.raises(kvdoctor.Worse, match="B is worse: parity lost"):
        diff.raise_if_worse()
    diff = kvdoctor.diff(fixed, sick, ignore="KV203", fail_on="note")
    assert "KV203" not in {one.finding.code for one in diff.findings}
    assert diff.reasons == ("parity lost: plain-loop passed -> failed at step 2",)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"consumer": "held"}, "written with --consumer plain, and the other side runs with --consumer held"),
        ({"require": "batch"}, "written without --require, and the other side runs with --require batch"),
        ({"thorough": True}, "written without --thorough, and the other side runs with --thorough"),
        ({"static": True, "agree": "bits"}, "remove one of them"),
    ],
)
def test_both_sides_must_be_asked_alike(asked: Any, said: str, sick_and_fixed: tuple[Path, Path]) -> None:
    with pytest.raises(kvdoctor.UsageError, match=said):
        kvdoctor.diff(*sick_and_fixed, **asked)


def with_other(report: Path, place: tuple[Any, ...], value: Any, out: Path) -> Path:
    """The report with another value at a place."""
    document = part = json.loads(report.read_text())
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    out.write_text(json.dumps(document))
    return out


def test_a_report_of_which_more_was_asked_is_refused(sick_and_fixed: tuple[Path, Path], tmp_path: Path) -> None:
    traced = with_other(sick_and_fixed[0], ("arguments", "trace"), "loop.jsonl", tmp_path / "traced.json")
    with pytest.raises(kvdoctor.UsageError, match=r"traced.json' was written with --trace .*, and the other side"):
        kvdoctor.diff(traced, sick_and_fixed[1])


def test_a_report_against_the_model_itself_needs_no_run_when_static(sick_and_fixed: tuple[Path, Path]) -> None:
    done = run("--static", sick_and_fixed[0], sick_and_fixed[0].with_suffix(""))
    said = "equal in contract and operator counts; wiring, weights and logits were not compared"
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, said)


def test_another_architecture_is_readable_and_worse() -> None:
    diff = kvdoctor.diff(GPT2, LLAMA, static=True)
    assert diff.reasons == ("contract broken: slot past_key_values.0.key and 3 more: size of kv_heads 4 -> 2",)
    assert "# kvdoctor diff: worse" in render_markdown(diff)
    assert "LayerNormalization 5 -> 0" in kvdoctor.render(diff)


def test_same_fault_under_other_names_is_not_new_and_on_more_layers_is_worse(sick_and_fixed: tuple[Path, Path]) -> None:
    findings = list(kvdoctor.read_report(sick_and_fixed[0]).findings)
    renamed = [replace(one, fingerprint="other", stack=one.stack and f"{one.stack}_q4") for one in findings]
    names = {"merged_q4": "merged", "merged": "merged"}
    assert {one.state for one in compare_findings(findings, renamed, names, "note")} == {"same"}
    (fault,) = (one for one in findings if one.code == "KV203")
    fewer = replace(fault, subject=fault.subject[:1], fingerprint="other")
    assert [one.effect for one in compare_findings([fewer], [fault], {"merged": "merged"}, "error")] == ["worse"]
    assert [one.effect for one in compare_findings([fault], [fewer], {"merged": "merged"}, "error")] == ["neutral"]


# --- what cannot be compared ------------------------------------------------------------------------------------------


def test_what_is_not_readable_is_neither_equal_nor_worse(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07" * 40)
    for sides in ((GPT2, tmp_path), (tmp_path, GPT2)):
        diff = kvdoctor.diff(*sides, static=True)
        assert (diff.verdict, diff.exit_code) == ("incomplete", 3)
        assert kvdoctor.render(diff).splitlines()[-1].startswith("the comparison is incomplete: ")


def test_a_report_without_runs_or_logits_is_no_proof(sick_and_fixed: tuple[Path, Path], tmp_path: Path) -> None:
    document = kvdoctor.inspect(GPT2).to_dict()
    (tmp_path / "static.json").write_text(json.dumps(document))
    diff = kvdoctor.diff(tmp_path / "static.json", tmp_path / "static.json")
    assert (diff.verdict, diff.exit_code) == ("incomplete", 3)
    assert "--static compares the rest" in kvdoctor.render(diff)
    assert kvdoctor.diff(tmp_path / "static.json", tmp_path / "static.json", static=True).verdict == "equal"
    diff = kvdoctor.diff(*sick_and_fixed, agree="bits")  # logits that are asked for
    assert (diff.verdict, diff.exit_code) == ("incomplete", 3)
    assert "a report has no logits; give both models" in kvdoctor.render(diff)


WRONG = {
    "another version": ('{"schema": "kvdoctor/report/2"}', "write it again with this one"),
    "broken": ('{"schema": ', "is not JSON"),
    "another document": ("[1, 2]", "it names no schema"),
    "not a report": ('{"schema": "kvdoctor/report/1", "findings": 3}', "does not fit kvdoctor/report/1: Report"),
    "a gate of two": ('{"schema": "kvdoctor/gate/1", "reports": [{}, {}]}', "with 2 reports; give one with a single"),
    "nested too deep": ("[" * 100_000, "is not JSON"),
    "a name that acts": ('{"schema": "\\u001b[2J"}', r"it says '\x1b[2J'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_report_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    text, said = WRONG[name]
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(kvdoctor.UsageError) as refused:
        kvdoctor.diff(tmp_path / "report.json", GPT2)
    assert said in str(refused.value)
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("arguments", "select"), [1]),
        (("arguments", "ignore"), -1),
        (("stacks", 0, "contract", "phases", "decode", "graph"), "nowhere"),
        (("stacks", 0, "contract", "phases"), {}),
        (("stacks", 0, "contract", "slots", 0, "axes"), None),
        (("findings", 0, "severity"), "fatal"),
        (("seed",), float("nan")),
    ],
    ids=str,
)
def test_a_report_that_contradicts_itself_is_refused(
    place: tuple[Any, ...], value: Any, sick_and_fixed: tuple[Path, Path], tmp_path: Path
) -> None:
    report = with_other(sick_and_fixed[0], place, value, tmp_path / "report.json")
    with pytest.raises(kvdoctor.UsageError, match=r"report\.json' (does not fit|is not JSON)"):
        kvdoctor.diff(report, sick_and_fixed[1])


def test_wrong_usage_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{")
    for arguments in ((tmp_path / "report.json", GPT2), (GPT2, GPT2, "--static", "--output", f"json={tmp_path}")):
        done = run(*arguments)
        assert done.returncode == 2, arguments
        assert "Traceback" not in done.stderr


# --- names from a model -----------------------------------------------------------------------------------------------

HOSTILE = "\x1b[31m\n::error::x\u202e]]><script>|`" + "n" * 5000


def hostile() -> DiffReport:
    side = ComparedModel(HOSTILE, "model", HOSTILE, "healthy", {})
    delta = Difference("input", (HOSTILE,), "name", HOSTILE, HOSTILE, "worse", HOSTILE)
    stack = StackDiff(HOSTILE, HOSTILE, (delta,), (delta,), (Outcomes(HOSTILE, "here", "passed", HOSTILE),))
    open_end = NotCompared(HOSTILE, HOSTILE, HOSTILE, True)
    return DiffReport(
        {}, 0, "worse", side, side, (HOSTILE, HOSTILE), (stack,), not_compared=(open_end,), notes=(HOSTILE,)
    )


@pytest.mark.parametrize("render", [render_text, render_markdown], ids=["text", "markdown"])
def test_hostile_names_are_escaped(render: Callable[[DiffReport], str]) -> None:
    page = render(hostile())
    assert not {"\x1b", "\u202e", "\r"} & set(page)
    assert not [line for line in page.splitlines() if line.lstrip().startswith("::")]
    assert len(page) < 60_000
    if render is render_markdown:
        assert "<script>" not in page.replace("`", "\0").partition("\0")[0]


# --- slow: models that are really other -------------------------------------------------------------------------------

QUANTISE = """
import sys
from onnxruntime.quantization import quantize_dynamic
quantize_dynamic(sys.argv[1], sys.argv[2])
"""


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8") / "gpt2"
    shutil.copytree(GPT2, folder)
    command = [sys.executable, "-c", QUANTISE, str(GPT2 / "model.onnx"), str(folder / "model.onnx")]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_a_quantized_copy_is_other_and_no_worse(int8: Path, tmp_path: Path) -> None:
    files = [f"--output={kind}={tmp_path / kind}" for kind in ("json", "markdown")]
    done = run(GPT2, int8, *files)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "B is different, but not worse"
    document = json.loads((tmp_path / "json").read_text())
    jsonschema.validate(document, schemas()["diff"])
    logits = document["stacks"][0]["logits"]
    assert logits["exactness"] == "dynamic-quantization"
    assert logits["agree"] in ("tokens", "other")
    assert "DynamicQuantizeLinear" in done.stdout
    assert (tmp_path / "markdown").read_text().startswith("# kvdoctor diff: different")


@pytest.mark.slow
def test_numbers_that_must_be_the_same_are_asked_for(int8: Path) -> None:
    diff = kvdoctor.diff(GPT2, int8, agree="bits")
    assert (diff.verdict, diff.exit_code) == ("worse", 1)
    assert diff.reasons == ("logits of decoder do not agree as required: --agree bits",)


@pytest.mark.slow
def test_a_sick_copy_is_worse_than_the_model_that_was_repaired(tmp_path: Path) -> None:
    fixed = tmp_path / "fixed"
    report: Report = kvdoctor.re_export(MARIAN, fixed)
    assert report.verdict == "healthy"
    diff = kvdoctor.diff(fixed, MARIAN)
    assert diff.exit_code == 1
    assert [stack.logits.agree for stack in diff.stacks if stack.logits] == ["bits", "bits"]


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "diff.md").read_text(encoding="utf-8")
    monkeypatch.chdir(ROOT)
    shown = re.findall(r"<!-- shown: kvdoctor diff (\S+) (\S+) --static -->\n```text\n(.+?)```", page, re.DOTALL)
    assert shown
    for a, b, text in shown:
        assert kvdoctor.render(kvdoctor.diff(a, b, static=True)) == text

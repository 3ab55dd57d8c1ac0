"""The rules of a trace on every layout: a right loop breaks nothing, stale and crossed pasts are named."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.sampling import thinned
from support.text_fixtures import load_all

from kvdoctor.addons.traces.check import compare_trace
from kvdoctor.addons.traces.options import TraceChoices
from kvdoctor.addons.traces.recorded import Trace, TraceStep, TraceTensor
from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Array, Call, Scenario, Value, as_array
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.messages import MeasureJob
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.worker.runner import StackRunner
from kvdoctor.runtime.worker.sessions import Sessions

FIXTURES = load_all()
LAYOUTS = [
    name for name in FIXTURES if name.endswith("healthy") and FIXTURES[name].platform is None and "-search-" not in name
]
"""An operator that holds the whole loop has no loop of a caller."""
WORDS = {"float32": "float", "float64": "double"}
Keep = Callable[[Array], bool]


def recorded(value: "Value | Array", keep: Keep) -> TraceTensor:
    array = as_array(value)
    word = getattr(value, "dtype", None) if not isinstance(value, np.ndarray) else None
    word = word or WORDS.get(array.dtype.name, array.dtype.name)
    return TraceTensor(word, array.shape, (lambda: array) if keep(array) else None)


def right_loop(contract: CacheContract, folder: Path, scenario: Scenario, keep: Keep) -> Trace:
    """Drive a stack by its contract, and note each call."""
    sessions = Sessions(folder, MeasureJob(threads=1), lambda *_, **__: None)
    exam = StackRunner("stack", contract, sessions, 0, lambda *_, **__: None)
    fitted = replace(
        scenario,
        batch=contract.fixed_batch or scenario.batch,
        prompt=contract.new_tokens or scenario.prompt,
        encoder=contract.encoder_length or scenario.encoder,
    )
    builder, steps = FeedBuilder(contract, fitted, exam.encode(fitted)), []
    past = None
    for start, stop in ((0, fitted.prompt), *((p, p + 1) for p in range(fitted.prompt, fitted.total))):
        call: Call = builder.prefill(stop) if past is None else builder.decode(start, stop, past)
        answer = exam.run_session(call)
        past = builder.carry(past, answer, "held")
        sides = ({n: recorded(v, keep) for n, v in side.items()} for side in (call.feeds, answer.outputs))
        steps.append(TraceStep(len(steps), f"line {len(steps) + 1}", *sides, file=contract.graph(call.phase).file))
    return tuple(steps)


def driven(name: str, tmp_path: Path, runtime: Runtime) -> list[CacheContract]:
    """The contracts of the stacks that step-test drives.

    A graph of several tokens in each call is left out: it is fed its own first call again, over a cut cache.
    """
    folder = FIXTURES[name].write(tmp_path)
    loops = (run for run in step_test(str(folder), runtime=runtime).runs if run.experiment == "plain-loop")
    ran = {run.stack for run in loops if run.outcome == "passed"}
    found = [
        stack.contract for stack in inspect(str(folder)).stacks if stack.name in ran and stack.contract is not None
    ]
    return [contract for contract in found if contract.new_tokens in (None, 1)]


@pytest.mark.parametrize("name", thinned(LAYOUTS, 8, 2))
def test_every_layout(name: str, tmp_path: Path, runtime: Runtime) -> None:
    for contract in driven(name, tmp_path, runtime):
        for keep in (lambda _: False, lambda array: array.size <= 16, lambda _: True):
            trace = right_loop(contract, tmp_path, Scenario(steps=5), keep)
            assert (compare_trace(trace, contract).breaks, compare_trace(trace, contract).sequences) == ((), 1)
        for kind, mistake in (("past-stale", stale), ("slots-crossed", crossed)):
            broken = mistake(trace, contract)
            if broken is not None:
                found = compare_trace(broken, contract)
                assert [one.kind for one in found.breaks] == [kind], found
                assert found.step is not None
                assert found.step.number == 2


def stale(trace: Trace, contract: CacheContract) -> Trace | None:
    """The third step is fed what the second was fed, in all that is carried."""
    carried = [slot.past for slot in contract.slots if slot.carry != "hold" and slot.past in trace[1].fed]
    again = {past: trace[1].fed[past] for past in carried}
    if all(np.array_equal(value.array(), trace[2].fed[past].array()) for past, value in again.items()):
        return None
    return (*trace[:2], replace(trace[2], fed={**trace[2].fed, **again}), *trace[3:])


def crossed(trace: Trace, contract: CacheContract) -> Trace | None:
    """The first and the last slot of a kind are fed to one another's inputs."""
    alike = [slot.past for slot in contract.of_kind(contract.slots[0].kind) if slot.past in trace[2].fed]
    fed = trace[2].fed
    one, other = alike[0], alike[-1]
    if one == other or fed[one].shape != fed[other].shape or np.array_equal(fed[one].array(), fed[other].array()):
        return None
    return (*trace[:2], replace(trace[2], fed={**fed, one: fed[other], other: fed[one]}), *trace[3:])


def test_variants_that_fit_as_well_are_named(tmp_path: Path) -> None:
    """Two files with the same inputs: whose numbers they are is not made up."""
    folder = FIXTURES["layout-transformersjs-healthy"].write(tmp_path)
    contract = next(s.contract for s in inspect(str(folder)).stacks if s.name == "decoder")
    assert contract is not None
    trace = right_loop(contract, tmp_path, Scenario(steps=3), lambda _: True)
    lines = [json.dumps({side: spoilt(getattr(step, side)) for side in ("fed", "got")}) for step in trace]
    (tmp_path / "loop.jsonl").write_text("\n".join(lines), encoding="utf-8")
    report = step_test(str(folder), Options(added=(TraceChoices(str(tmp_path / "loop.jsonl")),)))
    assert not [finding for finding in report.findings if finding.code == "KV420"]
    (reason,) = (entry.reason for entry in report.not_checked if entry.code == "KV420")
    assert "the trace fits decoder-q4 as well" in reason


def spoilt(tensors: Mapping[str, TraceTensor]) -> dict[str, dict[str, Any]]:
    """Tensors as a trace writes them, with other logits."""
    signs = {"logits": -1}
    values = {name: (tensor.array() * signs.get(name, 1)).ravel().tolist() for name, tensor in tensors.items()}
    return {name: {"dtype": t.dtype, "shape": t.shape, "data": values[name]} for name, t in tensors.items()}


def test_a_choice_of_the_caller_that_is_not_told_is_no_fault(tmp_path: Path) -> None:
    """Another language gives other logits than the first one, which is fed here where the trace holds no number."""
    folder = FIXTURES["decoder-only-language-healthy"].write(tmp_path)
    (contract,) = (stack.contract for stack in inspect(str(folder)).stacks)
    assert contract is not None
    graph = contract.graphs["decoder"]
    fifth = tuple(replace(port, value=5.0) if port.role == "setting" else port for port in graph.inputs)
    speaks = replace(contract, graphs={"decoder": replace(graph, inputs=fifth)})
    trace = right_loop(speaks, tmp_path, Scenario(steps=3), lambda _: True)
    for told in (True, False):
        lines = [{side: spoilt(getattr(step, side)) for side in ("fed", "got")} for step in trace]
        for line in lines:
            line["got"]["logits"]["data"] = [-number for number in line["got"]["logits"]["data"]]
            if not told:
                del line["fed"]["which"]["data"]
        (tmp_path / "loop.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        report = step_test(str(folder), Options(added=(TraceChoices(str(tmp_path / "loop.jsonl")),)))
        assert not report.findings


def test_the_mask_of_a_window_counts_its_tokens_from_the_right(tmp_path: Path, runtime: Runtime) -> None:
    (contract,) = driven("layout-window-in-mask-healthy", tmp_path, runtime)
    trace = right_loop(contract, tmp_path, Scenario(steps=5), lambda _: True)
    assert not compare_trace(trace, contract).breaks
    mask = trace[2].fed["attention_mask"].array().copy()
    mask[:, -1] = 0
    hidden = replace(trace[2], fed={**trace[2].fed, "attention_mask": recorded(mask, lambda _: True)})
    (found,) = compare_trace((*trace[:2], hidden, *trace[3:]), contract).breaks
    assert (found.kind, found.cause) == ("mask-values", "attention_mask hides the new token")


def test_a_step_without_tokens_hides_no_new_one(tmp_path: Path, runtime: Runtime) -> None:
    (contract,) = driven("layout-window-in-mask-healthy", tmp_path, runtime)
    trace = right_loop(contract, tmp_path, Scenario(steps=5), lambda _: True)
    ids, mask = trace[2].fed["input_ids"].array(), trace[2].fed["attention_mask"].array().copy()
    mask[:, -ids.shape[1] - 1] = 0
    changed = {"input_ids": recorded(ids[:, :0], lambda _: True), "attention_mask": recorded(mask, lambda _: True)}
    empty = replace(trace[2], fed={**trace[2].fed, **changed})
    causes = [found.cause for found in compare_trace((*trace[:2], empty, *trace[3:]), contract).breaks]
    assert "attention_mask hides the new token" not in causes

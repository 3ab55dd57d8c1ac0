"""The plan of a loop says all that a loop does: an interpreter of it decodes as the generated programs must."""

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support import text_fixtures
from support.isolated import EXPORTS
from support.plan_interpreter import PlanInterpreter
from support.sampling import sampled
from test_loop_of_each_layout import LOOPS

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.loops.languages.python import LANGUAGE
from kvdoctor.loops.make_plan import make_plan
from kvdoctor.loops.plan import NoLoop
from kvdoctor.loops.project import render
from kvdoctor.loops.vectors import LoopTarget, ObservedLoop, Vector, differences, observe
from kvdoctor.options import Options
from kvdoctor.runtime.client import Runtime

FIXTURES = text_fixtures.load_all()
OPTIONS = argparse.ArgumentParser()
for option in ("--prompt", "--follow", "--source"):
    OPTIONS.add_argument(option, action="append", default=[])
for option in ("--source-shape", "--self-test"):
    OPTIONS.add_argument(option, default="")


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    options = Options()
    with Runtime(options.limits) as shared:
        yield shared


def target_of(path: Path) -> LoopTarget:
    """The first stack that there is a loop for."""
    folder = open_folder(str(path))
    for stack in folder.stacks:
        contract = read_contract(stack, folder.side_cars)
        try:
            return LoopTarget(stack.name, folder.root, contract, make_plan(contract, folder.root.name))
        except NoLoop:
            continue
    raise AssertionError(f"no loop for {path}")


def ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def printed(interpreter: PlanInterpreter, vector: Vector) -> str:
    """What a program with the arguments of a vector prints; its self-tests are made."""
    given = OPTIONS.parse_args(vector.arguments)
    follow = np.array([ids(text) for text in given.follow])
    if vector.source is not None:
        interpreter.encode(vector.source)
    elif given.source:
        interpreter.encode(np.array([ids(text) for text in given.source]))
    logits = [interpreter.prefill([ids(text) for text in given.prompt])]
    logits += [interpreter.step(column[:, None].tolist()) for column in follow.T]
    order = list(range(len(follow)))
    for test in filter(None, given.self_test.split(",")):
        interpreter.rewind(1)
        if test == "reorder":
            order = [*reversed(order), 0]
            interpreter.reorder(order)
        again = interpreter.step(follow[order, -1:].tolist())
        assert again.argmax(-1).tolist() == logits[-1][order].argmax(-1).tolist(), test
    return "\n".join(",".join(map(str, row)) for row in np.array(logits).argmax(-1).T)


def problems(observed: ObservedLoop, folder: Path) -> list[str]:
    return [
        f"{vector.name}: {difference}"
        for vector in observed.vectors
        for difference in differences(vector, printed(PlanInterpreter(observed.plan, folder), vector))
    ]


@pytest.mark.parametrize("name", sampled(LOOPS, 3, pytest.mark.exhaustive))
def test_a_plan_is_all_that_a_loop_needs(name: str, tmp_path: Path, runtime: Runtime) -> None:
    target = target_of(FIXTURES[name].write(tmp_path))
    observed = observe(target, Options(), runtime)
    assert sum(vector.decided for vector in observed.vectors)
    assert not problems(observed, target.folder)


def test_a_plan_with_a_wrong_rule_decodes_other_tokens(runtime: Runtime) -> None:
    target = target_of(EXPORTS / "llama-gqa")
    observed = observe(target, Options(), runtime)
    assert not problems(observed, target.folder)
    decode = observed.plan.decode
    (positions,) = decode.of_rule("positions")
    without = tuple(one for one in decode.inputs if one is not positions)
    wrong = replace(decode, inputs=(*without, replace(positions, rule="number", count="constant")))
    assert problems(replace(observed, plan=replace(observed.plan, decode=wrong)), target.folder)
    crossed = tuple(
        replace(slot, present=slot.present and slot.present.replace("key", "value")) for slot in observed.plan.slots
    )
    assert problems(replace(observed, plan=replace(observed.plan, slots=crossed)), target.folder)


def load(project: Path) -> ModuleType:
    """The generated `loop.py` of a project."""
    name = f"generated_{project.name}"
    spec = importlib.util.spec_from_file_location(name, project / "loop.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


SAME = [
    "layout-delta-healthy",
    "layout-delta-appended-healthy",
    "layout-retained-state-healthy",
    "layout-moonshine-v1-healthy",
    "layout-bloom-transposed-healthy",
    "merged-healthy",
    "decoder-only-healthy",
    "layout-scatter-static-healthy",
]


@pytest.mark.parametrize("name", sampled(SAME, 2))
def test_the_generated_program_returns_the_logits_of_the_interpreter(name: str, tmp_path: Path) -> None:
    target = target_of(FIXTURES[name].write(tmp_path / "model"))
    plan = target.plan
    for path, text in render(plan, LANGUAGE).items():
        (tmp_path / path).write_text(text, encoding="utf-8")
    generated = load(tmp_path).Decoder(target.folder)
    interpreter = PlanInterpreter(plan, target.folder)
    random = np.random.default_rng(7)
    batch = plan.batch or 2

    def tokens(count: int) -> list[list[int]]:
        drawn: list[list[int]] = random.integers(1, plan.vocabulary or 8, (batch, count)).tolist()
        return drawn

    def both(use: str, *arguments: Any) -> None:
        ours, theirs = (getattr(one, use)(*arguments) for one in (generated, interpreter))
        if theirs is not None:
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)

    if plan.source is not None:
        shape = [dim if isinstance(dim, int) else batch if dim == "batch" else 6 for dim in plan.source.dims]
        integers = plan.source.dtype.startswith("int")
        both("encode", random.integers(1, 8, shape) if integers else random.standard_normal(shape).astype(np.float32))
    both("prefill", [row[: 3 + plan.pads * at] for at, row in enumerate(tokens(5))])
    for _ in range(3):
        both("step", tokens(1))
    if plan.chunks:
        both("step", tokens(2))
    if plan.rewinds:
        both("rewind", 2)
        both("step", tokens(1))
    if plan.reorders:
        both("reorder", [1, 0])
        both("step", tokens(1))

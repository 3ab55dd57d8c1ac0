"""kvdoctor finds every fault that was put into a healthy export, calls it by its name, and leaves harmless changes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.isolated import give_up

from evidence.faults import make_page, without_run
from evidence.faults.outcome import Missing, healthy_export, treat
from evidence.faults.registry import SUBJECTS, Fault, load
from evidence.zoo.making import Maker
from kvdoctor.findings import all_checks
from kvdoctor.runtime.client import Runtime

FAULTS = load()
SAMPLE = {
    ("positions-restart", "llama-gqa"),
    ("mask-off-by-one", "marian-pair"),
    ("past-ignored-in-layer-1", "t5"),
    ("presents-swapped", "gpt2"),
    ("new-token-zeroed", "gpt2"),
    ("keys-as-float16", "llama-gqa"),
    ("noise-behind-banned-tokens", "gpt2"),
    ("untouched", "llama-gqa"),
    ("banned-tokens", "gpt2"),
    ("tokens-banned-with-a-number", "marian-pair"),
    ("layers-swapped-both-ways", "gpt2"),
}
"""What every test run sees."""
LEFT_OUT = {
    "parts-do-not-fit": "a fault between the files of a bundle, which these exports are not",
    "encoder-rows-differ": "a fault of an encoder of images or audio, which these exports do not have",
    "use-impossible": "a layout that does not allow a use, and no fault of it: it has fixtures of its own",
    "suspect-weights": "a fault of the values of weights, which `inspect --weights` alone reads: tests of its own",
    "search-differs": "a fault of an operator that holds the loop: it has fixtures of its own",
    "golden-differs": "it compares with an earlier run, which a fault of the graph does not have",
    "names-mislead": "names hurt nobody who goes by the graph: it has fixtures of its own",
    "loop-breaks-contract": "a fault of the caller's loop, not of an export",
    "reference-differs": "asked only with a checkpoint, whose weights would have to be broken instead",
    "invalid-graph": "what the rules of ONNX refuse has nothing to do with a cache: it has a fixture of its own",
    "cached-branch-first": "a note on every merged decoder, and no fault of it",
    "wrong-at-lengths": "faults that begin at a length are in evidence/generated",
    "contract-unknown": "what a file leaves open is settled by runs, or is exit code 3: evidence/strangers",
    "keys-change-with-length": "rotations by the number of tokens, which these exports do not have",
    "chunk-differs": "faults that strike several new tokens alone are in evidence/generated",
}
"""Checks without a fault here, and why."""
MADE = pytest.mark.slow
QUICKLY_INSPECTED = ("positions-restart", "past-dropped")
"""Faults in committed exports of which every test run asks an inspection."""
EACH = 1
"""Exports that every fault is put into by the slow tests; `-m exhaustive` has the others."""


def parameters() -> list[object]:
    """Every fault in every export, those beyond the sample as slow ones; in four exports, in turn, for each fault."""
    found: list[object] = []
    for number, (name, fault) in enumerate(FAULTS.items()):
        for index, base in enumerate(fault.bases):
            marks = () if (name, base) in SAMPLE else (MADE,)
            if (index - number) % len(fault.bases) >= EACH and marks:
                marks = (MADE, pytest.mark.exhaustive)
            found.append(pytest.param(fault, base, id=f"{name}-{base}", marks=marks))
    return found


def inspected() -> Iterator[object]:
    """Every fault for an inspection: a few for each run of the tests, every second other one for slow ones."""
    yield from QUICKLY_INSPECTED
    for number, name in enumerate(name for name in FAULTS if name not in QUICKLY_INSPECTED):
        yield pytest.param(name, marks=(MADE, pytest.mark.exhaustive) if number % 2 else MADE)


@pytest.fixture(scope="module")
def measured() -> dict[str, make_page.Measured]:
    return make_page.read(make_page.DOCUMENT.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("fault", "base"), parameters())
def test_a_fault_is_found_and_called_by_its_name(  # noqa: PLR0913, PLR0917 - fixtures and the case
    fault: Fault, base: str, maker: Maker, runtime: Runtime, measured: dict[str, make_page.Measured], tmp_path: Path
) -> None:
    try:
        export = healthy_export(base, maker)
    except Missing as missing:
        give_up(str(missing))
    outcome = treat(fault, export, tmp_path / "broken", runtime)
    assert outcome.found, outcome.details
    wanted = measured[fault.name].misnamed.get(base, fault.check or "healthy")
    assert outcome.called == wanted, outcome.details
    assert outcome.named or base in measured[fault.name].misnamed, outcome.details
    if fault.check == "non-finite":  # of what has no distance nothing else may be said
        assert outcome.errors == ("non-finite",), outcome.details


def test_the_document_holds_every_fault_as_it_is(measured: dict[str, make_page.Measured]) -> None:
    assert list(measured) == list(FAULTS)
    text = make_page.DOCUMENT.read_text(encoding="utf-8")
    assert make_page.page(measured, make_page.other_sections(text)) == text


def test_the_document_holds_what_an_inspection_says() -> None:
    text = make_page.DOCUMENT.read_text(encoding="utf-8")
    said = without_run.read(text)
    assert list(said) == list(FAULTS)
    assert without_run.section(said) == without_run.find_section(text)
    broken = {name: fault for name, fault in FAULTS.items() if fault.check}
    named = [name for name, fault in broken.items() if said[name].names_it(fault)]
    assert 100 * len(named) >= without_run.DEMANDED * len(broken)
    assert all(said[name].names_it(fault) for name, fault in FAULTS.items() if not fault.check)


@pytest.mark.parametrize("name", list(inspected()))
def test_an_inspection_names_what_it_named(name: str, maker: Maker, tmp_path: Path) -> None:
    said = without_run.read(make_page.DOCUMENT.read_text(encoding="utf-8"))[name]
    try:
        export = healthy_export(said.base, maker)
    except Missing as missing:
        give_up(str(missing))
    assert said.base == without_run.choose_export(name, FAULTS)
    assert without_run.inspect_broken(FAULTS[name], export, tmp_path / "broken") == said.names


def test_all_are_found_and_nearly_all_are_named(measured: dict[str, make_page.Measured]) -> None:
    done, found, named = make_page.counted(measured)
    assert found == done
    assert 100 * named >= make_page.DEMANDED * done
    for name, fault in FAULTS.items():
        if not fault.check:
            assert measured[name].named == len(fault.bases)


def test_every_check_has_a_fault_or_a_reason() -> None:
    asked = {check.name for check in all_checks() if check.code < "KV4"}
    broken = {fault.check for fault in FAULTS.values() if fault.check}
    assert not broken & set(LEFT_OUT)
    assert asked == broken | set(LEFT_OUT)


def test_every_fault_is_done_to_several_exports() -> None:
    assert [name for name, fault in FAULTS.items() if len(fault.bases) < 2] == []


def test_the_sample_is_a_part_of_the_table() -> None:
    assert {(name, base) for name, fault in FAULTS.items() for base in fault.bases} >= SAMPLE


@pytest.mark.parametrize("name", [*SUBJECTS, "surgery", "anatomy", "base_models"])
def test_what_is_broken_knows_nothing_of_how_it_is_found(name: str) -> None:
    assert "kvdoctor" not in imported(Path(__file__).with_name(f"{name}.py"))


def imported(path: Path) -> set[str]:
    """The packages that a module imports."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.partition(".")[0] for name in names}

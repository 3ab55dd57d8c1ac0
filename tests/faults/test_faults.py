"""kvdoctor finds every fault that was put into a healthy export, calls it by its name, and leaves harmless changes."""

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import make_table
import pytest
from isolated import give_up
from making import Maker
from outcome import Missing, healthy_export, treat
from registry import SUBJECTS, Fault, load

from kvdoctor.doctor import Options
from kvdoctor.findings import all_checks
from kvdoctor.runtimes import Runtime

FAULTS = load()
SAMPLE = {
    ("positions-restart", "llama-gqa"),
    ("mask-off-by-one", "marian-pair"),
    ("past-ignored-in-layer-1", "t5"),
    ("presents-swapped", "gpt2"),
    ("history-scaled", "whisper-pair"),
    ("new-token-zeroed", "gpt2"),
    ("other-key-weights", "marian"),
    ("encoder-of-row-0", "t5-pair"),
    ("keys-as-float16", "llama-gqa"),
    ("noise-behind-masked-words", "gpt2"),
    ("weights-no-numbers", "marian"),
    ("untouched", "llama-gqa"),
    ("masked-words", "gpt2"),
    ("words-masked-with-a-number", "marian-pair"),
    ("layers-swapped-both-ways", "gpt2"),
}
"""What every test run sees."""
LEFT_OUT = {
    "names-mislead": "names hurt nobody who goes by the graph: it has fixtures of its own",
    "loop-breaks-contract": "a fault of the caller's loop, not of an export",
    "reference-differs": "asked only with a checkpoint, whose weights would have to be broken instead",
    "invalid-graph": "what the rules of ONNX refuse has nothing to do with a cache: it has a fixture of its own",
    "cached-branch-first": "a note on every merged decoder, and no fault of it",
}
"""Checks without a fault here, and why."""
MADE = pytest.mark.slow
EACH = 3
"""Exports that every fault is put into by the slow tests; `-m exhaustive` has the others."""


def parameters() -> list[object]:
    """Every fault in every export, those beyond the sample as slow ones; in four exports, in turn, for each fault."""
    found: list[object] = []
    for number, (name, fault) in enumerate(FAULTS.items()):
        for index, patient in enumerate(fault.patients):
            marks = () if (name, patient) in SAMPLE else (MADE,)
            if (index - number) % len(fault.patients) >= EACH and marks:
                marks = (MADE, pytest.mark.exhaustive)
            found.append(pytest.param(fault, patient, id=f"{name}-{patient}", marks=marks))
    return found


@dataclass(frozen=True)
class Clinic:
    """Where exports come from, and what diagnoses them."""

    maker: Maker
    runtime: Runtime


@pytest.fixture(scope="session")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clinic]:
    """Exports in a folder that the processes of one test session share with the zoo, and one warm worker."""
    mine = tmp_path_factory.getbasetemp()
    folder = (mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "zoo"
    with Runtime(Options().limits) as warm:
        yield Clinic(Maker(folder), warm)


@pytest.fixture(scope="module")
def measured() -> dict[str, make_table.Measured]:
    return make_table.read(make_table.DOCUMENT.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("fault", "patient"), parameters())
def test_a_fault_is_found_and_called_by_its_name(
    fault: Fault, patient: str, clinic: Clinic, measured: dict[str, make_table.Measured], tmp_path: Path
) -> None:
    try:
        export = healthy_export(patient, clinic.maker)
    except Missing as missing:
        give_up(str(missing))
    outcome = treat(fault, export, tmp_path / "broken", clinic.runtime)
    assert outcome.found, outcome.details
    wanted = measured[fault.name].misnamed.get(patient, fault.check or "healthy")
    assert outcome.called == wanted, outcome.details
    assert outcome.named or patient in measured[fault.name].misnamed, outcome.details
    if fault.check == "non-finite":  # of what has no distance nothing else may be said
        assert outcome.errors == ("non-finite",), outcome.details


def test_the_document_holds_every_fault_as_it_is(measured: dict[str, make_table.Measured]) -> None:
    assert list(measured) == list(FAULTS)
    assert make_table.page(measured) == make_table.DOCUMENT.read_text(encoding="utf-8")


def test_all_are_found_and_nearly_all_are_named(measured: dict[str, make_table.Measured]) -> None:
    done, found, named = make_table.counted(measured)
    assert found == done
    assert 100 * named >= make_table.DEMANDED * done
    for name, fault in FAULTS.items():
        if not fault.check:
            assert measured[name].named == len(fault.patients)


def test_every_check_has_a_fault_or_a_reason() -> None:
    asked = {check.name for check in all_checks() if check.code < "KV4"}
    broken = {fault.check for fault in FAULTS.values() if fault.check}
    assert not broken & set(LEFT_OUT)
    assert asked == broken | set(LEFT_OUT)


def test_every_fault_is_done_to_several_exports() -> None:
    assert [name for name, fault in FAULTS.items() if len(fault.patients) < 2] == []


def test_the_sample_is_a_part_of_the_table() -> None:
    assert {(name, patient) for name, fault in FAULTS.items() for patient in fault.patients} >= SAMPLE


@pytest.mark.parametrize("name", [*SUBJECTS, "surgery", "anatomy", "patients"])
def test_what_is_broken_knows_nothing_of_how_it_is_found(name: str) -> None:
    assert "kvdoctor" not in imported(Path(__file__).with_name(f"{name}.py"))


def imported(path: Path) -> set[str]:
    """The packages that a module imports."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.partition(".")[0] for name in names}

"""Names are hints: a graph whose tensors are all called t0, t1, ... has the same slots."""

import random
import shutil
from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.isolated import EXPORTS
from support.sampling import sampled, thinned
from support.text_fixtures import load_all

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options

NAMES = sorted(path.name for path in EXPORTS.iterdir() if path.is_dir())

TEXTS = load_all()
ONLY_NAMES_TELL = {
    "layout-cross-made-once-healthy": "that a past is a cache, where nothing returns it",
    "layout-aihub-opus-healthy": "whether new rows go to a place or push the oldest out",
    "layout-aihub-trocr-healthy": "whether the host drops the oldest row",
    "layout-aihub-whisper-healthy": "which of an encoder's axes is the length, where all are numbers",
    "layout-beam-search-plain-healthy": "that a past is a cache, where nothing attends to it",
    "layout-canary-healthy": "what the encoder's lengths are",
    "layout-delta-healthy": "what a mask is that the graph multiplies by zero",
    "layout-ep-context-healthy": "that an operator holds a cache",
    "layout-llama2-msft-stacked-healthy": "that the new rows of all layers, put together, are those of a cache",
    "layout-moonshine-v1-healthy": "which number is the length",
    "layout-ort-t5-init-healthy": "that a file called encoder decodes the first token as well",
    "layout-paged-healthy": "the tables of a paged cache",
    "layout-per-layer-embeddings-healthy": "that a second input is made of the tokens as well",
    "layout-qnn-window-healthy": "which stage of a pipeline gives logits",
    "layout-rwkv-healthy": "states of rank 1",
    "layout-rwkv-mobile-healthy": "which output of a graph without batch holds the logits",
    "layout-scatter-static-pair-healthy": "which inputs of two graphs are the same buffer",
    "layout-shift-left-healthy": "which of two tables holds the sines",
    "layout-shift-left-prompt-healthy": "which of two tables holds the sines",
    "layout-wenet-stream-healthy": "the states of a streaming encoder",
    "layout-genai-pipeline-healthy": "the stages, which the config names",
    "layout-pipeline-two-stages-healthy": "which values go from stage to stage",
    "names-mislead-conv-healthy": "the part of a state that its name gets wrong",
}
"""Healthy fixtures whose deal nobody could read without their names, and what is told by names alone there."""
MISREAD = {"layout-deepstack-healthy"}
"""Without names, features of images for deeper layers are taken for encoder states: one of three inputs alike."""
TOLD = sorted(
    name
    for name, text in TEXTS.items()
    if text.healthy and name not in {*ONLY_NAMES_TELL, *MISREAD} and not text.targets
)


def renamed(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """Call all tensors t0, t1, ... in a random order; the inputs of the main graph come in another order, too."""
    found: dict[str, None] = {}
    _collect(model.graph, found)
    names = list(found)
    random.Random(seed).shuffle(names)  # noqa: S311 - an order, not a secret
    _rename(model.graph, {name: f"t{number}" for number, name in enumerate(names)})
    inputs = list(model.graph.input)
    random.Random(seed).shuffle(inputs)  # noqa: S311 - as above
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    return model


def _collect(graph: onnx.GraphProto, found: dict[str, None]) -> None:
    for value in (*graph.input, *graph.output, *graph.initializer):
        found[value.name] = None
    for node in graph.node:
        for name in (*node.input, *node.output):
            if name:
                found[name] = None
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _collect(attribute.g, found)


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    del graph.value_info[:]
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = names[value.name]
    for node in graph.node:
        node.input[:] = [names[name] if name else "" for name in node.input]
        node.output[:] = [names[name] if name else "" for name in node.output]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g, names)


def rename_folder(name: str, out: Path, seed: int) -> Path:
    shutil.copytree(EXPORTS / name, out, dirs_exist_ok=True)
    for path in out.glob("*.onnx"):
        onnx.save(renamed(onnx.load(str(path)), seed), str(path))
    return out


def deal(contract: CacheContract) -> list[tuple[object, ...]]:
    """What a slot is, whatever it is called."""

    def key(slot: Slot) -> tuple[object, ...]:
        filled = (slot.filled_by is not None, slot.present is not None)
        return slot.kind, slot.layer, slot.part, slot.dtype, slot.axes, slot.carry, slot.growth, slot.emptied, *filled

    return sorted(map(key, contract.slots), key=str)


def ranked(contract: CacheContract) -> list[tuple[object, ...]]:
    """The same with layers by their rank, and heads that are not split called as wide as one."""
    layers: dict[str, list[int]] = {}
    for slot in contract.slots:
        layers.setdefault(slot.kind, []).append(-1 if slot.layer is None else slot.layer)
    found = []
    for slot in contract.slots:
        rank = sorted(set(layers[slot.kind])).index(-1 if slot.layer is None else slot.layer)
        axes = tuple("head_dim" if axis == "hidden" else axis for axis in slot.axes)
        returned = (slot.filled_by is not None, slot.present is not None)
        found.append((slot.kind, rank, slot.part, slot.dtype, axes, slot.carry, slot.growth, slot.emptied, *returned))
    return sorted(found, key=str)


def rename_text(name: str, out: Path, seed: int) -> Path:
    TEXTS[name].write(out)
    for path in out.rglob("*.onnx"):
        onnx.save(renamed(onnx.load(str(path)), seed), str(path))
    return out


def contracts(folder: Path) -> dict[str, CacheContract]:
    return {stack.name: stack.contract for stack in inspect(str(folder)).stacks if stack.contract is not None}


@pytest.mark.parametrize("name", sampled(NAMES, 2))
@given(seed=st.integers(0, 2**32))
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_slots_are_the_same_under_any_names(name: str, seed: int, tmp_path: Path) -> None:
    plain = contracts(EXPORTS / name)
    other = contracts(rename_folder(name, tmp_path / str(seed), seed))
    assert set(other) == set(plain)
    for stack, contract in other.items():
        assert deal(contract) == deal(plain[stack]), stack
        assert not contract.missing, contract.missing


# The later seeds give inputs of the two graphs of a pair the same name: t196 is a past here, the encoder's there.
DRIVEN = [("gpt2", 5), ("llama-gqa", 5), ("marian-4.46.3", 7), ("marian-4.57.6", 3), ("t5", 7), ("whisper", 3)]


@pytest.mark.parametrize(("name", "seed"), sampled([*DRIVEN, ("whisper", 7)], 2))
def test_a_renamed_export_is_driven(name: str, seed: int, tmp_path: Path) -> None:
    report = step_test(str(rename_folder(name, tmp_path / name, seed)), Options(consumer="held"))
    assert report.verdict == "healthy", [finding.cause for finding in report.findings]


@pytest.mark.parametrize("name", thinned(TOLD, 4, 2))
def test_every_layout_is_read_without_names(name: str, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    plain = contracts(TEXTS[name].write(tmp_path / "plain"))
    other = contracts(rename_text(name, tmp_path / "other", 3))
    assert [ranked(contract) for contract in other.values()] == [ranked(contract) for contract in plain.values()]
    assert not any(contract.missing for contract in other.values())


# ONNX Runtime asks for certain names inside an operator with the whole loop.
@pytest.mark.parametrize("name", sampled([name for name in TOLD if "-search-" not in name], 8))
def test_no_healthy_layout_is_accused_without_names(name: str, tmp_path: Path) -> None:
    report = step_test(str(rename_text(name, tmp_path, 3)), Options(consumer="held"))
    assert report.verdict != "unhealthy", [finding.cause for finding in report.findings]


@pytest.mark.parametrize("name", sampled(sorted(ONLY_NAMES_TELL), 4))
def test_what_only_names_tell_is_said_to_be_missing(name: str, tmp_path: Path) -> None:
    """Nothing but that the contract is unknown, a slot has nothing to be filled from, or a config has other names."""
    report = step_test(str(rename_text(name, tmp_path, 3)), Options(consumer="held"))
    errors = {finding.name for finding in report.findings if finding.severity == "error"}
    assert errors <= {"contract-unknown", "past-without-present", "past-axis-frozen", "parts-do-not-fit"}

"""inference_metadata.yaml against the graph: each entry is missed when it is wrong, and nothing else is."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import kvdoctor
from support.text_fixtures import load_all
from test_config import changed_at, folder_of, missed

from kvdoctor.analysis.model_folder import MOST_YAML_BYTES, open_folder

FIXTURES = load_all()
WORKFLOW = ("pipeline", "workflow")
COMPONENT = (*WORKFLOW, "components", "model")
GROUP = (*WORKFLOW, "serving", "state_service", "groups", "decoder_cache")
ALIAS = (*GROUP, "ports", "model", "cache_0")
PAST = {"dtype": "float32", "rank": 4, "shape": ["batch", 2, "past_sequence", 4]}


def document() -> dict[str, Any]:
    """What is right of the fixture."""
    return copy.deepcopy(folder_of("config-agrees-healthy").side_cars.inference)


def keys_missed(inference: dict[str, Any]) -> set[str]:
    return missed(folder_of("config-agrees-healthy"), inference=inference)


def test_it_is_read_and_agrees() -> None:
    assert document()["model"]["attention"]["head_dim"] == 4
    assert keys_missed(document()) == set()


@pytest.mark.parametrize(
    ("path", "wrong", "key"),
    [
        (("model", "attention", "num_kv_heads"), 1, "model.attention.num_kv_heads"),
        (("model", "attention", "head_dim"), 8, "model.attention.head_dim"),
        (("model", "max_sequence_length"), 129, "model.max_sequence_length"),
        ((*COMPONENT, "ports", "inputs", "mask"), {"dtype": "int64", "rank": 2}, "components.model.ports.inputs.mask"),
        (
            (*COMPONENT, "ports", "inputs", "past_key_values.0.key"),
            {**PAST, "dtype": "float16"},
            "components.model.ports.inputs.past_key_values.0.key",
        ),
        (
            (*COMPONENT, "ports", "inputs", "past_key_values.0.key"),
            {**PAST, "shape": ["batch", 4, "past_sequence", 4]},
            "components.model.ports.inputs.past_key_values.0.key",
        ),
        (
            (*COMPONENT, "ports", "outputs", "logits"),
            {"dtype": "fp32", "rank": 2},
            "components.model.ports.outputs.logits",
        ),
        ((*ALIAS, "output"), "present.1.key", "groups.decoder_cache.ports.model.cache_0.output"),
        ((*ALIAS, "role"), "value", "groups.decoder_cache.ports.model.cache_0.role"),
        ((*GROUP, "sequence_axis"), 1, "groups.decoder_cache.sequence_axis"),
        (
            (*WORKFLOW, "components", "encoder"),
            {"implementation": {"kind": "onnx", "artifact": "encoder/model.onnx"}},
            "components.encoder.implementation.artifact",
        ),
    ],
)
def test_each_entry_counts(path: tuple[str, ...], wrong: object, key: str) -> None:
    assert keys_missed(changed_at(document(), path, wrong)) == {key}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "attention", "type"), "a type of the future"),
        (("model", "max_sequence_length"), 128),
        ((*COMPONENT, "ports", "inputs", "adapter"), {"dtype": "float16", "rank": 2, "optional": True}),
        ((*COMPONENT, "ports", "outputs", "logits"), {"dtype": "a type of the future", "rank": 3}),
        ((*COMPONENT, "ports", "inputs", "input_ids"), {"dtype": "int64", "rank": 2, "shape": None}),
        ((*COMPONENT, "implementation"), {"kind": "onnx", "artifact": "./model.onnx"}),
        ((*COMPONENT, "implementation"), {"kind": "adapter", "abi": "native", "version": "1"}),
        ((*ALIAS, "access"), "read_only"),
        ((*GROUP, "kind"), "recurrent"),
        (("profiles",), {"text": {"kind": "generation", "version": "1"}}),
        (("model", "io"), {"kv_inputs": ["past_0"], "kv_outputs": ["present_0"]}),  # as documents of July 2026 have it
    ],
)
def test_what_agrees_or_is_not_known_says_nothing(path: tuple[str, ...], value: object) -> None:
    assert keys_missed(changed_at(document(), path, value)) == set()


def test_a_latent_cache_has_other_sizes() -> None:
    attention = {"type": "multi_latent_attention", "num_kv_heads": 16, "head_dim": 128}
    assert keys_missed(changed_at(document(), ("model", "attention"), attention)) == set()


def test_a_document_without_a_workflow_is_that_of_the_only_decoder() -> None:
    sizes = {"model": {"attention": {"type": "multi_head", "num_kv_heads": 3, "head_dim": 4}}}
    assert keys_missed(sizes) == {"model.attention.num_kv_heads"}


def test_the_sizes_of_a_package_are_those_of_the_decoder_that_a_component_names() -> None:
    other = changed_at(document(), (*COMPONENT, "implementation", "artifact"), "decoder_model.onnx")
    other = changed_at(other, ("model", "attention", "num_kv_heads"), 3)
    assert keys_missed(other) == {"components.model.implementation.artifact"}


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(leaves, inner, max_size=3), max_leaves=8
)
PLACES = [
    (),
    ("model",),
    ("model", "attention"),
    WORKFLOW,
    (*WORKFLOW, "components"),
    COMPONENT,
    (*COMPONENT, "implementation"),
    (*COMPONENT, "ports"),
    (*COMPONENT, "ports", "inputs"),
    (*COMPONENT, "ports", "inputs", "input_ids"),
    GROUP,
    (*GROUP, "ports"),
    ALIAS,
]


@settings(deadline=None)
@given(place=st.sampled_from(PLACES), value=anything)
def test_nothing_in_it_is_taken_for_granted(place: tuple[str, ...], value: Any) -> None:
    changed = changed_at(document(), place, value) if place else value
    keys_missed(changed if isinstance(changed, dict) else {})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model: [", "ParserError"),
        ("- a list", "not a YAML mapping"),
        ("!!python/object/apply:os.system [echo harm]", "ConstructorError"),
        ("a: &a [" + "[" * 3000 + "]" * 3000 + "]", "cannot be read"),
        ("#" * MOST_YAML_BYTES + "\na: 1", "larger than 1 MiB"),
        (b"\xff\xfe\x00", "UnicodeDecodeError"),
    ],
)
def test_a_broken_file_is_said_and_the_model_diagnosed(tmp_path: Path, text: str | bytes, reason: str) -> None:
    folder = FIXTURES["decoder-only-healthy"].write(tmp_path / "model")
    (folder / "inference_metadata.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    (problem,) = open_folder(str(folder)).side_cars.problems
    assert "inference_metadata.yaml" in problem
    assert reason in problem


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    folder = FIXTURES["config-disagrees-inference"].write(tmp_path / "model")
    code, out = kvdoctor("inspect", str(folder))
    assert code == 0
    for words in ("KV020", "(inference_metadata.yaml)", 'continues as "present.0.key"', "axis 2 counts the tokens"):
        assert words in out

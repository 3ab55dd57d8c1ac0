"""inference_metadata.yaml of onnx-genai and mobius against the graph: sizes, files, ports, and what is fed back.

Source: the JSON Schema of onnx-genai of August 2026, whose `$id` is https://github.com/onnx/onnx/issues/8184; mobius
keeps a copy in `src/mobius/integrations/onnx_genai/_schema`. It calls itself pre-release: what is not understood, as of
another version, is passed over.
"""

from pathlib import PurePosixPath
from typing import Any

from kvdoctor.analysis.configs import is_count, read_part
from kvdoctor.contract import Slot, describe
from kvdoctor.diagnose.checks.side_cars import numbers
from kvdoctor.diagnose.checks.side_cars.disagreement import (
    NOT_FOUND,
    Disagreement,
    Disagreements,
    describe_tensor,
    either,
    fits_port,
    missing_file,
    plain,
    quoted,
)
from kvdoctor.diagnose.checks.side_cars.graph_sizes import windows
from kvdoctor.diagnose.checks.side_cars.numbers import claimed
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.model.view import Declared

LATENT = ("multi_latent", "multi_latent_attention", "mla")
"""Types of attention whose cache has not the heads and widths of its keys and values."""


def inference_metadata(context: ContractContext) -> list[Disagreement]:
    """The entries of inference_metadata.yaml that disagree with the graph of a decoder."""
    document = context.folder.side_cars.inference
    workflow = read_part(read_part(document, "pipeline"), "workflow")
    components = read_part(workflow, "components")
    decoders = [name for name in _names(components) if _artifact(components, name) == context.decode_file]
    # The sizes are those of one decoder: of several stacks, the one that a component names.
    named = bool(decoders) or (not workflow and len(context.folder.stacks) == 1)
    artifacts = ((f"components.{plain(name)}.implementation.artifact", name) for name in _names(components))
    files = ((key, _artifact(components, name)) for key, name in artifacts)
    missing = (one for key, file in files for one in missing_file(context, key, file, "component"))
    return [
        *(_compare_numbers(context, read_part(document, "model")) if named else ()),
        *missing,
        *(one for name in decoders for one in _compare_ports(context, workflow, name)),
        *(one for name in decoders for one in _compare_state(context, workflow, name)),
    ]


def _names(part: dict[str, Any]) -> list[str]:
    """The keys of an object that are strings; YAML has others."""
    return [name for name in part if isinstance(name, str)]


def _artifact(components: dict[str, Any], name: str) -> str | None:
    """The ONNX file of a component, relative to the folder of the package."""
    made_by = read_part(read_part(components, name), "implementation")
    artifact = made_by.get("artifact")
    return PurePosixPath(artifact).as_posix() if made_by.get("kind") == "onnx" and isinstance(artifact, str) else None


def _compare_numbers(context: ContractContext, model: dict[str, Any]) -> Disagreements:
    attention = read_part(model, "attention")
    if attention.get("type") not in LATENT:
        for claim in claimed(attention, "model.attention", num_kv_heads="kv_heads", head_dim="head_dim"):
            yield from numbers.sizes(context, claim, fused=claim.what == "head_dim")
    for claim in claimed(model, "model", max_sequence_length="context"):
        yield from numbers.context(context, claim)
    size, seen = attention.get("sliding_window"), set((windows(context) or {}).values())
    if is_count(size) and seen and size not in seen:
        right = either(seen) if min(seen) > 0 else "no window"
        observed = f"local_window_size {either(seen)} of GroupQueryAttention"
        yield Disagreement("model.attention.sliding_window", str(size), observed, right)


def _compare_ports(context: ContractContext, workflow: dict[str, Any], name: str) -> Disagreements:
    """Names, element types, ranks and sizes of the inputs and outputs of a component."""
    ports = read_part(read_part(read_part(workflow, "components"), name), "ports")
    graph = context.decode_graph
    sides: tuple[tuple[str, dict[str, Declared]], ...] = (("inputs", graph.inputs), ("outputs", graph.outputs))
    for side, real in sides:
        key, declared = f"components.{plain(name)}.ports.{side}", read_part(ports, side)
        for port in _names(declared):
            tensor = read_part(declared, port)
            if port not in real:
                if tensor.get("optional") is not True:
                    missing = (quoted(port), f"no such {side[:-1]}", "is not in the graph")
                    yield Disagreement(f"{key}.{plain(port)}", *missing, NOT_FOUND)
            elif not fits_port(tensor, real[port]):
                there = describe(real[port].dtype, real[port].shape)
                yield Disagreement(f"{key}.{plain(port)}", describe_tensor(tensor), there, there)


def _compare_state(context: ContractContext, workflow: dict[str, Any], component: str) -> Disagreements:
    """Which present is the next past, what it holds, and which axis counts the tokens, of each group of states."""
    slots = {slot.past: slot for slot in context.contract.slots}
    groups = read_part(read_part(read_part(workflow, "serving"), "state_service"), "groups")
    for group in _names(groups):
        state = read_part(groups, group)
        aliases = read_part(read_part(state, "ports"), component)
        path = f"groups.{plain(group)}"
        pairs = {label: read_part(aliases, label) for label in _names(aliases)}
        named = {label: pair.get("input") for label, pair in pairs.items()}
        found = {label: slots[name] for label, name in named.items() if isinstance(name, str) and name in slots}
        for label, slot in found.items():
            yield from _compare_pair(f"{path}.ports.{plain(component)}.{plain(label)}", pairs[label], slot)
        axis, real = state.get("sequence_axis"), {slot.length_axis for slot in found.values()}
        # A state that is replaced as a whole has no axis that counts tokens.
        if isinstance(axis, int) and not isinstance(axis, bool) and real and None not in real and axis not in real:
            numbers = either(number for number in real if number is not None)
            yield Disagreement(f"{path}.sequence_axis", str(axis)[:20], f"axis {numbers} counts the tokens", numbers)


def _compare_pair(key: str, pair: dict[str, Any], slot: Slot) -> Disagreements:
    output, role = pair.get("output"), pair.get("role")
    if isinstance(output, str) and pair.get("access") != "read_only" and slot.present and output != slot.present:
        so = "the runtime feeds back the present of another layer or part"
        right = quoted(slot.present)
        yield Disagreement(f"{key}.output", quoted(output), f"{quoted(slot.past)} continues as {right}", right, so)
    if role in ("key", "value") and slot.used_as in ("key", "value") and role != slot.used_as:
        seen = f"attention reads {quoted(slot.past)} as a {slot.used_as}"
        yield Disagreement(f"{key}.role", str(role), seen, str(slot.used_as))

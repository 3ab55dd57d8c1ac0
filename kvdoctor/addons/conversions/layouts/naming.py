"""The names that Optimum gives to inputs, outputs and axes, for ports of which the contract says what they are.

Sources: `OnnxConfigWithPast` and `OnnxSeq2SeqConfigWithPast` in optimum/exporters/onnx/base.py (optimum-onnx 0.1.0).
Optimum's runtime pairs pasts and presents by their order: layer by layer, self- before cross-attention, key before
value.
"""

from collections.abc import Iterable
from dataclasses import field
from typing import Any

from kvdoctor.addons.conversions.layouts.registry import DoesNotFit
from kvdoctor.analysis.axes import as_number
from kvdoctor.contract import Axis, CacheContract, Graph, PhaseName, Slot
from kvdoctor.model.edit import fresh_name, keep_only, make_node, prune, rename_all, rename_banned, replace_all
from kvdoctor.model.proto import GraphProto, ModelProto
from kvdoctor.model.traverse import all_names, own_names, subgraphs
from kvdoctor.records import record
from kvdoctor.report.repair_record import Change
from kvdoctor.report.wording import join_some

MERGED, FIRST, LATER = "decoder_model_merged", "decoder_model", "decoder_with_past_model"
ENCODER, SINGLE = "encoder_model", "model"
"""The stems of Optimum's file names."""

ROLES = {
    "token_ids": "input_ids",
    "embeddings": "inputs_embeds",
    "attention_mask": "attention_mask",
    "encoder_mask": "encoder_attention_mask",
    "encoder_states": "encoder_hidden_states",
    "position_ids": "position_ids",
    "cache_position": "cache_position",
    "branch_switch": "use_cache_branch",
    "logits": "logits",
}
"""Optimum's names of the inputs and outputs of a decoder."""

FIRST_INPUTS = ("encoder_attention_mask", "attention_mask", "position_ids", "input_ids", "inputs_embeds")


@record(slots=False)
class PortNames:
    """New names of the inputs and outputs of one graph, and the axes of each by its new name."""

    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    axes: dict[str, tuple[Axis, ...]] = field(default_factory=dict)


def slot_name(slot: Slot, contract: CacheContract) -> str:
    """The part of a slot's names after `past_key_values.` and `present.`: `0.decoder.key`."""
    kind = "encoder." if slot.kind == "cross-attention" else "decoder." if contract.of_kind("cross-attention") else ""
    return f"{slot.layer}.{kind}{slot.part}"


def find_unnameable(contract: CacheContract) -> str | None:
    """The part of a contract that Optimum has no names for; None if there is none."""
    for slot in contract.slots:
        if slot.kind not in ("self-attention", "cross-attention") or slot.part not in ("key", "value"):
            return f"the slot {slot.past!r} is a {slot.kind} of part {slot.part}: Optimum supports only keys and values"
        if slot.growth not in ("grow", "shared", "constant"):
            return (
                f"the cache {slot.past!r} does not grow with each step ({slot.growth}), which Optimum's loop requires"
            )
        if slot.layer is None:
            return f"the slot {slot.past!r} holds all layers: Optimum requires one key and one value for each layer"
        if slot.axes[1:3] not in (("kv_heads", "past"), ("kv_heads", "encoder")):
            return f"the axes of {slot.past!r} are {', '.join(slot.axes)}: Optimum requires batch, heads, length, width"
    return None


def optimum_names(contract: CacheContract, phase: PhaseName) -> PortNames:
    """Optimum's names of the inputs and outputs of the decoder that serves a phase."""
    return _assign_names(contract, phase, {}, ROLES)


def unified_names(contract: CacheContract) -> tuple[PortNames, PortNames]:
    """Common names for the two halves of a pair: those of the half that takes the past."""
    first, later = contract.graph("prefill"), contract.graph("decode")
    ports = (*first.outputs, *first.inputs, *later.outputs, *later.inputs)
    by_role: dict[str, str] = {port.role: port.name for port in ports if port.role in ROLES}
    slots = {slot.past: (slot.past, slot.present or slot.filled_by or slot.past) for slot in contract.slots}
    return _assign_names(contract, "prefill", slots, by_role), _assign_names(contract, "decode", slots, by_role)


def _assign_names(
    contract: CacheContract, phase: PhaseName, slots: dict[str, tuple[str, str]], roles: dict[str, str]
) -> PortNames:
    graph, names = contract.graph(phase), PortNames()
    for port in graph.inputs:
        if port.role != "past" and port.role in roles:
            names.inputs[port.name] = roles[port.role]
            names.axes[roles[port.role]] = port.axes
    for port in graph.outputs:
        if port.role == "logits" and "logits" in roles:
            names.outputs[port.name] = roles["logits"]
            names.axes[roles["logits"]] = port.axes
    first = phase == "prefill" and contract.first_step == "no-past-graph"
    for slot in contract.slots:
        own = slot_name(slot, contract)
        past, present = slots.get(slot.past, (f"past_key_values.{own}", f"present.{own}"))
        made = slot.filled_by if first else slot.present
        total = tuple("total" if axis == "past" else axis for axis in slot.axes)
        names.axes[past], names.axes[present] = slot.axes, total
        if made is not None:
            names.outputs[made] = present
        if not first:
            names.inputs[slot.past] = past
    return names


def port_axes(contract: CacheContract, file: str) -> dict[str, tuple[Axis, ...]]:
    """The axes of the inputs and outputs of a decoder file, by their present names."""
    axes: dict[str, tuple[Axis, ...]] = {}
    for graph in contract.graphs.values():
        if graph.file == file:
            axes |= {port.name: port.axes for port in (*graph.inputs, *graph.outputs) if port.role != "present"}
    for slot in contract.slots:
        total: tuple[Axis, ...] = tuple("total" if axis == "past" else axis for axis in slot.axes)
        axes |= {name: total for name in (slot.present, slot.filled_by) if name is not None}
        axes[slot.past] = slot.axes
    return axes


def axis_names(contract: CacheContract) -> dict[Axis, str]:
    """Optimum's names of the open axes of a decoder."""
    prefix = "decoder_" if contract.has_encoder_states or contract.of_kind("cross-attention") else ""
    past, new = f"past_{prefix}sequence_length", f"{prefix}sequence_length"
    return {
        "batch": "batch_size",
        "new": new,
        "past": past,
        "total": f"{past} + {new}",
        "encoder": "encoder_sequence_length",
    }


def rename_as(model: ModelProto, names: PortNames, ports: Graph, but: str = "which has no name in the layout") -> None:
    """Give a graph those names; outputs without one are dropped, with all nodes that no other output needs.

    Raises:
        DoesNotFit: it still takes an input that has none, and what is wrong with that.
    """
    graph = model.graph
    keep_only(graph.output, lambda value: value.name in names.outputs)
    prune(model)
    weights = {tensor.name for tensor in graph.initializer}  # old files list them among the inputs
    if strange := {value.name for value in graph.input} - names.inputs.keys() - weights:
        roles = {port.name: f" ({port.role.replace('_', ' ')})" for port in ports.inputs}
        listed = first_of(name + roles.get(name, "") for name in sorted(strange))
        raise DoesNotFit(f"{ports.file} takes {listed}, {but}")
    rename_ports(graph, names.inputs, names.outputs)


def list_renamings(file: str, graph: GraphProto, names: PortNames) -> list[Change]:
    """The changes that these names make to the inputs and outputs of a graph."""
    both = {**names.inputs, **names.outputs}
    old = [value.name for value in (*graph.input, *graph.output)]
    return [
        Change(file, "inputs and outputs", name, both.get(name, "left out")) for name in old if both.get(name) != name
    ]


def put_in_order(graph: GraphProto, contract: CacheContract) -> None:
    """Order inputs and outputs as Optimum does."""
    slots = sorted(contract.slots, key=lambda s: (s.layer or 0, s.kind == "cross-attention", s.part == "value"))
    named = [slot_name(slot, contract) for slot in slots]
    sort_ports(graph.input, [*FIRST_INPUTS, "encoder_hidden_states", *(f"past_key_values.{name}" for name in named)])
    sort_ports(graph.output, ["logits", *(f"present.{name}" for name in named)])


def name_axes(graph: GraphProto, axes: dict[str, tuple[Axis, ...]], words: dict[Axis, str]) -> list[str]:
    """Give the open axes of inputs and outputs readable names; sizes that are numbers stay numbers.

    Gives a description of each change. Declarations of inner values with the old names are dropped, because one old
    name may have become several.
    """
    changed, old = [], set[str]()
    for value in (*graph.input, *graph.output):
        found = axes.get(value.name, ())
        dims = value.type.tensor_type.shape.dim
        if len(found) != len(dims):
            continue
        for dim, axis in zip(dims, found, strict=True):
            number = as_number(dim.dim_param, axis if axis != "fixed" else None) if dim.dim_param else None
            if isinstance(number, int):
                dim.dim_value = number
            elif not dim.HasField("dim_value") and axis in words and dim.dim_param != words[axis]:
                changed.append(f"{value.name}: {dim.dim_param or '?'} -> {words[axis]}")
                old.add(dim.dim_param)
                dim.dim_param = words[axis]
    for value in list(graph.value_info) if old else ():
        params = [dim.dim_param for dim in value.type.tensor_type.shape.dim if dim.dim_param]
        if not old.isdisjoint(word for one in params for word in (one, *one.replace("*", "+").split(" + "))):
            graph.value_info.remove(value)
    return changed


def first_of(items: Iterable[str]) -> str:
    """Three names, and how many more there are."""
    return join_some(list(items), 3)


def rename_ports(graph: GraphProto, inputs: dict[str, str], outputs: dict[str, str]) -> None:
    """Give inputs and outputs other names; colliding names are replaced by new ones.

    An output that is an input or a weight, or that is returned under several names, becomes an `Identity`.
    """
    outputs = {old: outputs.get(old, old) for old in (value.name for value in graph.output)}
    given = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    given |= {sparse.values.name for sparse in graph.sparse_initializer}
    inputs = {old: new for old, new in inputs.items() if any(value.name == old for value in graph.input)}
    wanted = {*inputs.values(), *outputs.values()}
    known = all_names(graph) | wanted
    names = dict(inputs)
    for index, value in enumerate(list(graph.output)):
        new, old = outputs[value.name], value.name
        if old in given or names.get(old, new) != new:
            passed = fresh_name(f"{new}.passed", known)
            graph.node.append(make_node("Identity", [old], passed))
            old = graph.output[index].name = passed
        names[old] = new
    names = {old: new for old, new in names.items() if old != new}
    stays = {name for name in wanted if name not in names}
    in_the_way = own_names(graph) & set(names.values()) - set(names)
    aside = {name: fresh_name(name, known) for name in sorted(in_the_way)}
    for node in graph.node:
        for body in subgraphs(node):
            rename_banned(body, wanted | stays, known)
    rename_all(graph, {**aside, **names})


def sort_ports(items: Any, names: list[str]) -> None:
    """Sort inputs or outputs by a list of names; others come last, in their present order."""
    place = {name: index for index, name in enumerate(names)}
    replace_all(items, sorted(items, key=lambda value: place.get(value.name, len(place))))

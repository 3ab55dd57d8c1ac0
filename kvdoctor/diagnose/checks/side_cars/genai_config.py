"""genai_config.json of onnxruntime-genai and inference_metadata.yaml of onnx-genai and mobius against the graph.

The behavior of onnxruntime-genai was tried with version 0.18 on tiny models. A wrong vocabulary or head size, a wrong
name or template of an existing input or output, and a shared buffer for a graph that appends new entries to the past
each cause an error at the first step. It reads layers and kv heads from the graph; older versions allocate by the
config.

Source of inference_metadata.yaml: the JSON Schema of onnx-genai of August 2026, whose `$id` is
https://github.com/onnx/onnx/issues/8184; mobius keeps a copy in `src/mobius/integrations/onnx_genai/_schema`. It calls
itself pre-release: what is not understood, as of another version, is passed over.
"""

import re
from pathlib import PurePosixPath
from typing import Any

from kvdoctor.analysis.configs import GENAI_ROLES, GENAI_SLOTS, declared_windows, is_count, read_part, read_strings
from kvdoctor.contract import CacheContract, Slot, describe
from kvdoctor.diagnose.checks.side_cars import numbers
from kvdoctor.diagnose.checks.side_cars.disagreement import (
    NOT_FOUND,
    Disagreement,
    Disagreements,
    describe_tensor,
    either,
    fits_port,
    missing_file,
    on_disk,
    plain,
    quoted,
)
from kvdoctor.diagnose.checks.side_cars.graph_sizes import windows
from kvdoctor.diagnose.checks.side_cars.numbers import ATTENTION, claimed
from kvdoctor.diagnose.checks.side_cars.tokenizer import genai_stops
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.model.view import Declared


def genai_config(context: ContractContext) -> list[Disagreement]:
    """The entries of genai_config.json that disagree with the graph of a decoder."""
    genai = context.folder.side_cars.genai
    model = read_part(genai, "model")
    decoder = read_part(model, "decoder")
    given, returned = (read_strings(decoder.get(side)) for side in ("inputs", "outputs"))
    file = decoder.get("filename")
    if not isinstance(file, str) and not (context.stack.stages and decoder.get("pipeline")):
        return []
    if isinstance(file, str) and file != context.stack.main.name:
        lost = Disagreement("model.decoder.filename", quoted(file), "no such file", quoted(context.decode_file))
        return [] if on_disk(context, file) else [lost]
    parts = ((part, read_part(model, part).get("filename")) for part in ("encoder", "embedding", "vision", "speech"))
    return [
        *(one for part, name in parts for one in missing_file(context, f"model.{part}.filename", name, "part")),
        *_compare_inputs(context, given, "embedding" in model),
        *_compare_outputs(context, given, returned),
        *_compare_encoder(context, read_part(model, "encoder")),
        *_compare_numbers(context, model, decoder),
        *_compare_window(context, read_part(decoder, "sliding_window")),
        *_compare_shared_buffer(context.contract, read_part(genai, "search")),
        *genai_stops(context),
    ]


def _compare_numbers(context: ContractContext, model: dict[str, Any], decoder: dict[str, Any]) -> Disagreements:
    for claim in claimed(decoder, "model.decoder", num_hidden_layers="layers"):
        yield from numbers.layers(context, claim, str(model.get("type")))
    for claim in claimed(decoder, "model.decoder", num_key_value_heads="kv_heads", head_size="head_dim"):
        yield from numbers.sizes(context, claim, fused=claim.what == "head_dim")
    for claim in claimed(model, "model", vocab_size="vocabulary"):
        yield from numbers.vocabulary(context, claim, exactly=True)
    for claim in claimed(model, "model", context_length="context"):
        yield from numbers.context(context, claim)


def _compare_inputs(context: ContractContext, names: dict[str, str], embedded: bool) -> Disagreements:
    """Names of inputs. The config may name inputs that the graph does not have: they are not fed."""
    ports = context.contract.graph("decode").inputs
    for key, name in names.items():
        if name in context.decode_graph.inputs or "%d" in name:
            continue
        role = GENAI_ROLES[key][0] if key in GENAI_ROLES else None
        actual = [port.name for port in ports if port.role == role]
        if key in context.decode_graph.inputs:
            actual.append(key)
        if key == "input_ids" and "inputs_embeds" not in names and not embedded:
            actual += [port.name for port in ports if port.role == "embeddings"]
        unnamed = [port for port in actual if port not in names.values()]
        yield from _report_name(f"model.decoder.inputs.{key}", name, "input", unnamed)


def _compare_outputs(context: ContractContext, given: dict[str, str], made: dict[str, str]) -> Disagreements:
    """The logits, and name templates of pasts and presents, completed by the number of the layer."""
    name, port, contract = made.get("logits"), context.contract.graph("decode").port("logits"), context.contract
    if name is not None and name not in context.decode_graph.outputs and port is not None:
        yield from _report_name("model.decoder.outputs.logits", name, "output", [port.name])
    for past_key, present_key, kind, part, _ in GENAI_SLOTS:
        whole = part or ("key-value" if kind in ATTENTION else None)
        slots = [s for s in contract.of_kind(kind) if s.layer is not None and s.part == (whole or s.part)]
        past, present = given.get(past_key), made.get(present_key)
        if past is not None and slots and not any(_complete(past, slot) == slot.past for slot in slots):
            actual = [_make_template(slots[0].past, slots[0])]
            yield from _report_name(f"model.decoder.inputs.{past_key}", past, "input", actual)
        for slot in slots:
            if present is not None and slot.present and _complete(present, slot) not in context.decode_graph.outputs:
                actual = [_make_template(slot.present, slot)]
                yield from _report_name(f"model.decoder.outputs.{present_key}", present, "output", actual)
                break


def _compare_encoder(context: ContractContext, encoder: dict[str, Any]) -> Disagreements:
    """Names of the encoder, whose ports have no known roles: wrong names, if there is a port without a name."""
    file = context.stack.files.get("encoder")
    if file is None or file.view is None or encoder.get("filename") != file.name:
        return
    layers = [slot for slot in context.contract.of_kind("cross-attention") if slot.layer is not None]
    for side, ports in (("input", file.view.inputs), ("output", file.view.outputs)):
        names = read_strings(encoder.get(f"{side}s"))
        whole = {key: {_complete(name, slot) for slot in layers} for key, name in names.items()}
        meant = {key: whole[key] if "%d" in name else {name} for key, name in names.items()}
        left = [port for port in ports if not any(port in one for one in meant.values())]
        for key, name in names.items():
            if not meant[key] & set(ports):
                actual = [_make_template(port, layers[0]) if "%d" in name else port for port in left if meant[key]]
                yield from _report_name(f"model.encoder.{side}s.{key}", name, side, actual)


def _report_name(key: str, name: str, side: str, actual: list[str]) -> Disagreements:
    for port in map(quoted, actual[:1]):
        yield Disagreement(key, quoted(name), f"{side} {port}", port, NOT_FOUND)


def _compare_window(context: ContractContext, window: dict[str, Any]) -> Disagreements:
    """The attention window, unless the cache slides over the prompt in chunks."""
    size, layers = window.get("window_size"), window.get("layers")
    seen = windows(context) or {}
    if not is_count(size) or window.get("slide_key_value_cache") is not False:
        return
    listed = [layer for layer in layers if is_count(layer) or layer == 0] if isinstance(layers, list) else []
    meant = {layer: width for layer, width in seen.items() if layer in listed} if listed else seen
    wrong = {width for width in meant.values() if width != size}
    # Without a list, the window is that of some layers.
    if wrong and (listed or size not in meant.values()):
        right = either(wrong) if min(wrong) > 0 else "no window"
        observed = f"local_window_size {either(wrong)} of GroupQueryAttention"
        agreed = size in declared_windows(context.folder.side_cars.config).values()
        if agreed:  # two files say the same: the export lost the window
            right, observed = f"{size} in the graph", f"{observed}, where config.json has {size} as well"
        key = "model.decoder.sliding_window.window_size"
        yield Disagreement(key, str(size), observed, right, by_graph=not agreed)


def _compare_shared_buffer(contract: CacheContract, search: dict[str, Any]) -> Disagreements:
    """One buffer for past and present, although the graph returns the past followed by the new entries."""
    slots = contract.of_kind("self-attention")
    joined = all(s.growth == "grow" and s.present is not None and s.continues_as == s.present for s in slots)
    if search.get("past_present_share_buffer") is True and search.get("num_beams", 1) == 1 and slots and joined:
        observed = "each present is the past followed by the new entries"
        so = "the runtime treats the whole buffer as past tokens"
        yield Disagreement("search.past_present_share_buffer", "true", observed, "false", so)


def _complete(template: str, slot: Slot) -> str:
    return template.replace("%d", str(slot.layer), 1)


def _make_template(name: str, slot: Slot) -> str:
    return re.sub(rf"(?<![0-9]){slot.layer}(?![0-9])", "%d", name, count=1)


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
        *(_compare_sizes(context, read_part(document, "model")) if named else ()),
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


def _compare_sizes(context: ContractContext, model: dict[str, Any]) -> Disagreements:
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

"""Genai: the graphs and the genai_config.json that onnxruntime-genai reads, and the tokenizer's files.

Requires: of a decoder without an encoder (`genai`) a graph for later steps that takes any number of tokens and an empty
past; keys and values of one size, layer by layer, that grow or are one buffer; token ids, and of masks and positions
those that onnxruntime-genai feeds; the token that ends a text, and the context, in the configs next to the model.
Ensures: one graph, model.onnx, whose names are declared in genai_config.json where one pattern names all layers, else
they become those of onnxruntime-genai. The copy generates the same tokens in onnxruntime-genai itself.

Whisper becomes an encoder that also returns the cross-attention cache, and a decoder that takes it.

Requires: a merged decoder or a pair, and an encoder of its own that takes features of 3,000 frames and nothing else;
token ids, encoder states, and one key and one value for each layer and each kind of attention.
Ensures: what computes the cross-attention cache moves from the graph of the first step into encoder.onnx. decoder.onnx
is an `If` on the length of the past: without one the graph of the first step runs, else that of later steps. The names
are those of the builder.
Sources: src/models/whisper.cpp, src/models/kv_cache.cpp and src/python/py/models/builders/whisper.py
(onnxruntime-genai 0.18.0).
"""

from pathlib import Path

from kvdoctor.addons.conversions.layouts import genai
from kvdoctor.addons.conversions.layouts.encoders import return_from_encoder, take_as_inputs
from kvdoctor.addons.conversions.layouts.genai import (
    CONSUMER,
    INTEGERS,
    NAME,
    SLOT_AXES,
    Configs,
    Setting,
    find_missing,
    list_settings,
    refuse_logits,
    refuse_slots,
    sort_slots,
    write_config,
)
from kvdoctor.addons.conversions.layouts.merging import SWITCH, MergePlan, merge
from kvdoctor.addons.conversions.layouts.naming import (
    PortNames,
    axis_names,
    first_of,
    name_axes,
    rename_as,
    rename_ports,
    sort_ports,
)
from kvdoctor.addons.conversions.layouts.optimum import INSIDE
from kvdoctor.addons.conversions.layouts.pair import find_halves
from kvdoctor.addons.conversions.layouts.registry import ConvertedModels, DoesNotFit, Layout, LayoutSource
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import Axis, CacheContract, Port, Slot
from kvdoctor.model.edit import GraphWriter, keep_only, make_node, sort_nodes
from kvdoctor.model.proto import ModelProto, TensorShapeProto
from kvdoctor.report.repair_record import Change

ENCODER, DECODER = "encoder", "decoder"
"""The stems of the files, and the parts of genai_config.json that name them."""
PROCESSOR = "audio_processor_config.json"
"""The file that onnxruntime-genai computes features from audio by."""
FRAMES = 3000
"""Frames of the features: 30 seconds, to which its processor pads and cuts every recording."""
FLOATS = ("float", "float16")
"""Types that it can be given features in."""
CROSS_AXES: tuple[Axis, ...] = ("batch", "kv_heads", "encoder", "head_dim")
TOKENS, STATES, LOGITS = "input_ids", "encoder_hidden_states", "logits"
FEATURES, HIDDEN = "audio_features", "hidden_states"
FAMILY = Setting("model.type", "whisper", "an encoder of features and a decoder with a cross-attention cache")
ADVICE = "cut it out first, with kvdoctor convert MODEL -o PARTS --layout optimum"


def refuse(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why onnxruntime-genai cannot run an encoder-decoder as a Whisper."""
    if stack.kind not in ("pair", "merged"):
        return (
            f"it has an encoder, and no graph of its own for the first step ({stack.kind}): of encoder-decoders this "
            "layout is for Whisper as a merged decoder or a pair"
        )
    if contract.graph("prefill").port("encoder_input") is not None:
        return f"its encoder is inside the graph of the first step: {ADVICE}"
    if "encoder" not in stack.files or "encode" not in contract.phases:
        return f"it has an encoder, whose file is not next to the decoder: {CONSUMER} needs both"
    crossed, own = contract.of_kind("cross-attention"), contract.of_kind("self-attention")
    if not crossed or not own or len(crossed) + len(own) < len(contract.slots):
        return "its caches are not those of a self-attention and a cross-attention"
    found = _refuse_features(contract) or _refuse_inputs(contract) or refuse_slots(own)
    found = found or refuse_slots(crossed, CROSS_AXES) or _refuse_caches(own, crossed, contract)
    return found or refuse_logits(contract)


def _refuse_features(contract: CacheContract) -> str | None:
    """Why an encoder cannot be fed the features that onnxruntime-genai makes of audio."""
    port, *more = contract.graph("encode").inputs
    if port.role != "encoder_input" or port.dtype not in FLOATS:
        return (
            f"it has an encoder that takes {port.name!r} ({port.dtype}): of encoder-decoders {CONSUMER} runs Whisper, "
            "whose encoder takes audio features"
        )
    if more:
        return (
            f"its encoder takes {more[0].name!r} as well, and {CONSUMER} feeds the encoder of a Whisper features alone"
        )
    frames = port.shape[2] if port.shape is not None and len(port.shape) == 3 else None
    if not isinstance(frames, int):
        return (
            f"its encoder does not declare how many frames {port.name!r} has: {CONSUMER} feeds a Whisper "
            f"[batch, mel bins, {FRAMES}]"
        )
    if frames != FRAMES:
        return (
            f"its encoder takes {frames} frames, and {CONSUMER} pads and cuts every recording to 30 seconds, {FRAMES} "
            f"frames: max_source_positions of the checkpoint must be {FRAMES // 2}"
        )
    return None if _width(contract) is not None else "the width of its encoder states is not declared"


def _states(contract: CacheContract) -> Port:
    """The encoder states as the encoder returns them."""
    graph = contract.graph("encode")
    return graph.port("encoder_states") or graph.outputs[0]


def _width(contract: CacheContract) -> int | None:
    size = (_states(contract).shape or (None,))[-1]
    return size if isinstance(size, int) else None


def _refuse_inputs(contract: CacheContract) -> str | None:
    """Why onnxruntime-genai cannot feed a decoder."""
    if contract.fixed_batch not in (None, 1):
        return f"it takes {contract.fixed_batch} sequences at once and no other number"
    for port in (*contract.graph("prefill").inputs, *contract.graph("decode").inputs):
        if port.role not in ("token_ids", "encoder_states", "past", "branch_switch"):
            role = port.role.replace("_", " ")
            return f"it takes {port.name!r} ({role}), which {CONSUMER} does not feed to the decoder of a Whisper"
        if port.role == "token_ids" and (port.dtype not in INTEGERS or port.axes != ("batch", "new")):
            return f"its input {port.name!r} is no {' or '.join(INTEGERS)}[batch, new]"
        if port.role == "past" and (size := port.size("past")) is not None:
            return f"its input {port.name!r} has the fixed length {size}, and {CONSUMER} feeds one that grows"
    if contract.graph("decode").port("token_ids") is None:
        return "it takes no token ids"
    if contract.new_tokens is not None:
        return f"its first step takes {contract.new_tokens} tokens and no other number"
    if contract.step_tokens not in (None, 1):
        return f"its later steps take {contract.step_tokens} tokens and no other number"
    return None


def _refuse_caches(own: tuple[Slot, ...], crossed: tuple[Slot, ...], contract: CacheContract) -> str | None:
    """Why the two kinds of caches cannot be one decoder's: onnxruntime-genai knows one size and type for both."""
    one, other = own[0], crossed[0]
    sizes = [(slot.dtype, slot.size("kv_heads"), slot.size("head_dim")) for slot in (one, other)]
    if sizes[0] != sizes[1] or {slot.layer for slot in own} != {slot.layer for slot in crossed}:
        return (
            f"the caches of its cross-attention differ in type, size or number from {one.past!r}: {CONSUMER} takes one"
        )
    features = contract.graph("encode").inputs[0]
    if not features.dtype == _states(contract).dtype == one.dtype:
        return f"its features, encoder states and caches differ in type, and {CONSUMER} feeds one"
    if any(slot.growth != "grow" for slot in own):
        return f"the cache {one.past!r} is a buffer, whose length does not tell the first step from later ones"
    strange = next((slot for slot in crossed if slot.filled_by is None or slot.filled_in != "prefill"), None)
    return None if strange is None else f"the first step does not compute {strange.past!r}"


def make(source: LayoutSource) -> ConvertedModels:
    """The encoder and the decoder, and the configuration that names their inputs and outputs."""
    contract, stack, words = source.contract, source.stack, axis_names(source.contract)
    encoder, (first, later) = source.model("encoder"), find_halves(source)
    files = source.new_name(ENCODER), source.new_name(DECODER)
    made = ConvertedModels({}, tuple(file.name for file in stack.files.values()), limit=INSIDE, encoder=files[0])
    caches = _name_half(first, contract, later=False)
    _name_half(later, contract, later=True)
    features, states = contract.graph("encode").inputs[0].name, _states(contract).name
    keep_only(encoder.graph.output, lambda value: value.name == states)
    rename_ports(encoder.graph, {features: FEATURES}, {states: HIDDEN})
    return_from_encoder(encoder, first, (HIDDEN, STATES), list(caches))
    rows = encoder.graph.input[0].type.tensor_type.shape.dim[0]
    for value in encoder.graph.output:  # the encoder halves the number of frames
        dims, axis = value.type.tensor_type.shape.dim, 1 if value.name == HIDDEN else CROSS_AXES.index("encoder")
        if len(dims) > axis:
            dims[0].CopyFrom(rows)
            dims[axis].CopyFrom(TensorShapeProto.Dimension(dim_value=FRAMES // 2))
    given = {value.name: value for value in later.graph.input}
    if missing := [past for past in caches.values() if past not in given]:
        raise DoesNotFit(f"later steps do not read {first_of(missing)}")
    take_as_inputs(first, STATES, {present: given[past] for present, past in caches.items()})
    plan = MergePlan(source.root, {})
    decoder = merge(first, later, plan)
    if plan.dropped:
        raise DoesNotFit(f"only one of its two graphs returns {first_of(plan.dropped)}")
    _choose_by_past(decoder)
    sort_ports(decoder.graph.input, [TOKENS])
    if source.readable:
        for graph in (encoder.graph, decoder.graph):
            name_axes(graph, {value.name: _axes(value.name) for value in (*graph.input, *graph.output)}, words)
    made.models |= {files[0]: encoder, files[1]: decoder}
    _configure(source, made)
    old = " and ".join(file.name for role, file in stack.files.items() if role != "encoder")
    made.changes += [
        Change(files[0], "outputs", f"computed by {old}", f"the cross-attention cache: {first_of(caches)}"),
        Change(files[1], "main graph", old, f"one If on the length of the past; {plan.shared} weights shared"),
    ]
    return made


def _name_half(half: ModelProto, contract: CacheContract, later: bool) -> dict[str, str]:
    """Give one half the builder's names; gives the pasts of the cross-attention by the names of their presents.

    Raises:
        DoesNotFit: it takes an input that has no such name.
    """
    graph, caches = contract.graph("decode" if later else "prefill"), dict[str, str]()
    roles = {"token_ids": TOKENS, "logits": LOGITS} | ({} if later else {"encoder_states": STATES})
    names = PortNames(
        {port.name: roles[port.role] for port in graph.inputs if port.role in roles},
        {port.name: roles[port.role] for port in graph.outputs if port.role in roles},
    )
    for kind, word in (("self-attention", "self"), ("cross-attention", "cross")):
        for index, slot in enumerate(sort_slots(contract.of_kind(kind))):
            past, present = (f"{side}_{slot.part}_{word}_{index // 2}" for side in ("past", "present"))
            if kind == "cross-attention":
                caches[present] = past
            if later:
                names.inputs[slot.past] = past
            if not later or kind == "self-attention":
                names.outputs[str(slot.present if later else slot.filled_by)] = present
    rename_as(half, names, graph, f"which {CONSUMER} does not feed to the decoder of a Whisper")
    return caches


def _axes(name: str) -> tuple[Axis, ...]:
    """The axes of an input or output, by its new name."""
    known: dict[str, tuple[Axis, ...]] = {TOKENS: ("batch", "new"), LOGITS: ("batch", "new", "vocabulary")}
    known |= {FEATURES: ("batch", "fixed", "fixed"), HIDDEN: ("batch", "encoder", "hidden")}
    if name in known:
        return known[name]
    length: Axis = "encoder" if "_cross_" in name else "past" if name.startswith("past") else "total"
    return tuple(length if axis == "past" else axis for axis in SLOT_AXES)


def _choose_by_past(model: ModelProto) -> None:
    """Let the length of a past decide which branch runs, in place of a switch that is an input."""
    past, writer = "past_key_self_0", GraphWriter(model, prefix="past")
    keep_only(model.graph.input, lambda value: value.name != SWITCH)
    length = writer.size_of(past, SLOT_AXES.index("past"))
    model.graph.node.append(make_node("Greater", [length, writer.numbers([0])], SWITCH))
    sort_nodes(model.graph)


def _configure(source: LayoutSource, made: ConvertedModels) -> None:
    """Add genai_config.json and the notes on what else the folder needs."""
    contract, configs = source.contract, Configs.beside(source.root)
    own = sort_slots(contract.of_kind("self-attention"))
    heads, graph = own[0].size("kv_heads"), "the graph"
    more = [
        Setting("model.decoder.num_attention_heads", heads, graph),
        Setting("model.encoder.hidden_size", _width(contract), graph),
    ]
    settings = list_settings(configs, contract, own, FAMILY, tuple(more))
    made.changes += [Change(NAME, one.key, "", f"{one.value} ({one.because})") for one in settings]
    encoder, decoder = made.models
    inputs, outputs = {"input_ids": TOKENS}, {"logits": LOGITS}
    returned = {"encoder_hidden_states": HIDDEN}
    for part in ("key", "value"):
        inputs[f"past_{part}_names"] = f"past_{part}_self_%d"
        inputs[f"cross_past_{part}_names"] = f"past_{part}_cross_%d"
        outputs[f"present_{part}_names"] = f"present_{part}_self_%d"
        returned[f"cross_present_{part}_names"] = f"present_{part}_cross_%d"
    graphs = {ENCODER: (encoder, {"audio_features": FEATURES}, returned), DECODER: (decoder, inputs, outputs)}
    made.texts[NAME] = write_config(graphs, settings)
    if not any((folder / PROCESSOR).is_file() for folder in (source.root, configs.folder)):
        made.notes.append(
            f"no {PROCESSOR} lies next to the model: {CONSUMER} generates from features without one, and needs it and "
            "the tokenizer of the checkpoint in the folder to read audio; kvdoctor re-export --from CHECKPOINT "
            "--exporter genai writes both"
        )


def refuse_any(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why onnxruntime-genai cannot run a stack."""
    root = stack.main.path.parents[len(Path(stack.main.name).parts) - 1]
    if (root / NAME).is_file():
        return f"its folder already has a {NAME}, which `kvdoctor step-test` compares with the graph"
    found = (refuse if contract.has_encoder else genai.refuse)(stack, contract)
    return found or find_missing(Configs.beside(root), contract)


LAYOUT = Layout(
    "genai",
    f"the graphs and genai_config.json for {CONSUMER}, proved by generating with it",
    refuse_any,
    lambda source: (make if source.contract.has_encoder else genai.make)(source),
    consumer=CONSUMER,
    beside=(*genai.TOKENIZER, PROCESSOR),
)

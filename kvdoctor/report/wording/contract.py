"""What the files of a model declare, in text: the files, their ports, and the cache contract of a stack."""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from kvdoctor.contract import DECODING, ITEM_BYTES, CacheContract, Carry, Features, First, Growth, Port, Slot, describe
from kvdoctor.report.facts import FileFacts, StackFacts
from kvdoctor.report.wording import format_bytes, format_count, join_some, shorten_names

GROWTH_TEXTS: dict[Growth, str] = {
    "grow": "grows by the new tokens",
    "static": "a buffer of fixed capacity, written in place",
    "shared": "grows, or stays a fixed buffer if it is fed as one",
    "ring": "a window of fixed capacity; the oldest entries drop out",
    "delta": "only the new entries are returned",
    "replace": "a state of fixed size, replaced by each step",
    "constant": "does not change after the first step",
    "paged": "blocks of a pool, addressed by the block table",
}

CARRY_TEXTS: dict[Carry, tuple[str, str]] = {
    "feed-back": ("feed back", "{present} -> {past}"),
    "hold": ("keep", "{filled_by} -> {past} at every later step"),
    "append": ("append", "next {past} = {past} followed by {present}"),
    "write": ("write", "{present} into {past} at the past length"),
    "shift": ("shift", "next {past} = {past} without its oldest rows, followed by {present}"),
    "drop-oldest": ("feed back", "{present} without its first row -> {past}"),
    "extend": ("feed back", "{present} followed by one row of zeros -> {past}"),
}

FIRST_TEXTS: dict[First, str] = {
    "empty": "a past of length 0",
    "dummy": "a past of length 1, masked out",
    "zeros": "zeros",
    "encoder": "the encoder's output",
    "prefill": "filled by {prefill}, which takes no past",
    "ignored": "any length (ignored by the graph; usually 0)",
}

STATES = {"hidden-memory": "hidden memory", "encoder-states": "encoder states", "conv-state": "convolution state"}
MOST_NUMBERED = 6
NUMBERED = re.compile(r"\d+|key|value")
MOST_SLOTS = 8
MOST_MISSING = 6
MOST_READINGS = 3


def describe_contract(stack: StackFacts) -> Iterator[tuple[str, str]]:
    """The cache contract of a stack as label and text; a label that repeats is left out."""
    contract = stack.contract
    if contract is None:
        return
    yield "layout", f"{stack.layout}: {', '.join(stack.files)}"
    yield from _stages(contract)
    label = "cache"
    # Slots that differ in their layer, or in being key or value, alone.
    for group in _group(
        contract.slots, lambda one: (one.kind, describe_step(one), one.window, one.dtype, fixed_axes(one))
    ):
        yield label, _slots(group)
        label = ""
    if contract.ring is not None and any(slot.growth == "static" for slot in contract.slots):
        full = f"after {format_count(contract.ring, 'token')}" if contract.ring else "when the buffer is full"
        yield "ring", f"{full}, each step of one token writes over the oldest entry"
    yield from _axes(contract)
    yield "first step", _first_step(contract)
    yield "feed", _fed(contract)
    yield from _readings(contract)
    if adapters := [port.name for port in contract.graph("decode").inputs if port.role == "adapter"]:
        yield "adapter", f"{len(adapters)} inputs, as {adapters[0]}: zeros without an adapter"
    if "embed" in contract.phases:
        yield "embed", _embedded(contract)
    yield from ((features.phase, _rows(features, contract)) for features in contract.features)
    for carry, (verb, rule) in CARRY_TEXTS.items():
        carried = [slot for slot in contract.slots if slot.carry == carry]
        for slots in _group(carried, lambda one: (one.kind, one.filled_in, one.is_given)):
            yield verb, _carry_rule(slots, rule)
    yield from _memory(stack)
    for part in contract.missing[:MOST_MISSING]:
        yield "missing", f"{part.subject}: {part.reason}"


def _readings(contract: CacheContract) -> Iterator[tuple[str, str]]:
    """How each port with more than one reading is read, and by what that was settled."""
    for one in contract.ambiguities:
        texts = list(dict.fromkeys(reading.text for reading in one.readings))
        if one.settled:
            yield "reading", f"{one.subject}: {texts[0]} ({one.settled})"
        elif one.unknown:
            tried = f"step-test tries {'; '.join(texts[:MOST_READINGS])}; --feed NAME=VALUE decides"
            yield "reading", f"{one.subject}: nothing says what to feed; {tried}"


def list_fed(stacks: Sequence[StackFacts]) -> Iterator[str]:
    """What inputs were fed of which nothing in the file says it, and the runs did."""
    ambiguities = (one for stack in stacks if stack.contract is not None for one in stack.contract.ambiguities)
    found = [f"{one.subject}, {one.readings[0].text}" for one in ambiguities if one.unknown and len(one.readings) > 1]
    if found:
        yield "; ".join(found[:MOST_READINGS])


def _stages(contract: CacheContract) -> Iterator[tuple[str, str]]:
    """The files of a pipeline in their order, and what each hands on to a later one."""
    for phase in dict.fromkeys(contract.phases[one].graph for one in DECODING):
        label, stages = "stages", contract.graphs[phase].stages
        for number, stage in enumerate(stages, 1):
            later = {name: (one.file, own) for one in stages[number:] for own, name in one.inputs.items()}
            handed = [(own, *later[name]) for own, name in stage.outputs.items() if name in later]
            handed_on = ", ".join(f"{own} -> {name} of {file}" for own, file, name in handed)
            last = "logits" if number == len(stages) else "nothing"
            yield label, f"{number}. {stage.file}: {handed_on or last}"
            label = ""


PROMPT = 4096
"""Tokens of the prompt whose logits are counted, where a sequence may have so many."""


def describe_logits(stack: StackFacts) -> Iterator[tuple[str, str]]:
    """The bytes of logits that a long prompt costs, as label and text; nothing where a call returns one row."""
    if (contract := stack.contract) is None:
        return
    port = contract.graph("prefill").port("logits") if "prefill" in contract.phases else None
    width, item = contract.vocabulary, ITEM_BYTES.get(port.dtype) if port is not None else None
    if width is None or item is None or contract.new_tokens is not None:
        return
    one = format_bytes(width * item)
    if contract.last_logits_only:
        yield "logits", f"{one} per sequence for a prompt of any length: those of the last token"
        return
    chosen = contract.graph("prefill").port("logits_to_keep")
    less = f"; {one} with convert --logits last" if stack.logits_can_be_cut else ""
    less = f"; {one} with {chosen.name} = 1" if chosen is not None else less
    prompt = min(PROMPT, contract.usable_length or PROMPT)
    yield "logits", f"{format_bytes(prompt * width * item)} for a prompt of {prompt:,} tokens{less}"


def describe_proof(stack: StackFacts) -> Iterator[tuple[str, str]]:
    """What is proved, as label and text: one line, two where it holds for one new token a step alone."""
    proof, contract = stack.proof, stack.contract
    if proof is None or contract is None:
        return
    if proof.holds:
        batched = contract.fixed_batch is None
        if proof.single:
            lengths = "past and batch, one new token a step" if batched else "past, one new token a step"
        else:
            lengths = "past, chunk and batch" if batched else "past and chunk"
        end = f" up to {proof.up_to:,} tokens (rows of {proof.table})" if proof.up_to is not None else ""
        end += ", with one sequence where several tokens come on a past" if proof.one_row and batched else ""
        end += ", if no attention score is below the mask value (such as -10,000)" if proof.weak_mask else ""
        end += ", but for the rounding of activations to integers" if proof.rounded else ""
        yield "proved", f"with and without a cache agree for every {lengths}{end}"
    if proof.exceptions:
        what = "for several new tokens a step" if proof.single else "at lengths that were not run"
        yield "not proved", f"agreement {what}; limit of the analysis: {'; '.join(proof.exceptions)}"


OUTLINED = (
    *("layout", "stages", "cache", "ring", "axes", "first step", "reading"),
    *("embed", "vision", "audio", "memory", "logits", "proved", "not proved", "missing"),
)


def outline_contracts(stacks: Sequence[StackFacts]) -> Iterator[tuple[str, str]]:
    """The cache contracts in short: what is the same once, else with its stack. Names are left out."""
    found: dict[str, dict[str, list[str]]] = {label: {} for label in OUTLINED}
    for stack in stacks:
        label = ""
        for title, text in (*describe_contract(stack), *describe_logits(stack), *describe_proof(stack)):
            label = title or label
            if label in found:
                found[label].setdefault(text, []).append(stack.name)
    for label, texts in found.items():
        for number, (text, names) in enumerate(texts.items()):
            whose = "" if len(names) == len(stacks) else f" ({', '.join(names)})"
            yield label if number == 0 else "", text + whose


def format_files(files: Sequence[FileFacts]) -> str:
    """`4 files, 881.9 KiB: IR 8, 9; opset ai.onnx 18; pytorch 2.13.0, optimum-onnx`."""
    size = format_bytes(sum(file.bytes for file in files))
    ir = dict.fromkeys(str(file.ir_version) for file in files if file.ir_version is not None)
    opsets = dict.fromkeys(f"{name or 'ai.onnx'} {number}" for one in files for name, number in one.opsets.items())
    producers = dict.fromkeys(file.producer for file in files if file.producer)
    facts = [f"IR {', '.join(ir)}" if ir else "", f"opset {', '.join(opsets)}" if opsets else "", ", ".join(producers)]
    # The release that opens all files, where an older one does not.
    demanding = [file for file in files if file.oldest_runtime and file.oldest_because]
    if demanding and not any(file.graph is not None and file.oldest_runtime is None for file in files):
        worst = max(demanding, key=lambda file: [int(part) for part in str(file.oldest_runtime).split(".")])
        facts.append(f"needs onnxruntime {worst.oldest_runtime} ({worst.oldest_because})")
    known = "; ".join(filter(None, facts))
    return f"{format_count(len(files), 'file')}, {size}" + (f": {known}" if known else "")


def list_slots(contract: CacheContract) -> Iterator[list[str]]:
    """Every slot: past, type with the meaning of its axes, growth, carry, present."""
    for slot in contract.slots:
        present = slot.present or f"({slot.filled_by or 'nothing'})"
        yield [slot.past, format_slot_type(slot), slot.growth, slot.carry, present]


def format_layers(slots: Sequence[Slot]) -> str:
    """`layers 0 to 11`."""
    numbers = sorted({slot.layer for slot in slots if slot.layer is not None})
    if not numbers:
        return "all layers in one tensor"
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]} to {numbers[-1]}"
    return f"layers {join_some([*map(str, numbers)], MOST_NUMBERED)}"


def format_slot_type(slot: Slot) -> str:
    """`float[batch, 4 kv_heads, past, 8 head_dim]`: the meaning of each axis, and its size where it is a number."""
    known = ("fixed", "state")
    written = [
        (str(size) if axis in known else f"{size} {axis}") if isinstance(size, int) else axis
        for size, axis in zip(slot.shape, slot.axes, strict=True)
    ]
    return f"{slot.dtype}[{', '.join(written)}]"


def fixed_axes(slot: Slot) -> tuple[object, ...]:
    """Axes with their sizes where these are numbers: names of axes may differ from slot to slot."""
    numbers = (size if isinstance(size, int) else None for size in slot.shape)
    return tuple(zip(slot.axes, numbers, strict=True))


def _group(slots: Iterable[Slot], facts: Callable[[Slot], Hashable]) -> Iterable[list[Slot]]:
    groups: dict[Hashable, list[Slot]] = {}
    for slot in slots:
        groups.setdefault(facts(slot), []).append(slot)
    return groups.values()


def describe_step(slot: Slot) -> str:
    """What a step does to the length of a slot, and where new entries come if not at its end."""
    return GROWTH_TEXTS[slot.growth] + ", which come before the past" * slot.prepended


def _slots(slots: list[Slot]) -> str:
    """`self-attention, layers 0 to 11, key and value float[batch, 4 kv_heads, past, 8 head_dim]: grows ...`."""
    slot = slots[0]
    parts = " and ".join(dict.fromkeys(s.part for s in slots if s.part != "state"))
    window = f"; attention window of {slot.window} tokens" if slot.window is not None else ""
    kind = f"{STATES.get(slot.kind, slot.kind.replace('-state', ' state'))}, {format_layers(slots)}"
    return f"{kind}, {parts + ' ' if parts else ''}{format_slot_type(slot)}: {describe_step(slot)}{window}"


def _axes(contract: CacheContract) -> Iterator[tuple[str, str]]:
    """The name of each dynamic axis, and the size of each fixed one, as label and text."""
    kinds: dict[str, dict[str, dict[str, None]]] = {"dynamic": {}, "fixed": {}}
    for phase in contract.phases.values():
        for port in contract.graphs[phase.graph].inputs:
            for axis, size in zip(port.axes, port.shape or (), strict=False):
                if axis != "fixed":
                    kind = "fixed" if isinstance(size, int) else "dynamic"
                    kinds[kind].setdefault(axis, {})[str(size or "unnamed")] = None
    sizes = {title: ", ".join(f"{a} = {' or '.join(n)}" for a, n in found.items()) for title, found in kinds.items()}
    yield from zip(("axes", ""), (f"{title}: {text}" for title, text in sizes.items() if text), strict=False)


def _first_step(contract: CacheContract) -> str:
    """The graph or branch of the first step, and what its pasts are fed."""
    switch, prefill = contract.graph("decode").port("branch_switch"), contract.graph("prefill").file
    if contract.first_step == "no-past-graph" and all(slot.first == "prefill" for slot in contract.slots):
        return f"{prefill}, which takes no past; every later step {contract.graph('decode').file}"
    firsts = []
    for first in dict.fromkeys(slot.first for slot in contract.slots):
        slots = [slot for slot in contract.slots if slot.first == first]
        kinds = ", ".join(dict.fromkeys(slot.kind for slot in slots))
        whose = "past inputs of " if first == "ignored" else f"{kinds}: " if len(slots) < len(contract.slots) else ""
        firsts.append(whose + FIRST_TEXTS[first].format(prefill=prefill))
    text = "; ".join(firsts) or "no past"
    if contract.first_step == "no-past-branch":
        off, on = (str(contract.phases[phase].switch).lower() for phase in ("prefill", "decode"))
        return f"{switch.name if switch else 'the switch'} = {off}, {text}; {on} at every later step"
    if contract.graph("prefill") is not contract.graph("decode"):
        return f"{prefill}: {text}; every later step {contract.graph('decode').file}"
    return text


def _fed(contract: CacheContract) -> str:
    """The inputs of every step besides the cache, and those of the first step on top."""
    fed = (contract.graph(phase).inputs for phase in ("decode", "prefill"))
    other = ("past", "branch_switch", "auxiliary", "adapter")
    every, first = ([port for port in ports if port.role not in other] for ports in fed)
    first = [port for port in first if port.name not in {one.name for one in every}]
    return f"every step: {_port_names(every)}" + (f"; first step also: {_port_names(first)}" if first else "")


def _embedded(contract: CacheContract) -> str:
    """The embedding graph, what it is fed, and which of its outputs go where."""
    from kvdoctor.decode.embeddings import embedded_inputs  # loads numpy, which other contracts do not need

    graph = contract.graph("embed")
    pairs = {name: made for phase in DECODING for name, made in embedded_inputs(contract, phase).items()}
    fed = [p.name if p.role == "token_ids" else f"{p.name} (features, none for text)" for p in graph.inputs]
    rules = ", ".join(f"{made} -> {name}" for name, made in pairs.items())
    return f"{graph.file} at every step, fed {', '.join(fed)}: {rules}"


def _rows(one: Features, contract: CacheContract) -> str:
    """An encoder of images or audio, and where its rows go."""
    graph = contract.graph(one.phase)
    token = f"token {one.token}" if one.token is not None else "a placeholder token"
    places = f"the places of {token} among the embeddings"
    if "embed" in contract.phases and any(port.role == "features" for port in contract.graph("embed").inputs):
        places = f"{contract.graph('embed').file}, for the places of {token}"
    thing = "image" if one.phase == "vision" else "audio clip"
    count = f"; {one.rows} rows for one {thing} ({one.declared})" if one.rows is not None else ""
    return f"{graph.file} once, fed {', '.join(port.name for port in graph.inputs)}: {one.output} -> {places}{count}"


def _port_names(ports: list[Port]) -> str:
    """Names, with role and type where the name does not say the role."""
    said = {"token_ids": "input_ids", "embeddings": "embeds", "encoder_states": "encoder_hidden_states"}
    made = []
    for port in ports:
        fed = "" if port.value is None else f", fed {port.value:g}"
        kind = f" ({port.role} {describe(port.dtype, port.shape)}{fed})"
        is_said = said.get(port.role, port.role) in port.name or (port.role == "encoder_mask" and "mask" in port.name)
        made.append(port.name if is_said else port.name + kind)
    return ", ".join(made)


def _carry_rule(slots: list[Slot], rule: str) -> str:
    """The rule for the first slot where the others follow from it by their numbers and parts, else for each."""
    sources = {"prefill": "the first step", "encode": "the encoder", "decode": "the first step"}
    rules = []
    for slot in slots:
        filled = f"{slot.filled_by} of {sources[slot.filled_in]}" if slot.filled_by else "the caller's value"
        rules.append(rule.format(past=slot.past, present=slot.present or "nothing", filled_by=filled))
    patterns = {_pattern(text) for text in rules}
    if len(rules) == 1 or (len(patterns) == 1 and min(patterns)[1]):
        return rules[0] + (f" ({len(slots)} slots)" if len(slots) > 1 else "")
    return join_some(rules, MOST_SLOTS, "; ", "; {} more (all in --format json)")


def _pattern(text: str) -> tuple[str, bool]:
    """A line without its numbers, and without what says key or value, and whether both names have the same of them."""
    before, _, after = text.partition(" -> ")
    marks = re.compile(r"\d+|key|value|[kv](?=_|\b|\d)", re.ASCII)
    return marks.sub("", text), marks.findall(before)[:1] == marks.findall(after)[:1]


def _memory(stack: StackFacts) -> Iterator[tuple[str, str]]:
    size = stack.cache
    if size is None or size.bytes_per_token is None or not size.parts:
        return
    states = sum(part.bytes or 0 for part in size.parts if part.counted == "once")
    sizes = {"per token": size.bytes_per_token, "per encoder state": size.bytes_per_encoder_state, "of states": states}
    text = ", ".join(f"{format_bytes(number)} {of}" for of, number in sizes.items() if number)
    if size.bytes_at_context:
        text += f"; {format_bytes(size.bytes_at_context)} at the context of {size.context} tokens"
    if text:
        yield "memory", f"{text}, for each sequence"


def list_file_facts(file: FileFacts) -> list[str]:
    """File, role, size, IR, opsets, producer."""
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in file.opsets.items())
    weights = f" + {', '.join(file.external)}" if file.external else ""
    size, producer = format_bytes(file.bytes), file.producer or ""
    return [file.path + weights, file.role, size, str(file.ir_version or "-"), opsets, producer]


def list_ports(file: FileFacts) -> Iterator[list[str]]:
    """Inputs and outputs: direction, name, type. Those that differ in their layer, or in key and value, are one row."""
    for direction, ports in (("in", file.inputs), ("out", file.outputs)):
        groups: dict[tuple[str, str], list[str]] = {}
        for port in ports:
            name = NUMBERED.sub("*", port["name"]) if re.search(r"\d", port["name"]) else port["name"]
            dtype, shape = port["dtype"] or "?", port["shape"]
            declared = f"{dtype}, no shape" if shape is None else describe(dtype, shape)
            groups.setdefault((declared, name), []).append(port["name"])
        for (declared, _), names in groups.items():
            yield [direction, shorten_names(names), declared]

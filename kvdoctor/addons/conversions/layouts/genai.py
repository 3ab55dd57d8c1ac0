"""Genai: the graphs and the genai_config.json that onnxruntime-genai reads, and the tokenizer's files.

Requires: Whisper (`genai_whisper`), or a decoder without an encoder, whose graph for later steps takes any number of
tokens and an empty past; keys and values of one size, layer by layer, that grow or are one buffer; token ids, and of
masks and positions those that onnxruntime-genai feeds; the token that ends a text, and the context, in the configs
next to the model.
Ensures: of a decoder one graph, model.onnx, whose names are declared in genai_config.json where one pattern names all
layers, else they become those of onnxruntime-genai. The copy generates the same tokens in onnxruntime-genai itself.
"""

from pathlib import Path

from kvdoctor.addons.conversions.layouts import genai_whisper
from kvdoctor.addons.conversions.layouts.genai_config import (
    CONSUMER,
    DECODER,
    DEFAULTS,
    INPUTS,
    INTEGERS,
    NAME,
    SLOT_AXES,
    Configs,
    GraphEntries,
    find_missing,
    list_settings,
    refuse_logits,
    refuse_slots,
    sort_slots,
    write_config,
)
from kvdoctor.addons.conversions.layouts.naming import (
    SINGLE,
    PortNames,
    axis_names,
    first_of,
    list_renamings,
    name_axes,
    rename_as,
    unnamed_inputs,
)
from kvdoctor.addons.conversions.layouts.optimum import INSIDE
from kvdoctor.addons.conversions.layouts.pair import split_halves
from kvdoctor.addons.conversions.layouts.registry import ConvertedModels, DoesNotFit, Layout, LayoutSource
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract, Role
from kvdoctor.model.proto import ModelProto
from kvdoctor.records import record
from kvdoctor.report.repair_record import Change

FED: dict[Role, str] = {"token_ids": "input_ids", "attention_mask": "attention_mask", "position_ids": "position_ids"}
"""Inputs that onnxruntime-genai feeds, by role, and their entries in genai_config.json."""
AXES = {"token_ids": ("batch", "new"), "attention_mask": ("batch", "total"), "position_ids": ("batch", "new")}
MOST_LETTERS = 63
"""Letters of a name that is made from a pattern. Source: ComposeKeyValueName in src/models/kv_cache.cpp."""

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
"""The files of a tokenizer, as transformers and sentencepiece write them."""


def refuse(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why onnxruntime-genai cannot run a decoder."""
    root = stack.main.path.parents[len(Path(stack.main.name).parts) - 1]
    if (root / NAME).is_file():
        return f"its folder already has a {NAME}, which `kvdoctor step-test` compares with the graph"
    configs = Configs.beside(root)
    if contract.has_encoder:
        return genai_whisper.refuse(stack, contract) or find_missing(configs, contract)
    if stack.kind not in ("decoder-only", "pair", "merged"):
        return f"it is no decoder that one graph can serve ({stack.kind})"
    found = _refuse_inputs(contract) or _refuse_lengths(contract) or refuse_slots(contract.slots)
    return found or refuse_logits(contract) or find_missing(configs, contract)


def _refuse_inputs(contract: CacheContract) -> str | None:
    ports = [port for port in contract.graph("decode").inputs if port.role not in ("past", "branch_switch")]
    if contract.codebooks > 1:
        return f"it takes {contract.codebooks} tokens at each position"
    for port in ports:
        role = port.role
        if role not in FED:
            return f"it takes {port.name!r} ({role.replace('_', ' ')}), which {CONSUMER} does not feed to a decoder"
        if port.axes != AXES[role] or port.dtype not in INTEGERS:
            declared = f"{port.dtype}[{', '.join(port.axes)}]"
            wanted = f"{' or '.join(INTEGERS)}[{', '.join(AXES[role])}]"
            return f"its input {port.name!r} is {declared}, and {CONSUMER} feeds {wanted}"
    if not any(port.role == "token_ids" for port in ports):
        return "it takes no token ids"
    types = {port.dtype for port in ports if port.role != "token_ids"}
    if len(types) > 1:
        return f"its mask and its positions differ in type ({', '.join(sorted(types))}), and {CONSUMER} feeds one type"
    return None


def _refuse_lengths(contract: CacheContract) -> str | None:
    if contract.fixed_batch not in (None, 1):
        return f"it takes {contract.fixed_batch} sequences at once and no other number"
    for port in contract.graph("decode").inputs:
        size = port.size("new")
        if size is not None:
            return f"it takes {size} new token{'s' * (size > 1)} at a time, and {CONSUMER} feeds a prompt in one call"
        size = port.size("past") or port.size("total")
        if size is not None:
            return f"its input {port.name!r} has the fixed length {size}, and {CONSUMER} feeds one that grows"
    return None


@record(slots=False)
class GenaiNames:
    """The names of the new graph: by port, as a `PortNames`, and by entry of genai_config.json."""

    ports: PortNames
    entries: dict[str, str]


def choose_names(contract: CacheContract) -> GenaiNames:
    """The names stay if one pattern names each kind of cache in all layers; else all become the usual ones."""
    graph, slots = contract.graph("decode"), sort_slots(contract.slots)
    caches = {
        "past_key_names": [slot.past for slot in slots if slot.part == "key"],
        "past_value_names": [slot.past for slot in slots if slot.part == "value"],
        "present_key_names": [str(slot.present) for slot in slots if slot.part == "key"],
        "present_value_names": [str(slot.present) for slot in slots if slot.part == "value"],
    }
    patterns = {entry: find_pattern(names) for entry, names in caches.items()}
    stay = all(patterns.values())
    names, entries = PortNames(), dict[str, str]()
    for port in (*graph.inputs, *graph.outputs):
        entry = "logits" if port.role == "logits" else FED.get(port.role)
        if entry is not None and entry not in entries:
            entries[entry] = port.name if stay else DEFAULTS[entry]
            side = names.outputs if entry == "logits" else names.inputs
            side[port.name] = entries[entry]
            names.axes[entries[entry]] = port.axes
    for entry, olds in caches.items():
        entries[entry] = patterns[entry] if stay else DEFAULTS[entry]  # type: ignore[assignment]
        side = names.outputs if entry.startswith("present") else names.inputs
        for layer, old in enumerate(olds):
            side[old] = entries[entry].replace("%d", str(layer))
            total = tuple("total" if axis == "past" else axis for axis in SLOT_AXES)
            names.axes[side[old]] = total if entry.startswith("present") else SLOT_AXES
    return GenaiNames(names, entries)


def find_pattern(names: list[str]) -> str | None:
    """The pattern with `%d` for the layer, counted from 0, that gives these names; None if there is none."""
    first = names[0]
    for at, letter in enumerate(first):
        pattern = f"{first[:at]}%d{first[at + 1 :]}"
        if letter == "0" and [pattern.replace("%d", str(layer)) for layer in range(len(names))] == names:
            fits = "%" not in first and all(0 < len(name.encode()) <= MOST_LETTERS for name in names)
            return pattern if fits else None
    return None


def make(source: LayoutSource) -> ConvertedModels:
    """The graphs, and the configuration that names their inputs and outputs."""
    return (genai_whisper.make if source.contract.has_encoder else _make_decoder)(source)


def _make_decoder(source: LayoutSource) -> ConvertedModels:
    model, contract = _read_graph(source), source.contract
    roles = ("decoder", "decoder-with-past", "decoder-merged")
    files = [source.stack.main.name, *(f.name for r, f in source.stack.files.items() if r in roles)]
    made = ConvertedModels({}, tuple(dict.fromkeys(files)), limit=INSIDE)
    names, file = choose_names(contract), source.new_name(SINGLE)
    renamed = list_renamings(source.stack.main.name, model.graph, names.ports)
    rename_as(model, names.ports)
    if strange := unnamed_inputs(model, contract.graph("decode"), names.ports):
        raise DoesNotFit(f"it takes {first_of(port.name for port in strange)}, which {CONSUMER} does not feed")
    if source.readable:
        name_axes(model.graph, names.ports.axes, axis_names(contract))
    configs = Configs.beside(source.root)
    settings = list_settings(configs, contract, sort_slots(contract.slots), DECODER)
    made.changes += [Change(NAME, one.key, "", f"{one.value} ({one.because})") for one in settings]
    made.changes += renamed
    made.models[file] = model
    inputs = {key: name for key, name in names.entries.items() if key in INPUTS}
    outputs = {key: name for key, name in names.entries.items() if key not in INPUTS}
    made.texts[NAME] = write_config({"decoder": GraphEntries(file, inputs, outputs)}, settings)
    if not has_tokenizer(source.root, configs.folder):
        made.notes.append(
            f"no tokenizer lies next to the model: {CONSUMER} generates from token ids without one, and needs "
            "tokenizer.json and tokenizer_config.json of the checkpoint in the folder to read text"
        )
    return made


def has_tokenizer(*folders: Path) -> bool:
    """Whether one of the folders has the file of a tokenizer that says more than its settings."""
    words = [name for name in TOKENIZER if not name.endswith(("_config.json", "_map.json", "_tokens.json", ".jinja"))]
    return any((folder / name).is_file() for folder in folders for name in words)


def _read_graph(source: LayoutSource) -> ModelProto:
    """The graph that takes the past: alone, the later one of a pair, or the cached branch of a merged decoder."""
    if source.stack.kind == "pair":
        return source.model("decoder-with-past")
    if source.stack.kind == "merged":
        return split_halves(source.model("decoder-merged"), source.contract)[1]
    return source.model(source.stack.main_role)


LAYOUT = Layout(
    "genai",
    f"the graphs and genai_config.json for {CONSUMER}, proved by generating with it",
    (SINGLE, genai_whisper.ENCODER, genai_whisper.DECODER),
    refuse,
    make,
    consumer=CONSUMER,
    beside=(*TOKENIZER, genai_whisper.PROCESSOR),
)

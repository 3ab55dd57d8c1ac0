"""What onnxruntime-genai takes of a decoder, its genai_config.json, and the graph of a decoder without an encoder.

Limits are types, caches, logits, and the lengths of names. Each value of the config has its origin: vocabulary, heads,
head size and layers come from the contract, token ids and the context from the configs next to the model. What is
needed and stands in none of them is asked for, never invented.
Sources: src/models/kv_cache.cpp, src/models/input_ids.cpp, src/config.h and src/config.cpp (onnxruntime-genai 0.18.0).
"""

import json
from pathlib import Path
from typing import Any

from kvdoctor.addons.conversions.layouts.naming import (
    SINGLE,
    PortNames,
    axis_names,
    list_renamings,
    name_axes,
    rename_as,
)
from kvdoctor.addons.conversions.layouts.optimum import INSIDE
from kvdoctor.addons.conversions.layouts.pair import split_halves
from kvdoctor.addons.conversions.layouts.registry import ConvertedModels, LayoutSource
from kvdoctor.analysis.configs import decoder_config, is_count
from kvdoctor.analysis.model_folder import read_object
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import Axis, CacheContract, Role, Slot
from kvdoctor.model.files import side_car_folder
from kvdoctor.records import record
from kvdoctor.report.repair_record import Change

CONSUMER = "onnxruntime-genai"
INTEGERS = ("int32", "int64")
FLOATS = ("float", "float16", "bfloat16")
SLOT_AXES: tuple[Axis, ...] = ("batch", "kv_heads", "past", "head_dim")


def refuse_slots(slots: tuple[Slot, ...], axes: tuple[Axis, ...] = SLOT_AXES) -> str | None:
    """Why it cannot carry caches: they must be one key and one value for each layer, of one type and size."""
    first = slots[0]
    for slot in slots:
        if (reason := _refuse_slot(slot, first, axes)) is not None:
            return reason
    keys, values = ([slot.layer for slot in slots if slot.part == part] for part in ("key", "value"))
    if sorted(map(str, keys)) != sorted(map(str, values)) or len({*keys}) != len(keys):
        return "its layers do not each have one key and one value"
    return None


def _refuse_slot(slot: Slot, first: Slot, axes: tuple[Axis, ...]) -> str | None:
    where = f"the cache {slot.past!r}"
    whose = "all layers" if slot.layer is None else f"layer {slot.layer}"
    if slot.kind != first.kind or slot.part not in ("key", "value") or slot.layer is None:
        what = slot.kind if slot.kind not in ("self-attention", "cross-attention") else f"{slot.part} of {whose}"
        return f"{where} is a {what}: this layout is for one key and one value in each layer"
    if slot.kind == "self-attention" and (slot.growth not in ("grow", "shared") or slot.trimmed or slot.prepended):
        how = "cut to a window" if slot.trimmed else "new entries first" if slot.prepended else slot.growth
        return f"{where} neither grows with each step nor is one buffer for past and present ({how})"
    if slot.axes != axes:
        return f"the axes of {slot.past!r} are {', '.join(slot.axes)}: {CONSUMER} feeds {', '.join(axes)}"
    if slot.kind == "self-attention" and slot.present is None:
        return f"{where} is not returned"
    if slot.dtype not in FLOATS or slot.dtype != first.dtype:
        return f"{where} is {slot.dtype}, where {CONSUMER} feeds one type of {', '.join(FLOATS)} to all layers"
    own, sizes = ((one.size("kv_heads"), one.size("head_dim")) for one in (slot, first))
    if None in own:
        return f"the number of heads or the head size of {slot.past!r} is not known"
    if own != sizes:
        mine, others = ("x".join(map(str, pair)) for pair in (own, sizes))
        return f"{where} has {mine} heads x head size, {first.past!r} {others}: {CONSUMER} takes one size"
    return None


def refuse_logits(contract: CacheContract) -> str | None:
    """Why it cannot read the logits."""
    port = contract.graph("decode").port("logits")
    if port is None:
        return "it returns no logits"
    if port.dtype not in FLOATS or (port.shape is not None and len(port.shape) != 3):
        return f"its logits {port.name!r} are {port.dtype} with {len(port.shape or ())} axes, and {CONSUMER} reads 3"
    return None


def sort_slots(slots: tuple[Slot, ...]) -> list[Slot]:
    """Slots layer by layer, the key before the value."""
    return sorted(slots, key=lambda slot: (slot.layer or 0, slot.part == "value"))


NAME = "genai_config.json"
MOST_TOKENS_OF_END = 64
"""Tokens that end a text, in a config that can be believed."""

DEFAULTS = {
    "input_ids": "input_ids",
    "attention_mask": "attention_mask",
    "position_ids": "position_ids",
    "past_key_names": "past_key_values.%d.key",
    "past_value_names": "past_key_values.%d.value",
    "logits": "logits",
    "present_key_names": "present.%d.key",
    "present_value_names": "present.%d.value",
}
"""The names that onnxruntime-genai looks for by itself."""
NOT_READ = {
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
}
"""Sizes that onnxruntime-genai does not use, and their names in config.json: left out where it has none."""
INPUTS = ("input_ids", "attention_mask", "position_ids", "past_key_names", "past_value_names")


@record
class Setting:
    """A value of the file, `key` as in `model.decoder.head_size`, and where it comes from."""

    key: str
    value: Any
    because: str


DECODER = Setting("model.type", "decoder", "a decoder without rules of its own")
"""The type of most decoders: a family's name would ask for the graph that the builder makes."""


@record
class Configs:
    """What config.json and generation_config.json say, and the folder in which they were looked for."""

    folder: Path
    config: dict[str, Any]
    generation: dict[str, Any]

    @classmethod
    def beside(cls, root: Path) -> "Configs":
        """Those of the models in a folder; a file that is missing or damaged is empty."""
        folder = side_car_folder(root)
        config, generation = (read_object(folder / f"{name}.json")[0] for name in ("config", "generation_config"))
        return cls(folder, config, generation)

    def read_ids(self, key: str, vocabulary: int) -> tuple[list[int], str] | None:
        """The token ids of an entry and the file that has them: generation_config.json before config.json."""
        both = (self.config, decoder_config(self.config))
        for file, part in (("generation_config.json", self.generation), *(("config.json", one) for one in both)):
            given = part.get(key)
            listed = given if isinstance(given, list) else [given]
            valid = all(type(one) is int and 0 <= one < vocabulary for one in listed)
            if valid and 0 < len(listed) <= MOST_TOKENS_OF_END:
                return list(listed), file
        return None


def find_missing(configs: Configs, contract: CacheContract) -> str | None:
    """What onnxruntime-genai needs to know and neither the graph nor a config says; None if nothing is missing."""
    vocabulary = read_vocabulary(contract)
    if vocabulary is None:
        return "the logits declare no size of the vocabulary, and no config.json next to the model has a vocab_size"
    if contract.context_limit is None:
        return "how many tokens it can take is not known: give config.json next to the model a max_position_embeddings"
    if configs.read_ids("eos_token_id", vocabulary) is None:
        return (
            f"which token ends a text is not known: give generation_config.json next to the model an eos_token_id from "
            f"0 to {vocabulary - 1}"
        )
    return None


def read_vocabulary(contract: CacheContract) -> int | None:
    """The entries of a row of logits: that of the graph before that of a config."""
    port = contract.graph("decode").port("logits")
    size = port.shape[-1] if port is not None and port.shape else None
    return size if is_count(size) else contract.vocabulary


def list_settings(
    configs: Configs, contract: CacheContract, slots: list[Slot], family: Setting, more: tuple[Setting, ...] = ()
) -> list[Setting]:
    """The values of the file other than names, where `find_missing` said that nothing is missing.

    `slots` are those of the self-attention, `family` is the type, and `more` are values that only this family has.
    """
    vocabulary = read_vocabulary(contract) or 0
    end, file = configs.read_ids("eos_token_id", vocabulary) or ([], "")
    shared = all(slot.growth == "shared" for slot in slots)
    buffer = "every cache may be one buffer for past and present" if shared else "a step returns a longer cache"
    graph = "the graph"
    found = [
        family,
        Setting("model.vocab_size", vocabulary, graph),
        Setting("model.context_length", contract.context_limit, "the config of the model"),
        Setting("model.eos_token_id", end[0] if len(end) == 1 else end, file),
    ]
    padding = configs.read_ids("pad_token_id", vocabulary)
    if padding is None:
        padding = end, f"the token that ends a text, from {file}: the configs have no pad_token_id"
    found.append(Setting("model.pad_token_id", padding[0][0], padding[1]))
    begin = configs.read_ids("bos_token_id", vocabulary)
    if begin is not None:
        found.append(Setting("model.bos_token_id", begin[0][0], begin[1]))
    for key, number in (("num_key_value_heads", slots[0].size("kv_heads")), ("head_size", slots[0].size("head_dim"))):
        found.append(Setting(f"model.decoder.{key}", number, graph))
    found.append(Setting("model.decoder.num_hidden_layers", len(slots) // 2, graph))
    part = decoder_config(configs.config)
    for key, names in NOT_READ.items():
        size = next((part[name] for name in names if is_count(part.get(name))), None)
        if size is not None and f"model.decoder.{key}" not in {one.key for one in more}:
            found.append(Setting(f"model.decoder.{key}", size, "config.json"))
    return [
        *found,
        *more,
        Setting("search.max_length", contract.context_limit, "the context"),
        Setting("search.do_sample", False, "greedy, unless a program asks for more"),
        Setting("search.num_beams", 1, "greedy, unless a program asks for more"),
        Setting("search.past_present_share_buffer", shared, buffer),
    ]


def write_config(graphs: dict[str, tuple[str, dict[str, str], dict[str, str]]], settings: list[Setting]) -> str:
    """The text of the file. By the part of the model that it is, a graph has a file and names of inputs and outputs."""
    model: dict[str, Any] = {}
    search: dict[str, Any] = {}
    named = {part: dict(zip(("filename", "inputs", "outputs"), one, strict=True)) for part, one in graphs.items()}
    parts = {"model": model, "search": search} | {f"model.{part}": entries for part, entries in named.items()}
    for one in settings:
        part, _, key = one.key.rpartition(".")
        parts[part][key] = one.value
    whole = {"model": model | named, "search": search}
    return json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


FED: dict[Role, str] = {"token_ids": "input_ids", "attention_mask": "attention_mask", "position_ids": "position_ids"}
"""Inputs that onnxruntime-genai feeds, by role, and their entries in genai_config.json."""
AXES = {"token_ids": ("batch", "new"), "attention_mask": ("batch", "total"), "position_ids": ("batch", "new")}
MOST_LETTERS = 63
"""Letters of a name that is made from a pattern. Source: ComposeKeyValueName in src/models/kv_cache.cpp."""

TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
"""The files of a tokenizer, as transformers and sentencepiece write them."""


def refuse(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why onnxruntime-genai cannot run a decoder."""
    if stack.kind not in ("decoder-only", "pair", "merged"):
        return f"it is no decoder that one graph can serve ({stack.kind})"
    found = _refuse_inputs(contract) or _refuse_lengths(contract) or refuse_slots(contract.slots)
    return found or refuse_logits(contract)


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


def choose_names(contract: CacheContract) -> tuple[PortNames, dict[str, str]]:
    """The names of the new graph, by port and by entry of genai_config.json.

    They stay if one pattern names each kind of cache in all layers; else all become the usual ones.
    """
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
    return names, entries


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
    """One graph, and the configuration that names its inputs and outputs."""
    contract, kind = source.contract, source.stack.kind
    if kind == "merged":
        model = split_halves(source.model("decoder-merged"), contract)[1]
    else:
        model = source.model("decoder-with-past" if kind == "pair" else source.stack.main_role)
    roles = ("decoder", "decoder-with-past", "decoder-merged")
    files = [source.stack.main.name, *(f.name for r, f in source.stack.files.items() if r in roles)]
    made = ConvertedModels({}, tuple(dict.fromkeys(files)), limit=INSIDE)
    (names, entries), file = choose_names(contract), source.new_name(SINGLE)
    renamed = list_renamings(source.stack.main.name, model.graph, names)
    rename_as(model, names, contract.graph("decode"), f"which {CONSUMER} does not feed")
    if source.readable:
        name_axes(model.graph, names.axes, axis_names(contract))
    configs = Configs.beside(source.root)
    settings = list_settings(configs, contract, sort_slots(contract.slots), DECODER)
    made.changes += [Change(NAME, one.key, "", f"{one.value} ({one.because})") for one in settings]
    made.changes += renamed
    made.models[file] = model
    inputs = {key: name for key, name in entries.items() if key in INPUTS}
    outputs = {key: name for key, name in entries.items() if key not in INPUTS}
    made.texts[NAME] = write_config({"decoder": (file, inputs, outputs)}, settings)
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

"""The tokens that end a sequence, and their types, in generation_config.json and genai_config.json.

transformers' `generate` ends by the ids of generation_config.json alone, onnxruntime-genai by those of its own config,
which takes one number for padding and start: it refuses a list there. The end token of the tokenizer is what the model
learned to end by. Sources: transformers 5.23, `generation/utils.py`; onnxruntime-genai 0.18, `src/config.cpp`, tried.
"""

from collections.abc import Iterator
from typing import Any

from kvdoctor.analysis.configs import decoder_config, read_part
from kvdoctor.diagnose.checks.side_cars.config_json import meant_for
from kvdoctor.diagnose.checks.side_cars.disagreement import MOST_SHOWN, Disagreement, plain
from kvdoctor.diagnose.checks.side_cars.graph_sizes import logits_width
from kvdoctor.diagnose.checks.side_cars.tokenizer import is_id, read_special
from kvdoctor.diagnose.context import ContractContext

END = "eos_token_id"
SINGLE = ("pad_token_id", "bos_token_id", "sep_token_id", "decoder_start_token_id")
"""Keys of genai_config.json that take one number."""
ENDLESS = "generation ends only at the largest length"


def generation_stops(context: ContractContext) -> list[Disagreement]:
    """End tokens that generation_config.json leaves out."""
    content = context.folder.side_cars.generation
    return list(_compare_ends(context, content, END)) if content and meant_for(context) else []


def genai_stops(context: ContractContext) -> list[Disagreement]:
    """End tokens that genai_config.json leaves out, ids that the logits do not have, and lists in place of a number."""
    model = read_part(context.folder.side_cars.genai, "model")
    if not model:
        return []
    return [*_compare_types(context, model), *_compare_ends(context, model, f"model.{END}"), *_outside(context, model)]


def _compare_ends(context: ContractContext, content: dict[str, Any], key: str) -> Iterator[Disagreement]:
    """Against the tokenizer, which may be that of the encoder, or of other tokens than those of the logits."""
    ids, width = _list_ids(content.get(END)), logits_width(context)
    text, end = ("", -1) if context.contract.has_encoder_states else read_special(context).get("eos_token", ("", -1))
    if width is not None and end >= width:
        end = -1
    if not ids and content.get("_from_model_config") is not True:
        config = context.folder.side_cars.config
        others = _list_ids(decoder_config(config).get(END)) or _list_ids(config.get(END))
        meant = [end] if end >= 0 else others
        if meant:
            right = str(meant[0] if len(meant) == 1 else meant)
            seen = f'the end token "{text}", {right}' if end >= 0 else f"the end token {right}"
            against = "the tokenizer" if end >= 0 else "config.json"
            yield Disagreement(key, "left out", seen, right, ENDLESS, against=against)
    elif ids and end >= 0 and end not in ids:
        shown = ids[0] if len(ids) == 1 else ids[:MOST_SHOWN]
        so = "a sequence does not end where the tokenizer's end token comes"
        seen, right = f'the end token "{text}", {end}', str([*ids, end])
        yield Disagreement(key, str(shown), seen, right, so, against="the tokenizer")


def _compare_types(context: ContractContext, model: dict[str, Any]) -> Iterator[Disagreement]:
    """A list where the loader takes a number; the right one is that of the other files, where they have one."""
    side_cars, special = context.folder.side_cars, read_special(context)
    for key in SINGLE:
        value = model.get(key)
        if is_id(value) or value is None:
            continue
        named = special.get(key.removesuffix("_id"))
        known = [part.get(key) for part in (side_cars.generation, decoder_config(side_cars.config))]
        known += [named[1] if named is not None else None, *(value if isinstance(value, list) else [])]
        right = next((str(one) for one in known if is_id(one)), "one number")
        so = "onnxruntime-genai refuses the file"
        declared = plain(str(value))
        yield Disagreement(f"model.{key}", declared, "a key that takes one number", right, so, against="its loader")


def _outside(context: ContractContext, model: dict[str, Any]) -> Iterator[Disagreement]:
    """End tokens that the model never returns."""
    width = logits_width(context)
    wrong = [one for one in _list_ids(model.get(END)) if width is not None and one >= width]
    if wrong:
        so = "the model never returns the id, so generation does not end by it"
        yield Disagreement(f"model.{END}", str(wrong[0]), f"logits of width {width}", f"an id below {width}", so)


def _list_ids(value: Any) -> list[int]:
    """The ids of an entry: one or a list."""
    return [one for one in (value if isinstance(value, list) else [value])[:1000] if is_id(one)]

"""The tokens that the tokenizer, generation_config.json and genai_config.json name, against the graph and each other.

A tokenizer may hold ids beyond the graph on purpose: tokens for images (Gemma 3), or tokens that are added and not
used. So of the added tokens only those that generation uses by itself count: the end, the start and the padding. The
ordinary vocabulary must fit the table, and may be smaller: tables are padded to round sizes.

transformers' `generate` ends by the ids of generation_config.json alone, onnxruntime-genai by those of its own config,
which takes one number for padding and start: it refuses a list there. The end token of the tokenizer is what the model
learned to end by.

Sources: tokenizers 0.22, `tokenizer.json`; transformers 4.57 and 5.23, `tokenization_utils_base.py` and
`generation/utils.py`; onnxruntime-genai 0.18, `src/config.cpp`, tried.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

from kvdoctor.analysis.configs import decoder_config, is_count, read_part
from kvdoctor.analysis.model_folder import MOST_TOKENIZER_BYTES, read_object
from kvdoctor.diagnose.checks.side_cars.config_json import meant_for
from kvdoctor.diagnose.checks.side_cars.disagreement import MOST_SHOWN, Disagreement, Disagreements, plain, quoted
from kvdoctor.diagnose.checks.side_cars.graph_sizes import logits_width, token_rows
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.errors import CannotCheck
from kvdoctor.records import record

CONFIG, TOKENIZER = "tokenizer_config.json", "tokenizer.json"
END = "eos_token_id"
SINGLE = ("pad_token_id", "bos_token_id", "sep_token_id", "decoder_start_token_id")
"""Keys of genai_config.json that take one number."""
ENDLESS = "generation ends only at the largest length"


@record
class _Tokenizer:
    """`special` are the ids of end, start and padding by key; `largest` is the largest id that was not added."""

    special: dict[str, tuple[str, int]]
    largest: int | None
    size: int


def vocabulary(context: ContractContext) -> list[Disagreement]:
    """The ordinary ids of tokenizer.json that the table of a decoder does not have.

    Every text may bring an ordinary token; that of an encoder-decoder may be of the encoder's vocabulary. Where a
    tokenizer cannot be read, this and `special_tokens` raise `CannotCheck`.
    """
    found = _read(context.folder.root) if meant_for(context) else None
    rows = token_rows(context) if found is not None else None
    if found is None or rows is None or found.largest is None or found.largest < rows:
        return []
    declared, observed = f"{found.size} entries, the largest id {found.largest}", f"an embedding table of length {rows}"
    so = "a text with one of these tokens looks up a row that the table does not have"
    wrong = Disagreement("model.vocab", declared, observed, f"ids below {rows}", so)
    return [] if context.contract.has_encoder_states else [wrong]


def special_tokens(context: ContractContext) -> list[Disagreement]:
    """The ids of end, start and padding, named in tokenizer_config.json, that the graph cannot take or return."""
    found = _read(context.folder.root) if meant_for(context) else None
    return [] if found is None else [*_compare_special(context, found)]


def _read_special(context: ContractContext) -> dict[str, tuple[str, int]]:
    """Text and id of the end, start and padding tokens by key; none where the tokenizer cannot be read."""
    try:
        found = _read(context.folder.root)
    except CannotCheck:  # which the comparison of the tokenizer reports
        return {}
    return found.special if found is not None else {}


def _compare_special(context: ContractContext, found: _Tokenizer) -> Disagreements:
    """The decoder of an encoder-decoder is fed other first tokens, which generation_config.json names."""
    width, rows = logits_width(context), token_rows(context)
    uses = [("eos_token", width, "logits of width", "the model never returns the id, so generation does not end by it")]
    if not context.contract.has_encoder_states:
        row = "looks up a row that the table does not have"
        uses += [
            ("bos_token", rows, "an embedding table of length", f"a prompt that begins with it {row}"),
            ("pad_token", rows, "an embedding table of length", f"a padded batch {row}"),
        ]
    for key, count, what, so in uses:
        content, number = found.special.get(key, ("", -1))
        named = context.folder.side_cars.generation.get(f"{key}_id")
        known = number in (named if isinstance(named, list) else [named])  # reported of generation_config.json
        if count is not None and number >= count and not known:
            yield Disagreement(key, f"{quoted(content)} = {number}", f"{what} {count}", f"an id below {count}", so)


def _read(root: Path) -> _Tokenizer | None:
    """The tokenizer in a folder, or in the folder around it where the graphs lie in `onnx`."""
    for folder in (root, root.parent) if root.name == "onnx" else (root,):
        paths = tuple(folder / name for name in (CONFIG, TOKENIZER))
        try:
            states = tuple((path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else None for path in paths)
        except OSError as error:
            raise CannotCheck(f"{TOKENIZER} cannot be read: {type(error).__name__}") from None
        if any(states):
            return _read_once(paths, states)
    return None


@lru_cache(maxsize=4)
def _read_once(paths: tuple[Path, ...], _states: tuple[tuple[int, int] | None, ...]) -> _Tokenizer:
    """Each stack of a folder has the same tokenizer."""
    config, whole = (_read_file(path) for path in paths)
    ids: dict[str, int] = {}
    added = whole.get("added_tokens")
    for one in added if isinstance(added, list) else []:
        if isinstance(one, dict) and isinstance(one.get("content"), str) and _is_id(one.get("id")):
            ids[one["content"]] = one["id"]
    for digits, one in read_part(config, "added_tokens_decoder").items():
        if isinstance(one, dict) and isinstance(one.get("content"), str) and digits.isascii() and digits.isdecimal():
            ids[one["content"]] = int(digits[:10])
    vocabulary = read_part(whole, "model").get("vocab")
    words = vocabulary if isinstance(vocabulary, dict) else {}
    special = {}
    for key in ("eos_token", "bos_token", "pad_token"):
        given = config.get(key)
        content = given.get("content") if isinstance(given, dict) else given
        number = ids.get(content, words.get(content)) if isinstance(content, str) else None
        if isinstance(content, str) and _is_id(number):
            special[key] = (plain(content), number)
    added = {*ids.values()}
    if isinstance(vocabulary, list):  # of Unigram: the id is the place
        own = [number for number in range(len(vocabulary) - 1, -1, -1) if number not in added][:1]
        return _Tokenizer(special, max(own, default=None), len(vocabulary))
    numbers = [number for number in words.values() if _is_id(number) and number not in added]
    return _Tokenizer(special, max(numbers, default=None), len(words))


def _read_file(path: Path) -> dict[str, Any]:
    content, obstacle = read_object(path, MOST_TOKENIZER_BYTES)
    if obstacle is not None:
        raise CannotCheck(obstacle)
    return content


def _is_id(value: object) -> TypeGuard[int]:
    return (value == 0 and not isinstance(value, bool)) or is_count(value)


def generation_stops(context: ContractContext) -> list[Disagreement]:
    """End tokens that generation_config.json leaves out."""
    content = context.folder.side_cars.generation
    return list(_compare_ends(context, content, END)) if content and meant_for(context) else []


def genai_stops(context: ContractContext) -> list[Disagreement]:
    """End tokens that genai_config.json leaves out, ids that the logits do not have, and lists in place of a number."""
    model = read_part(context.folder.side_cars.genai, "model")
    if not model:
        return []
    found = (*_compare_types(context, model), *_compare_ends(context, model, f"model.{END}"))
    return [*found, *_find_outside(context, model)]


def _compare_ends(context: ContractContext, content: dict[str, Any], key: str) -> Disagreements:
    """Against the tokenizer, which may be that of the encoder, or of other tokens than those of the logits."""
    ids, width = _list_ids(content.get(END)), logits_width(context)
    text, end = ("", -1) if context.contract.has_encoder_states else _read_special(context).get("eos_token", ("", -1))
    if width is not None and end >= width:
        end = -1
    if not ids and content.get("_from_model_config") is not True:
        config = context.folder.side_cars.config
        others = _list_ids(decoder_config(config).get(END)) or _list_ids(config.get(END))
        meant = [end] if end >= 0 else others
        if meant:
            right = str(meant[0] if len(meant) == 1 else meant)
            seen = (
                f'the tokenizer ends with "{text}" (id {right})' if end >= 0 else f"the tokenizer ends with id {right}"
            )
            against = "the tokenizer" if end >= 0 else "config.json"
            yield Disagreement(key, "left out", seen, right, ENDLESS, against=against)
    elif ids and end >= 0 and end not in ids:
        shown = ids[0] if len(ids) == 1 else ids[:MOST_SHOWN]
        so = "a sequence does not end where the tokenizer's end token comes"
        seen, right = f'the tokenizer ends with "{text}" (id {end})', str([*ids, end])
        yield Disagreement(key, str(shown), seen, right, so, against="the tokenizer")


def _compare_types(context: ContractContext, model: dict[str, Any]) -> Disagreements:
    """A list where the loader takes a number; the right one is that of the other files, where they have one."""
    side_cars, special = context.folder.side_cars, _read_special(context)
    for key in SINGLE:
        value = model.get(key)
        if _is_id(value) or value is None:
            continue
        named = special.get(key.removesuffix("_id"))
        known = [part.get(key) for part in (side_cars.generation, decoder_config(side_cars.config))]
        known += [named[1] if named is not None else None, *(value if isinstance(value, list) else [])]
        right = next((str(one) for one in known if _is_id(one)), "one number")
        so = "onnxruntime-genai refuses the file"
        declared = plain(str(value))
        yield Disagreement(f"model.{key}", declared, "the loader takes one number", right, so, against="its loader")


def _find_outside(context: ContractContext, model: dict[str, Any]) -> Disagreements:
    """End tokens that the model never returns."""
    width = logits_width(context)
    wrong = [one for one in _list_ids(model.get(END)) if width is not None and one >= width]
    if wrong:
        so = "the model never returns the id, so generation does not end by it"
        yield Disagreement(f"model.{END}", str(wrong[0]), f"logits of width {width}", f"an id below {width}", so)


def _list_ids(value: Any) -> list[int]:
    return [one for one in (value if isinstance(value, list) else [value])[:1000] if _is_id(one)]

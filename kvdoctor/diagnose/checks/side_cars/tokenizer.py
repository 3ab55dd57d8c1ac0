"""tokenizer.json and tokenizer_config.json against the graph: ids that it has no row or no logits for.

A tokenizer may hold ids beyond the graph on purpose: tokens for images (Gemma 3), or tokens that are added and not
used. So of the added tokens only those that generation uses by itself count: the end, the start and the padding. The
ordinary vocabulary must fit the table, and may be smaller: tables are padded to round sizes.

Source of the keys: tokenizers 0.22, `tokenizer.json`; transformers 4.57 and 5.23, `tokenization_utils_base.py`.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

from kvdoctor.analysis.configs import is_count, read_part
from kvdoctor.analysis.model_folder import MOST_TOKENIZER_BYTES, read_object
from kvdoctor.diagnose.checks.side_cars.config_json import meant_for
from kvdoctor.diagnose.checks.side_cars.disagreement import Disagreement, plain, quoted
from kvdoctor.diagnose.checks.side_cars.graph_sizes import logits_width, token_rows
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.errors import CannotCheck
from kvdoctor.records import record

CONFIG, TOKENIZER = "tokenizer_config.json", "tokenizer.json"


@record
class _Tokenizer:
    """`special` are the ids of end, start and padding by key; `largest` is the largest id that was not added."""

    special: dict[str, tuple[str, int]]
    largest: int | None
    size: int


def vocabulary(context: ContractContext) -> list[Disagreement]:
    """The ordinary ids of tokenizer.json that the table of a decoder does not have.

    Raises:
        CannotCheck: there is a tokenizer that cannot be read.
    """
    found = _read(context.folder.root) if meant_for(context) else None
    return [] if found is None else [*_compare_vocabulary(context, found)]


def special_tokens(context: ContractContext) -> list[Disagreement]:
    """The ids of end, start and padding, named in tokenizer_config.json, that the graph cannot take or return.

    Raises:
        CannotCheck: there is a tokenizer that cannot be read.
    """
    found = _read(context.folder.root) if meant_for(context) else None
    return [] if found is None else [*_compare_special(context, found)]


def read_special(context: ContractContext) -> dict[str, tuple[str, int]]:
    """Text and id of the end, start and padding tokens by key; none where the tokenizer cannot be read."""
    try:
        found = _read(context.folder.root)
    except CannotCheck:  # which the comparison of the tokenizer reports
        return {}
    return found.special if found is not None else {}


def _compare_special(context: ContractContext, found: _Tokenizer) -> Iterator[Disagreement]:
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


def _compare_vocabulary(context: ContractContext, found: _Tokenizer) -> Iterator[Disagreement]:
    """Every text may bring an ordinary token; that of an encoder-decoder may be of the encoder's vocabulary."""
    rows = token_rows(context)
    if rows is None or found.largest is None or found.largest < rows or context.contract.has_encoder_states:
        return
    yield Disagreement(
        "model.vocab",
        f"{found.size} entries, the largest id {found.largest}",
        f"an embedding table of length {rows}",
        f"ids below {rows}",
        "a text with one of these tokens looks up a row that the table does not have",
    )


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
        if isinstance(one, dict) and isinstance(one.get("content"), str) and is_id(one.get("id")):
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
        if isinstance(content, str) and is_id(number):
            special[key] = (plain(content), number)
    added = {*ids.values()}
    if isinstance(vocabulary, list):  # of Unigram: the id is the place
        own = [number for number in range(len(vocabulary) - 1, -1, -1) if number not in added][:1]
        return _Tokenizer(special, max(own, default=None), len(vocabulary))
    numbers = [number for number in words.values() if is_id(number) and number not in added]
    return _Tokenizer(special, max(numbers, default=None), len(words))


def _read_file(path: Path) -> dict[str, Any]:
    content, obstacle = read_object(path, MOST_TOKENIZER_BYTES)
    if obstacle is not None:
        raise CannotCheck(obstacle)
    return content


def is_id(value: object) -> TypeGuard[int]:
    """Whether a value can be the id of a token."""
    return (value == 0 and not isinstance(value, bool)) or is_count(value)

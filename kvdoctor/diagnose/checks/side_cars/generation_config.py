"""generation_config.json against the graph: token ids that it does not have, and more tokens than it has positions.

Source of the keys: transformers 4.57 and 5.23, `generation/configuration_utils.py`, and that of Whisper.
"""

from collections.abc import Iterator
from typing import Any

from kvdoctor.analysis.configs import is_count
from kvdoctor.diagnose.checks.side_cars import compare_numbers
from kvdoctor.diagnose.checks.side_cars.claims import ConfigClaim
from kvdoctor.diagnose.checks.side_cars.config_json import meant_for
from kvdoctor.diagnose.checks.side_cars.disagreement import Disagreement, plain
from kvdoctor.diagnose.checks.side_cars.graph_sizes import logits_width, token_rows
from kvdoctor.diagnose.context import ContractContext

ENDS = ("eos_token_id",)
FORCED = ("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids", "no_timestamps_token_id")
NAMED = ("lang_to_id", "task_to_id")
SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")
FED = ("decoder_start_token_id", "bos_token_id")
"""Keys by what becomes of their ids: they end a sequence, are chosen, are forbidden, or are fed first."""

MOST_IDS = 10_000
"""Ids of one key that are looked at; the file may hold anything."""


def generation_config(context: ContractContext) -> list[Disagreement]:
    """The entries of generation_config.json that the graph of a decoder cannot follow."""
    config = context.folder.side_cars.generation
    if not config or not meant_for(context):
        return []
    return [*_compare_chosen(context, config), *_compare_fed(context, config), *_compare_length(context, config)]


def _compare_chosen(context: ContractContext, config: dict[str, Any]) -> Iterator[Disagreement]:
    """Ids that are looked for among the logits, or written into them."""
    width = logits_width(context)
    if width is None:
        return
    for keys, so in (
        (ENDS, "the model never returns the id, so generation does not end by it"),
        (FORCED, "the logits have no entry for the id that is forced"),
        (NAMED, "the logits have no entry for the id that is forced"),
        (SUPPRESSED, "the logits have no entry for the id that is suppressed"),
    ):
        for key in keys:
            yield from _outside(key, config.get(key), width, f"logits of width {width}", so)


def _compare_fed(context: ContractContext, config: dict[str, Any]) -> Iterator[Disagreement]:
    """The first id that a decoder is fed; the other ids of an encoder-decoder may be those of its encoder."""
    rows = token_rows(context)
    if rows is not None:
        so = "the first call looks up a row that the table does not have"
        key = FED[0] if context.contract.has_encoder_states else FED[1]
        yield from _outside(key, config.get(key), rows, f"an embedding table of {rows} rows", so)


def _compare_length(context: ContractContext, config: dict[str, Any]) -> Iterator[Disagreement]:
    """More tokens than there are positions. A buffer of fixed size has fewer on purpose."""
    length = config.get("max_length")
    if is_count(length) and context.contract.capacity is None:
        yield from compare_numbers.context(context, ConfigClaim("context", "max_length", length))


def _outside(key: str, value: Any, count: int, observed: str, so: str) -> Iterator[Disagreement]:
    """An entry with ids from `count` on. Ids below 0 stand for none."""
    outside = sorted({one for one in _list_ids(value) if one >= count})
    if outside:
        more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        yield Disagreement(plain(key), f"{outside[0]}{more}", observed, f"an id below {count}", so)


def _list_ids(value: Any) -> Iterator[int]:
    """The whole numbers of an entry: one, a list, the values of names, or pairs of a position and an id."""
    values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    for one in values[:MOST_IDS]:
        last = one[-1] if isinstance(one, list) and one else one
        if isinstance(last, int) and not isinstance(last, bool):
            yield last

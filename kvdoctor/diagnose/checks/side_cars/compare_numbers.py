"""Compares the numbers that configs declare of a decoder with those that the graph shows."""

from collections.abc import Iterator

from kvdoctor.diagnose.checks.side_cars.claims import ALL_LAYERS_CACHE, ConfigClaim
from kvdoctor.diagnose.checks.side_cars.disagreement import Disagreement, either, span
from kvdoctor.diagnose.checks.side_cars.graph_sizes import cache_sizes, head_widths, logits_width, positions
from kvdoctor.diagnose.context import ContractContext

ATTENTION = ("self-attention", "cross-attention")
PARTS = {
    "kv_heads": ("key", "value", "key-value"),
    "head_dim": ("key", "value"),
    "key_dim": ("key",),
    "value_dim": ("value",),
}
PADDED_TO = (8, 16, 32, 64, 128, 256, 512, 1024)
MOST_PADDED = 0.06
"""Share of a vocabulary that padding may add: 50257 tokens become 51200 rows, but 64 do not become 128."""


def layers(context: ContractContext, claim: ConfigClaim, model_type: str) -> Iterator[Disagreement]:
    """Another number of layers with a cache than the graph has."""
    slots = context.contract.slots
    numbered = [slot for slot in slots if slot.layer is not None]
    cached = {slot.layer or 0 for slot in numbered if slot.kind in ATTENTION}
    growing = {slot.layer or 0 for slot in numbered if slot.kind == "self-attention"}
    limit = max(claim.value, *claim.also, 0)
    from_nought = any(slot.layer == 0 for slot in numbered)
    # A number left out is a fault of the graph (KV106): then the highest one does not count the layers.
    whole = from_nought and {slot.layer for slot in numbered} == set(range(max(s.layer or 0 for s in numbered) + 1))
    if not numbered:  # one tensor for all layers, unless it also stacks keys and values
        own = context.contract.of_kind("self-attention")
        counts = {slot.size("layers") for slot in own if slot.part in ("key", "value") or "parts" in slot.axes}
        count = next(iter(counts)) if len(counts) == 1 else None
        if count is not None and count not in {claim.value, *claim.also}:
            yield _numbered(claim, f"{count} layers in one tensor", str(count))
    elif len(cached) > limit or (whole and max(cached, default=0) >= limit):
        yield _numbered(claim, f"caches of layers {span(cached)}", str(max(len(cached), max(cached) + from_nought)))
    elif model_type in ALL_LAYERS_CACHE and growing == set(range(len(growing))) and 0 < len(growing) < claim.value:
        yield _numbered(claim, f"caches of layers {span(growing)} and no more", str(len(growing)))


def sizes(context: ContractContext, claim: ConfigClaim, *, fused: bool = False) -> Iterator[Disagreement]:
    """Kv heads and widths, one of which a config may name; `fused` asks operators where no cache declares one."""
    seen = cache_sizes(context, "kv_heads" if claim.what == "kv_heads" else "head_dim", PARTS[claim.what])
    seen = seen or (head_widths(context) if fused else set())
    if seen and claim.value not in seen and not seen <= claim.also:
        word = {"kv_heads": "kv heads", "key_dim": "head_dim of keys", "value_dim": "head_dim of values"}
        so = "the runtime refuses a cache that is allocated by the config"
        yield _numbered(claim, f"{word.get(claim.what, 'head_dim')} {either(seen)}", either(seen), so)


def vocabulary(context: ContractContext, claim: ConfigClaim, *, exactly: bool = False) -> Iterator[Disagreement]:
    """The width of the logits: that of the vocabulary, or that of a table padded to a round number of rows."""
    width = logits_width(context)
    if width is None or width == claim.value:
        return
    if exactly or not any(_is_padded(words, width) for words in (claim.value, *claim.also)):
        so = "the runtime allocates logits of the width in the config and stops" if exactly else ""
        yield _numbered(claim, f"logits of width {width}", str(width), so)


def context(context: ContractContext, claim: ConfigClaim) -> Iterator[Disagreement]:
    """A table of positions that ends before the context does. A longer one is no fault."""
    rows = positions(context.stack, context.contract)
    if rows is not None and rows < claim.value:
        so = f"token {rows + 1} and later ones have no position"
        yield _numbered(claim, f"a table of {rows} positions", f"{rows} at most", so)


def _numbered(claim: ConfigClaim, observed: str, right: str, so: str = "") -> Disagreement:
    if claim.key == "multi_query":  # a flag that stands for one head
        return Disagreement(claim.key, "true", observed, "false", so)
    return Disagreement(claim.key, str(claim.value), observed, right, so)


def _is_padded(words: int, width: int) -> bool:
    """Whether a table of that width can be one of so many tokens, padded to a round number."""
    if not words <= width <= words * (1 + MOST_PADDED):
        return False
    return width == words or any(-(-words // unit) * unit == width for unit in PADDED_TO)

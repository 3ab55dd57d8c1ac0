"""What a narrower type of the cache costs, in words: a table for each stack, and the layers that cost most."""

from collections.abc import Iterator

from kvdoctor.records import record
from kvdoctor.report.repair_record import CacheCost, CacheCosts, RepairRecord

HEADER = ["rounded", "a scale for each", "divergence", "same token", "first other", "largest difference"]
SHARES = {
    "token": "token and head",
    "channel": "channel",
    "head": "head",
    "tensor": "tensor",
}
MOST_LAYERS = 3
"""The layers that a short table has: those that cost most."""


@record
class CostTable:
    """A table with its title, and what it means in lines."""

    title: str
    header: list[str]
    rows: list[list[str]]
    lines: tuple[str, ...]


def tabulate_cache_costs(found: RepairRecord, whole: bool) -> Iterator[CostTable]:
    """For each stack a table; the short one has what a copy does and the layers that cost most."""
    for costs in found.cache_costs:
        layers = [one for one in costs.costs if one.layer is not None]
        ways = [one for one in costs.costs if one.layer is None]
        if not whole:
            ways = [one for one in ways if {one.keys, one.values} <= {"token", None}]
            layers = sorted(layers, key=lambda one: -(one.divergence or 0.0))[:MOST_LAYERS]
        rows = [_row(one, costs) for one in (*ways, *layers)]
        yield CostTable(_title(costs), HEADER, rows, tuple(_explain(costs, whole)))


def _explain(costs: CacheCosts, whole: bool) -> Iterator[str]:
    if costs.sensitive_layers:
        listed = ", ".join(map(str, costs.sensitive_layers))
        option = f"--exact-layers {listed.replace(' ', '')}"
        yield f"layers that cost most of it, and had better stay as they are: {listed} ({option})"
    if whole and costs.cache_type != "float16" and len(costs.costs) > 1:
        yield (
            "a copy has a scale for each token and head; those for a channel, head or tensor are constants here, from "
            "another random sequence"
        )


def _title(costs: CacheCosts) -> str:
    size = ""
    if costs.bytes_before and costs.bytes_after is not None:
        share = costs.bytes_after / costs.bytes_before
        size = f", {costs.bytes_before} -> {costs.bytes_after} bytes for each token ({share:.0%})"
    over = f"; its cost over {costs.tokens} tokens, one by one" if costs.tokens else ""
    exact = f" but for layer {', '.join(map(str, costs.exact_layers))}" if costs.exact_layers else ""
    return f"cache of {costs.stack} as {costs.cache_type}{exact}{size}{over}"


def _row(one: CacheCost, costs: CacheCosts) -> list[str]:
    parts = " and ".join(word for word, shared in (("keys", one.keys), ("values", one.values)) if shared)
    what = f"layer {one.layer} alone" if one.layer is not None else parts
    shared = "-" if costs.cache_type == "float16" else SHARES.get(one.keys or one.values or "", "")
    if one.divergence is None or one.same_top1 is None or one.largest is None:
        return [what, shared, f"not measured: {one.reason}", "", "", ""]
    first = f"token {one.first_other}" if one.first_other is not None else "none"
    return [what, shared, f"{one.divergence:.2g} nats", f"{one.same_top1:.0%}", first, f"{one.largest:.2g} SD"]

"""Variants of one model in words: the table that grades each by the most exact one."""

from itertools import pairwise

from kvdoctor.report.document import Report
from kvdoctor.report.facts import VariantFacts
from kvdoctor.report.wording.units import format_bytes

HEADER = ["variant", "size", "divergence", "same token", "first other", "most in layers"]
MOST_LAYERS = 3
SHARE_SHOWN = 0.02
"""Layers are named from this difference of their cache on; smaller ones cost nothing."""


def tabulate_variants(report: Report) -> list[tuple[str, list[str], list[list[str]]]]:
    """For each base the title, the header and the rows of its variants."""
    bases = dict.fromkeys(one.base for one in report.variants)
    rows = {base: [_row(one) for one in report.variants if one.base == base] for base in bases}
    return [(_title(report, base), HEADER, rows[base]) for base in bases]


def _title(report: Report, base: str) -> str:
    tokens = max(one.tokens for one in report.variants if one.base == base)
    over = f" over {tokens} tokens that it decodes" if tokens else ""
    return f"variants of {base}, compared with it{over}"


def _row(one: VariantFacts) -> list[str]:
    share = f" ({one.bytes / one.base_bytes:.0%})" if one.base_bytes else ""
    size = f"{format_bytes(one.bytes)}{share}"
    if one.reason is not None or one.divergence is None or one.same_top1 is None:
        return [one.stack, size, f"not compared: {one.reason}", "", "", ""]
    first = f"token {one.first_other}" if one.first_other is not None else "none"
    return [one.stack, size, f"{one.divergence:.2g} nats", f"{one.same_top1:.0%}", first, _name_layers(one.layers)]


def _name_layers(layers: dict[str, float]) -> str:
    """The layers whose cache is off most beyond that of the layer below, the worst first."""
    ordered = sorted(layers, key=int)
    below = {name: layers[before] for before, name in pairwise(ordered)}
    added = {name: layers[name] - below.get(name, 0.0) for name in ordered}
    worst = sorted((name for name in ordered if added[name] >= SHARE_SHOWN), key=lambda name: -added[name])
    return ", ".join(f"{name} ({layers[name]:.0%})" for name in worst[:MOST_LAYERS]) or "-"

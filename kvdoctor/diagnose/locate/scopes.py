"""The modules of a checkpoint that the scopes of a graph's nodes name (`diagnose.node_source`).

A graph may be exported from a wrapper around the checkpoint's model or from a part of it, so that one side has more
leading parts; these are left out where that makes names equal.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from kvdoctor.diagnose.locate.runnable import LAYER

MOST_LEADING = 2
"""Leading parts of a name that may be left out."""


def match_scopes(scopes: Iterable[str], modules: Sequence[str]) -> dict[str, str]:
    """The module of each scope that has one: the leading parts are left out that make most names equal.

    Only names of modules inside layers count: `lm_head` alone shows no relation.
    """
    found = sorted({scope for scope in scopes if scope})
    best: dict[str, str] = {}
    for more, less in sorted(product(_leading(found), _leading(modules)), key=lambda pair: len(pair[0] + pair[1])):
        named = _without(modules, less)
        matched = {scope: named[short] for short, scope in _without(found, more).items() if short in named}
        if _count_layered(matched) > _count_layered(best):
            best = matched
    return best


def _count_layered(matched: Mapping[str, str]) -> int:
    return sum(LAYER.search(scope) is not None for scope in matched)


def _leading(names: Iterable[str]) -> list[str]:
    """What may be left out at the front of names, the empty text first."""
    counted = Counter(
        ".".join(parts[:length]) + "."
        for parts in (name.split(".") for name in names)
        for length in range(1, min(MOST_LEADING, len(parts) - 1) + 1)
    )
    return ["", *(prefix for prefix, _ in counted.most_common(6))]


def _without(names: Iterable[str], prefix: str) -> dict[str, str]:
    """Names by what is left without a prefix; those that do not have it keep all, if that is free."""
    cut = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    return {name: name for name in names if not name.startswith(prefix) and name not in cut} | cut

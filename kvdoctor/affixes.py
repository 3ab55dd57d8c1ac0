"""Pasts and presents paired by the ends of their names: `x` and `x_out`, `in_x` and `out_x`."""

from difflib import SequenceMatcher

MOST_LETTERS = 300
"""Of names that are compared letter by letter."""


def by_affix(pasts: list[str], presents: set[str], by_number: bool = False) -> dict[str, str]:
    """Pair pasts and presents by a change at the ends of their names that is the same for all; empty if there is none.

    Numbers alone prove little, `in1` and `out1` may be the first and the second tensor of their kind: they are asked
    for apart.
    """
    if len(pasts) < 2 or max(map(len, (*pasts, *presents)), default=0) > MOST_LETTERS:
        return {}
    for present in sorted(presents):
        core = _longest_common(pasts[0], present)
        if core.isdigit() != by_number or not core or (not by_number and not any(map(str.isalpha, core))):
            continue
        (before, after), (new_before, new_after) = (name.split(core, 1) for name in (pasts[0], present))
        pairs = {}
        for past in pasts:
            middle = past.removeprefix(before).removesuffix(after) if after else past.removeprefix(before)
            if past.startswith(before) and past.endswith(after):
                pairs[past] = f"{new_before}{middle}{new_after}"
        if set(pairs) == set(pasts) and set(pairs.values()) == presents:
            return pairs
    return {}


def _longest_common(one: str, other: str) -> str:
    match = SequenceMatcher(None, one, other, autojunk=False).find_longest_match()
    return one[match.a : match.a + match.size]

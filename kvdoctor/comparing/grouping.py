"""What is other in the same way on 24 layers is one thing: it names them all and is not told 24 times."""

import re
from collections.abc import Iterable
from dataclasses import replace

from kvdoctor.report.diff_document import Delta

MARKS = re.compile(r"\d+|key|value", re.ASCII)
"""What the names of the slots of one kind differ in."""


def grouped(deltas: Iterable[Delta]) -> tuple[Delta, ...]:
    """The deltas, those alike with all their subjects on the first of them."""
    found: dict[object, Delta] = {}
    for delta in deltas:
        key = _key(delta) if delta.what != "operator" else delta
        known = found.get(key)
        found[key] = delta if known is None else replace(known, subject=(*known.subject, *delta.subject))
    return tuple(found.values())


def _key(delta: Delta) -> object:
    """What must be alike: names of what was renamed but for their numbers, all else as it is."""
    names = delta.field in ("name", "past", "present", "filled by", "keeps")
    sides = [MARKS.sub("", side or "") if names else side for side in (delta.before, delta.after)]
    return (delta.what, delta.field, *sides, delta.before is None, delta.after is None, delta.effect, delta.because)

"""The sentences and table rows that all formats share: one module for each thing that a report describes.

Functions take parts of a report and return text, pairs of label and text, or a header with rows; where these stand on a
page is decided by the formats. Figures with units, counts with nouns and long lists of names are written here.
`summary` is quoted by the document itself, so it and its imports take `report.document` for types only.
"""

from collections.abc import Sequence

KIBI = 1024


def format_bytes(number: int) -> str:
    """`512 B`, `1.5 KiB`."""
    if number < KIBI:
        return f"{number} B"
    value, units = float(number), ["KiB", "MiB", "GiB", "TiB"]
    for unit in units:
        value /= KIBI
        if value < KIBI or unit == units[-1]:
            return f"{value:.1f} {unit}"
    return f"{number} B"


def format_milliseconds(seconds: float) -> str:
    """`0.51 ms`."""
    return f"{seconds * 1000:.2f} ms"


def format_count(number: int, noun: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def join_some(texts: Sequence[str], most: int, between: str = ", ", rest: str = " and {} more") -> str:
    """The first of many, and how many are left out: `KV203, KV301 and 3 more`."""
    left = len(texts) - most
    return between.join(texts[:most]) + (rest.format(left) if left > 0 else "")


def shorten_names(names: Sequence[str], most: int = 1) -> str:
    """Name the first of many: `present.0.encoder.key and 3 more`."""
    return join_some(names, most)

"""The parts of a decoder beside those of its checkpoint, in words and as a table."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from kvdoctor.decode.runs import PartDifference, Run

MOST_LISTED = 12


def describe_parts(parts: Sequence[PartDifference]) -> str:
    """All parts in one line, in standard deviations; parts that agree before the first one that differs as one."""
    first = next((index for index, part in enumerate(parts) if part.differs), len(parts))
    before, after = parts[:first], parts[first:]
    listed = [_describe_equal(before)] if before else []
    listed += [f"{_name(part)} {_format(part)}" for part in after[:MOST_LISTED]]
    more = f" and {len(after) - MOST_LISTED} more" if len(after) > MOST_LISTED else ""
    return "; ".join(listed) + more


def tabulate_parts(run: Run) -> tuple[list[str], list[list[str]]] | None:
    """A header and a row for each part of a run; None where its parts were not compared."""
    if not run.parts:
        return None
    first = next((part for part in run.parts if part.differs), None)
    rows = []
    for layer, parts in groupby(run.parts, key=lambda part: part.layer):
        for index, part in enumerate(parts):
            shown = "" if layer is None or index else str(layer)
            mark = "first that differs" if part is first else "differs" if part.differs else ""
            rows.append([shown, part.part, _format(part), mark])
    return ["layer", "part", "largest difference", ""], rows


def _describe_equal(parts: Iterable[PartDifference]) -> str:
    parts = tuple(parts)
    worst = max(parts, key=lambda part: part.relative)
    ends = _name(parts[0]) if len(parts) == 1 else f"{_name(parts[0])} to {_name(parts[-1])}"
    return f"{ends} within {_format(worst)}"


def _name(part: PartDifference) -> str:
    return part.part if part.layer is None else f"layer {part.layer} {part.part}"


def _format(part: PartDifference) -> str:
    return "not finite" if part.relative < 0 else f"{part.relative:.1e}"

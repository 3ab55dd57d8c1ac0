"""The speed of a model in words: a table for each stack."""

from kvdoctor.decode.speed import SpeedPoint, middle, spread
from kvdoctor.report.document import Report
from kvdoctor.report.facts import SpeedFacts
from kvdoctor.report.wording.units import format_bytes, format_milliseconds

HEADER = [
    "past",
    "first token",
    "step",
    "tokens per second",
    "range of rounds",
    "peak memory",
    "cache written per step",
]


def tabulate_speed(report: Report) -> list[tuple[str, list[str], list[list[str]]]]:
    """For each stack the title, the header and a row for each length of the past."""
    return [(_title(one), HEADER, [_row(point) for point in one.points]) for one in report.speed]


def list_speed_remarks(report: Report) -> list[str]:
    """What the tables do not say: whether memory grows, and what was left out."""
    found = []
    for one in report.speed:
        if one.steps:
            found.append(f"{one.stack}: {one.steps} equal steps took {format_bytes(one.grown_bytes)} more memory")
        found += [f"{one.stack}: {reason}" for reason in one.left_out]
    return found


def _title(one: SpeedFacts) -> str:
    return f"speed of {one.stack}: {one.provider}, {one.threads} threads, {one.processor}"


def _row(point: SpeedPoint) -> list[str]:
    step = middle(point.step)
    apart = max(spread(point.first), spread(point.step))
    return [
        f"{point.past:,}",
        format_milliseconds(middle(point.first)),
        format_milliseconds(step),
        f"{1 / step:,.0f}" if step else "",
        f"{apart:.0%}",
        format_bytes(point.peak_bytes),
        format_bytes(point.written),
    ]

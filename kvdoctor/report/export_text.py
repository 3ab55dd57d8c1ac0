"""An export made afresh, in words: with what, chosen why, and what is other than in the model that it replaces."""

from collections.abc import Iterator

from kvdoctor.report.document import ExportRecord, PortChange

MOST_PORTS = 8


def title(record: ExportRecord) -> str:
    """What was exported with what."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return f"exported afresh from {record.checkpoint} with {record.exporter} ({versions}; by {record.way})"


def rows(record: ExportRecord, replaced: str) -> Iterator[tuple[str, str]]:
    """Labels and texts: each choice with its reason, then what else there is to know."""
    for choice in record.choices:
        yield choice.what, f"{choice.value}: {choice.because}"
    for failure in record.failures:
        yield "in vain", failure
    if record.left_out:
        yield "left out", f"{', '.join(record.left_out)}: {replaced} has no such file"
    for port in record.ports[:MOST_PORTS]:
        yield "other", _port(port, replaced)
    if len(record.ports) > MOST_PORTS:
        yield "other", f"{len(record.ports) - MOST_PORTS} more inputs and outputs (all in the JSON report)"
    if record.recipe is not None:
        yield "again", f"{record.recipe} in OUT holds the scripts, the pins, the command and the log"


def _port(port: PortChange, replaced: str) -> str:
    if port.before is None:
        return f"{port.name} of {port.file} is new: {port.after}"
    if port.after is None:
        return f"{port.name} of {port.file} is gone: {port.before} in {replaced}"
    return f"{port.name} of {port.file} is {port.after}, and {port.before} in {replaced}"

"""What a report says of its surroundings: the environment, what was asked for, the files and their ports, notes."""

import json
from collections.abc import Iterator
from typing import Any

from kvdoctor.report import matrix, wording
from kvdoctor.report.document import Report
from kvdoctor.report.page.blocks import Place, code, facts, folded, listed, more_line, table
from kvdoctor.report.page.markup import Content

MOST_FILES, MOST_PORTS, MOST_NOTES = 100, 200, 100


def environment(report: Report) -> Iterator[Content]:
    """Versions, and the options that held."""
    yield facts(report.environment.items())
    options = [
        (name.replace("_", "-"), _asked(value)) for name, value in sorted(report.arguments.items()) if value != []
    ]
    yield facts([*options, ("seed", str(report.seed))])
    if limits := list(matrix.limits(report)):
        yield listed(limits)


def _asked(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def files(report: Report, place: Place) -> Iterator[Content]:
    """The files of the model; of those that were inspected inputs and outputs too."""
    header = ("file", "role", "size", "IR", "opsets", "producer")
    rows = [(code(row[0]), *row[1:]) for row in map(wording.file_row, report.model.files[:MOST_FILES])]
    yield table(place.id("files-table"), "Files", header, rows)
    yield more_line(len(report.model.files) - MOST_FILES, "file")
    if digests := [(code(f.path), code(f.sha256)) for f in report.model.files[:MOST_FILES] if f.sha256]:
        yield table(place.id("hashes"), "SHA-256 of the files", ("file", "SHA-256"), digests)
    for number, file in enumerate(report.model.files[:MOST_FILES]):
        if file.inputs or file.outputs:
            ports = list(wording.port_rows(file, everything=False))
            rows = [(code(name), way, code(typed)) for way, name, typed in ports[:MOST_PORTS]]
            made = table(
                place.id(f"ports-{number}"), f"Inputs and outputs of {file.path}", ("name", "direction", "type"), rows
            )
            yield folded(("Inputs and outputs of ", code(file.path)), made, more_line(len(ports) - MOST_PORTS, "port"))


def notes(report: Report) -> Iterator[Content]:
    """What else there is to know."""
    yield listed(report.notes[:MOST_NOTES])
    yield more_line(len(report.notes) - MOST_NOTES, "note")

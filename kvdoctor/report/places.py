"""Where a finding stands, for tools that show it beside the files of a repository."""

import posixpath
import re
from urllib.parse import quote

from kvdoctor.findings import Finding
from kvdoctor.report.document import Report


def path_of(report: Report, finding: Finding | None = None) -> str:
    """The path of the file that a finding is about, as far as the user wrote it; else that of the model."""
    model = report.model.path.replace("\\", "/")
    if finding is None or finding.file is None:
        return model
    is_file = any(posixpath.basename(model) == file.path for file in report.model.files)
    folder = posixpath.dirname(model) if is_file else model
    return posixpath.normpath(posixpath.join(folder, finding.file))


def uri(path: str) -> str:
    """A path as a reference that no character in it can turn into another one (RFC 3986)."""
    if re.match(r"[A-Za-z]:/", path):
        return "file:///" + quote(path, safe="/:")
    quoted = quote(path, safe="/")
    return f"file://{quoted}" if path.startswith("/") else quoted

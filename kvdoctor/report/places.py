"""Where a finding stands, for tools that show it beside the files of a repository."""

import posixpath
import re
from urllib.parse import quote

from kvdoctor.findings import Finding
from kvdoctor.report.document import Report
from kvdoctor.report.safe import shortened

LONGEST_PATH = 4096


def path_of(report: Report, finding: Finding | None = None) -> str:
    """The path of the file that a finding is about, as far as the user wrote it; else that of the model."""
    model = shortened(report.model.path.replace("\\", "/"), LONGEST_PATH)
    if finding is None or finding.file is None:
        return model
    is_file = any(posixpath.basename(model) == file.path for file in report.model.files)
    folder = posixpath.dirname(model) if is_file else model
    return posixpath.normpath(posixpath.join(folder, shortened(finding.file, LONGEST_PATH)))


def uri(path: str) -> str:
    """A path as a reference that no character in it can turn into another one (RFC 3986).

    Bytes of a name that are no UTF-8, which Python holds as lone surrogates, are written as these bytes.
    """
    if re.match(r"[A-Za-z]:/", path):
        return "file:///" + quote(_bytes(path), safe="/:")
    quoted = quote(_bytes(path), safe="/")
    return f"file://{quoted}" if path.startswith("/") else quoted


def _bytes(path: str) -> bytes:
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return path.encode("utf-8", "replace")

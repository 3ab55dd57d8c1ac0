"""For a GitHub workflow: findings as annotations, the summary of the step, and the paths of files in a repository.

An annotation is a line `::error file=F,title=T::MESSAGE` (GitHub Docs, Workflow commands). In data `%`, carriage return
and line feed are escaped, in properties `:` and `,` as well, so that a name from a model cannot end a command or begin
one. A step has 10 annotations of each kind, and the runner drops the others: the tenth says how many there are.

Paths in annotations and SARIF are read from the root of the repository, wherever the step ran: on a runner that is
`GITHUB_WORKSPACE` (GitHub Docs, Variables reference).
"""

import contextlib
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from kvdoctor.errors import UsageError
from kvdoctor.findings import Finding
from kvdoctor.report.document import Report
from kvdoctor.report.escaping import printable, shortened
from kvdoctor.report.markdown import render_summary
from kvdoctor.report.wording.finding import write_lines

KINDS = {"error": "error", "warning": "warning", "note": "notice"}
MOST_OF_A_KIND = 10
ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
IN_PROPERTIES = {**ESCAPES, ":": "%3A", ",": "%2C"}
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
MOST_SUMMARY_BYTES = 1 << 20
"""GitHub refuses a longer summary of a step as a whole (GitHub Docs, Workflow commands)."""
LONGEST_PATH = 4096
WORKSPACE = "GITHUB_WORKSPACE"


def render_all(reports: Sequence[Report]) -> str:
    """An annotation for each finding that counts, and for each essential check that could not run, the worst first."""
    lines: dict[str, list[str]] = {kind: [] for kind in KINDS.values()}
    count = Counter[str]()
    for kind, line in _annotations(reports):
        count[kind] += 1
        lines[kind] += [line] if count[kind] <= MOST_OF_A_KIND else []
    for kind, of_kind in lines.items():
        if (more := count[kind] - MOST_OF_A_KIND + 1) > 1:
            words = f"{more} more of these; the log of the step lists all of them"
            of_kind[MOST_OF_A_KIND - 1 :] = [f"::{kind} title=kvdoctor::{words}"]
    return "".join(f"{line}\n" for of_kind in lines.values() for line in of_kind)


def _annotations(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    """Each annotation after its kind. Known findings are the last: they must not displace new ones from the ten."""
    for known, report in ((known, report) for known in (False, True) for report in reports):
        for finding in (finding for finding in report.findings if (finding.known is not None) is known):
            kind = KINDS["note" if known else finding.severity]
            title = f"kvdoctor {finding.code} {finding.name}"
            yield kind, _line(kind, path_of(report, finding), title, *write_lines(finding))
        for entry in (entry for entry in report.not_checked if entry.essential and not known):
            kind = "warning" if report.allowed(entry.code) is None else "notice"
            yield kind, _line(kind, path_of(report), f"kvdoctor {entry.code}", f"not checked: {entry.reason}")


def _line(kind: str, path: str, title: str, *words: str) -> str:
    properties = f"file={_escape(printable(path), IN_PROPERTIES)},title={_escape(printable(title), IN_PROPERTIES)}"
    text = "\n".join(printable(shortened(line, 600)) for line in words)
    return f"::{kind} {properties}::{_escape(text, ESCAPES)}"


def _escape(text: str, escapes: dict[str, str]) -> str:
    return "".join(escapes.get(character, character) for character in text)


def write_step_summary(verdict: str, reports: Sequence[Report], last: tuple[str, ...]) -> bool:
    """Add the reports of a gate to the summary of the step, where there is one; False where they do not fit.

    Raises:
        UsageError: it cannot be written.
    """
    file = os.environ.get(SUMMARY_VARIABLE)
    if not file:
        return True
    try:
        used = Path(file).stat().st_size if Path(file).exists() else 0
        text = render_summary(verdict, reports, last).encode("utf-8")
        if fits := used + len(text) <= MOST_SUMMARY_BYTES:
            with Path(file).open("ab") as summary:
                summary.write(text)
    except OSError as error:
        raise UsageError(f"cannot write the summary {file!r} ({SUMMARY_VARIABLE}): {error.strerror or error}") from None
    return fits


def path_of(report: Report, finding: Finding | None = None) -> str:
    """The path of a finding's file or of the model, on a runner of GitHub from the root of the repository."""
    path = shortened(report.model.path.replace("\\", "/"), LONGEST_PATH)
    if finding is not None and finding.file is not None:
        is_file = any(posixpath.basename(path) == file.path for file in report.model.files)
        folder = posixpath.dirname(path) if is_file else path
        path = posixpath.normpath(posixpath.join(folder, shortened(finding.file, LONGEST_PATH)))
    if root := os.environ.get(WORKSPACE):
        with contextlib.suppress(OSError):
            here = os.getcwd()  # noqa: PTH109 - a text like the others, not a path of this system
            # The working folder is given with links resolved, the root as it was configured.
            return in_repository(path, here, root, os.path.realpath(root))
    return path


def in_repository(path: str, here: str, *roots: str) -> str:
    """The path, absolute or relative to `here`, relative to the first of the roots that it lies in; else unchanged."""
    whole = _plain(posixpath.join(_plain(here), path.replace("\\", "/")) if not _absolute(path) else path)
    for root in map(_plain, roots):
        if _absolute(root) and (whole == root or whole.startswith(f"{root.rstrip('/')}/")):
            return posixpath.relpath(whole, root)
    return path


def _plain(path: str) -> str:
    return posixpath.normpath(path.replace("\\", "/"))


def _absolute(path: str) -> bool:
    return re.match(r"([A-Za-z]:)?[/\\]", path) is not None


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

"""The path of a finding's file, for tools that show findings beside the files of a repository.

GitHub reads paths in annotations and SARIF from the root of the repository, wherever the step ran. On a runner
`GITHUB_WORKSPACE` is that root (GitHub Docs, Variables reference).
"""

import os
import posixpath
import re
from urllib.parse import quote

from kvdoctor.findings import Finding
from kvdoctor.report.document import Report
from kvdoctor.report.safe import shortened

LONGEST_PATH = 4096
WORKSPACE = "GITHUB_WORKSPACE"


def path_of(report: Report, finding: Finding | None = None) -> str:
    """The path of a finding's file, or of the model, from where the user's path starts.

    On a runner of GitHub it starts at the root of the repository if the file lies in it.
    """
    path = _as_written(report, finding)
    root = os.environ.get(WORKSPACE)
    if not root:
        return path
    try:
        here = os.getcwd()  # noqa: PTH109 - a text like the others, not a path of this system
    except OSError:
        return path
    # The working folder is given with links resolved, the root as it was configured.
    return in_repository(path, here, root, os.path.realpath(root))


def in_repository(path: str, here: str, *roots: str) -> str:
    """The path relative to the first of the roots that it lies in; unchanged if it lies in none.

    Args:
        path: A file, relative to `here` or absolute.
        here: The folder that relative paths start in, absolute.
        roots: Names of the repository's folder, absolute.
    """
    whole = _plain(posixpath.join(_plain(here), path.replace("\\", "/")) if not _absolute(path) else path)
    for root in map(_plain, roots):
        if _absolute(root) and (whole == root or whole.startswith(f"{root.rstrip('/')}/")):
            return posixpath.relpath(whole, root)
    return path


def _plain(path: str) -> str:
    return posixpath.normpath(path.replace("\\", "/"))


def _absolute(path: str) -> bool:
    return re.match(r"([A-Za-z]:)?[/\\]", path) is not None


def _as_written(report: Report, finding: Finding | None) -> str:
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

"""What of the replaced model's deal is kept: its files by the part they play, and its inputs and outputs by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvdoctor.afresh.sick import Known
from kvdoctor.model_folder import open_folder
from kvdoctor.report.document import PortChange

DECODERS = ("decoder-merged", "decoder", "decoder-with-past")


def leave_out(folder: Path, known: Known) -> tuple[str, ...]:
    """Take away decoders that the replaced model has not, where the ones it has are all there. Gives their names."""
    if not known.sick.roles:
        return ()
    files = open_folder(str(folder)).files
    wanted = set(known.sick.roles).intersection(DECODERS)
    if not wanted or not wanted <= {file.role for file in files}:
        return ()
    surplus = [file for file in files if file.role in DECODERS and file.role not in wanted]
    shared = {external.path for file in files if file not in surplus for external in file.external}
    for file in surplus:
        file.path.unlink()
        for external in file.external:
            if external.path not in shared and external.path.is_relative_to(folder):
                external.path.unlink(missing_ok=True)
    return tuple(file.name for file in surplus)


def changed_ports(known: Known, files: tuple[dict[str, Any], ...]) -> Iterator[PortChange]:
    """Inputs and outputs that are other than in the replaced model, in files of the same name or part."""
    for file in files:
        before = _counterpart(file, known.files, files)
        if before is None:
            continue
        for kind in ("inputs", "outputs"):
            was, now = (_ports(each, kind) for each in (before, file))
            for name in dict.fromkeys([*was, *now]):
                if not _alike(was.get(name), now.get(name)):
                    yield PortChange(str(file["path"]), name, _words(was.get(name)), _words(now.get(name)))


def _counterpart(
    file: dict[str, Any], old: tuple[dict[str, Any], ...], new: tuple[dict[str, Any], ...]
) -> dict[str, Any] | None:
    named = next((other for other in old if other["path"] == file["path"]), None)
    if named is not None:
        return named
    same = [other for other in old if other["role"] == file["role"]]
    alone = sum(other["role"] == file["role"] for other in new) == 1
    return same[0] if len(same) == 1 and alone else None


def _ports(file: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    return {str(port["name"]): port for port in file.get(kind) or ()}


def _alike(was: dict[str, Any] | None, now: dict[str, Any] | None) -> bool:
    """Whether a caller feeds and reads both in the same way: the names of free axes do not matter."""
    if was is None or now is None:
        return False
    old, new = was.get("shape"), now.get("shape")
    if was.get("dtype") != now.get("dtype"):
        return False
    if old is None or new is None:
        return True
    return len(old) == len(new) and all(
        before == after or not isinstance(after, int) for before, after in zip(old, new, strict=True)
    )


def _words(port: dict[str, Any] | None) -> str | None:
    if port is None:
        return None
    shape = port.get("shape")
    sizes = "" if shape is None else f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
    return f"{port.get('dtype')}{sizes}"

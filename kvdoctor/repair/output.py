"""The files of OUT: copied if unchanged, written again if changed."""

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from kvdoctor._version import __version__
from kvdoctor.analysis.model_folder import ModelFolder
from kvdoctor.model.files import SIDE_CARS
from kvdoctor.model.output_folder import MARK, copy_whole, regular_files, write_whole
from kvdoctor.model.proto import ModelProto
from kvdoctor.model.write import write_model
from kvdoctor.repair.workspace import WorkingCopy, side_car_path, source_of
from kvdoctor.report.document import Report

REPORTS = (MARK, "kvdoctor-report.md", "kvdoctor-report.html")
PROVENANCE = "kvdoctor."
"""Prefix of the entries in `metadata_props` in which kvdoctor records its changes."""


def copy_export(folder: ModelFolder, target: Path, left_out: Collection[Path] = ()) -> None:
    """Copy the export without the files left out; weights once, and never by a link."""
    for path in _list_files(folder):
        if path.name not in REPORTS and path not in left_out:
            copy_whole(path, target / path.relative_to(folder.root))
    for name in SIDE_CARS:
        above = side_car_path(folder, name)
        if above is not None and above not in left_out and not (target / name).exists():
            copy_whole(above, target / name)


def write_changed(copy: WorkingCopy, target: Path, repairs: dict[str, tuple[str, ...]]) -> None:
    """Write the changed files over their copies; `repairs` are the names of the repairs that changed each file.

    Raises:
        UsageError: a changed graph is too large for a file.
        OSError: a file cannot be written.
    """
    for name in sorted(copy.changed):
        if name in copy.models:
            source = copy.file(name).path
            model = ModelProto()
            model.CopyFrom(copy.models[name])
            note_provenance(model, source.name, repairs.get(name, ()))
            write_model(model, source, target / name)
        else:
            text = json.dumps(copy.side_cars[name], indent=2, ensure_ascii=False, allow_nan=False)
            (target / name).write_text(text + "\n", encoding="utf-8", newline="\n")


def put_back(folder: ModelFolder, names: Iterable[str], target: Path) -> None:
    """Replace the changed files of OUT by their originals, for another attempt."""
    for name in names:
        place, source = target / name, source_of(folder, name)
        if place.is_file() and source.is_file():
            place.unlink()
            copy_whole(source, place)


def write_reports(target: Path, report: Report) -> None:
    """Write the fix report beside the model, with the names of all files that kvdoctor wrote."""
    from kvdoctor.report import html, json_format, markdown

    assert report.repair is not None  # noqa: S101 - written of a repair
    contents = tuple(path.relative_to(target).as_posix() for path in regular_files(target))
    report = replace(report, repair=replace(report.repair, contents=(*contents, *REPORTS)))
    write_whole(target / "kvdoctor-report.md", markdown.render_whole(report))
    write_whole(target / "kvdoctor-report.html", html.render(report))
    write_whole(target / MARK, json_format.render(report))


def note_provenance(model: ModelProto, source: str, repairs: Iterable[str]) -> None:
    """Record in the model who changed what, without time and folder, so that equal repairs give equal files."""
    earlier = {entry.key: entry.value for entry in model.metadata_props}
    done = [*filter(None, earlier.get(f"{PROVENANCE}repairs", "").split(", ")), *repairs]
    facts = {"version": __version__, "source": source, "repairs": ", ".join(dict.fromkeys(done))}
    kept = [entry for entry in model.metadata_props if not entry.key.startswith(PROVENANCE)]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    for key, value in facts.items():
        model.metadata_props.add(key=PROVENANCE + key, value=value)


def _list_files(folder: ModelFolder) -> Iterator[Path]:
    """The files of the export: all below a folder; for a single file those of its stack, its data and its configs."""
    if Path(folder.shown).is_dir():
        yield from regular_files(folder.root)
        return
    wanted = {file.path for file in folder.files}
    wanted |= {external.path for file in folder.files for external in file.external}
    wanted |= {folder.root / name for name in SIDE_CARS if (folder.root / name).is_file()}
    yield from sorted(wanted)

"""The working copy of an export: its files as repairs change them in memory, the stack that they are for, and OUT.

Models are read without their weights: a tensor whose values were left out points into the file that it came from, and
gets them back when the model is written (`model/write.py`). In OUT, files that did not change are copied.
"""

import copy
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvdoctor._version import __version__
from kvdoctor.analysis.model_folder import MOST_CONFIG_BYTES, ModelFolder
from kvdoctor.analysis.stacks import INPUT_ROLES, OnnxFile, StackFiles
from kvdoctor.contract import CacheContract, PhaseName, describe
from kvdoctor.decode.runs import Run
from kvdoctor.decode.side_files import read_side_file
from kvdoctor.errors import UsageError
from kvdoctor.findings import Finding
from kvdoctor.model.edit import keep_only
from kvdoctor.model.files import SIDE_CARS
from kvdoctor.model.output_folder import MARK, copy_whole, regular_files, write_whole
from kvdoctor.model.proto import GraphProto, ModelProto, TensorProto, ValueInfoProto
from kvdoctor.model.skeleton import read_skeleton
from kvdoctor.model.traverse import explain_old_opset
from kvdoctor.model.view import GraphView, declared
from kvdoctor.model.write import write_model
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.report.document import Report
from kvdoctor.report.repair_record import Change

if TYPE_CHECKING:
    import numpy as np

    from kvdoctor.runtime.client import Runtime

__all__ = ("CannotRepair", "Change", "RepairContext")  # what every repair needs

REPORTS = (MARK, "kvdoctor-report.md", "kvdoctor-report.html")
PROVENANCE = "kvdoctor."
"""Prefix of the entries in `metadata_props` in which kvdoctor records its changes."""


class CannotRepair(Exception):
    """Raised by a repair before it changes anything, with the reason; `instead` is an alternative, if one is known."""

    def __init__(self, reason: str, instead: str = "") -> None:
        super().__init__(reason)
        self.instead = instead


class CannotConvert(UsageError):
    """No stack, or one of those that must be, is of the form that a conversion or a layout needs.

    A fault may be the reason, so a model is diagnosed before it is refused.
    """


class NoRuntime(CannotRepair):
    """A repair has to run the graph, and no runtime is available."""


def side_car_path(folder: ModelFolder, name: str) -> Path | None:
    """The path of the config of that name: next to the models, or next to the `onnx/` folder that holds them."""
    roots = (folder.root, folder.root.parent) if folder.root.name == "onnx" else (folder.root,)
    return next((root / name for root in roots if (root / name).is_file()), None)


def source_of(folder: ModelFolder, name: str) -> Path:
    """The source of a file of OUT; `name` is that of the copy, relative to OUT."""
    above = side_car_path(folder, name) if name in SIDE_CARS else None
    return above or folder.root / name


@dataclass
class WorkingCopy:
    """The files of an export as repairs change them, each read when it is needed; those `changed` are written."""

    folder: ModelFolder
    changed: set[str] = field(default_factory=set)
    models: dict[str, ModelProto] = field(default_factory=dict)
    side_cars: dict[str, Any] = field(default_factory=dict)

    def file(self, name: str) -> OnnxFile:
        """The ONNX file of that name, relative to the folder."""
        return next(file for file in self.folder.files if file.name == name)

    def model(self, name: str) -> ModelProto:
        """The model of that file, to be changed in place; large weights are left out and point to their bytes.

        Raises:
            UnreadableError: the file can no longer be read.
            CannotRepair: its inputs or outputs are sequences, and a copy would take and return tensors.
        """
        if sequences := self.file(name).sequences:
            ports = " and ".join(map(repr, sequences))
            raise CannotRepair(f"{ports} are sequences of tensors, and a copy would have tensors instead")
        if name not in self.models:
            self.models[name] = read_skeleton(self.file(name).path, located=True).model
        return self.models[name]

    def side_car(self, name: str) -> Any:
        """The content of a config, to be changed in place; None if there is none or it cannot be read."""
        if name not in self.side_cars:
            path = side_car_path(self.folder, name)
            try:
                found = None if path is None else json.loads(read_side_file(path, MOST_CONFIG_BYTES))
                # Values that JSON does not allow (NaN, numbers too large) could not be written again.
                json.dumps(found, allow_nan=False)
                self.side_cars[name] = found
            except (OSError, ValueError, RecursionError):
                self.side_cars[name] = None
        return self.side_cars[name]

    def snapshot(self) -> "WorkingCopy":
        """A copy of the present state, to which a repair can be undone."""
        return WorkingCopy(self.folder, set(self.changed), *copy.deepcopy((self.models, self.side_cars)))

    def restore(self, saved: "WorkingCopy") -> None:
        """Go back to a snapshot."""
        self.changed, self.models, self.side_cars = saved.changed, saved.models, saved.side_cars


@record(slots=False)
class RepairContext:
    """One stack, what was found on it, and its files to be changed.

    A file or config is written if a `Change` that a repair returns names it. `contract` is None only for a stack
    without slots. `findings` are those of this stack and of its files from before any repair; `runs` are the runs of
    the experiments. `runtime` and `options` serve repairs that run the graph to prove which axis a constant stands for;
    `runtime` is None if nothing may be run. All repairs work on the same copy, in order: read the graph as it is now
    (`view`), not the one that was diagnosed.
    """

    stack: StackFiles
    contract: CacheContract | None
    findings: tuple[Finding, ...]
    runs: tuple[Run, ...]
    copy: WorkingCopy
    runtime: "Runtime | None"
    options: Options

    def found(self, *checks: str) -> tuple[Finding, ...]:
        """The findings of those checks."""
        return tuple(finding for finding in self.findings if finding.name in checks)

    @property
    def drivable(self) -> CacheContract:
        """The contract, for repairs that need one. Raises CannotRepair: there is none."""
        if self.contract is None or not self.contract.slots:
            raise CannotRepair("the cache contract could not be read from the graph")
        return self.contract

    @property
    def running(self) -> "Runtime":
        """The runtime, for repairs that run the graph. Raises NoRuntime: nothing may be run."""
        if self.runtime is None:
            raise NoRuntime("the repair has to run the graph, and no runtime is available")
        return self.runtime

    @property
    def files(self) -> tuple[str, ...]:
        """The ONNX files of the stack that can be read, those that do not decode last."""
        names = {file.name: role in INPUT_ROLES for role, file in self.stack.files.items() if file.view is not None}
        return tuple(sorted(names, key=names.__getitem__))

    def file_of(self, phase: PhaseName) -> str:
        """The name of the file that serves a phase."""
        return self.drivable.graph(phase).file

    def model(self, name: str) -> ModelProto:
        """The model of a file, to be changed in place."""
        return self.copy.model(name)

    def view(self, name: str) -> GraphView:
        """A read-only view of a model as it is now, valid until the next change."""
        return GraphView(self.copy.model(name))

    def files_of(self, *checks: str) -> tuple[str, ...]:
        """The files of the stack that findings of those checks name."""
        return tuple(dict.fromkeys(one.file for one in self.found(*checks) if one.file in self.files))

    def graphs(self) -> Iterator[tuple[PhaseName, str]]:
        """The phases that decode and the file of each, the first step before the later ones."""
        for phase in ("prefill", "decode"):
            if phase in self.drivable.phases:
                yield phase, self.file_of(phase)

    def values(self, name: str, tensor: TensorProto) -> "np.ndarray[Any, Any]":
        """The values of a tensor of a file, inside it or external. Reads that tensor alone.

        Raises:
            CannotRepair: its bytes cannot be read.
        """
        import numpy as np
        from onnx import numpy_helper

        folder = self.copy.file(name).path.parent
        try:
            return np.asarray(numpy_helper.to_array(tensor, str(folder)))
        except Exception as error:  # onnx raises many types here: for links, for sizes, for missing files
            raise CannotRepair(f"the values of {tensor.name!r} cannot be read ({type(error).__name__})") from None

    def require_opset(self, file: str, least: int, operator: str) -> None:
        """End a repair that inserts an operator which the opset of a file does not have."""
        if (old := explain_old_opset(self.model(file), file, least, operator)) is not None:
            self.cannot(old)

    @staticmethod
    def cannot(reason: str, instead: str = "") -> NoReturn:
        """End a repair whose requirements are not met, before it changes anything. Raises CannotRepair: always."""
        raise CannotRepair(reason, instead)


def find_declared(values: Iterable[ValueInfoProto], name: str | None) -> ValueInfoProto | None:
    """The declaration of a value among those of a graph."""
    return next((value for value in values if value.name == name), None)


def describe_type(value: ValueInfoProto) -> str:
    """The declared type of a value, as in `float[batch, 4, past, 8]`."""
    return describe(declared(value).dtype, declared(value).shape)


def forget_declaration(graph: GraphProto, name: str) -> None:
    """Drop what a graph declares of a value inside it."""
    keep_only(graph.value_info, lambda value: value.name != name)


def copy_export(folder: ModelFolder, target: Path, left_out: Collection[Path] = ()) -> None:
    """Copy the export without the files left out; weights once, and never by a link."""
    # All below a folder; for a single file those of its stack, its data and its configs.
    files = set(regular_files(folder.root) if Path(folder.shown).is_dir() else ())
    if not Path(folder.shown).is_dir():
        files = {file.path for file in folder.files}
        files |= {external.path for file in folder.files for external in file.external}
        files |= {folder.root / name for name in SIDE_CARS if (folder.root / name).is_file()}
    for path in sorted(files):
        if path.name not in REPORTS and path not in left_out:
            copy_whole(path, target / path.relative_to(folder.root))
    for name in SIDE_CARS:
        above = side_car_path(folder, name)
        if above is not None and above not in left_out and not (target / name).exists():
            copy_whole(above, target / name)


def write_changed(made: WorkingCopy, target: Path, repairs: dict[str, tuple[str, ...]]) -> None:
    """Write the changed files over their copies; `repairs` are the names of the repairs that changed each file.

    Raises:
        UsageError: a changed graph is too large for a file.
        OSError: a file cannot be written.
    """
    for name in sorted(made.changed):
        if name in made.models:
            source, model = made.file(name).path, copy.deepcopy(made.models[name])
            note_provenance(model, source.name, repairs.get(name, ()))
            write_model(model, target / name, {source.name: source})
        else:
            text = json.dumps(made.side_cars[name], indent=2, ensure_ascii=False, allow_nan=False)
            (target / name).write_text(text + "\n", encoding="utf-8", newline="\n")


def put_back(folder: ModelFolder, names: Iterable[str], target: Path) -> None:
    """Replace the changed files of OUT by their originals, for another attempt."""
    for name in names:
        place, source = target / name, source_of(folder, name)
        if place.is_file() and source.is_file():
            place.unlink()
            copy_whole(source, place)


def write_reports(target: Path, report: Report) -> None:
    """Write the fix report next to the model, with the names of all files that kvdoctor wrote."""
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
    keep_only(model.metadata_props, lambda entry: not entry.key.startswith(PROVENANCE))
    for key, value in facts.items():
        model.metadata_props.add(key=PROVENANCE + key, value=value)

"""The working copy: the files of an export as repairs change them in memory, and the stack that they are changed for.

Models are read without their weights: a tensor whose values were left out points into the file that it came from, and
gets them back when the model is written (`model/write.py`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvdoctor.analysis.model_folder import ModelFolder
from kvdoctor.analysis.stacks import BESIDE, OnnxFile, StackFiles
from kvdoctor.contract import CacheContract, PhaseName
from kvdoctor.decode.runs import Run
from kvdoctor.errors import UsageError
from kvdoctor.findings import Finding
from kvdoctor.model.files import SIDE_CARS
from kvdoctor.model.proto import ModelProto, TensorProto
from kvdoctor.model.skeleton import read_skeleton
from kvdoctor.model.traverse import explain_old_opset
from kvdoctor.model.view import GraphView
from kvdoctor.options import Options
from kvdoctor.records import record

if TYPE_CHECKING:
    import numpy as np

    from kvdoctor.runtime.client import Runtime


class CannotRepair(Exception):
    """Raised by a repair whose requirements are not met, before it changes anything; the message tells the user why.

    `instead` is an alternative, if one is known: another export, or a change to the loop.
    """

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
    """The path of the config of that name: beside the models, or beside the `onnx/` folder that holds them."""
    root = folder.root
    places = [root / name, *([root.parent / name] if root.name == "onnx" else [])]
    return next((place for place in places if place.is_file()), None)


def source_of(folder: ModelFolder, name: str) -> Path:
    """The source of a file of OUT; `name` is that of the copy, relative to OUT."""
    above = side_car_path(folder, name) if name in SIDE_CARS else None
    return above or folder.root / name


@dataclass
class WorkingCopy:
    """The files of an export as repairs change them, each read when it is first needed.

    `changed` are the names of the files to write; the source is never written to.
    """

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
        """
        if name not in self.models:
            self.models[name] = read_skeleton(self.file(name).path, located=True).model
        return self.models[name]

    def side_car(self, name: str) -> Any:
        """The content of a config, to be changed in place; None if there is none or it cannot be read."""
        if name not in self.side_cars:
            path = side_car_path(self.folder, name)
            try:
                found = None if path is None else json.loads(path.read_text(encoding="utf-8"))
                # Values that JSON does not allow (NaN, numbers too large) could not be written again.
                json.dumps(found, allow_nan=False)
                self.side_cars[name] = found
            except (OSError, ValueError, RecursionError):
                self.side_cars[name] = None
        return self.side_cars[name]

    def snapshot(self) -> "WorkingCopy":
        """A copy of the present state, to which a repair can be undone."""
        models = {}
        for name, model in self.models.items():
            models[name] = ModelProto()
            models[name].CopyFrom(model)
        return WorkingCopy(self.folder, set(self.changed), models, json.loads(json.dumps(self.side_cars)))

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
        """The contract, for repairs that need one.

        Raises:
            CannotRepair: there is none.
        """
        if self.contract is None or not self.contract.slots:
            raise CannotRepair("the cache contract could not be read from the graph")
        return self.contract

    @property
    def running(self) -> "Runtime":
        """The runtime, for repairs that run the graph.

        Raises:
            NoRuntime: nothing may be run.
        """
        if self.runtime is None:
            raise NoRuntime("the repair has to run the graph, and no runtime is available")
        return self.runtime

    @property
    def files(self) -> tuple[str, ...]:
        """The ONNX files of the stack that can be read, those that do not decode last."""
        names = {file.name: role in BESIDE for role, file in self.stack.files.items() if file.view is not None}
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

    def graphs(self) -> Iterator[tuple[PhaseName, str]]:
        """The phases that decode and the file of each, the first step before the later ones."""
        for phase in ("prefill", "decode"):
            if phase in self.drivable.phases:
                yield phase, self.file_of(phase)

    def values(self, name: str, tensor: TensorProto) -> "np.ndarray[Any, Any]":
        """The values of a tensor of a file, inside or beside it. Reads that tensor alone.

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
        """End a repair of a file that is older than the operator that the repair inserts.

        Raises:
            CannotRepair: its opset is below `least`.
        """
        if (old := explain_old_opset(self.model(file), file, least, operator)) is not None:
            self.cannot(old)

    @staticmethod
    def cannot(reason: str, instead: str = "") -> NoReturn:
        """End a repair whose requirements are not met, before it changes anything.

        Raises:
            CannotRepair: always.
        """
        raise CannotRepair(reason, instead)

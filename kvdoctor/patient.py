"""The patient: one stack as repairs see it, with its files as they are being changed.

Models are read without their weights, which stay where they are: a tensor whose values were left out points into the
file it came from, and gets them back when the model is written (`cure/splicing.py`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvdoctor.contract import CacheContract, PhaseName
from kvdoctor.findings import Finding
from kvdoctor.graph import GraphView
from kvdoctor.model_folder import ModelFolder
from kvdoctor.onnx_schema import ModelProto, TensorProto
from kvdoctor.options import Options
from kvdoctor.runtimes import Runtime
from kvdoctor.skeleton import read_skeleton
from kvdoctor.stacks import OnnxFile, StackFiles
from kvdoctor.trace import Run

if TYPE_CHECKING:
    import numpy as np

SIDE_CARS = ("config.json", "generation_config.json", "genai_config.json", "export.json")


class CannotRepair(Exception):
    """Raised by a repair whose requirements do not hold: says why, in words for the user, before it changes anything.

    `instead` is what would do it, where that is known: a re-export, or a change to the loop.
    """

    def __init__(self, reason: str, instead: str = "") -> None:
        super().__init__(reason)
        self.instead = instead


def side_car_path(folder: ModelFolder, name: str) -> Path | None:
    """Where the config of that name lies: beside the models, or beside the `onnx/` folder that holds them."""
    root = folder.root
    places = [root / name, *([root.parent / name] if root.name == "onnx" else [])]
    return next((place for place in places if place.is_file()), None)


def source_of(folder: ModelFolder, name: str) -> Path:
    """The file that one of OUT is a copy of; its name is that of the copy, relative to OUT."""
    above = side_car_path(folder, name) if name in SIDE_CARS else None
    return above or folder.root / name


@dataclass
class WorkingCopy:
    """The files of an export as repairs change them, each read when it is first asked for.

    `changed` are the names of files that are to be written; the source is never written to.
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
            UnreadableError: the file cannot be read any more.
        """
        if name not in self.models:
            self.models[name] = read_skeleton(self.file(name).path, located=True).model
        return self.models[name]

    def side_car(self, name: str) -> Any:
        """The content of a config, to be changed in place; None where there is none that can be read."""
        if name not in self.side_cars:
            path = side_car_path(self.folder, name)
            try:
                found = None if path is None else json.loads(path.read_text(encoding="utf-8"))
                # What no JSON may hold (NaN, numbers too large) could not be written again as it was.
                json.dumps(found, allow_nan=False)
                self.side_cars[name] = found
            except (OSError, ValueError, RecursionError):
                self.side_cars[name] = None
        return self.side_cars[name]

    def snapshot(self) -> "WorkingCopy":
        """The same as it is now, for when a repair must be taken back."""
        models = {}
        for name, model in self.models.items():
            models[name] = ModelProto()
            models[name].CopyFrom(model)
        return WorkingCopy(self.folder, set(self.changed), models, json.loads(json.dumps(self.side_cars)))

    def restore(self, saved: "WorkingCopy") -> None:
        """Go back to a snapshot."""
        self.changed, self.models, self.side_cars = saved.changed, saved.models, saved.side_cars


@dataclass(frozen=True)
class Patient:
    """One stack, what was found on it, and its files to be changed.

    A file is written when a `Change` that a repair returns names it; so are configs. `contract` is None only for a
    stack without slots. `findings` are those of this stack and of its files that the check found before any repair;
    `runs` what the experiments showed. `runtime` and `options` are for repairs that prove which axis a constant stands
    for by running the graph; None where nothing is run (`running`). Every repair of a patient works on the same copy,
    in order: ask the graph as it is now (`view`), not the one that was diagnosed.
    """

    stack: StackFiles
    contract: CacheContract | None
    findings: tuple[Finding, ...]
    runs: tuple[Run, ...]
    copy: WorkingCopy
    runtime: Runtime | None
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
    def running(self) -> Runtime:
        """The runtime, for repairs that run the graph.

        Raises:
            CannotRepair: nothing is run here.
        """
        if self.runtime is None:
            raise CannotRepair("the graph would have to be run")
        return self.runtime

    @property
    def files(self) -> tuple[str, ...]:
        """The ONNX files of the stack that can be read, the encoder last."""
        names = {file.name: role == "encoder" for role, file in self.stack.files.items() if file.view is not None}
        return tuple(sorted(names, key=names.__getitem__))

    def file_of(self, phase: PhaseName) -> str:
        """The name of the file that serves a phase."""
        return self.drivable.graph(phase).file

    def model(self, name: str) -> ModelProto:
        """The model of a file, to be changed in place."""
        return self.copy.model(name)

    def view(self, name: str) -> GraphView:
        """Questions to a model as it is now; a view does not outlive the next change."""
        return GraphView(self.copy.model(name))

    def graphs(self) -> Iterator[tuple[PhaseName, str]]:
        """The phases that decode and the file of each: the first step before the later ones."""
        for phase in ("prefill", "decode"):
            if phase in self.drivable.phases:
                yield phase, self.file_of(phase)

    def values(self, name: str, tensor: TensorProto) -> "np.ndarray[Any, Any]":
        """The values of a tensor of a file, wherever they lie. Reads that tensor alone.

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

    @staticmethod
    def cannot(reason: str, instead: str = "") -> NoReturn:
        """End a repair that does not fit, before it changes anything.

        Raises:
            CannotRepair: always.
        """
        raise CannotRepair(reason, instead)

"""Lowers the files of an export that ask for more than is wanted: the encoder beside a decoder as well."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvdoctor.graph import GraphView
from kvdoctor.lowering import Wanted, lower
from kvdoctor.model_folder import ModelFolder
from kvdoctor.report.document import Change
from kvdoctor.targets.demands import demands

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class Lowered:
    """The models that were lowered, by their path, and what was changed, by the name of the stack."""

    models: "dict[Path, onnx.ModelProto]" = field(default_factory=dict)
    changes: dict[str, tuple[Change, ...]] = field(default_factory=dict)


def lower_files(folder: ModelFolder, want: Wanted, repaired: "dict[Path, onnx.ModelProto]") -> Lowered:
    """Lower the files of every stack; those that were repaired in place, others as they are read from the disk.

    Raises:
        CannotLower: a file cannot be lowered as wanted.
    """
    done = Lowered()
    for stack in folder.stacks if want.is_anything else ():
        changes: list[Change] = []
        for file in stack.files.values():
            if file.view is None or not _asks_more(file.view, want):
                continue
            if file.path in done.models:
                continue
            model = repaired.get(file.path) or _read(file.path)
            made = lower(model, want, file.name)
            if made:
                done.models[file.path] = model
                changes += made
        if changes:
            done.changes[stack.name] = tuple(changes)
    return done


def _asks_more(view: GraphView, want: Wanted) -> bool:
    asked = demands(view)
    too_new = (want.ir is not None and asked.ir > want.ir) or (want.opset is not None and asked.opset > want.opset)
    return too_new or bool(want.lacks & asked.features.keys())


def _read(path: Path) -> "onnx.ModelProto":
    import onnx

    return onnx.load(str(path), load_external_data=False)

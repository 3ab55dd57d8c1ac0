"""Raises a model to a newer IR version and opset, as `lower` lowers it: node by node, without its weights.

Operators of other domains, the bodies of If and Loop and local functions are raised with the model or stay as they
are; whatever has no newer form with the same meaning is named, and then nothing is changed.
"""

from collections.abc import Iterator

import onnx
from onnx import IR_VERSION, helper

from kvdoctor.model.proto import ModelProto
from kvdoctor.model.traverse import STANDARD, opset_version
from kvdoctor.repair.lowering.limits import CannotChangeVersion, VersionLimit
from kvdoctor.repair.lowering.lower import lower_model, refuse_older_ir, set_ir
from kvdoctor.repair.lowering.opset import replace_nodes, rewrite_nodes
from kvdoctor.report.repair_record import Change

WEIGHTS_ALONE = 4
"""From this IR version on a weight need not be an input, and one that is may be fed by the caller."""


def change_versions(model: ModelProto, ir: int | None, opset: int | None, file: str) -> tuple[Change, ...]:
    """Give a model an IR version and an opset, in place; None keeps what it has. `file` is the name in the changes.

    A raised opset raises the IR version as far as files of that opset have it, where none is asked for. External data
    need not be loaded.

    Raises:
        CannotChangeVersion: something has no form there; the model is as it was.
    """
    if ir is not None and model.ir_version < ir > IR_VERSION:
        raise CannotChangeVersion(
            (f"IR version {ir} is newer than onnx {onnx.__version__} knows",), "pip install -U onnx", "raised"
        )
    if opset is None or opset <= opset_version(model.opset_import):
        changes = [*lower_model(model, VersionLimit(ir=ir, opset=opset), file)]
    else:
        if ir is not None:
            refuse_older_ir(model, ir)
        replaced = rewrite_nodes(model, opset, "raised")
        changes = [*replace_nodes(model, replaced, file), *_raise_imports(model, opset, file)]
        least = helper.find_min_ir_version_for([helper.make_opsetid("", opset)], ignore_unknown=True)
        ir = ir or max(model.ir_version, least)
        changes += set_ir(model, ir, file) if ir < model.ir_version else []
    if ir is not None and ir > model.ir_version:
        changes += [*_fix_weights(model, ir, file), *set_ir(model, ir, file)]
    return tuple(changes)


def _raise_imports(model: ModelProto, opset: int, file: str) -> Iterator[Change]:
    places = [
        ("opset", model.opset_import),
        *((f"opset of function {f.name}", f.opset_import) for f in model.functions),
    ]
    for where, imports in places:
        for entry in imports:
            if entry.domain in STANDARD and entry.version < opset:
                yield Change(file, where, str(entry.version), str(opset))
                entry.version = opset


def _fix_weights(model: ModelProto, ir: int, file: str) -> Iterator[Change]:
    """Take weights from the inputs: older versions list all of them there, newer ones let the caller replace those."""
    if model.ir_version >= WEIGHTS_ALONE or ir < WEIGHTS_ALONE:
        return
    weights = {tensor.name for tensor in model.graph.initializer}
    kept = [value for value in model.graph.input if value.name not in weights]
    if count := len(model.graph.input) - len(kept):
        del model.graph.input[:]
        model.graph.input.extend(kept)
        yield Change(file, "inputs", f"{count} weights among them", "the weights are no inputs")

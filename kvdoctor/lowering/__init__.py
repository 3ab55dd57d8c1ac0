"""Makes a model that asks for less: an older IR version, an older opset, no attributes that say nothing.

Every node is lowered by itself, so that weights need not be loaded and everything else stands as it was. What cannot
be lowered is named; nothing is changed then.
"""

from dataclasses import dataclass

from kvdoctor.errors import KvdoctorError
from kvdoctor.onnx_schema import ModelProto
from kvdoctor.report.document import Change
from kvdoctor.targets import Target
from kvdoctor.targets.demands import STANDARD

MENDS = ("ir-too-new", "opset-too-new", "operator-unsupported")
"""The checks whose findings a lowering can take away."""


NO_OTHER_FORM = (
    "there is no other form of it: export again without it, as in kvdoctor re-export MODEL --from CHECKPOINT -o OUT "
    "--exporter optimum"
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The largest IR version and opset that a model may have, None where any will do.

    `lacks` are features of the table of limits that it may not use.
    """

    ir: int | None = None
    opset: int | None = None
    lacks: frozenset[str] = frozenset()

    @property
    def is_anything(self) -> bool:
        """Whether anything is asked for."""
        return bool(self.ir or self.opset or self.lacks)


class CannotLower(KvdoctorError):
    """A model cannot be lowered as wanted. `blocks` names what stands against it, one reason each."""

    def __init__(self, blocks: tuple[str, ...], advice: str) -> None:
        shown = "; ".join(blocks[:4]) + (f"; and {len(blocks) - 4} more" if len(blocks) > 4 else "")
        super().__init__(f"the model cannot be lowered: {shown}; {advice}")
        self.blocks, self.advice = blocks, advice


def wanted(targets: tuple[Target, ...], ir: int | None = None, opset: int | None = None) -> Wanted:
    """What all targets take, and no more than what was asked for by number."""
    known = [limits for target in targets if (limits := target.limits) is not None]
    return Wanted(
        ir=min([*(limits.ir for limits in known), *([ir] if ir else [])], default=None),
        opset=min([*(limits.opset for limits in known), *([opset] if opset else [])], default=None),
        lacks=frozenset().union(*(limits.lacks for limits in known)),
    )


def lower(model: ModelProto, want: Wanted, file: str) -> tuple[Change, ...]:
    """Lower a model in place as far as is wanted; nothing where it asks for no more already.

    `file` is the name under which the changes are told. External data need not be loaded.

    Raises:
        CannotLower: something that the model uses needs more; the model is as it was.
    """
    from kvdoctor.lowering.attributes import unknown, without_silent
    from kvdoctor.lowering.ir import floor
    from kvdoctor.lowering.opset import lowered_nodes, put_in_place

    if left := unknown(model, want.lacks):
        raise CannotLower(left, NO_OTHER_FORM)
    replaced = lowered_nodes(model, want.opset) if want.opset is not None else []
    least = floor(model)
    if want.ir is not None and model.ir_version > want.ir and least[0] > want.ir:
        raise CannotLower((f"{least[1]} needs IR version {least[0]}",), f"IR version {want.ir} has no form for it")
    changes = [*put_in_place(model, replaced, file), *_lower_imports(model, want, file)]
    changes += without_silent(model, want.lacks, file)
    if want.ir is not None and model.ir_version > want.ir:
        changes.append(Change(file, "IR version", str(model.ir_version), str(want.ir)))
        model.ir_version = want.ir
    return tuple(changes)


def _lower_imports(model: ModelProto, want: Wanted, file: str) -> list[Change]:
    changes = []
    places = [
        ("opset", model.opset_import),
        *((f"opset of function {f.name}", f.opset_import) for f in model.functions),
    ]
    for where, imports in places:
        for entry in imports:
            if want.opset is not None and entry.domain in STANDARD and entry.version > want.opset:
                changes.append(Change(file, where, str(entry.version), str(want.opset)))
                entry.version = want.opset
    return changes

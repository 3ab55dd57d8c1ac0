"""What a call of `re-export` asks for."""

from dataclasses import field
from typing import TYPE_CHECKING

from kvdoctor.records import record

if TYPE_CHECKING:
    from kvdoctor.repair.conversions.registry import Asked


@record
class LayoutRequest:
    """The form of the copy: a layout by name, readable names of axes, an IR version and an opset."""

    layout: str | None = None
    readable: bool = False
    ir_version: int | None = None
    opset: int | None = None

    @property
    def is_asked(self) -> bool:
        """Whether anything is asked for."""
        return self.layout is not None or self.readable or self.has_versions

    @property
    def has_versions(self) -> bool:
        """Whether an IR version or an opset is asked for by number."""
        return self.ir_version is not None or self.opset is not None


@record
class ExportRequest:
    """An export from a checkpoint; None leaves the choice to kvdoctor.

    `because` is the path of a kvdoctor report that is used in place of a diagnosis of the model to be replaced.
    """

    checkpoint: str
    exporter: str | None = None
    opset: int | None = None
    dtype: str | None = None
    task: str | None = None
    because: str | None = None


@record
class RepairRequest:
    """A call of `re-export`.

    `path` is the model to repair, or with an `export` the model to be replaced, None if there is none. Without `out`
    the copy is made and proved in a private folder and then deleted. `fix` are the names of the repairs that may be
    used, all if empty.
    """

    path: str | None
    out: str | None
    force: bool = False
    fix: tuple[str, ...] = ()
    keep_unproved: bool = False
    layout: LayoutRequest = field(default_factory=LayoutRequest)
    conversions: "tuple[Asked, ...]" = ()
    export: ExportRequest | None = None

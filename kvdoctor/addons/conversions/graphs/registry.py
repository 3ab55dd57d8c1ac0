"""What a conversion declares, and the list of all: each module here that defines `CONVERSION`."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from kvdoctor.addons.conversions.messages import Comparison
from kvdoctor.addons.conversions.options import ConvertChoices
from kvdoctor.model.edit import set_size
from kvdoctor.model.proto import ValueInfoProto
from kvdoctor.records import record
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report.repair_record import Change


@record
class Converted:
    """A stack after its conversion in memory.

    Attributes:
        changes: Every change of a graph; a file is written if one names it.
        loop: What a loop must do from now on that it need not do with the original.
        how: How it is compared with the original.
        reveals: Names of findings that are the purpose of the conversion.
    """

    changes: tuple[Change, ...]
    loop: tuple[str, ...]
    how: Comparison = Comparison()
    reveals: tuple[str, ...] = ()


@record
class GraphConversion:
    """A conversion of a stack.

    `read` gives the choice of the options, None if it was not asked for, and raises `UsageError` for one that makes no
    sense; `title` names it with its choice, as it is written on the command line. `convert` changes the models of the
    context in place, or raises `CannotRepair` with the node that it does not know; then the caller undoes the changes.
    Conversions are applied by `order`.
    """

    name: str
    order: int
    read: Callable[[ConvertChoices], Any]
    title: Callable[[Any], str]
    convert: Callable[[RepairContext, Any], Converted]

    @property
    def summary(self) -> str:
        """What it does, in one line."""
        documentation = importlib.import_module(self.convert.__module__).__doc__ or ""
        return documentation.partition("\n")[0]


@record
class Asked:
    """A conversion that was asked for, with its choice."""

    conversion: GraphConversion
    choice: Any

    @property
    def title(self) -> str:
        """The conversion as it is written on the command line, without dashes: `logits last`."""
        return self.conversion.title(self.choice)


@cache
def load() -> tuple[GraphConversion, ...]:
    """All conversions, in the order in which they are applied."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    modules = (importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__))
    found = [one for module in modules if (one := getattr(module, "CONVERSION", None)) is not None]
    return tuple(sorted(found, key=lambda one: one.order))


def read_asked(choices: ConvertChoices) -> tuple[Asked, ...]:
    """The conversions that options ask for, in order.

    Raises:
        UsageError: a choice makes no sense.
    """
    return tuple(Asked(one, choice) for one in load() if (choice := one.read(choices)) is not None)


TRACE = "export.json"
"""What the exporter of transformers writes next to the graph."""


def forget_trace(context: RepairContext, file: str) -> Iterator[Change]:
    """Remove the inputs of the trace from export.json: the copy takes others."""
    content = context.copy.side_car(TRACE)
    components = content.get("components") if isinstance(content, dict) else None
    for key, entry in (components if isinstance(components, dict) else {}).items():
        metadata = entry.get("metadata") if isinstance(entry, dict) and entry.get("file") == file else None
        if isinstance(metadata, dict) and metadata.pop("kwargs", None):
            yield Change(TRACE, f"components.{key}.metadata.kwargs", "the inputs of the trace", "removed")


def fix_sizes(values: Iterable[ValueInfoProto], symbols: Mapping[str, int]) -> None:
    """Declare sizes with these names as numbers."""
    for dim in (dim for value in values for dim in value.type.tensor_type.shape.dim):
        if dim.dim_param in symbols:
            set_size(dim, symbols[dim.dim_param])

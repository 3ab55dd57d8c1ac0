"""Frees axes of a graph: declared sizes become names, and numbers that stand for them are computed.

`free_axes` changes a model in place. The changes follow from the graph alone: a number is changed only if, at any other
length, something could not be added, joined or reshaped. If the graph does not tell the right value, the repair is
refused with the reason.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvdoctor.analysis.proof.types import Term, symbol
from kvdoctor.contract import Axis, Graph
from kvdoctor.model.edit import drop_unread_constants
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto
from kvdoctor.model.traverse import describe_node, find_attribute, subgraphs
from kvdoctor.model.view import declared, integers
from kvdoctor.repair.shapes.facts import ConstantUse, GraphScope, ShapeFacts, SizeConflict, WalkNotes
from kvdoctor.repair.shapes.reshapes import write_target
from kvdoctor.repair.shapes.terms import CannotFree, ConflictingSizes, Lengths, declare_size, read_lengths
from kvdoctor.repair.shapes.walk import ShapeWalk
from kvdoctor.repair.shapes.writing import Table, Writer
from kvdoctor.report.repair_record import Change

if TYPE_CHECKING:
    from kvdoctor.decode.calls import Array

Values = Callable[[TensorProto], "Array"]


def no_values(tensor: TensorProto) -> "Array":
    """For callers that only read a graph. Raises CannotFree: always."""
    raise CannotFree(f"the values of {tensor.name!r} are not available")


@dataclass
class AxisFreeing:
    """One model while its axes are freed; `values` reads the values of a constant."""

    model: ModelProto
    lengths: Lengths
    values: Values = no_values
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.facts = ShapeFacts(dict(self.lengths.traced))
        rows = symbol("new") if "new" in self.lengths.traced else None
        self.walk = ShapeWalk(self.model, self.lengths.inputs, WalkNotes(self.facts, rows))
        self.main = self.walk.run()

    def settled(self, term: Term) -> Term:
        """A term with numbers for the axes that stay fixed."""
        return self.lengths.settled(self.facts.real(term))

    def run(self) -> tuple[Change, ...]:
        """Make all changes. Raises CannotFree: the graph does not tell how; the model may be changed in part."""
        for conflict in self.conflicts[:1]:
            place = describe_place(conflict.node, conflict.scope)
            raise CannotFree(f"in {place} {conflict.words}; the graph does not tell which is meant")
        writer, sites = Writer(self.model, self.lengths), self._bound()
        names = [site.node.input[site.index] for site, _ in sites]
        for site, entries in sites:
            self._rewrite(site, entries, writer)
        self._refuse_rows()
        writer.done()
        drop_unread_constants(self.model, set(names))
        self._declare()
        return tuple(self.changes)

    @property
    def conflicts(self) -> list[SizeConflict]:
        """The nodes at which sizes meet that cannot agree at all lengths."""
        pairs = [(one, [self.settled(term) for term in one.sizes]) for one in self.facts.conflicts]
        return [one for one, sizes in pairs if len(sizes) != 2 or sizes[0] != sizes[1]]

    def _refuse_rows(self) -> None:
        """Refuse values that were computed for the position of the one traced token.

        Raises:
            CannotFree: there is such a value, or one that may be.
        """
        if self.lengths.freed.isdisjoint(("past", "new")):
            return
        for one in self.walk.notes.candidates:
            values = None if one.site is None else self.values(one.site.tensor)
            if values is not None and bool((values == values.ravel()[:1]).all()) and not self._is_mask_row(one.site):
                continue
            name = one.site.tensor.name or "a constant" if one.site else ""
            what = f"{name} {list(one.site.tensor.dims)}" if one.site else "a value computed from constants alone"
            raise CannotFree(
                f"{what}, which {describe_place(one.node, one.path)} reads, may hold only the traced position: whether "
                "it was computed for that position, and its values at others, are not in the file"
            )

    def _is_mask_row(self, site: "ConstantUse | None") -> bool:
        """Whether a row has a column for each cached token, and several rows are needed."""
        if site is None or "new" not in self.lengths.freed:
            return False
        bound = ((self.facts.baked[name], term) for name, term in self.facts.bound.items())
        here = ((one, term) for one, term in bound if one.site.node is site.node and one.site.index == site.index)
        return any(one.kind == "axis" and "past" in self.settled(term).symbols for one, term in here)

    def _bound(self) -> "list[tuple[ConstantUse, dict[tuple[str, int], Term]]]":
        """Each use of a constant with the terms that its numbers and axes stand for."""
        found = dict[tuple[int, int], tuple[ConstantUse, dict[tuple[str, int], Term]]]()
        for name, term in self.facts.bound.items():
            stand_in, settled = self.facts.baked[name], self.settled(term)
            if settled.number is None:
                site = stand_in.site
                entry = found.setdefault((id(site.node), site.index), (site, {}))
                entry[1][stand_in.kind, stand_in.at] = settled
        return list(found.values())

    def _rewrite(self, site: ConstantUse, entries: dict[tuple[str, int], Term], writer: Writer) -> None:
        axes, known = {at: term for (kind, at), term in entries.items() if kind == "axis"}, integers(site.tensor)
        before = f"{site.tensor.name or 'constant'} {list(known) if known else f'of shape {list(site.tensor.dims)}'}"
        where = f"{describe_place(site.node, site.scope)}, input {site.index}"
        if axes:
            table = Table(self.values(site.tensor), axes, site.node, self.facts.size)
            found = table.rewritten(writer)
            if found is None:
                sizes = " and ".join(f"{term} = {self.facts.size(term)}" for term in axes.values())
                raise CannotFree(
                    f"{before}, which {describe_place(site.node, site.scope)} reads, was computed for {sizes}: its "
                    "values do not show those at other lengths, and what it was computed from is not in the file"
                )
            site.node.input[site.index], after = found
            self.changes.append(Change(self.lengths.file, where, before, after))
            return
        numbers: list[int | Term] = list(known or ())
        reshaped = self.walk.notes.reshapes.get(id(site.node))
        if site.node.op_type == "Reshape" and site.index == 1 and reshaped is not None:
            allowzero = bool((given := find_attribute(site.node, "allowzero")) and given.i)
            into, out = (tuple(map(self.settled, terms)) for terms in (reshaped.into, reshaped.out))
            target = write_target(into, out, allowzero, frozenset(("past",)))
            numbers = list(target.entries)
            if target.allowzero != allowzero:
                set_allowzero(site.node, writer.opset)
        else:
            for (_, at), term in entries.items():
                numbers[at] = self._entry(site, at, term)
        site.node.input[site.index] = writer.shaped(numbers, tuple(site.tensor.dims), site.tensor.data_type)
        self.changes.append(Change(self.lengths.file, where, before, f"[{', '.join(map(str, numbers))}]"))

    def _entry(self, site: ConstantUse, at: int, term: Term) -> int | Term:
        """An entry of a target; in an Expand a 1 keeps the size of the data."""
        into = self.walk.notes.expanded.get(id(site.node)) if site.node.op_type == "Expand" else None
        if into is not None and site.index == 1:
            axis = at - int(site.tensor.dims[0]) + len(into)
            dim = into[axis] if axis >= 0 else None
            if dim is not None and self.settled(dim) == term:
                return 1
        return term

    def _declare(self) -> None:
        names = dict[str, str]()
        for value in self.model.graph.input:
            terms = self.lengths.inputs.get(value.name, ())
            for term, dim in zip(terms, value.type.tensor_type.shape.dim, strict=False):
                if dim.dim_param and not dim.dim_param.isdecimal() and str(term) in self.lengths.traced:
                    names.setdefault(str(term), dim.dim_param)
        for value in self.model.graph.input:
            self._declare_one(value, self.lengths.inputs.get(value.name), f"input {value.name!r}", names)
        self._declare_graph(self.model.graph, self.main, names)

    def _declare_graph(self, graph: GraphProto, inside: GraphScope, names: dict[str, str]) -> None:
        for value in graph.output:
            known = inside.known(value.name)
            where = f"output {value.name!r}" if inside is self.main else None
            self._declare_one(value, known.shape if known is not None else None, where, names)
        for index in reversed(range(len(graph.value_info))):
            known = inside.known(graph.value_info[index].name)
            if known is None or known.shape is None:
                del graph.value_info[index]  # the declaration may no longer be right
            else:
                self._declare_one(graph.value_info[index], known.shape, None, names)
        for body in (body for node in graph.node for body in subgraphs(node)):
            if (inner := self.walk.scopes.get(id(body))) is not None:
                self._declare_graph(body, inner, names)

    def _declare_one(self, value: ValueInfoProto, terms: Any, where: str | None, names: dict[str, str]) -> None:
        dims = value.type.tensor_type.shape.dim
        if terms is None or len(terms) != len(dims):
            return
        for axis, (term, dim) in enumerate(zip(terms, dims, strict=True)):
            settled = None if term is None else self.settled(term)
            is_number = dim.HasField("dim_value") or dim.dim_param.isdecimal()
            if settled is None or not settled.symbols or not is_number or settled.symbols & self.lengths.mixed:
                continue
            before = dim.dim_param or str(dim.dim_value)
            dim.Clear()
            dim.dim_param = declare_size(settled, names)
            if where is not None:
                self.changes.append(Change(self.lengths.file, f"declared {where}, axis {axis}", before, dim.dim_param))


def free_axes(model: ModelProto, graph: Graph, kinds: Iterable[Axis], values: Values) -> tuple[Change, ...]:
    """Free some kinds of axes of a model in place; it may be changed in part if this raises.

    `graph` gives the kinds of the axes of its inputs.

    Returns:
        The changes; none if no such axis is a number.

    Raises:
        CannotFree: the graph does not tell what it has to compute.
    """
    try:
        lengths = read_lengths(graph, read_declared_sizes(model), kinds)
    except ConflictingSizes as reason:
        raise CannotFree(str(reason)) from None
    if not lengths.freed:
        return ()
    return AxisFreeing(model, lengths, values).run()


def read_declared_sizes(model: ModelProto) -> "dict[str, tuple[int | str | None, ...]]":
    """The sizes that a model declares for its inputs now."""
    found = {value.name: declared(value).shape for value in model.graph.input}
    return {name: shape for name, shape in found.items() if shape is not None}


def set_allowzero(node: NodeProto, opset: int) -> None:
    """Make the zeros in the target of a Reshape mean 0. Raises CannotFree: the opset has no such option."""
    if opset < 14:
        raise CannotFree(f'Reshape "{node.name}" needs allowzero, which exists from opset 14 on')
    if (given := find_attribute(node, "allowzero")) is not None:
        given.i = 1
    else:
        node.attribute.add(name="allowzero", i=1, type=2)


def describe_place(node: NodeProto, scope: str) -> str:
    """A node as reports name it, and the subgraph that it stands in."""
    return describe_node(node) + (f" ({scope})" if scope != "main graph" else "")

"""Frees axes of a graph: declared sizes become names, and numbers that stand for them are computed.

`free` changes a model in place. What it changes follows from the graph alone: a number is changed only where, at any
other length, something could not be added, joined or reshaped. What the graph does not tell is refused with the reason.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvdoctor.contract import Axis, Graph
from kvdoctor.graph import bodies_of, integers
from kvdoctor.onnx_schema import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto
from kvdoctor.scoping import graphs
from kvdoctor.sizing.known import Clash, Ledger, Site, StandIn
from kvdoctor.sizing.lengths import Lengths, MixedSizes, lengths_of, readable
from kvdoctor.sizing.reshapes import written
from kvdoctor.sizing.tables import Table
from kvdoctor.sizing.terms import Term, symbol
from kvdoctor.sizing.walk import Inside, Walk
from kvdoctor.sizing.writing import Writer

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Values = Callable[[TensorProto], "Array"]


def no_values(tensor: TensorProto) -> "Array":
    """For who only reads a graph.

    Raises:
        NotFreed: always.
    """
    raise NotFreed(f"the values of {tensor.name!r} are not at hand")


class NotFreed(Exception):
    """Raised where the graph does not tell what it would have to compute at another length; the text says why."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One thing that was changed: where, what stood there before, and what stands there now."""

    where: str
    before: str
    after: str


@dataclass
class Freeing:
    """One model on the way; `values` reads the values of a constant, where something is to be freed."""

    model: ModelProto
    lengths: Lengths
    values: Values = no_values
    edits: list[Edit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger(dict(self.lengths.traced))
        self.walk = Walk(self.model, self.lengths.inputs, self.ledger)
        if "new" in self.lengths.traced:
            self.walk.rows = symbol("new")
        self.main = self.walk.run()

    def settled(self, term: Term) -> Term:
        """What a term is once axes that stay fixed are numbers."""
        return self.lengths.settled(self.ledger.real(term))

    def run(self) -> tuple[Edit, ...]:
        """Make all changes.

        Raises:
            NotFreed: the graph does not tell; the model may be half changed.
        """
        for clash in self.clashes[:1]:
            place = place_of(clash.node, clash.scope)
            raise NotFreed(f"in {place} {clash.words}, and nothing tells which of them is meant")
        writer, sites = Writer(self.model, self.lengths), self._bound()
        names = [site.node.input[site.index] for site, _ in sites]
        for site, entries in sites:
            self._rewrite(site, entries, writer)
        self._refuse_rows()
        writer.done()
        _drop_unread(self.model.graph, set(names))
        self._declare()
        return tuple(self.edits)

    @property
    def clashes(self) -> list[Clash]:
        """Where sizes meet that cannot agree at all lengths."""
        return [clash for clash in self.ledger.clashes if not self._agrees_when_settled(clash.sizes)]

    def _refuse_rows(self) -> None:
        """Refuse what was computed for the place of one traced token.

        Raises:
            NotFreed: there is such a value, or one that may be that.
        """
        if self.lengths.freed.isdisjoint(("past", "new")):
            return
        for one in self.walk.beside:
            values = None if one.site is None else self.values(one.site.tensor)
            if values is not None and bool((values == values.ravel()[:1]).all()) and not self._is_mask_row(one.site):
                continue
            name = one.site.tensor.name or "a constant" if one.site else ""
            what = f"{name} {list(one.site.tensor.dims)}" if one.site else "a value computed from constants alone"
            raise NotFreed(
                f"{what}, which {place_of(one.node, one.path)} reads, may be of the one place of the trace: whether it "
                "was computed for that place, and what it is at others, is not in the file"
            )

    def _agrees_when_settled(self, sizes: tuple[Term, ...]) -> bool:
        return len(sizes) == 2 and self.settled(sizes[0]) == self.settled(sizes[1])

    def _is_mask_row(self, site: "Site | None") -> bool:
        """Whether a row has a column for each cached token, and there are to be several rows."""
        if site is None or "new" not in self.lengths.freed:
            return False
        for stand_in, term in self._by_site().get(id(site.node), ()):
            if stand_in.site.index == site.index and stand_in.kind == "axis" and "past" in term.symbols:
                return True
        return False

    def _by_site(self) -> "dict[int, list[tuple[StandIn, Term]]]":
        found = dict[int, list[tuple[StandIn, Term]]]()
        for name, term in self.ledger.bound.items():
            stand_in = self.ledger.held[name]
            found.setdefault(id(stand_in.site.node), []).append((stand_in, self.settled(term)))
        return found

    def _bound(self) -> "list[tuple[Site, dict[tuple[str, int], Term]]]":
        """Each site with what its numbers and axes stand for, where that is no longer the number."""
        found = dict[tuple[int, int], tuple[Site, dict[tuple[str, int], Term]]]()
        for name, term in self.ledger.bound.items():
            stand_in, settled = self.ledger.held[name], self.settled(term)
            if settled.number is None:
                site = stand_in.site
                entry = found.setdefault((id(site.node), site.index), (site, {}))
                entry[1][stand_in.kind, stand_in.at] = settled
        return list(found.values())

    def _rewrite(self, site: Site, entries: dict[tuple[str, int], Term], writer: Writer) -> None:
        axes = {at: term for (kind, at), term in entries.items() if kind == "axis"}
        before = f"{site.tensor.name or 'constant'} {_shown(site.tensor)}"
        where = f"{place_of(site.node, site.scope)}, input {site.index}"
        if axes:
            table = Table(self.values(site.tensor), axes, site.node, self.ledger.size)
            found = table.rewritten(writer)
            if found is None:
                sizes = " and ".join(f"{term} = {self.ledger.size(term)}" for term in axes.values())
                raise NotFreed(
                    f"{before}, which {place_of(site.node, site.scope)} reads, was computed for {sizes}: what it is at "
                    "other lengths does not show in its values, and what it was computed from is not in the file"
                )
            site.node.input[site.index] = found.value
            self.edits.append(Edit(where, before, found.words))
            return
        numbers: list[int | Term] = list(integers(site.tensor) or ())
        reshaped = self.walk.reshapes.get(id(site.node))
        if site.node.op_type == "Reshape" and site.index == 1 and reshaped is not None:
            allowzero = any(a.name == "allowzero" and a.i for a in site.node.attribute)
            into, out = (tuple(map(self.settled, terms)) for terms in (reshaped.into, reshaped.out))
            target = written(into, out, allowzero, frozenset(("past",)))
            numbers = list(target.entries)
            if target.allowzero != allowzero:
                mean_zero(site.node, writer.opset)
        else:
            for (_, at), term in entries.items():
                numbers[at] = self._entry(site, at, term)
        value = writer.shaped(numbers, tuple(site.tensor.dims), site.tensor.data_type)
        site.node.input[site.index] = value
        self.edits.append(Edit(where, before, f"[{', '.join(map(str, numbers))}]"))

    def _entry(self, site: Site, at: int, term: Term) -> int | Term:
        """In an Expand a 1 keeps the size that the data has."""
        into = self.walk.expanded.get(id(site.node)) if site.node.op_type == "Expand" else None
        if into is not None and site.index == 1:
            axis = at - int(site.tensor.dims[0]) + len(into)
            dim = into[axis] if axis >= 0 else None
            if dim is not None and self.settled(dim) == term:
                return 1
        return term

    def _declare(self) -> None:
        names = dict[str, str]()
        for value in self.model.graph.input:
            for term, dim in zip(
                self.lengths.inputs.get(value.name, ()), value.type.tensor_type.shape.dim, strict=False
            ):
                if dim.dim_param and not dim.dim_param.isdecimal() and str(term) in self.lengths.traced:
                    names.setdefault(str(term), dim.dim_param)
        for value in self.model.graph.input:
            terms = self.lengths.inputs.get(value.name)
            self._declare_one(value, terms, f"input {value.name!r}", names)
        self._declare_graph(self.model.graph, self.main, names)

    def _declare_graph(self, graph: GraphProto, inside: Inside, names: dict[str, str]) -> None:
        for value in graph.output:
            known = inside.known(value.name)
            shown = f"output {value.name!r}" if inside is self.main else None
            self._declare_one(value, known.shape if known is not None else None, shown, names)
        for index in reversed(range(len(graph.value_info))):
            known = inside.known(graph.value_info[index].name)
            if known is None or known.shape is None:
                del graph.value_info[index]  # it may say what is no longer so
            else:
                self._declare_one(graph.value_info[index], known.shape, None, names)
        for node in graph.node:
            for attribute in node.attribute:
                for body in bodies_of(attribute):
                    inner = self.walk.scopes.get(id(body))
                    if inner is not None:
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
            dim.dim_param = readable(settled, names)
            if where is not None:
                self.edits.append(Edit(f"declared {where}, axis {axis}", before, dim.dim_param))


def free(model: ModelProto, graph: Graph, kinds: Iterable[Axis], values: Values) -> tuple[Edit, ...]:
    """Free some kinds of axes of a model, in place, or half of it where it raises.

    `graph` says what the axes of its inputs count.

    Returns:
        What was changed; nothing where no such axis is a number.

    Raises:
        NotFreed: the graph does not tell what it would have to compute.
    """
    try:
        lengths = lengths_of(graph, declared_now(model), kinds)
    except MixedSizes as reason:
        raise NotFreed(str(reason)) from None
    if not lengths.freed:
        return ()
    return Freeing(model, lengths, values).run()


def declared_now(model: ModelProto) -> "dict[str, tuple[int | str | None, ...]]":
    """The sizes that a model declares for its inputs as it is now."""
    from kvdoctor.graph import declared

    found = {value.name: declared(value).shape for value in model.graph.input}
    return {name: shape for name, shape in found.items() if shape is not None}


def mean_zero(node: NodeProto, opset: int) -> None:
    """Let the zeros in the target of a Reshape mean 0.

    Raises:
        NotFreed: the operator cannot do that in this opset.
    """
    if opset < 14:
        raise NotFreed(f'Reshape "{node.name}" would have to take a 0 for 0, which it can from opset 14 on')
    for attribute in node.attribute:
        if attribute.name == "allowzero":
            attribute.i = 1
            return
    node.attribute.add(name="allowzero", i=1, type=2)


def place_of(node: NodeProto, scope: str = "main graph") -> str:
    """A node as reports call it."""
    name = node.name or next(iter(node.output), "")
    return f'{node.op_type} "{name}"' + (f" ({scope})" if scope != "main graph" else "")


def _shown(tensor: TensorProto) -> str:
    numbers = integers(tensor)
    return str(list(numbers)) if numbers else f"of shape {list(tensor.dims)}"


def _drop_unread(graph: GraphProto, names: set[str]) -> None:
    """Take out those constants of these names that nothing reads any more."""
    gone = names - set(_read(graph))
    for body in graphs(graph):
        for index in reversed(range(len(body.initializer))):
            if body.initializer[index].name in gone:
                del body.initializer[index]
        for index in reversed(range(len(body.node))):
            node = body.node[index]
            if node.op_type == "Constant" and gone.issuperset(node.output):
                del body.node[index]


def _read(graph: GraphProto) -> Iterable[str]:
    for body in graphs(graph):
        yield from (value.name for value in body.output)
        for node in body.node:
            yield from node.input

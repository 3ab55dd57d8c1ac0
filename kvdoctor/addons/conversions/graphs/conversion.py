"""What a conversion declares, the list of all, its proof, and what a narrower type of the cache costs.

Each module here that defines `CONVERSION` is found. A copy is proved where its own loops pass, and it computes call by
call what the original computes. The cost of a type is measured in the worker: it decodes with the model as it was, and
rounds what it carries (worker/cache_cost.py). A copy rounds the same rows, and those of the call itself as well, so its
logits may be off by a small multiple of what that loop shows.
"""

import importlib
import pkgutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from kvdoctor.addons.conversions.messages import CacheCosted, CacheCostJob, Comparison, PairedDone, PairedJob
from kvdoctor.addons.conversions.options import ConvertChoices
from kvdoctor.analysis.lm_head import describe_op
from kvdoctor.analysis.memory import total
from kvdoctor.choices import CacheType
from kvdoctor.contract import ITEM_BYTES, CacheContract, Slot
from kvdoctor.decode.messages import PairedSide
from kvdoctor.decode.stored_cache import STORABLE, StoredSlot
from kvdoctor.model.edit import set_size
from kvdoctor.model.operators import has, operator_of
from kvdoctor.model.proto import GraphProto, ModelProto, TensorProto, ValueInfoProto
from kvdoctor.model.traverse import find_attribute, input_of, producer, readers
from kvdoctor.records import record
from kvdoctor.repair.proof import prove_loops, prove_no_new_finding
from kvdoctor.repair.session import DiagnosisSide, RepairSession
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report.repair_record import CacheCost, CacheCosts, Change, Proof


@record
class Converted:
    """A stack after its conversion in memory: every change of a graph, and what a `loop` must do from now on.

    A file is written if a change names it. `how` says how the stack is compared with the original, and `reveals` names
    findings that are the purpose of the conversion.
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
    Conversions are applied by `order`; one that takes `one_graph` for all steps is given a pair or a merged decoder as
    such a graph (`--layout single`).
    """

    name: str
    order: int
    read: Callable[[ConvertChoices], Any]
    title: Callable[[Any], str]
    convert: Callable[[RepairContext, Any], Converted]
    one_graph: bool = False

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


def name_reader(context: RepairContext, name: str) -> str:
    """The first node that reads a value of the decoder, as text; empty where none does."""
    found = readers(context.model(context.file_of("decode")).graph).get(name, ())
    return f"the node {describe_op(found[0][0])}" if found else ""


def declare_sizes(model: ModelProto, sizes: Mapping[str, Mapping[int, int | str]], file: str) -> Iterator[Change]:
    """Declare sizes of inputs and outputs: by name, the size of some axes."""
    for kind, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            dims = value.type.tensor_type.shape.dim
            found = {at: size for at, size in sizes.get(value.name, {}).items() if at < len(dims)}
            before = [dims[at].dim_param or str(dims[at].dim_value or "?") for at in found]
            for at, size in found.items():
                set_size(dims[at], size)
            after = [str(size) for size in found.values()]
            if before != after:
                yield Change(file, f"{kind} {value.name!r}", ", ".join(before), ", ".join(after))


def fix_sizes(values: Iterable[ValueInfoProto], symbols: Mapping[str, int]) -> None:
    """Declare sizes with these names as numbers."""
    for dim in (dim for value in values for dim in value.type.tensor_type.shape.dim):
        if dim.dim_param in symbols:
            set_size(dim, symbols[dim.dim_param])


def find_element(graphs: Sequence[GraphProto], name: str) -> int | None:
    """The element type of a value, by what it is computed from; `graphs` are its own and those around it."""
    declared = {one.name: one.data_type for graph in graphs for one in graph.initializer}
    ports = (one for graph in graphs for one in (*graph.input, *graph.value_info))
    declared |= {one.name: kind for one in ports if (kind := one.type.tensor_type.elem_type)}
    waiting, seen = [name], set[str]()
    while waiting:
        name = waiting.pop()
        node = next((found for graph in graphs if (found := producer(graph, name)) is not None), None)
        if name in declared:
            return int(declared[name])
        if node is None or name in seen:
            continue
        seen.add(name)
        operator = operator_of(node.op_type)
        if has(node.op_type, "measure"):
            return int(TensorProto.INT64)
        if has(node.op_type, "cast") and (to := find_attribute(node, "to")) is not None:
            return int(to.i)
        if has(node.op_type, "constant", "fill"):
            value = find_attribute(node, "value")
            return int(value.t.data_type) if value is not None else int(TensorProto.FLOAT)
        if has(node.op_type, "compare", "quantize", "static"):
            continue
        if operator.scale is not None:
            waiting.append(input_of(node, operator.scale))
        else:
            first = 1 if has(node.op_type, "select") else 0
            waiting += [one for at, one in enumerate(node.input) if one and at >= first and operator.takes_content(at)]
    return None


ROWS, LOGITS = 3.0, 5.0
"""What the rows and the logits of a copy may be off by, as multiples of what the loop that rounds shows: the copy also
rounds the rows of the call itself, which weighs most in short prompts, and more calls are compared."""
NOISE = 1e-3
"""What rows may be off by anyway, in standard deviations of the cache: float32 tips a rounding here and there."""
STANDS_OUT = 4.0
"""A layer stands out that costs so many times the median of all."""
SCALE_BYTES = 2
"""Bytes of the scale of a row."""
CHEAP = 1e-3
"""Nats below which a cost is not worth a layer in another type."""


def measure_costs(
    session: RepairSession, stored: tuple[StoredSlot, ...], side: PairedSide
) -> tuple[CacheCosts, Comparison]:
    """Run a model in a loop that rounds its cache as its conversion does, and in other ways.

    Gives the cost, and what the comparison of a copy may allow for it.

    Raises:
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    job = CacheCostJob(side, stored, seed=session.options.seed, provider=session.options.provider)
    found, failed = session.runtime.answer(job, CacheCosted)
    if not found:
        found = (CacheCosted("token", "token", failed=failed or "nothing was measured"),)
    written, kind = found[0], stored[0].kind
    alone = {one.layer: one.divergence for one in found if one.layer is not None and not one.failed}
    sensitive: tuple[int, ...] = ()  # layers that cost far more than the others, where all together cost something
    if not written.failed and written.divergence >= CHEAP and len(alone) > 2:
        most = max(STANDS_OUT * statistics.median(alone.values()), CHEAP / 10)
        sensitive = tuple(sorted(layer for layer, cost in alone.items() if cost > most))
    narrow = {one.past for one in stored}
    growing = [slot for slot in side.contract.slots if slot.kind in STORABLE and "past" in slot.axes]
    facts = CacheCosts(
        side.stack,
        kind,
        total(slot.bytes_per_position() for slot in growing),
        total(_stored_bytes(slot, kind) if slot.past in narrow else slot.bytes_per_position() for slot in growing),
        written.tokens,
        tuple(
            CacheCost(one.keys, one.values, one.layer, reason=one.failed)
            if one.failed
            else CacheCost(
                *(one.keys, one.values, one.layer, one.divergence, one.same_top1, one.first_other), largest=one.relative
            )
            for one in found
        ),
        sensitive,
        tuple(sorted({slot.layer for slot in growing if slot.past not in narrow and slot.layer is not None})),
    )
    drift = {past: (deviation, ROWS * off + NOISE) for past, (deviation, off) in written.drift.items()}
    return facts, Comparison(allowed=LOGITS * written.allowed, drift=drift)


def _stored_bytes(slot: Slot, kind: CacheType) -> int | None:
    """Bytes of one token in the narrower type, its scales included."""
    whole, width = slot.bytes_per_position(), slot.size("head_dim")
    if whole is None or not width:
        return None
    numbers = whole // ITEM_BYTES[slot.dtype]
    values = numbers * {"float16": 2, "int8": 1, "int4": 0.5}[kind]
    return int(values) + (0 if kind == "float16" else SCALE_BYTES * (numbers // width))


MOST_NOT_RUN = 2
"""Calls that the base does not run are listed up to this number."""


@record
class Base:
    """What the conversion of a stack is compared with: the original, or the copy of it that was repaired.

    `side` is None if its cache contract could not be read. `repaired` are the names of the checks whose findings were
    repaired before.
    """

    stack: str
    side: PairedSide | None
    repaired: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """It as text."""
        return "the repaired copy" if self.repaired else "the original"


def prove_conversions(
    session: RepairSession, made: Converted, base: Base, before: DiagnosisSide, copy: tuple[str, DiagnosisSide]
) -> Iterator[Proof]:
    """The claims on a converted stack, and whether they hold; `before` is the diagnosis of the base.

    `copy` is the stack in the copy, and the diagnosis of that.
    """
    stack, after = copy
    yield from prove_loops(stack, after, before)
    yield prove_no_new_finding(stack, before.report, after.report, made.reveals)
    yield from _compare(session, made.how, base, (stack, after.contract(stack)))


def _compare(
    session: RepairSession, how: Comparison, base: Base, copied: tuple[str, CacheContract | None]
) -> Iterator[Proof]:
    stack, converted = copied
    what = "logits and caches" if how.rows == "all" else "the last row of logits and the caches"
    claim = f"{what} of every call are those of {base.words}"
    if how.stored:
        kind = how.stored[0].kind
        claim += f", but for the rounding to {kind}"
        if not how.drift:
            yield Proof(stack, claim, False, f"what {kind} costs could not be measured on {base.words}")
            return
    if base.side is None or converted is None or not converted.slots:
        yield Proof(stack, claim, False, "the cache contract of the copy could not be read")
        return
    done = compare_calls(session, base.side, PairedSide(stack, session.at.absolute(), converted), how)
    claimed = conclude(Proof(stack, claim, False), done, how, base)
    yield claimed
    if claimed.holds:
        if how.window and (converted.usable_length or how.window + 1) > how.window:
            detail = f"the longest sequence has {done.tokens} tokens"
            yield Proof(stack, f"the window of {how.window} tokens was left", done.tokens > how.window, detail)
        if (most := how.capacity) is not None:  # a full buffer was compared, and nothing is written past its end
            detail = f"the longest sequence has {done.tokens} tokens, its last call a past of {done.longest}"
            filled = done.tokens + (converted.new_tokens or 1) > most
            yield Proof(stack, f"a buffer of {most} tokens was filled", filled, detail)
            claim, beyond = f"a buffer of {most} tokens is not written beyond its end", done.overflow
            yield Proof(stack, claim, bool(beyond), beyond or "it runs, and nothing says what it computes")


def compare_calls(session: RepairSession, original: PairedSide, copy: PairedSide, how: Comparison) -> PairedDone:
    """Compare a copy with its original in the worker, call by call."""
    options = session.options
    job = PairedJob(original, copy, how, dict(options.tolerances), seed=options.seed, provider=options.provider)
    answers, failed = session.runtime.answer(job, PairedDone)
    return answers[0] if answers and not failed else PairedDone(failed=f"no comparison: {failed or 'no answer'}")


def conclude(claim: Proof, done: PairedDone, how: Comparison, base: Base) -> Proof:
    """A claim with what a comparison says of it."""
    if done.failed:
        return replace(claim, detail=f"first difference: {done.failed}")
    if not done.calls:
        reasons = "; ".join(done.not_run[:MOST_NOT_RUN])
        return replace(claim, detail=f"no call could be compared, {base.words} runs none: {reasons}")
    return replace(claim, holds=True, detail=_describe(done, how, base))


def _describe(done: PairedDone, how: Comparison, base: Base) -> str:
    within = "bit for bit" if done.exact else f"within {done.worst:.1e} standard deviations"
    sizes = [
        f"prompts of {_list(done.prompts)}",
        f"steps of {_list(done.chunks)} on pasts up to {done.longest}" if done.chunks else "",
        f"batches of {_list(done.batches)}",
        f"with {_list(how.keep)} rows asked for" if how.keep else "",
        f"{done.padded} calls with padding on the left" if done.padded else "",
    ]
    if how.stored and not done.exact:
        within += f" (allowed: {how.allowed:.1e}, by what a loop of {base.words} shows that rounds its cache)"
    text = f"{done.calls} calls, {within}: {', '.join(filter(None, sizes))}"
    if done.not_run:
        text += f"; not run by {base.words}: {len(done.not_run)} calls, as {done.not_run[0]}"
    return text


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))

"""Abstract runs of a stack: the experiments of a step-test, answered without a runtime and without weights.

The experiments are those that a real run has, so that a fault has the same name in both. What an abstract run cannot
compute is left out: it shows faults, and never that there is none.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor.analysis.abstract_run.graph_run import AbstractGraph, Budget
from kvdoctor.analysis.abstract_run.tables import read_tables
from kvdoctor.analysis.abstract_run.values import (
    Abstract,
    CannotRun,
    Parts,
    TooMuchWork,
    collapse,
    exactly,
    find_alike,
    find_parts,
)
from kvdoctor.contract import Axis, CacheContract, Port, Role
from kvdoctor.decode.calls import Answer, Array, Call, Encoded, Scenario, StepFailed, Value
from kvdoctor.decode.experiment_run import ExperimentRunner
from kvdoctor.decode.experiments import Experiment, by_name
from kvdoctor.decode.experiments.determinism import gives_all_logits
from kvdoctor.decode.inputs import synthetic_cross_caches
from kvdoctor.decode.messages import Event, StepDone
from kvdoctor.decode.runs import GENERAL_CAUSES, Node, ObservedTensor, Run, Step
from kvdoctor.decode.settle import settle
from kvdoctor.decode.stack_driver import Environment, StackDriver
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.errors import CannotCheck
from kvdoctor.model.operators import has, operators_with
from kvdoctor.model.proto import ModelProto
from kvdoctor.model.traverse import nodes_in, subgraphs
from kvdoctor.model.view import GraphView

NODES = 100_000
"""Nodes that the abstract runs of one stack compute: about a second. More where its graphs are large (`LOOP_CALLS`)."""
LARGE = 16_000
"""Nodes of the graphs of a stack from which on a loop has fewer steps, so that it comes to its end."""
LARGEST = 30_000
"""Nodes of the graphs of a stack, at most: an inspection of so many takes three seconds, half of them for the runs."""
LOOP_CALLS, SEARCH_CALLS = 5, 7
"""Times that the nodes of a large stack are computed: the calls of a short loop, and of the search for a cause."""
MOST_FED = 1 << 24
"""Elements of the inputs by their declared sizes, at most: a loop copies large buffers at each step."""
STEPS, FEW_STEPS = 5, 3
"""Steps of a loop, the prefill included; the second number is that of large graphs."""
FEATURES: tuple[Axis, ...] = ("kv_heads", "head_dim", "hidden", "vocabulary", "channels", "state")
"""Axes along which one number is broadcast."""
STACKED: tuple[Axis, ...] = ("layers", "parts")
"""Axes of which each element has a number; where the graph makes one for all, it takes them for an axis of features."""
DATA: tuple[Role, ...] = ("past", "embeddings", "encoder_states", "features")
DATA += ("encoder_input", "condition", "token_states")
"""Inputs with data; all others are lengths, positions, masks and settings."""
ROTARY = operators_with("rotary")
LONGEST = 128
"""Tokens of a context that is tried at its end, at most."""
OPEN = "the file allows several readings of its inputs, which a run has to settle"
MOST_KEPT = 64
"""The most calls whose outputs are stored for equal ones."""
MOST_LOGITS = 48
"""Logits that are made of the number that stands for a row of them."""
LOOPS = (
    *("plain-loop", "held-loop", "same-feed", "later-token", "empty-past", "dummy-past-runs"),
    *("why", "why-fed-back", "written-places"),
)
"""The loops and what explains their differences. What follows is run only where they pass."""
PADDED = ("left-padding", "encoder-padding")
"""Uses that no proof covers: all that is run where the graph proves the others."""
UNMASKED = ("not-causal", *GENERAL_CAUSES)
"""Causes that a mask has as well which does not hide later tokens."""
USES = (
    *("long-past", "why-long", "chunk", "why-chunk", "batch", "batch-rows", "why-batch"),
    *("other-encoder-length", "left-padding", "encoder-padding", "rewind", "full-context"),
)
"""Other uses, in the order of their importance."""


class Undecided(Exception):
    """An experiment needs what is unknown. No `CannotCheck`, which would be reported as a run that was skipped."""


@dataclass(eq=False)
class AbstractTensor:
    """A value of an abstract run, as the feed builder and the experiments see it; unknown parts raise `Undecided`."""

    value: Abstract
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The true sizes."""
        if self.value.shape is None:
            raise Undecided
        return self.value.shape

    @property
    def observed(self) -> ObservedTensor:
        """What a step records of it."""
        return ObservedTensor(self.dtype, self.shape)

    def array(self) -> Array:
        """Its numbers."""
        try:
            return self.value.array()
        except ValueError:
            raise Undecided from None


def spread_logits(value: Abstract) -> Array | None:
    """Logits float[batch, new, vocabulary], the first `MOST_LOGITS`, made of the numbers that stand for them."""
    if value.data is None or value.shape is None or not value.shape:
        return None
    at = np.arange(min(max(value.shape[-1], 2), MOST_LOGITS))
    data = np.broadcast_to(np.asarray(value.data[..., : at.size], np.float64), (*value.shape[:-1], at.size))
    with np.errstate(all="ignore"):
        waves = np.sin(data * (0.37 + 0.61 * at) + 1.3 * at)
    found: Array = np.where(np.isfinite(data), waves, data).astype(np.float32)
    return found


@dataclass
class AbstractDriver(StackDriver):
    """Runs calls on abstract graphs, by file in `sessions`. `parts` and `uniform` say what one number stands for."""

    failed: Node | None = None
    parts: dict[str, Parts] = field(default_factory=dict)
    uniform: dict[str, tuple[int, ...]] = field(default_factory=dict)
    found: dict[bytes, dict[str, Abstract]] = field(default_factory=dict)

    @property
    def environment(self) -> Environment:
        """No runtime."""
        return Environment("none", "none", "none")

    def run_session(self, call: Call, session: Any = None) -> Answer:  # noqa: ARG002
        """Run a call: `StepFailed` where sizes cannot agree, `Undecided` with unknown logits, or `TooMuchWork`."""
        graph = self.contract.graph(call.phase)
        ports = {port.name: port for port in graph.inputs}
        feeds = {name: self._to_abstract(value, ports[name]) for name, value in call.feeds.items()}
        found = self._run_once(self.sessions[graph.file], feeds)
        logits = self.logits_name(call.phase)
        if logits in found:
            spread = spread_logits(found[logits])
            if spread is None:
                raise Undecided
            found = {**found, logits: Abstract(spread.shape, spread)}
        known = (port for port in graph.outputs if port.name in found)
        return self.make_answer(call, {port.name: AbstractTensor(found[port.name], port.dtype) for port in known})

    def _to_abstract(self, value: Value | Array, port: Port) -> Abstract:
        if isinstance(value, AbstractTensor):
            if port.role == "past" and value.value.data is not None and len(port.axes) == value.value.data.ndim:
                axes = list(enumerate(port.axes))
                counting, stacked = ([at for at, axis in axes if axis in kind] for kind in (FEATURES, STACKED))
                self.parts[port.name] = find_parts(value.value.data, counting) or self.parts.get(port.name, {})
                self.uniform[port.name] = find_alike(value.value, stacked)
            return value.value
        if any(isinstance(size, int) and size != fed for size, fed in zip(port.shape or (), value.shape, strict=False)):
            raise Undecided  # a runtime refuses it: nothing can be said of the graph
        array = value if isinstance(value, np.ndarray) else value.array()
        if port.role not in DATA:
            return exactly(array)
        if len(port.axes) == array.ndim:
            uniform = self.uniform.get(port.name, ())
            kept = [axis not in FEATURES and at not in uniform for at, axis in enumerate(port.axes)]
            return collapse(array, kept, self.parts.get(port.name))
        return collapse(array, [at < array.ndim - 1 for at in range(array.ndim)])

    def _run_once(self, graph: AbstractGraph, feeds: Mapping[str, Abstract]) -> dict[str, Abstract]:
        """The outputs of a graph. A third of the calls are repeated, and answered again but for random numbers."""
        key = _digest_call(graph, feeds) if not graph.random_used else b""
        if key in self.found:
            return self.found[key]
        try:
            found = graph.run(feeds)
        except CannotRun as reason:
            self.failed = Node(reason.node, reason.op)
            raise StepFailed(str(reason)) from reason
        if key:
            self.found[key] = found
            if len(self.found) > MOST_KEPT:
                del self.found[next(iter(self.found))]
        return found

    def encode(self, scenario: Scenario) -> Encoded:
        """Synthetic outputs of an encoder; its graph is not run."""
        return Encoded(self._synthetic_states(scenario), synthetic_cross_caches(self.contract, scenario))

    @property
    def can_embed(self) -> bool:
        """Embeddings are synthetic."""
        return False


def _digest_call(graph: AbstractGraph, feeds: Mapping[str, Abstract]) -> bytes:
    digest = blake2b(str(id(graph)).encode())
    for name, value in feeds.items():
        data = value.data
        held = None if data is None else (data.dtype.str, data.shape)
        digest.update(repr((name, value.shape, value.exact, value.key, held)).encode())
        if data is not None:
            digest.update(data.tobytes())
    return digest.digest()


def run_abstractly(context: ContractContext) -> tuple[Run, ...]:
    """The experiments that the budget of nodes allows on a stack; raises `CannotCheck` where there are none."""
    contract = replace(context.contract, exactness="float")
    size, budget, graphs = _open_stack(context, contract)
    runs = _run_by(contract, context, size, budget, graphs)
    doubtful = any(not one.settled for one in contract.ambiguities)
    if not doubtful or not any(run.outcome in ("failed", "differs") for run in runs):
        return runs
    try:
        budget.left = max(budget.left, SEARCH_CALLS * size)
        settled = settle(AbstractDriver(context.stack.name, contract, graphs, 0, lambda _: None))
    except TooMuchWork:
        return runs
    except (Undecided, CannotCheck, MemoryError):
        raise CannotCheck(OPEN) from None
    if settled.holds:
        budget.left = max(budget.left, NODES)
        return _run_by(settled.contract, context, size, budget, graphs)
    if not settled.tried or any(one.unknown for one in settled.contract.ambiguities):
        raise CannotCheck(OPEN)
    return runs  # what differs differs under every reading


def _run_by(
    contract: CacheContract, context: ContractContext, size: int, budget: Budget, graphs: dict[str, AbstractGraph]
) -> tuple[Run, ...]:
    """The experiments by one contract; `CannotCheck` where not even a plain loop can be computed."""
    steps: list[Step] = []

    def keep(event: Event) -> None:
        if isinstance(event, StepDone):
            steps.append(event.step)

    driver = AbstractDriver(context.stack.name, contract, graphs, 0, keep)
    runner = ExperimentRunner(driver, timed=False)
    found: list[Run] = []
    # Positions of a rotary embedding only tell distances apart: one number in place of a vector cannot show that, and
    # padding that moves all positions equally would look wrong.
    rotary = any(kind in graph.view.operators for graph in graphs.values() for kind in ROTARY)
    names = PADDED if context.is_proved else (*LOOPS, *USES)
    for experiment in _choose(names, contract.usable_length, rotary, size):
        loop = replace(context, runs=tuple(found)).checked_loop
        if experiment.name in USES and loop is not None and loop.outcome in ("failed", "differs"):
            break
        steps.clear()
        try:
            run = runner.run(experiment)
            found.append(replace(run, steps=tuple(steps), node=driver.failed if run.outcome == "failed" else None))
            if run.experiment in LOOPS and not experiment.explains and run.outcome in ("failed", "differs"):
                budget.left = max(budget.left, SEARCH_CALLS * size)
        except TooMuchWork:
            break
        except (Undecided, CannotCheck, ValueError, KeyError, IndexError, MemoryError):
            if experiment.name == "plain-loop":
                break
            continue
    if not found and not context.is_proved:
        raise CannotCheck("the logits or the cache of a plain loop cannot be computed without a run")
    return tuple(_drop_unsure(found, contract, graphs.values()))


def _open_stack(context: ContractContext, contract: CacheContract) -> tuple[int, Budget, dict[str, AbstractGraph]]:
    """The number of nodes of a stack, the budget for them, and its graphs by file."""
    files = {file.name: file for file in context.stack.files.values()}
    wanted = dict.fromkeys(contract.graph(phase).file for phase in ("prefill", "decode"))
    views = {name: (files[name].view, files[name].path) for name in wanted if name in files}
    size = sum(sum(view.operators.values()) for view, _ in views.values() if view is not None)
    if len(views) < len(wanted):
        raise CannotCheck("a graph of the stack was not read")
    if size > LARGEST:
        raise CannotCheck(f"{size:,} nodes are more than the {LARGEST:,} that are followed without a run")
    ports = [port for phase in ("prefill", "decode") for port in contract.graph(phase).inputs]
    fed = sum(math.prod(size for size in port.shape or () if isinstance(size, int)) for port in ports)
    if fed > MOST_FED:
        raise CannotCheck(f"inputs of {fed:,} elements are more than the {MOST_FED:,} that are followed without a run")
    logits = contract.graph("decode").port("logits")
    if logits is not None and logits.axes[-1:] == ("new",):
        raise CannotCheck("logits whose last axis is that of the tokens are not followed without a run")
    if any(slot.kind == "recurrent-state" and slot.dtype.startswith("int") for slot in contract.slots):
        raise CannotCheck("a state of whole numbers, as of the token before, is not followed without a run")
    budget = Budget(max(NODES, LOOP_CALLS * size))
    return size, budget, _open_graphs(contract, views, budget)


def _drop_unsure(runs: list[Run], contract: CacheContract, graphs: Iterable[AbstractGraph]) -> list[Run]:
    """The runs, or those that fail: loops may differ by an unknown mask, as where tokens see later ones."""
    wrong = [run for run in runs if run.experiment in LOOPS and run.outcome == "differs"]
    causes = {run.cause.name for run in wrong if run.cause is not None}
    later = next((run for run in runs if run.experiment == "later-token"), None)
    masked = later is not None and later.outcome == "passed" and gives_all_logits(contract) is None
    explained = causes and not causes.intersection(UNMASKED)
    random = any(run.experiment == "same-feed" and run.outcome == "differs" for run in runs)  # whatever the mask is
    if random or not wrong or masked or explained or not any(graph.may_hide() for graph in graphs):
        return runs
    return [run for run in runs if run.outcome == "failed"]


def _open_graphs(
    contract: CacheContract, views: Mapping[str, tuple[GraphView | None, Path]], budget: Budget
) -> dict[str, AbstractGraph]:
    """The graphs of a stack by file, with their views and paths."""
    read = {name: (view, path) for name, (view, path) in views.items() if view is not None}
    if len(read) < len(views):
        raise CannotCheck("a graph of the stack was not read")
    if called := next((name for name, (view, _) in read.items() if view.model.functions), None):
        raise CannotCheck(f"{called} defines functions, which are not followed without a run")
    shared = _find_shared_weights({name: view.model for name, (view, _) in read.items()})
    presents = {slot.present for slot in contract.slots} | {slot.filled_by for slot in contract.slots}
    given = (shared, budget, tuple(sorted(filter(None, presents))))
    return {name: AbstractGraph(view, *given, read_tables(view, path)) for name, (view, path) in read.items()}


def _find_shared_weights(models: Mapping[str, ModelProto]) -> frozenset[str]:
    """The weights of every body: of a pair embedding tables alone, of a merged decoder what both branches read."""
    if len(models) > 1:
        return frozenset.intersection(*(_find_tables(model) for model in models.values()))
    graph = next(iter(models.values())).graph
    names = frozenset(tensor.name for tensor in graph.initializer)
    for node in (node for node in graph.node if has(node.op_type, "branch")):
        read = [{name for inner in nodes_in(body.node) for name in inner.input} for body in subgraphs(node)]
        names -= set.union(*read) - set.intersection(*read) if read else set()
    return names


def _find_tables(model: ModelProto) -> frozenset[str]:
    """The weights that only Gather reads."""
    names = {tensor.name for tensor in model.graph.initializer}
    others = {name for node in nodes_in(model.graph.node) for name in node.input if not has(node.op_type, "embed")}
    return frozenset(names - others)


def _choose(names: Iterable[str], limit: int | None, rotary: bool, size: int) -> Iterator[Experiment]:
    """The experiments of an abstract run, in its order; a loop on graphs of many nodes has few steps."""
    left_out = {"left-padding"} if rotary else set[str]()
    left_out |= {"full-context"} if limit is None or limit > LONGEST else set()
    for one in (by_name()[name] for name in names if name not in left_out):
        shorter = replace(one, scenario=replace(one.scenario, steps=STEPS if size <= LARGE else FEW_STEPS))
        yield shorter if one.name.endswith("-loop") else one

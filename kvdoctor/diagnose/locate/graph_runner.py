"""Runs parts of a graph in the worker: they are written into a private folder, and fed with a saved call."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdoctor.decode.messages import CompareJob, TrialDone, TrialJob, TrialModel, TrialValue, ValueDifference, ValuePair
from kvdoctor.decode.runs import ObservedTensor
from kvdoctor.diagnose.locate.runnable import RunnableGraph, Variant, flatten, read_located, write_variant
from kvdoctor.errors import CannotCheck, UnreadableError, WorkerDied
from kvdoctor.model.proto import ModelProto
from kvdoctor.runtime.client import Runtime

if TYPE_CHECKING:
    from kvdoctor.decode.calls import Array

Pair = tuple[str, str, Sequence[Sequence[int] | None]]
"""An output of the left model, the corresponding one of the right, and the entries to take of it (`ValuePair`)."""
SHORT = 64
"""Elements of a tensor up to which its numbers are read: shapes, axes, positions."""
SECONDS = 45.0
"""How long the search for one fault may take."""


class TrialFailed(Exception):
    """The runtime failed in a trial; `names` are what its text mentions."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        super().__init__(text)
        self.names = tuple(names)


@dataclass
class ObservedValues:
    """Observed values of a graph: sizes, types, and the numbers of short tensors of integers."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def observed(self, value: str) -> ObservedTensor:
        """The tensor as reports show it."""
        return ObservedTensor(self.dtypes.get(value, "?"), self.shapes[value])


@dataclass
class GraphRunner:
    """Runs variants of the files of one stack. `folder` is private; `deadline` is a moment of `time.monotonic`.

    What runs a graph raises `TrialFailed` where the runtime fails, and `CannotCheck` where the graph cannot be read or
    written, the worker process crashes, or time is up. With `crashes` a crash is such a failure.
    """

    runtime: Runtime
    folder: Path
    provider: str
    deadline: float
    models: dict[Path, ModelProto] = field(default_factory=dict)
    written: int = 0
    crashes: bool = False
    seconds: float = SECONDS

    def model(self, source: Path) -> ModelProto:
        """The model in a file, its weights left where they are."""
        if source not in self.models:
            try:
                self.models[source] = read_located(source)
            except UnreadableError as error:
                raise CannotCheck(f"the graph cannot be read again: {error}") from None
        return self.models[source]

    def flatten(self, source: Path, taken: Mapping[str, bool]) -> RunnableGraph:
        """The flat graph of a file; `taken` says which branch an `If` takes, by the first value that it makes."""
        return flatten(self.model(source), taken, source)

    def variant(self, flat: RunnableGraph, **wanted: Any) -> Variant:
        """Write a part of a graph; see `write_variant`."""
        self.written += 1
        return write_variant(flat, self.folder / f"variant{self.written}.onnx", **wanted)

    def feeds(self, arrays: "Mapping[str, Array]") -> Path:
        """Write feeds for a call of our own."""
        from kvdoctor.decode.calls import save_call

        self.written += 1
        path = self.folder / f"feeds{self.written}.npz"
        save_call(path, arrays)
        return path

    def run(self, variant: Variant, feeds: Path, provider: str | None = None) -> dict[str, TrialValue]:
        """Run a variant: for each value its dtype and shape, and its numbers where it is short."""
        found = self._trial(TrialJob(side(variant, feeds), provider=provider or self.provider)).outputs
        return {value: found[output] for value, output in variant.outputs.items() if output in found}

    def passes(self, model: TrialModel) -> bool:
        """Whether a call of a file of the user, as it is, passes."""
        try:
            self._trial(TrialJob(model, provider=self.provider))
        except TrialFailed:
            return False
        return True

    def compare(
        self, left: TrialModel, right: TrialModel, pairs: Iterable[Pair], inject: Iterable[Pair] = ()
    ) -> tuple[ValueDifference | None, ...]:
        """Compare outputs of two models."""
        made = (
            tuple(
                ValuePair(own, other, tuple(rule if rule is None else tuple(rule) for rule in take))
                for own, other, take in one
            )
            for one in (pairs, inject)
        )
        return self._trial(CompareJob(left, right, *made, provider=self.provider)).differences

    def sizes(
        self, flat: RunnableGraph, values: Iterable[str], feeds: Path, provider: str | None = None
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of values, without reading the values."""
        wanted = [value for value in dict.fromkeys(values) if flat.is_tensor(value)]
        found = self.run(self.variant(flat, shapes=wanted), feeds, provider)
        return {value: output.values or () for value, output in found.items()}

    def known(
        self, flat: RunnableGraph, values: Iterable[str], feeds: Path, whole: Iterable[str] = ()
    ) -> ObservedValues:
        """Sizes of values, and types and numbers of short or `whole` ones: two runs, so that no others are held."""
        known = ObservedValues(self.sizes(flat, values, feeds))
        short = {value for value, shape in known.shapes.items() if len(shape) < 2 and prod(shape) <= SHORT}
        short |= {value for value in whole if value in known.shapes}
        for value, output in self.run(self.variant(flat, values=sorted(short)), feeds).items():
            known.dtypes[value] = output.dtype
            if output.values is not None:
                known.numbers[value] = output.values
        return known

    def arrays(self, flat: RunnableGraph, values: Iterable[str], feeds: Path) -> "dict[str, Array]":
        """The values themselves, through a file of the private folder: the caller bounds their size."""
        from kvdoctor.decode.calls import load_call

        variant = self.variant(flat, values=values)
        kept = variant.path.with_suffix(".values.npz")
        self._trial(TrialJob(side(variant, feeds), provider=self.provider, keep=kept))
        found = load_call(kept)
        kept.unlink()
        return {value: found[output] for value, output in variant.outputs.items() if output in found}

    def _trial(self, job: TrialJob | CompareJob) -> TrialDone:
        import time

        if time.monotonic() > self.deadline:
            raise CannotCheck(f"the search took longer than {self.seconds:g} s")
        try:
            done = self.runtime.trial(job)
        except WorkerDied as death:
            if self.crashes:
                raise TrialFailed(death.how, ()) from None
            raise CannotCheck(f"the worker process crashed during the search: {death.how}") from None
        if done.error is not None:
            raise TrialFailed(done.error, done.names)
        return done


def side(variant: Variant, feeds: Path) -> TrialModel:
    """A variant and the feeds of its call, as the worker reads them."""
    return TrialModel(variant.path, variant.root, feeds, "off")

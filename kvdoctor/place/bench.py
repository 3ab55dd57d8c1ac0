"""The bench: changed graphs are written into a private folder, and the worker runs them on the feeds of a kept call."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdoctor.errors import UnreadableError, WorkerDied
from kvdoctor.onnx_schema import ModelProto
from kvdoctor.place.flat import Flat, NotFlat
from kvdoctor.place.variants import Variant, is_tensor, read_located, write_variant
from kvdoctor.runtimes import Runtime
from kvdoctor.trace import Seen

if TYPE_CHECKING:
    from kvdoctor.calls import Array

SHORT = 64
"""Elements of a tensor up to which its numbers are of interest: shapes, axes, positions."""

SECONDS = 45.0
"""How long the search for one place may take: what it has not found by then, it says it has not found."""


class NoPlace(Exception):
    """The place cannot be found; the text says why."""


class TrialFailed(Exception):
    """The runtime failed in a trial; `names` are what its text mentions."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        super().__init__(text)
        self.names = tuple(names)


@dataclass
class Known:
    """What a run showed of the values of a graph: sizes, types, and the numbers of short tensors of integers."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def seen(self, value: str) -> Seen:
        """The tensor as reports show it."""
        return Seen(self.dtypes.get(value, "?"), self.shapes[value])


@dataclass
class Bench:
    """Runs variants of the files of one stack. `folder` is private; `deadline` is a moment of `time.monotonic`."""

    runtime: Runtime
    folder: Path
    provider: str
    deadline: float
    models: dict[Path, ModelProto] = field(default_factory=dict)
    written: int = 0

    def model(self, source: Path) -> ModelProto:
        """The model in a file, its weights left where they are.

        Raises:
            NoPlace: it cannot be read.
        """
        if source not in self.models:
            try:
                self.models[source] = read_located(source)
            except UnreadableError as error:
                raise NoPlace(f"the graph cannot be read again: {error}") from None
        return self.models[source]

    def variant(self, flat: Flat, source: Path, **wanted: Any) -> Variant:
        """Write a part of a graph; see `write_variant`.

        Raises:
            NoPlace: that part cannot be written.
        """
        self.written += 1
        try:
            return write_variant(flat, source, self.folder / f"variant{self.written}.onnx", **wanted)
        except NotFlat as error:
            raise NoPlace(str(error)) from None

    def feeds(self, arrays: "Mapping[str, Array]") -> Path:
        """Write feeds for a call of our own."""
        from kvdoctor.kept_calls import save_call

        self.written += 1
        path = self.folder / f"feeds{self.written}.npz"
        save_call(path, arrays)
        return path

    def run(self, variant: Variant, feeds: Path) -> dict[str, dict[str, Any]]:
        """Run a variant: for each value its dtype and shape, and its numbers where it is short.

        Raises:
            TrialFailed: the runtime failed.
            NoPlace: the worker died, or time is up.
        """
        told = self._trial({"trial": "run", "model": side(variant, feeds)})["outputs"]
        return {value: told[output] for value, output in variant.outputs.items() if output in told}

    def run_file(self, file: Path, feeds: Path, level: str, provider: str | None = None) -> None:
        """Run a file of the user as it is, at an optimisation level.

        Raises:
            TrialFailed: the runtime failed.
            NoPlace: the worker died, or time is up.
        """
        whole = {"path": str(file.absolute()), "root": None, "feeds": str(feeds), "level": level, "provider": provider}
        self._trial({"trial": "run", "model": whole})

    def compare(self, left: dict[str, Any], right: dict[str, Any], pairs: Any, inject: Any = ()) -> list[Any]:
        """Hold outputs of two models against one another.

        Raises:
            TrialFailed: the runtime failed.
            NoPlace: the worker died, or time is up.
        """
        job = {"trial": "compare", "left": left, "right": right, "pairs": list(pairs), "inject": list(inject)}
        found: list[Any] = self._trial(job)["pairs"]
        return found

    def sizes(self, flat: Flat, source: Path, values: Iterable[str], feeds: Path) -> dict[str, tuple[int, ...]]:
        """The shapes of values, without holding the values.

        Raises:
            TrialFailed: the runtime failed.
            NoPlace: the worker died, or time is up.
        """
        wanted = [value for value in dict.fromkeys(values) if is_tensor(flat, value)]
        told = self.run(self.variant(flat, source, shapes=wanted), feeds)
        return {value: tuple(facts["values"]) for value, facts in told.items()}

    def known(self, flat: Flat, source: Path, values: Iterable[str], feeds: Path, whole: Iterable[str] = ()) -> Known:
        """Sizes of values, and types and numbers of those that are short or wanted `whole`.

        Two runs: what is short shows in the first, and no more than that is held in memory at once.

        Raises:
            TrialFailed: the runtime failed.
            NoPlace: the worker died, or time is up.
        """
        known = Known(self.sizes(flat, source, values, feeds))
        short = {value for value, shape in known.shapes.items() if len(shape) < 2 and prod(shape) <= SHORT}
        short |= {value for value in whole if value in known.shapes}
        for value, told in self.run(self.variant(flat, source, values=sorted(short)), feeds).items():
            known.dtypes[value] = told["dtype"]
            if "values" in told:
                known.numbers[value] = tuple(told["values"])
        return known

    def _trial(self, job: dict[str, Any]) -> dict[str, Any]:
        import time

        if time.monotonic() > self.deadline:
            raise NoPlace(f"the search took longer than {SECONDS:g} s")
        try:
            told = self.runtime.trial({**job, "provider": self.provider})
        except WorkerDied as death:
            raise NoPlace(f"the worker did not live through the search: {death.how}") from None
        if "error" in told:
            raise TrialFailed(told["error"], told["names"])
        return told


def side(variant: Variant, feeds: Path, level: str = "off") -> dict[str, Any]:
    """One model and its call, as the worker reads it."""
    return {"path": str(variant.path), "root": str(variant.root), "feeds": str(feeds), "level": level}

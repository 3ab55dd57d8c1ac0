"""The reports of a gate in a file, each read when it is looked at; its runs, nine tenths of it, when they are."""

import tempfile
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import msgspec

from kvdoctor.decode.runs import Run
from kvdoctor.report.document import Report

MOST_HELD = 16
"""The reports of a gate that are held in memory as they are."""
_REPORT, _RUNS = msgspec.json.Decoder(Report), msgspec.json.Decoder(tuple[Run, ...])

Item = TypeVar("Item")


class ReadOnDemand(Sequence[Item]):
    """A sequence whose items are made when they are looked at. It equals a tuple of them, and is pickled as one."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, count: int, read: Callable[[int], Item]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        chosen = range(self._count)[index]
        return self._read(chosen) if isinstance(chosen, int) else tuple(map(self._read, chosen))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


class ReportStore:
    """Reports by number: all but the first few in a file without a name, which ends with this process."""

    def __init__(self) -> None:
        self._file: Any = None
        self._lock = threading.Lock()
        self._held: dict[int, Report] = {}
        self._places: dict[int, tuple[int, int, int, int]] = {}
        self._last: tuple[int, tuple[Run, ...]] = (-1, ())

    def put(self, number: int, report: Report) -> None:
        """Store a report."""
        if len(self._held) < MOST_HELD:
            self._held[number] = report
            return
        parts = (replace(report, runs=()), report.runs)
        head, runs = (zlib.compress(msgspec.json.encode(part), 1) for part in parts)
        with self._lock:
            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - it ends with the last of its reports
            self._places[number] = self._file.seek(0, 2), len(head), len(runs), len(report.runs)
            self._file.write(head + runs)

    def get(self, number: int) -> Report:
        """The report of that number; its runs stay in the file."""
        if number in self._held:
            return self._held[number]
        place, size, size_of_runs, count = self._places[number]
        report: Report = _REPORT.decode(self._read(place, size))
        runs = ReadOnDemand(count, lambda index: self._read_runs(place + size, size_of_runs)[index])
        return replace(report, runs=cast("tuple[Run, ...]", runs))

    def all(self) -> Sequence[Report]:
        """All reports by number, which must be without a gap."""
        found = ReadOnDemand(len(self._held) + len(self._places), self.get)
        return found if self._places else tuple(found)

    def _read_runs(self, place: int, size: int) -> tuple[Run, ...]:
        """The runs at a place of the file; those that were read last are at hand."""
        last = self._last
        if last[0] != place:
            self._last = last = place, _RUNS.decode(self._read(place, size))
        return last[1]

    def _read(self, place: int, size: int) -> bytes:
        with self._lock:
            self._file.seek(place)
            packed = self._file.read(size)
        return zlib.decompress(packed)

"""The runs of many reports in one file, each read when it is looked at: they are nine tenths of what a report holds."""

import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast, overload

import msgspec

from kvdoctor.decode.runs import Run
from kvdoctor.report.document import Report

MOST_HELD = 64
"""The reports of a gate that stay in memory as they are."""
_RUNS = msgspec.json.Decoder(tuple[Run, ...])


class RunStore:
    """A file without a name, which ends with this process, for what more than `MOST_HELD` reports hold."""

    def __init__(self) -> None:
        self._file: Any = None
        self._lock = threading.Lock()
        self._last: tuple[int, tuple[Run, ...]] = (-1, ())
        self._count = 0

    def put(self, report: Report) -> Report:
        """The same report, with its runs in the file."""
        self._count += 1
        if self._count <= MOST_HELD:
            return report
        packed = zlib.compress(msgspec.json.encode(report.runs), 1)
        with self._lock:
            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - it ends with the last of its reports
            place = self._file.seek(0, 2)
            self._file.write(packed)
        stored: Any = StoredRuns(self, place, len(packed), len(report.runs))
        return replace(report, runs=cast("tuple[Run, ...]", stored))

    def read(self, place: int, size: int) -> tuple[Run, ...]:
        """The runs at a place of the file; those that were read last are at hand."""
        with self._lock:
            if self._last[0] != place:
                self._file.seek(place)
                self._last = place, _RUNS.decode(zlib.decompress(self._file.read(size)))
            return self._last[1]


class StoredRuns(Sequence[Run]):
    """The runs of one report. They equal a tuple of the same, and become one where they are pickled."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, store: RunStore, place: int, size: int, count: int) -> None:
        self._store, self._place, self._size, self._count = store, place, size, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Run]:
        return iter(self._store.read(self._place, self._size))

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Run, ...]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._store.read(self._place, self._size)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)

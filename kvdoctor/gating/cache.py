"""Reports of models that have not changed, kept in a folder from one gate to the next.

An entry is the report as JSON under the key of all that it depends on. What is broken, foreign, or not what a whole
diagnosis would have said is a miss. Entries appear whole or not at all, so that several gates may share a folder.
"""

import contextlib
import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kvdoctor.errors import KvdoctorError
from kvdoctor.gating.contents import Contents
from kvdoctor.gating.jobs import Job
from kvdoctor.gating.keys import digests, external_state, key_of, nearby, places
from kvdoctor.listing import looked_at
from kvdoctor.out_folder import write_whole
from kvdoctor.report.document import Report, decide, is_open

SCHEMA = "kvdoctor/gate-cache/1"
MOST_BYTES = 512 << 20
MOST_ENTRY_BYTES = 64 << 20
PARTIAL = ".*.kvdoctor-*.partial"
PARTIAL_SECONDS = 3600
"""After so long nobody writes a file any more."""
TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by kvdoctor gate; it may be deleted at any time.\n"
"""Source: https://bford.info/cachedir/."""
_REPORT = msgspec.json.Decoder(Report)
"""Several times as fast as `kvdoctor.plain`. It passes over unknown fields, of which an entry has none: its key names
the version that wrote it."""


class Cache:
    """The reports kept in a folder. `elsewhere`: the models are run on other machines."""

    def __init__(self, folder: Path, elsewhere: bool = False) -> None:
        self._folder, self._elsewhere = folder, elsewhere
        self._contents = Contents(folder)
        self._wrote = False

    def key(self, job: Job) -> str | None:
        """What the report of a job is kept under, by its files as they are; None where nothing may be kept.

        To be asked before the job is run: from now on its files are watched, also those whose names only its graph
        knows.
        """
        with contextlib.suppress(OSError):
            self._contents.watch(nearby(job))
        return key_of(job, self._contents, self._elsewhere)

    def find(self, key: str | None, job: Job) -> Report | None:
        """The report of a job on which nothing has changed since it was kept."""
        if key is None:
            return None
        file = self._file(key)
        try:
            report = self._read(file, key, job)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError):
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # what is used is not pruned
        return replace(report, measured={**report.measured, "cached": True})

    def keep(self, key: str | None, job: Job, report: Report) -> None:
        """Keep a report, if it is complete, and if the model is still what it was when its key was made."""
        if key is None or not is_complete(report):
            return
        try:
            external = external_state(job, report, self._contents)
            files = (*looked_at(job.place)[1], *places(job, list(external)).values())
            unchanged = key_of(job, self._contents, self._elsewhere) == key
            if unchanged and all(map(self._contents.is_settled, files)):
                self._write(key, report, external)
        except (OSError, ValueError, TypeError, KvdoctorError):
            return  # a folder that cannot be written to costs time, and nothing else

    def close(self) -> None:
        """Remember what was read, and forget what nobody has used for longest, beyond the most that is kept."""
        if self._folder.is_dir():
            self._contents.save()
        if self._wrote:
            self._prune()

    def _read(self, file: Path, key: str, job: Job) -> Report:
        if not file.is_file() or file.stat().st_size > MOST_ENTRY_BYTES:
            raise ValueError("no entry, or too large for one")
        head, _, body = file.read_bytes().partition(b"\n")
        entry: dict[str, Any] = json.loads(head)
        if entry["schema"] != SCHEMA or entry["key"] != key or entry["sha256"] != hashlib.sha256(body).hexdigest():
            raise ValueError("not this entry")
        if entry["external"] != digests(job, list(entry["external"]), self._contents):
            raise ValueError("the weights have changed")
        report = _REPORT.decode(body)
        if not (is_complete(report) and _answers(report, job)):
            raise ValueError("not what a diagnosis says")
        return report

    def _write(self, key: str, report: Report, external: dict[str, str | None]) -> None:
        body = msgspec.json.encode(report)
        if _REPORT.decode(body) != report:
            return
        digest = hashlib.sha256(body).hexdigest()
        head = msgspec.json.encode({"schema": SCHEMA, "key": key, "sha256": digest, "external": external})
        file = self._file(key)
        self._make_folder(file.parent)
        write_whole(file, (head + b"\n" + body).decode())
        self._wrote = True

    def _file(self, key: str) -> Path:
        return self._folder / "reports" / key[:2] / f"{key}.json"

    def _make_folder(self, folder: Path) -> None:
        if not (self._folder / "CACHEDIR.TAG").exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / "CACHEDIR.TAG", TAG)
            write_whole(self._folder / ".gitignore", "*\n")
        folder.mkdir(parents=True, exist_ok=True)

    def _prune(self) -> None:
        self._sweep()
        entries = []
        for file in (self._folder / "reports").glob("*/*.json"):
            with contextlib.suppress(OSError):
                found = file.stat()
                entries.append((found.st_mtime, found.st_size, file))
        total = sum(size for _, size, _ in entries)
        for _, size, file in sorted(entries):
            if total <= MOST_BYTES:
                return
            with contextlib.suppress(OSError):
                file.unlink()
                total -= size

    def _sweep(self) -> None:
        """Take away what gates that were killed left half written."""
        for pattern in (PARTIAL, f"reports/*/{PARTIAL}"):
            for file in self._folder.glob(pattern):
                with contextlib.suppress(OSError):
                    if time.time() - file.stat().st_mtime > PARTIAL_SECONDS:
                        file.unlink()


def is_complete(report: Report) -> bool:
    """Whether the diagnosis came to its end, and no limit and nothing that lacks here had a part in it."""
    died = any(run.outcome == "died" for run in report.runs)
    lacking = any(target.not_run for target in report.targets)
    return report.verdict in ("healthy", "unhealthy") and not (
        died or lacking or is_open(report.findings, report.not_checked)
    )


def _answers(report: Report, job: Job) -> bool:
    """Whether a report is one on this job, and its verdict the one that its findings have."""
    verdict = decide("gate", report.findings, report.not_checked, job.options.fail_on)
    asked = (report.command, report.model.path, report.arguments, report.seed, report.verdict)
    return asked == ("gate", job.path, job.options.as_arguments(), job.options.seed, verdict)

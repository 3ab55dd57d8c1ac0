"""The cache of a gate: a folder with the reports of models that have not changed.

An entry is a report as JSON, compressed to a fifteenth, stored under a key of everything that the report depends on.
A damaged, foreign or incomplete entry is a miss. Entries are written atomically, so that several gates can share a
folder.
"""

import contextlib
import hashlib
import json
import os
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kvdoctor.errors import KvdoctorError
from kvdoctor.findings import means_incomplete
from kvdoctor.gating import cache_key
from kvdoctor.gating.jobs import WORKERS_LOST, GateJob
from kvdoctor.model.files import looked_at
from kvdoctor.model.output_folder import write_whole
from kvdoctor.report.document import Report, decide

SCHEMA = "kvdoctor/gate-cache/1"
MAX_ENTRY_BYTES, MAX_REPORT_BYTES = 64 << 20, 1 << 30
PARTIAL = ".*.kvdoctor-*.partial"
PARTIAL_SECONDS = 3600
"""A partial file older than this belongs to a gate that was killed."""
TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by kvdoctor gate; it may be deleted at any time.\n"
"""Source: https://bford.info/cachedir/."""
_REPORT = msgspec.json.Decoder(Report)
"""Several times as fast as `records`. It ignores unknown fields, but an entry has none: its key includes the
version that wrote it."""


class Cache:
    """The cached reports in a folder, of `max_bytes` at most. `remote`: the models run on other machines."""

    def __init__(self, folder: Path, remote: bool = False, max_bytes: int = 512 << 20) -> None:
        self._folder, self._remote, self._max_bytes = folder, remote, max_bytes
        self._started = time.time()
        self._digests = cache_key.FileDigests(folder)
        self._wrote = False

    def key(self, job: GateJob) -> str | None:
        """The key of a job's report, from the current content of its files; None if the report must not be cached.

        Call it before the job runs: it starts to watch the files, including those that only the graph names.
        """
        with contextlib.suppress(OSError):
            self._digests.watch(*cache_key.find_homes(job))
        return cache_key.compute_key(job, self._digests, self._remote)

    def find(self, key: str | None, job: GateJob) -> Report | None:
        """The cached report of a job, if nothing has changed since."""
        if key is None:
            return None
        file = self._file(key)
        try:
            report = self._read(file, key, job)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError, zlib.error):
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # entries in use are not pruned
        return replace(report, measured={**report.measured, "cached": True})

    def keep(self, key: str | None, job: GateJob, report: Report) -> None:
        """Store a report, if it is complete and the model has not changed since its key was computed."""
        if key is None or not can_be_cached(report):
            return
        try:
            external = cache_key.digest_external_files(job, report, self._digests)
            files = (*looked_at(job.location)[1], *cache_key.locate_files(job, list(external)).values())
            unchanged = cache_key.compute_key(job, self._digests, self._remote) == key
            if unchanged and all(map(self._digests.is_settled, files)):
                self._write(key, report, external)
        except (OSError, ValueError, TypeError, KvdoctorError):
            return  # without a writable folder the gate is slower, and otherwise the same

    def close(self) -> int:
        """Save the digests that were computed, and delete the least recently used entries beyond the size limit.

        Returns:
            The number of entries of this run among them.
        """
        if self._folder.is_dir():
            self._digests.save()
        return self._prune() if self._wrote else 0

    def _read(self, file: Path, key: str, job: GateJob) -> Report:
        if not file.is_file() or file.stat().st_size > MAX_ENTRY_BYTES:
            raise ValueError("no entry, or too large")
        head, _, packed = file.read_bytes().partition(b"\n")
        entry: dict[str, Any] = json.loads(head)
        if entry["schema"] != SCHEMA or entry["key"] != key or entry["sha256"] != hashlib.sha256(packed).hexdigest():
            raise ValueError("another entry")
        if entry["external"] != cache_key.digest_files(job, list(entry["external"]), self._digests):
            raise ValueError("the weights have changed")
        unpacking = zlib.decompressobj()
        report = _REPORT.decode(unpacking.decompress(packed, MAX_REPORT_BYTES))
        if not unpacking.eof:
            raise ValueError("cut short, or larger than a report")
        # On this job with these options, and with a verdict that agrees with its findings.
        verdict = decide("gate", report.findings, report.not_checked, job.options.fail_on)
        wanted = ("gate", job.path, job.options.as_arguments(), job.options.seed, verdict)
        found = (report.command, report.model.path, report.arguments, report.seed, report.verdict)
        if found != wanted or not can_be_cached(report):
            raise ValueError("not a complete report on this job")
        return report

    def _write(self, key: str, report: Report, external: dict[str, str | None]) -> None:
        body = msgspec.json.encode(report)
        if _REPORT.decode(body) != report:
            return
        packed = zlib.compress(body)
        digest = hashlib.sha256(packed).hexdigest()
        head = msgspec.json.encode({"schema": SCHEMA, "key": key, "sha256": digest, "external": external})
        file = self._file(key)
        if not (self._folder / "CACHEDIR.TAG").exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / "CACHEDIR.TAG", TAG)
            write_whole(self._folder / ".gitignore", "*\n")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, head + b"\n" + packed)
        self._wrote = True

    def _file(self, key: str) -> Path:
        return self._folder / "reports" / key[:2] / f"{key}.json"

    def _prune(self) -> int:
        for pattern in (PARTIAL, f"reports/*/{PARTIAL}"):  # of gates that were killed
            for file in self._folder.glob(pattern):
                with contextlib.suppress(OSError):
                    if time.time() - file.stat().st_mtime > PARTIAL_SECONDS:
                        file.unlink()
        entries = []
        for file in (self._folder / "reports").glob("*/*.json"):
            with contextlib.suppress(OSError):
                found = file.stat()
                entries.append((found.st_mtime, found.st_size, file))
        total, lost = sum(size for _, size, _ in entries), 0
        for used, size, file in sorted(entries):
            if total <= self._max_bytes:
                break
            with contextlib.suppress(OSError):
                file.unlink()
                total, lost = total - size, lost + (used >= self._started)
        return lost


def can_be_cached(report: Report) -> bool:
    """Whether the diagnosis has a verdict, and neither a limit nor a missing target of this machine affected it.

    A faulty model stays faulty with what its faults leave unchecked: another run would find the same.
    """
    died = any(run.outcome == "died" for run in report.runs) or report.measured.get(WORKERS_LOST)
    not_run = any(target.not_run for target in report.targets)
    incomplete = any(means_incomplete(finding.code) for finding in report.findings)
    return report.verdict in ("healthy", "unhealthy") and not (died or not_run or incomplete)

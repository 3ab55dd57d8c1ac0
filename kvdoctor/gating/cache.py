"""The cache of a gate: a folder with the reports of models that have not changed.

An entry is a report as JSON, stored under a key of everything that the report depends on. A damaged, foreign or
incomplete entry is a miss. Entries are written atomically, so that several gates can share a folder.
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
from kvdoctor.gating.cache_key import (
    FileDigests,
    compute_key,
    digest_external_files,
    digest_files,
    list_nearby_files,
    locate_files,
)
from kvdoctor.gating.jobs import GateJob
from kvdoctor.model.files import looked_at
from kvdoctor.model.output_folder import write_whole
from kvdoctor.report.document import Report, decide, is_open

SCHEMA = "kvdoctor/gate-cache/1"
MAX_BYTES = 512 << 20
MAX_ENTRY_BYTES = 64 << 20
PARTIAL = ".*.kvdoctor-*.partial"
PARTIAL_SECONDS = 3600
"""A partial file older than this belongs to a gate that was killed."""
TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by kvdoctor gate; it may be deleted at any time.\n"
"""Source: https://bford.info/cachedir/."""
_REPORT = msgspec.json.Decoder(Report)
"""Several times as fast as `records`. It ignores unknown fields, but an entry has none: its key includes the
version that wrote it."""


class Cache:
    """The cached reports in a folder. `remote`: the models run on other machines."""

    def __init__(self, folder: Path, remote: bool = False) -> None:
        self._folder, self._remote = folder, remote
        self._digests = FileDigests(folder)
        self._wrote = False

    def key(self, job: GateJob) -> str | None:
        """The key of a job's report, from the current content of its files; None if the report must not be cached.

        Call it before the job runs: it starts to watch the files, including those that only the graph names.
        """
        with contextlib.suppress(OSError):
            self._digests.watch(list_nearby_files(job))
        return compute_key(job, self._digests, self._remote)

    def find(self, key: str | None, job: GateJob) -> Report | None:
        """The cached report of a job, if nothing has changed since."""
        if key is None:
            return None
        file = self._file(key)
        try:
            report = self._read(file, key, job)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError):
            return None
        with contextlib.suppress(OSError):
            os.utime(file)  # entries in use are not pruned
        return replace(report, measured={**report.measured, "cached": True})

    def keep(self, key: str | None, job: GateJob, report: Report) -> None:
        """Store a report, if it is complete and the model has not changed since its key was computed."""
        if key is None or not can_be_cached(report):
            return
        try:
            external = digest_external_files(job, report, self._digests)
            files = (*looked_at(job.location)[1], *locate_files(job, list(external)).values())
            unchanged = compute_key(job, self._digests, self._remote) == key
            if unchanged and all(map(self._digests.is_settled, files)):
                self._write(key, report, external)
        except (OSError, ValueError, TypeError, KvdoctorError):
            return  # without a writable folder the gate is slower, and otherwise the same

    def close(self) -> None:
        """Save the digests that were computed, and delete the least recently used entries beyond the size limit."""
        if self._folder.is_dir():
            self._digests.save()
        if self._wrote:
            self._prune()

    def _read(self, file: Path, key: str, job: GateJob) -> Report:
        if not file.is_file() or file.stat().st_size > MAX_ENTRY_BYTES:
            raise ValueError("no entry, or too large")
        head, _, body = file.read_bytes().partition(b"\n")
        entry: dict[str, Any] = json.loads(head)
        if entry["schema"] != SCHEMA or entry["key"] != key or entry["sha256"] != hashlib.sha256(body).hexdigest():
            raise ValueError("another entry")
        if entry["external"] != digest_files(job, list(entry["external"]), self._digests):
            raise ValueError("the weights have changed")
        report = _REPORT.decode(body)
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
        digest = hashlib.sha256(body).hexdigest()
        head = msgspec.json.encode({"schema": SCHEMA, "key": key, "sha256": digest, "external": external})
        file = self._file(key)
        if not (self._folder / "CACHEDIR.TAG").exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / "CACHEDIR.TAG", TAG)
            write_whole(self._folder / ".gitignore", "*\n")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, (head + b"\n" + body).decode())
        self._wrote = True

    def _file(self, key: str) -> Path:
        return self._folder / "reports" / key[:2] / f"{key}.json"

    def _prune(self) -> None:
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
        total = sum(size for _, size, _ in entries)
        for _, size, file in sorted(entries):
            if total <= MAX_BYTES:
                return
            with contextlib.suppress(OSError):
                file.unlink()
                total -= size


def can_be_cached(report: Report) -> bool:
    """Whether the diagnosis is complete, and neither a limit nor a missing target of this machine affected it."""
    died = any(run.outcome == "died" for run in report.runs)
    not_run = any(target.not_run for target in report.targets)
    left = died or not_run or is_open(report.findings, report.not_checked)
    return report.verdict in ("healthy", "unhealthy") and not left

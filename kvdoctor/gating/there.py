"""On a worker of a cluster: what is carried out there, in processes that a model may take down."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvdoctor.errors import KvdoctorError
from kvdoctor.gating.keys import software
from kvdoctor.gating.slots import Slots

T = TypeVar("T")

MOST_THREADS = 256
"""More than a worker has threads: how many calls it gets is decided by who submits them."""
IDLE_SECONDS = 120
"""After so long without a call a worker ends the processes of a gate, which may have been killed."""


@dataclass
class _Kept:
    """The processes of a gate, and when they were last given something."""

    slots: Slots
    used: float = 0.0


_KEPT: dict[str, _Kept] = {}
_LOCK = threading.Lock()


def carried_out(
    gate: str, asked_for: dict[str, Any], function: Callable[..., T], given: tuple[Any, ...], named: dict[str, Any]
) -> T:
    """Carry out a call in a process of its own.

    Raises:
        KvdoctorError: this worker joined later, with other versions.
        Lost: the process ended before it answered.
    """
    if any(software()[name] != version for name, version in asked_for.items()):
        raise KvdoctorError("a worker that joined the cluster has other versions; install the same on all of them")
    with _LOCK:
        kept = _KEPT.get(gate) or _KEPT.setdefault(gate, _Kept(Slots(MOST_THREADS)))
        kept.used = math.inf
    try:
        return kept.slots.submit(function, *given, **named).result()
    finally:
        kept.used = time.monotonic()
        timer = threading.Timer(IDLE_SECONDS, _end_if_idle, [gate])
        timer.daemon = True
        timer.start()


def end_slots(gate: str) -> None:
    """End the processes of a gate."""
    with _LOCK:
        kept = _KEPT.pop(gate, None)
    if kept is not None:
        kept.slots.shutdown(wait=False)


def _end_if_idle(gate: str) -> None:
    kept = _KEPT.get(gate)
    if kept is not None and time.monotonic() - kept.used >= IDLE_SECONDS:
        end_slots(gate)

"""The child process: the only door to ONNX Runtime.

It reads jobs from standard input, one JSON object a line, runs whole experiments and answers with small facts, one
JSON object a line. It announces every step before it runs it, so that its death has an address. Standard library,
numpy and onnxruntime only, so that it starts in an environment that holds nothing else.

Jobs:   {"stack", "folder", "contract", "experiments": [names], "seed", "provider", "threads", "keep_logits",
         "keep_calls", "prompt": [token ids], "inputs": a file of arrays, "trace": a file, "settings", "timed",
         "tolerances": {arithmetic: share of the spread}};
         with "trial" one call on a changed graph (see trials.py), with "record" one experiment is told call by call,
         with "script" calls are played (see replaying.py); with
         "ceilings" it is told what the runtime takes (see ceilings.py)
Events: hello, start (an experiment), open / refused (a file), step (about to run), stepped, timing, run, note,
obstacle, crash, tried, ceilings, scripted, playing, played, done.
"""

import json
import os
import platform
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from kvdoctor.contract import CacheContract
from kvdoctor.errors import UsageError
from kvdoctor.examination import Examination
from kvdoctor.experiments import load
from kvdoctor.plain import from_plain, to_plain
from kvdoctor.samples import Samples, read_arrays
from kvdoctor.sessions import Announce, ProviderMissing, Sessions
from kvdoctor.tolerances import tolerating
from kvdoctor.trials import trial


def examine(job: dict[str, Any], announce: Announce) -> None:
    """Carry out one job, judged by the tolerances that hold for it."""
    with tolerating(job["tolerances"]):
        _examine(job, announce)


def _examine(job: dict[str, Any], announce: Announce) -> None:
    sessions = Sessions(Path(job["folder"]), job["provider"], job["threads"], announce, job["settings"])
    contract = from_plain(CacheContract, job["contract"])
    samples = Samples(tuple(job["prompt"]), read_arrays(Path(job["inputs"])) if job["inputs"] else {})
    exam = Examination(
        job["stack"], contract, sessions, job["seed"], announce, bool(job["keep_logits"]), samples, job["timed"]
    )
    exam.kept_calls = Path(job["keep_calls"]) if job.get("keep_calls") else None
    experiments = load()
    if job["trace"]:
        # Here and below: what few jobs need is loaded by them, since every user waits for the start of the worker.
        from kvdoctor.caller.reading import read_trace
        from kvdoctor.caller.replay import replaying

        try:
            experiments += (replaying(read_trace(job["trace"]), contract),)
        except UsageError:
            announce("obstacle", text="the trace was changed while it was read; give it again")
    for experiment in experiments:
        if experiment.name in job["experiments"]:
            announce("start", experiment=experiment.name)
            begin = time.perf_counter()
            try:
                run = exam.run(experiment)
            except ProviderMissing as error:
                announce("obstacle", text=str(error))
                break
            except UsageError:
                announce("obstacle", text="values of the trace cannot be read; save it again")
                continue
            except Exception:  # a fault of ours in one experiment must not cost the others
                announce("crash", text=traceback.format_exc())
                continue
            announce("run", run=to_plain(run), seconds=time.perf_counter() - begin)
    if job["keep_logits"]:
        np.savez(job["keep_logits"], **exam.logits)  # type: ignore[arg-type]


def try_out(job: dict[str, Any], announce: Announce) -> None:
    """Carry out a trial."""
    announce("tried", **trial(job))


def measure(_: dict[str, Any], announce: Announce) -> None:
    """Tell what this runtime takes."""
    from kvdoctor.ceilings import ceilings

    announce("ceilings", **ceilings())


def record(job: dict[str, Any], announce: Announce) -> None:
    """Tell an experiment call by call."""
    from kvdoctor import replaying

    replaying.record(job, announce)


def play(job: dict[str, Any], announce: Announce) -> None:
    """Play the calls of a script."""
    from kvdoctor import replaying

    replaying.replay(job, announce)


def main() -> None:
    """Serve jobs until standard input ends."""
    ort.disable_telemetry_events()
    # The runtime may print to descriptor 1 by itself: the events keep a descriptor of their own.
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def announce(event: str, **facts: Any) -> None:
        events.write(json.dumps({"event": event, **facts}) + "\n")
        events.flush()

    versions = {"onnxruntime": ort.__version__, "numpy": np.__version__, "python": platform.python_version()}
    announce("hello", **versions, providers=ort.get_available_providers())
    for line in _jobs():
        try:
            job = json.loads(line)
            kinds = {"trial": try_out, "record": record, "script": play, "ceilings": measure}
            next((carry_out for kind, carry_out in kinds.items() if kind in job), examine)(job, announce)
        except Exception:  # a fault of ours must reach the parent as a fact, not as a dead pipe
            announce("crash", text=traceback.format_exc())
        announce("done")


def _jobs() -> Iterator[str]:
    """Lines of standard input. Its end means that the parent is gone, and ends this process in the middle of a step.

    Tearing the runtime down would cost time and can itself crash, and nothing is left to save.
    """
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()

"""Runs one model along the golden walks, and writes a digest of what it returned."""

from collections.abc import Iterator

import numpy as np

from kvdoctor.decode.calls import Array, NothingToRun, Refused, StepFailed, TooShort
from kvdoctor.decode.golden import WALKS, GoldenWalk, digest, from_arrays, to_arrays
from kvdoctor.decode.messages import Digested, DigestJob
from kvdoctor.decode.paired_walks import Walk, fit_walk
from kvdoctor.decode.stack_driver import Announce
from kvdoctor.runtime.worker.decoding import Way, choose_states, decode


def write_digests(job: DigestJob, announce: Announce) -> Digested:
    """Run every walk up to the first that fails, and write the digests of those that were run."""
    way = Way(job.seed, job.provider, job.threads, choose_states(job.side.contract))
    found, failed = list[GoldenWalk](), ""
    for walk, tokens in _list_walks(job):
        try:
            done = decode(job.side, walk, way, announce, tokens)
        except (StepFailed, Refused, TooShort, NothingToRun) as error:
            failed = f"{walk.describe(0, walk.prompt)}: {error}"[:300]
            break
        found.append(digest(walk, done.tokens, done.logits, done.last, job.side.contract))
    if found:
        with job.out.open("xb") as file:
            np.savez_compressed(file, **to_arrays(tuple(found)))  # type: ignore[arg-type]
    return Digested(len(found), failed or ("" if found else "no golden walk fits the sizes of the model"))


def _list_walks(job: DigestJob) -> Iterator[tuple[Walk, Array | None]]:
    """The walks to run, each with the tokens to feed if they are known."""
    if job.golden is None:
        fitted = dict.fromkeys(filter(None, (fit_walk(walk, job.side.contract) for walk in WALKS)))
        yield from ((walk, None) for walk in fitted)
        return
    with np.load(job.golden) as arrays:
        yield from ((one.walk, one.tokens) for one in from_arrays({name: arrays[name] for name in arrays.files}))

"""Runs one model along the golden walks, and writes a digest of what it returned."""

from collections.abc import Iterator

from kvdoctor.decode.calls import Array
from kvdoctor.decode.golden import WALKS, GoldenWalk, checksum_draws, digest, from_arrays, pack, to_arrays, unpack
from kvdoctor.decode.messages import Digested, DigestJob
from kvdoctor.decode.paired_walks import Walk, fit_walk
from kvdoctor.decode.stack_driver import Announce
from kvdoctor.runtime.worker.decoding import NOT_RUN, Way, choose_states, decode


def write_digests(job: DigestJob, announce: Announce) -> Digested:
    """Run the walks, and write the digests of those that the model takes. The first must be one of them."""
    states = choose_states(job.side.contract) if job.states is None else job.states
    way = Way(job.seed, job.provider, job.threads, states)
    found, failed = dict[int, GoldenWalk](), list[str]()
    for number, (walk, tokens) in enumerate(_list_walks(job)):
        try:
            done = decode(job.side, walk, way, announce, tokens)
        except (*NOT_RUN, ValueError) as error:  # ValueError: its sizes make no feed
            failed.append(f"{walk.describe(0, walk.prompt)}: {error}"[:300])
            continue
        found[number] = digest(walk, done.tokens, done.logits, done.last, job.side.contract)
    if found:
        with job.out.open("xb") as file:
            file.write(pack(to_arrays(tuple(found.values()))))
    reason = "" if 0 in found else (failed or ["no golden decoding fits the sizes of the model"])[0]
    return Digested(tuple(found), states, checksum_draws(job.seed), reason)


def _list_walks(job: DigestJob) -> Iterator[tuple[Walk, Array | None]]:
    """The walks to run, in the sizes of the model, each with the tokens to feed if they are known."""
    contract = job.side.contract
    if job.golden is None:
        fitted = dict.fromkeys(filter(None, (fit_walk(walk, contract) for walk in WALKS)))
        yield from ((walk, None) for walk in fitted)
        return
    for one in from_arrays(unpack(job.golden)):
        walk = fit_walk(one.walk, contract)
        if walk is not None and walk.batch == one.walk.batch:
            yield walk, one.tokens[:, : walk.total]
        else:
            yield one.walk, one.tokens

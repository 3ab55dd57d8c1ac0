"""Decodes with one model along a walk: the same calls for every model that is to be compared with another."""

from collections.abc import Callable

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Answer, Array, NothingToRun, Past, Refused, Scenario, StepFailed, TooShort
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.messages import PairedSide
from kvdoctor.decode.paired_walks import Walk
from kvdoctor.decode.parity import divergences
from kvdoctor.decode.samples import Samples
from kvdoctor.decode.stack_driver import Announce
from kvdoctor.records import record
from kvdoctor.runtime.worker.runner import StackRunner
from kvdoctor.runtime.worker.sessions import Sessions

NOT_RUN = (StepFailed, Refused, TooShort, NothingToRun)
"""How a decoding ends that a model does not take (`decode`)."""


@record
class Way:
    """What every model is run with: the seed and the encoder states of its feeds, the provider, and the threads.

    `prompt` are token ids to begin with, in place of random ones. `store` is what becomes of the cache between one call
    and the next, where it is not fed as it was returned.
    """

    seed: int
    provider: str
    threads: int
    states: int
    prompt: tuple[int, ...] = ()
    store: Callable[[Past], Past] | None = None


@record(slots=False)
class Decoded:
    """What one model returned along a walk.

    `tokens` int64[batch, total] are what it was fed, `logits` float64[calls, vocabulary] the last of each call (of the
    last sequence of a batch), `first` and `last` what the first and the last call returned.
    """

    walk: Walk
    tokens: Array
    logits: Array
    first: Answer
    last: Answer


@record
class TokenAgreement:
    """How the next tokens of two decodings of the same tokens compare.

    `divergence` is the mean Kullback-Leibler divergence in nats, `same_top1` the share of positions with the same
    likeliest token, `first_other` the first position, from 1, with another one.
    """

    tokens: int
    divergence: float
    same_top1: float
    first_other: int | None


def compare_tokens(got: Array, want: Array) -> TokenAgreement | None:
    """Compare logits, float[calls, vocabulary]; None where some are not finite."""
    found = divergences(got, want)
    if found is None:
        return None
    same = got.argmax(-1) == want.argmax(-1)
    return TokenAgreement(
        tokens=len(same),
        divergence=float(f"{found.mean():.3g}"),
        same_top1=round(float(same.mean()), 4),
        first_other=None if same.all() else int(np.argmin(same)) + 1,
    )


def choose_states(*contracts: CacheContract) -> int:
    """The encoder states that all of these models take."""
    fixed = (contract.encoder_length for contract in contracts)
    return next((count for count in fixed if count is not None), Scenario().encoder)


def decode(side: PairedSide, walk: Walk, way: Way, announce: Announce, tokens: Array | None = None) -> Decoded:
    """Run all calls with the model's own encoder and cache. Without `tokens`, the one after each call is the likeliest.

    Raises:
        StepFailed: the runtime fails in a call.
        Refused: the runtime does not open a file.
        TooShort: a buffer is too short for the walk.
        NothingToRun: the contract has no such call.
    """
    sessions = Sessions(side.folder, way.provider, way.threads, announce, {})
    runner = StackRunner(side.stack, side.contract, sessions, way.seed, announce)
    scenario = Scenario(walk.batch, walk.prompt, walk.total - walk.prompt + 1, way.states, way.seed)
    embed = runner.embed if runner.can_embed else None
    given = np.zeros((0, 0), np.int64) if tokens is None else tokens
    samples = Samples(way.prompt)
    builder = FeedBuilder(side.contract, scenario, runner.encode(scenario), given, samples=samples, embed=embed)
    past: Past | None = None
    logits, answers = list[Array](), list[Answer]()
    for start, stop in walk.calls():
        call = builder.prefill(stop) if past is None else builder.decode(start, stop, past)
        answer = runner.run_session(call)
        answers = [*answers[:1], answer]
        logits.append(answer.logits.reshape(-1, answer.logits.shape[-1])[-1].astype(np.float64))
        if tokens is None and stop < walk.total and side.contract.codebooks == 1:
            # The head may be padded to more rows than there are tokens.
            builder.tokens[:, stop] = int(logits[-1][: side.contract.vocabulary].argmax())
        past = builder.carry(past, answer, "held")
        past = past if way.store is None else way.store(past)
    return Decoded(walk, builder.tokens, np.stack(logits), answers[0], answers[-1])


def read_caches(contract: CacheContract, answer: Answer) -> dict[tuple[str, str], Array]:
    """The self-attention caches that a prompt left, by layer and name."""
    slots = ((slot.filled_by, slot.layer) for slot in contract.of_kind("self-attention"))
    known = ((name, layer) for name, layer in slots if name in answer.outputs and layer is not None)
    return {(str(layer), str(name)): answer.outputs[str(name)].array() for name, layer in known}

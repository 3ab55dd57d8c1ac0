"""A search operator against a loop of ours over the decoder inside it: both must find the same tokens.

The loop keeps one cache for each sequence that it follows, pairs presents with pasts by the contract, and chooses
tokens by the operator's own rules (decode/search.py). A sequence that the operator returns is also scored token by
token: so a tie that rounding decides is no difference.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import NUMPY_TYPES, Answer, Array, Asking, Call, Past, Value, as_array
from kvdoctor.decode.experiments import Decision, Experiment
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.inputs import random_tokens
from kvdoctor.decode.runs import SEARCH, Cause
from kvdoctor.decode.search import OUT_OF_PLAY, Ended, SearchPlan, SearchRules, choose, log_softmax
from kvdoctor.errors import CannotCheck
from kvdoctor.records import record

BEAMS, PROMPTS = (1, 2, 4), 2
"""Beams that are tried where the file leaves their number open; prompts with one beam, with more there is one."""
MOST_LENGTH, SLACK = 64, 1e-4
"""Tokens up to which a search is computed where the file fixes them; scores that differ by less are equal."""
CAUSE = "search-differs"


@record(slots=False)
class Followed:
    """A sequence with its cache: its tokens, the cache after all but the last, and the logits of the next token."""

    tokens: tuple[int, ...]
    past: Past
    logits: Array


Follow = Asking[Followed]


@record(slots=False)
class OwnLoop:
    """Our loop over the decoder. Where it is `blind`, its self-attention caches are zeros: the positive control."""

    builder: FeedBuilder
    blind: bool = False

    def begin(self) -> Follow:
        """Run the prompt."""
        count = self.builder.scenario.prompt
        answer = yield replace(self.builder.prefill(count), kind="probe")
        return self._follow(tuple(int(token) for token in self.builder.tokens[0, :count]), None, answer)

    def go_on(self, sequence: Followed, token: int) -> Follow:
        """Run one more token."""
        at = len(sequence.tokens)
        self.builder.tokens[0, at] = token
        answer = yield replace(self.builder.decode(at, at + 1, sequence.past), kind="probe")
        return self._follow((*sequence.tokens, token), sequence.past, answer)

    def _follow(self, tokens: tuple[int, ...], past: Past | None, answer: Answer) -> Followed:
        if answer.failed:
            raise CannotCheck("the decoder inside the operator fails in a loop of ours")
        plan, width = self.builder.search, answer.logits.shape[-1]
        if plan is not None and plan.vocabulary > 0 and plan.vocabulary != width:
            reason = f"vocab_size of the operator is {plan.vocabulary}, and the logits are {width} wide"
            raise CannotCheck(f"{reason}: onnxruntime reads the logits of a prompt by vocab_size")
        row = answer.logits.reshape(-1, answer.logits.shape[-1])[-1].astype(np.float64)
        if not np.isfinite(row).all():
            raise CannotCheck("the decoder inside the operator returns logits that are not finite")
        carried = self.builder.carry(past, answer, "held")
        if self.blind:
            zeros = {s.past: np.zeros_like(as_array(carried[s.past])) for s in self.builder.contract.of_kind(ATTENTION)}
            carried = Past({**carried, **zeros}, carried.length)
        return Followed(tokens, carried, row[: self.builder.contract.vocabulary])


ATTENTION = "self-attention"

Found = tuple[tuple[int, ...], float]
"""The tokens of a sequence, and its score."""


def searches(contract: CacheContract) -> str | None:
    """There must be an operator that searches, and one sequence at a time."""
    if "generate" not in contract.phases:
        return "no operator runs the loop"
    return None if contract.fixed_batch in (None, 1) else f"the decoder takes {contract.fixed_batch} sequences only"


@Experiment(
    SEARCH,
    "the sequences that the operator finds, against kvdoctor's own search over its decoder",
    applies=searches,
    order=60,
)
def search_operator(builder: FeedBuilder) -> Decision:
    """Compare the searches with each number of beams."""
    plan = builder.search
    if plan is None:
        raise CannotCheck("nothing is known of the operator")
    if plan.unknown:
        raise CannotCheck(f"the search cannot be computed by its definition: {plan.unknown}")
    fixed = plan.fixed.get("num_beams")
    beams = (int(fixed),) if fixed is not None else BEAMS if "num_beams" in plan.fed else (1,)
    seen = False
    for count in beams:
        for number in range(PROMPTS if count == 1 else 1):
            prompted = _with_prompt(builder, plan, number)
            rules = _rules(plan, count, prompted.scenario.prompt)
            ours = yield from _search(OwnLoop(prompted), rules)
            cause = yield from _compare(prompted, rules, ours)
            if cause is not None:
                return cause
            if not seen:
                blind = yield from _search(OwnLoop(prompted, blind=True), rules)
                seen = ours[0][0] != blind[0][0]
    if not seen:
        raise CannotCheck("control failed: a search with a corrupted cache finds the same tokens")
    return None


def _rules(plan: SearchPlan, beams: int, prompt: int) -> SearchRules:
    """The settings: those of the file, else ones that let sequences run long."""
    length = int(plan.fixed.get("max_length", prompt + LENGTH))
    if not prompt < length <= MOST_LENGTH:
        raise CannotCheck(f"the file fixes max_length at {length}")
    returned = int(plan.fixed.get("num_return_sequences", beams))
    return SearchRules(
        plan,
        beams,
        returned,
        length,
        # Sequences that may not end early have no padding that could be taken for tokens.
        int(plan.fixed.get("min_length", length if "min_length" in plan.fed else 0)),
        plan.fixed.get("length_penalty", 1.0),
        plan.fixed.get("repetition_penalty", 1.0),
    )


LENGTH = 9
"""New tokens of a sequence, where the file leaves that open."""


def _with_prompt(builder: FeedBuilder, plan: SearchPlan, number: int) -> FeedBuilder:
    """The builder with another prompt, and room for the longest sequence; one of an encoder begins with its start."""
    shapes = {port.name: port.shape for port in builder.contract.graph("generate").inputs}
    shape = shapes.get(plan.fed.get("input_ids", "")) or ()
    fixed = shape[1] if len(shape) > 1 else None
    count = 1 if plan.prompts else fixed if isinstance(fixed, int) and fixed else 3
    total = int(min(plan.fixed.get("max_length", count + LENGTH), MOST_LENGTH))
    scenario = replace(builder.scenario, prompt=count, steps=total - count + 1)
    tokens = random_tokens(builder.contract, (1, scenario.total), builder.scenario.seed + number)
    if plan.prompts:
        tokens[0, 0] = plan.start
    else:
        # The operator takes a token that is the padding for padding, wherever it stands.
        tokens[tokens == plan.pad] += 1
    return replace(builder, scenario=scenario, tokens=tokens)


def _compare(builder: FeedBuilder, rules: SearchRules, ours: list[Found]) -> Asking[Cause | None]:
    """Compare what the operator returns with our search; a sequence of the same score is as good."""
    answer = yield _call_operator(builder, rules)
    theirs = _read(answer, rules, ours)
    operator = rules.plan.operator
    beams = "" if rules.plan.is_of_one_sequence else f" with {rules.beams} beam{'s' * (rules.beams > 1)}"
    for number, ((tokens, score), (want, best)) in enumerate(zip(theirs, ours, strict=False)):
        own = yield from _score(OwnLoop(builder), rules, tokens)
        if own is None:
            shown = " ".join(map(str, tokens[:12])) + " ..." * (len(tokens) > 12)
            return Cause(CAUSE, f"{operator}{beams} returns tokens outside the vocabulary: {shown}")
        at = next((i for i, pair in enumerate(zip(tokens, want, strict=False)) if pair[0] != pair[1]), None)
        at = at if at is not None or len(tokens) == len(want) else min(len(tokens), len(want))
        if at is not None and (own.gaps.get(at, 0.0) if rules.is_greedy else best - own.score) > own.slack(builder):
            right, got = (str(one[at]) if at < len(one) else "the end" for one in (want, tokens))
            step = at - builder.scenario.prompt
            text = f"{operator}{beams} gives {got} as new token {step}" + (f" of sequence {number}" if number else "")
            return Cause(CAUSE, f"{text}; the inner decoder run step by step gives {right}")
        if at is not None and rules.is_greedy:
            return None  # what follows a tie is another sequence
        if score is not None and abs(score - own.score) > own.slack(builder):
            why = f"its score is {score:.4g}; by the inner decoder run step by step it is {own.score:.4g}"
            return Cause(CAUSE, f"{operator}{beams}: sequence {number} has the same tokens, and {why}")
    return None


@record(slots=False)
class Scored:
    """A sequence by our loop: its score, the log probability that each token lacks to the likeliest, the deviation."""

    score: float
    gaps: dict[int, float]
    deviation: float

    def slack(self, builder: FeedBuilder) -> float:
        """By how much log probabilities may differ for rounding alone."""
        return SLACK + builder.tolerance.fails * self.deviation


def _search(loop: OwnLoop, rules: SearchRules) -> Asking[list[Found]]:
    """The best sequences of our own search, without the ending token."""
    first = yield from loop.begin()
    if rules.is_greedy:
        return [((yield from _take_likeliest(loop, rules, first)), 0.0)]
    beams, sums = [first] * rules.beams, [0.0] + [OUT_OF_PLAY] * (rules.beams - 1)
    ended = Ended(rules)
    while True:
        scores = np.stack([_adjusted(rules, one) for one in beams])
        kept = ended.take(choose(scores + np.array(sums)[:, None], rules), [one.tokens for one in beams])
        if not kept or len(beams[0].tokens) + 1 == rules.max_length:
            for score, beam, token in kept:
                ended.add((*beams[beam].tokens, token), score)
            return [(tokens, score) for score, tokens in ended.found]
        grown = []
        for _, beam, token in kept:
            grown.append((yield from loop.go_on(beams[beam], token)))
        beams, sums = grown, [score for score, _, _ in kept]


def _adjusted(rules: SearchRules, sequence: Followed) -> Array:
    """The scores of the next token: GreedySearch adjusts logits, BeamSearch, with one beam as well, log probabilities.

    Source: onnxruntime, contrib_ops/cpu/transformers/generation_device_helper.cc.
    """
    return rules.adjust(
        sequence.logits if rules.plan.is_of_one_sequence else log_softmax(sequence.logits), sequence.tokens
    )


def _take_likeliest(loop: OwnLoop, rules: SearchRules, sequence: Followed) -> Asking[tuple[int, ...]]:
    while True:
        token = int(_adjusted(rules, sequence).argmax())
        if token == rules.plan.eos:
            return sequence.tokens
        if len(sequence.tokens) + 1 == rules.max_length:
            return (*sequence.tokens, token)
        sequence = yield from loop.go_on(sequence, token)


def _score(loop: OwnLoop, rules: SearchRules, tokens: tuple[int, ...]) -> Asking[Scored | None]:
    """A sequence by our loop; None where it has a token without a logit."""
    one = yield from loop.begin()
    total, deviation, gaps = 0.0, 0.0, dict[int, float]()
    ends = [rules.plan.eos] if len(tokens) < rules.max_length else []
    for place, token in enumerate([*tokens, *ends]):
        if place < len(one.tokens):
            continue
        if not 0 <= token < len(one.logits):
            return None
        scores = _adjusted(rules, one)
        total += float(scores[token])
        gaps[place] = float(scores.max() - scores[token])
        deviation = max(deviation, float(one.logits.std()))
        if place + 1 < rules.max_length and place < len(tokens):
            one = yield from loop.go_on(one, token)
    return Scored(rules.score(total, len(tokens)), gaps, deviation)


def _read(answer: Answer, rules: SearchRules, ours: list[Found]) -> list[tuple[tuple[int, ...], float | None]]:
    """The sequences that the operator returned, with their scores."""
    plan = rules.plan
    rows = np.asarray(as_array(answer.outputs[plan.sequences])).reshape(-1, rules.max_length)[: rules.returned]
    found = as_array(answer.outputs[plan.scores]).reshape(-1) if plan.scores else None
    cut = [_cut(tuple(map(int, row)), rules, [tokens for tokens, _ in ours]) for row in rows]
    return [(tokens, None if found is None else float(found[number])) for number, tokens in enumerate(cut)]


def _cut(row: tuple[int, ...], rules: SearchRules, ours: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Trim trailing padding: to the length of one of our sequences that is the same, else all of it.

    The padding may be a token as well. GreedySearch writes it once, and leaves the rest as it was.
    """
    pad = rules.plan.pad
    for tokens in ours:
        rest = row[len(tokens) :][: 1 if rules.plan.is_of_one_sequence else None]
        if row[: len(tokens)] == tokens and set(rest) <= {pad}:
            return tokens
    end = len(row)
    while rules.min_length < rules.max_length and end > 1 and row[end - 1] == pad:
        end -= 1
    return row[:end]


def _call_operator(builder: FeedBuilder, rules: SearchRules) -> Call:
    """The call of the whole model. The prompt is that of the decoder, or what the encoder was fed."""
    plan, graph = rules.plan, builder.contract.graph("generate")
    ports = {port.name: port for port in graph.inputs}
    prompt: Array = builder.tokens[:, : builder.scenario.prompt]
    if plan.prompts:
        prompt = _encoder_feed(builder)
        if np.issubdtype(prompt.dtype, np.integer) and (prompt == plan.pad).any():
            raise CannotCheck("an ordinary token is the padding of the operator")
    values: dict[str, Array | float] = {
        "input_ids": prompt,
        "max_length": rules.max_length,
        "min_length": rules.min_length,
        "num_beams": rules.beams,
        "num_return_sequences": rules.returned,
        "length_penalty": 1.0,
        "repetition_penalty": 1.0,
        "decoder_input_ids": builder.tokens[:, :1],
        "vocab_mask": np.ones(builder.contract.vocabulary or 1),
        "prefix_vocab_mask": np.ones((1, builder.contract.vocabulary or 1)),
        "attention_mask": np.ones(prompt.shape[:2]),
        "logits_processor": 0,
        "temperature": 1.0,
    }
    feeds: dict[str, Value | Array] = {}
    for meaning, name in plan.fed.items():
        made, shape = np.array(values[meaning], NUMPY_TYPES[ports[name].dtype]), ports[name].shape
        made = made if made.ndim or not shape else made.reshape((1,) * len(shape))
        fixed = zip(shape or (), made.shape, strict=False)
        if len(shape or ()) == made.ndim and any(isinstance(dim, int) and dim != size for dim, size in fixed):
            raise CannotCheck(f"the graph takes {name} of the sizes {list(shape or ())} only")
        feeds[name] = np.ascontiguousarray(made)
    return Call("generate", feeds, 0, builder.scenario.prompt)


def _encoder_feed(builder: FeedBuilder) -> Array:
    """What the encoder reads: of a file of its own, or within the first step."""
    if "encode" in builder.contract.phases:
        ports = builder.contract.graph("encode").inputs
        given: Mapping[str, Value | Array] = builder.encoded.fed
    else:
        ports, given = builder.contract.graph("prefill").inputs, builder.prefill(builder.scenario.prompt).feeds
    names = [port.name for port in ports if port.role == "encoder_input" and port.name in given]
    if not names:
        raise CannotCheck("the encoder inside the operator does not run on synthetic input")
    return as_array(given[names[0]])

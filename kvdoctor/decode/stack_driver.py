"""Runs the calls of one stack; encoder states and reference runs are shared by all experiments.

What computes a call is left to a subclass: sessions of ONNX Runtime in the worker, abstract runs in the diagnosis.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, ClassVar, Literal

import numpy as np

from kvdoctor.contract import CacheContract, PhaseName, Port
from kvdoctor.decode.calls import Answer, Array, Call, Encoded, Scenario, StepFailed, Value, as_array
from kvdoctor.decode.embeddings import FeatureRows, embedded_inputs
from kvdoctor.decode.experiments.cache_entries import growing
from kvdoctor.decode.experiments.multi_turn import count_tokens, drives
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.inputs import encoder_feeds, plain_token_ids, synthetic_cross_caches, synthetic_encoder_states
from kvdoctor.decode.messages import Event, Note
from kvdoctor.decode.samples import Samples
from kvdoctor.errors import CannotCheck
from kvdoctor.records import record

ENCODER_FACTORS = (1, 40, 400)
"""Longer inputs are tried where an encoder refuses a short one: speech is sampled many times for each state."""

MOST_KEPT = 1 << 24
"""Numbers in the answers that are held for equal calls: all of them would take more memory than many a model. Sixty
tokens have as many logits with a vocabulary of 262,144."""


@record
class UnusableLogits:
    """Logits in a shape that cannot be compared. `undeclared`: a reference run returned those of other tokens."""

    reason: str
    undeclared: bool = False


Announce = Callable[[Event], None]
"""Sends an event to the parent."""


@record
class Rerun:
    """What a failed call shows in other sessions; see the fields of `Run`."""

    reason: str | None = None
    passes_with: Literal["no-optimization", "no-buffer-reuse"] | None = None
    node_names: tuple[str, ...] = ()


@record
class Environment:
    """Where calls are run: the target, the provider, and the level of graph optimization, as a run names them."""

    target: str
    provider: str
    level: str


@dataclass
class HeldAnswers:
    """Answers by the digests of their calls. Beyond `MOST_KEPT` numbers those that were not used for longest go."""

    answers: dict[bytes, tuple[Answer, int]] = field(default_factory=dict)
    numbers: int = 0

    def find(self, key: bytes) -> Answer | None:
        """An answer that is held, which becomes the last one in the order of use."""
        if key not in self.answers:
            return None
        self.answers[key] = self.answers.pop(key)
        return self.answers[key][0]

    def hold(self, key: bytes, answer: Answer) -> Answer:
        """Hold an answer, at least up to the next one, and return it."""
        self.numbers -= self.answers.pop(key, (answer, 0))[1]
        size = sum(math.prod(value.shape) for value in answer.outputs.values())
        while self.answers and self.numbers + size > MOST_KEPT:
            self.numbers -= self.answers.pop(next(iter(self.answers)))[1]
        self.answers[key] = answer, size
        self.numbers += size
        return answer

    def clear(self) -> None:
        """Hold none of them any more."""
        self.answers.clear()
        self.numbers = 0


@dataclass
class StackDriver:
    """Runs calls of one stack. `contract` is corrected where the first reference run contradicts the graph.

    `sessions` is whatever a subclass runs its calls with.
    """

    stack: str
    contract: CacheContract
    sessions: Any
    seed: int
    announce: Announce
    samples: Samples = field(default_factory=Samples)
    references: HeldAnswers = field(default_factory=HeldAnswers)
    known: HeldAnswers = field(default_factory=HeldAnswers)
    overwritten: int = 0
    corrected: bool = False
    reuses: ClassVar[bool] = True
    encoded: dict[Scenario, Encoded] = field(default_factory=dict)

    def run_reference(self, call: Call, used: set[bytes]) -> Answer | UnusableLogits:
        """Run a reference call; the answer to an equal call is reused. `used`: see `run_once`.

        Raises:
            StepFailed: the runtime failed.
            CannotCheck: the file does not open.
        """
        key = digest_call(call, self.overwritten)
        if key is not None and (known := self.references.find(key)) is not None:
            used.add(key)
            return known
        answer = self.run_once(call, used)
        shape = answer.outputs[self.logits_name("prefill")].shape
        if len(answer.logits_shape) != 3:
            return UnusableLogits(f"logits have shape {list(shape)}, not [batch, new, vocabulary]")
        if call.new > 1 and answer.logits_shape[1] == (call.new if self.contract.last_logits_only else 1):
            return UnusableLogits("logits of other tokens are returned than the graph declares", undeclared=True)
        names = {self.logits_name("prefill"), *(slot.filled_by for slot in growing(self.contract))}
        kept = {name: value for name, value in answer.outputs.items() if name in names}
        answer = replace(answer, outputs=kept)
        return answer if key is None else self.references.hold(key, answer)

    def run_once(self, call: Call, used: set[bytes]) -> Answer:
        """Run a call, or reuse the answer that an equal one had in another experiment.

        `used` are the digests of the calls of this experiment: what it repeats is run again, since the second answer
        may differ. Calls with memory or options of their own always run.

        Raises:
            StepFailed: the runtime failed.
            CannotCheck: the file does not open.
        """
        if call.via == "one-buffer":  # it overwrites what earlier answers hold
            self.known.clear()
            self.overwritten += 1
        key = digest_call(call, self.overwritten) if call.via == "run" and self.reuses else None
        if key is None:
            return self.run_session(call)
        known = self.known.find(key) if key not in used else None
        used.add(key)
        return known or self.known.hold(key, self._run_marked(call, key))

    def _run_marked(self, call: Call, key: bytes) -> Answer:
        """The answer with outputs that say which call made them: their values need not be read to tell them apart."""
        answer = self.run_session(call)
        for name, value in answer.outputs.items():
            if hasattr(value, "made"):
                value.made = (self.overwritten, key + name.encode())
        return answer

    def forget(self) -> None:
        """Drop what was computed by another contract."""
        self.references.clear()
        self.known.clear()
        self.encoded.clear()

    def correct_logits(self) -> None:
        """Correct the contract, once: a call returns the logits of its last token alone, or else of each token."""
        last_only = self.contract.last_logits_only

        def correct(port: Port) -> Port:
            if port.role != "logits" or port.shape is None:
                return port
            if "new" not in port.axes and last_only:
                return replace(port, axes=("batch", "new", "vocabulary"), shape=(port.shape[0], None, port.shape[-1]))
            new = None if last_only else 1
            pairs = zip(port.axes, port.shape, strict=True)
            return replace(port, shape=tuple(new if axis == "new" else size for axis, size in pairs))

        if not self.corrected:
            self.contract, self.corrected = self.contract.with_ports(correct), True
            self.known.clear()

    @property
    def environment(self) -> Environment:
        """Where calls are run."""
        raise NotImplementedError

    def run_session(self, call: Call) -> Answer:
        """Run a call of a phase; a pipeline stage by stage.

        Raises:
            StepFailed: it failed.
            CannotCheck: the file does not open.
        """
        raise NotImplementedError

    def rerun(self, call: Call) -> Rerun:  # noqa: ARG002 - for subclasses
        """Run a failed call in other ways."""
        return Rerun()

    def logits_name(self, phase: str) -> str:
        """The name of the logits output; an encoder has none."""
        port = self.contract.graph(phase).port("logits")  # type: ignore[arg-type]
        return port.name if port else ""

    def make_answer(self, call: Call, outputs: Mapping[str, Value]) -> Answer:
        """The answer to a call with these outputs by name."""
        port = self.contract.graph(call.phase).port("logits")
        axes = port.axes if port is not None else ()
        return Answer(outputs, self.logits_name(call.phase), call.past, call.new, axes)

    def encode(self, scenario: Scenario) -> Encoded:
        """The encoder's outputs for a scenario: of the encoder file, else synthetic."""
        key = Scenario(batch=scenario.batch, encoder=scenario.encoder, seed=scenario.seed)
        if key not in self.encoded:
            self.encoded[key] = self._encode(key)
        return self.encoded[key]

    def build(self, scenario: Scenario, **more: Any) -> FeedBuilder:
        """The builder of a scenario, with the outputs of the encoder and what makes embeddings."""
        embed, count_rows = (self.embed, self.count_rows) if self.can_embed else (None, None)
        given = {"samples": self.samples, "embed": embed, "count_rows": count_rows, **more}
        return FeedBuilder(self.contract, scenario, self.encode(scenario), **given)

    def _encode(self, scenario: Scenario) -> Encoded:
        synthetic = Encoded(self._synthetic_states(scenario), synthetic_cross_caches(self.contract, scenario))
        if "encode" not in self.contract.phases:
            return synthetic
        error = ""
        for factor in ENCODER_FACTORS:
            longer = replace(scenario, encoder=scenario.encoder * factor)
            made = encoder_feeds(self.contract, longer)
            fed = {name: self.samples.overlay(name, array) for name, array in made.items()}
            try:
                answer = self.run_session(Call("encode", fed, 0, longer.encoder))
                break
            except (StepFailed, CannotCheck) as refusal:
                error = error or str(refusal)
        else:
            self.announce(Note(f"the encoder file could not be run ({error}); synthetic encoder outputs are used"))
            return synthetic
        port = self.contract.graph("encode").port("encoder_states")
        states = answer.outputs[port.name].array() if port else None
        if synthetic.states is not None and (states is None or states.ndim != 3):
            self.announce(Note("the encoder file returns no states of rank 3; synthetic states are used"))
            states = synthetic.states
        caches = {name: answer.outputs[name].array() for name in synthetic.outputs if name in answer.outputs}
        if synthetic.states is None:
            return Encoded(None, caches, fed)
        return Encoded(states, caches, fed if states is not synthetic.states else {})

    def _synthetic_states(self, scenario: Scenario) -> Array | None:
        """Encoder states where no encoder file makes any."""
        made = synthetic_encoder_states(self.contract, scenario)
        ports = (port for graph in self.contract.graphs.values() for port in graph.inputs)
        port = next((port for port in ports if port.role == "encoder_states"), None)
        return made if made is None or port is None else self.samples.overlay(port.name, made)

    @cached_property
    def can_embed(self) -> bool:
        """Whether the embedding file makes embeddings of token ids; where it is there and does not, a note says so."""
        if "embed" not in self.contract.phases:
            return False
        rows, new = self.contract.fixed_batch or 1, self.contract.new_tokens or 2
        try:
            self.embed("prefill", np.full((rows, new), plain_token_ids(self.contract)[0]))
        except CannotCheck as error:
            self.announce(Note(f"{error}; synthetic embeddings are used"))
            return False
        return True

    def embed(self, phase: PhaseName, tokens: Array) -> dict[str, Array]:
        """The embeddings of token ids int64[batch, new] for the inputs of a phase, by the embedding file.

        Negative ids stand for rows of images and audio (decode/feeds.py). Where these cannot be embedded, a note says
        so: text alone is run then.

        Raises:
            CannotCheck: it fails, or returns something else.
        """
        try:
            return self._embed(phase, tokens)
        except CannotCheck as error:
            if (tokens < 0).any():
                self.announce(Note(f"{error}; images and audio in the prompt were not run"))
            raise

    def _embed(self, phase: PhaseName, tokens: Array) -> dict[str, Array]:
        """See `embed`."""
        try:
            answer = self.run_session(self.feature_rows.embedding_call(tokens))
        except StepFailed as error:
            raise CannotCheck(f"the embedding file could not be run ({error})") from error
        made = {name: answer.outputs[output] for name, output in embedded_inputs(self.contract, phase).items()}
        for name, value in made.items():
            if value.shape[:2] != tokens.shape:
                shapes = f"{list(value.shape)} for tokens {list(tokens.shape)}"
                raise CannotCheck(f"the embedding file returns {shapes} as {name}")
        return {name: self.feature_rows.replace_rows(value.array(), tokens) for name, value in made.items()}

    @cached_property
    def feature_rows(self) -> FeatureRows:
        """The rows of images and audio."""
        return FeatureRows(self.contract, self.seed, self.run_session)

    def count_rows(self) -> dict[PhaseName, int]:
        """The number of rows that each encoder of images or audio makes; where one cannot be run, a note says so.

        Raises:
            CannotCheck: an encoder cannot be run on synthetic input.
        """
        try:
            return self.feature_rows.count()
        except CannotCheck as error:
            self.announce(Note(f"{error}; images and audio in the prompt were not run"))
            raise

    def fit_scenario(self, scenario: Scenario) -> Scenario:
        """The scenario in the sizes that the contract and the user's samples allow."""
        contract, scenario = self.contract, self._fit_to_samples(scenario)
        scenario = replace(
            scenario,
            seed=self.seed,
            batch=contract.fixed_batch or scenario.batch,
            encoder=contract.encoder_length or scenario.encoder,
            prompt=contract.frozen_past or scenario.prompt,
        )
        limit = contract.usable_length
        if contract.new_tokens == 1:
            scenario = replace(scenario, prompt=1)
        elif contract.new_tokens is not None and drives(contract) is None:
            tokens = min([count_tokens(contract), *([limit] if limit is not None else [])])
            return replace(scenario, prompt=contract.new_tokens, steps=tokens - contract.new_tokens + 1)
        steps = scenario.steps if limit is None else min(scenario.steps, limit - scenario.prompt)
        return replace(scenario, steps=steps)

    def _fit_to_samples(self, scenario: Scenario) -> Scenario:
        """The default sizes become those of the user's samples; an experiment's own sizes stay."""
        usual, prompt, encoder = Scenario(), len(self.samples.prompt), None
        for graph in self.contract.graphs.values():
            for port in graph.inputs:
                axis = next((axis for axis in ("encoder_input", "encoder") if axis in port.axes), None)
                if axis is not None and port.role in ("encoder_input", "encoder_states"):
                    encoder = encoder or self.samples.length(port.name, port.axes.index(axis))
        return replace(
            scenario,
            prompt=prompt if prompt and scenario.prompt == usual.prompt else scenario.prompt,
            encoder=encoder if encoder and scenario.encoder == usual.encoder else scenario.encoder,
        )


def digest_call(call: Call, overwritten: int = 0) -> bytes | None:
    """A digest of the phase, the sizes, and the values of all feeds.

    Of an output of an earlier call it is the digest of that call; None where the output has none, or where calls in
    place have `overwritten` outputs since.
    """
    digest = blake2b(f"{call.phase} {call.past} {call.new}".encode())
    for name, value in sorted(call.feeds.items()):
        if hasattr(value, "made"):
            if value.made is None or value.made[0] != overwritten:
                return None
            digest.update(f"{name} of ".encode() + value.made[1])
        else:
            array = as_array(value)
            digest.update(f"{name}{array.dtype}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()

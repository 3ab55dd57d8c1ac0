"""Settles the readings of a contract by short calls: numpy and the standard library only.

A reading holds under which the model runs, gives each row of a batch the logits that it has alone, and gives the same
logits in one call and in pieces. Where it is not the first one, the calls must also show that they could have failed:
the first token changes the last logits, unless a mask hides it. Readings are tried best first, one port at a time; a
port that makes the model come closer to that retains its reading while the others are tried.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvdoctor.contract import CacheContract, Port, with_reading
from kvdoctor.decode.calls import Answer, Array, Call, Past, Scenario, StepFailed
from kvdoctor.decode.experiments.cache_entries import same_logits
from kvdoctor.decode.experiments.determinism import gives_all_logits
from kvdoctor.decode.messages import Settled
from kvdoctor.decode.parity import measurable
from kvdoctor.decode.stack_driver import StackDriver
from kvdoctor.errors import CannotCheck

if TYPE_CHECKING:
    from kvdoctor.decode.feeds import FeedBuilder

MOST_CALLS, FOR_ONE_ROW = 24, 4
"""Calls of the model that settle all readings of a contract; how many of them are left for one row alone."""
SCENARIO = Scenario(batch=2, prompt=3, steps=4)
ONE_ROW = Scenario(batch=1, prompt=4, steps=4)
MASKS = ("attention_mask", "padding_mask", "additive_mask")
REFUSED, SHAPED, CAUSAL, PIECES, AGREES, STEPS, ROWS, CONSISTENT, HIDDEN = range(9)
"""How far a model comes under a reading: it is refused, or returns logits of each token, which know no later one; runs
in pieces; a step agrees with one call, and a mask hides its first token; so does each row alone, and several tokens on
top of a cache; and what a mask hides counts for nothing."""


class _OutOfCalls(Exception):
    """The calls are used up."""


def settle(driver: StackDriver) -> Settled:
    """Try the readings of the driver's contract; it has the settled one afterwards.

    Where none holds with two rows, one row decides after a prompt of another length: the fault may be one of batches
    alone, or of some lengths.
    """
    trial = _Trial(driver)
    best, level, tried = trial.search(driver.contract)
    if level < ROWS:
        trial.scenario, trial.most = ONE_ROW, MOST_CALLS
        with contextlib.suppress(_OutOfCalls):
            trial.rate(best)
        level = max(trial.reached, level)
    how = "with it, runs with and without the cache agree" if level >= ROWS or level == AGREES else ""
    settled = tuple(replace(one, settled=one.settled or how) for one in best.ambiguities)
    driver.contract = replace(best, ambiguities=settled)
    driver.forget()
    return Settled(driver.contract, level >= ROWS, level > REFUSED, tried, trial.calls)


def _ports(contract: CacheContract) -> tuple[Port, ...]:
    """The ports with more than one reading, as a contract reads them."""
    return tuple(one.readings[0].port for one in contract.ambiguities)


def _neighbors(contract: CacheContract) -> Iterator[CacheContract]:
    """The contracts in which one port has another reading, the second best of all ports first."""
    most = max((len(one.readings) for one in contract.ambiguities), default=0)
    for rank in range(1, most):
        for at, ambiguity in enumerate(contract.ambiguities):
            if rank < len(ambiguity.readings) and not ambiguity.settled:
                reading = ambiguity.readings[rank]
                others = tuple(one for one in ambiguity.readings if one is not reading)
                ambiguities = list(contract.ambiguities)
                ambiguities[at] = replace(ambiguity, readings=(reading, *others))
                yield replace(with_reading(contract, ambiguity, reading), ambiguities=tuple(ambiguities))


class _Trial:
    """Rates contracts by calls of a driver."""

    def __init__(self, driver: StackDriver) -> None:
        self.driver, self.calls, self.reached = driver, 0, REFUSED
        self.scenario, self.most = SCENARIO, MOST_CALLS - FOR_ONE_ROW
        self.first = _ports(driver.contract)
        self.causal: dict[tuple[Port, ...], bool] = {}
        self.shown: set[tuple[Port, ...]] = set()

    def search(self, best: CacheContract) -> tuple[CacheContract, int, bool]:
        """The contract under which the model comes farthest, how far, and whether all readings were tried."""
        level = REFUSED
        try:
            level = self.rate(best)
            done = {_ports(best)}
            aim = HIDDEN if any(port.role in MASKS for port in _ports(best)) else CONSISTENT
            while level < aim:
                for candidate in _neighbors(best):
                    if (ports := _ports(candidate)) in done:
                        continue
                    done.add(ports)
                    if (found := self.rate(candidate)) > level:
                        best, level = candidate, found
                        break
                else:
                    break
        except _OutOfCalls:
            return best, level, False
        return best, level, True

    def rate(self, contract: CacheContract) -> int:
        """How far the model comes under a contract."""
        self.driver.contract = contract
        self.driver.forget()
        self.reached = REFUSED
        with contextlib.suppress(StepFailed, CannotCheck, ValueError, IndexError, KeyError):
            for level in self._levels():
                self.reached = level  # those before an error count
        return self.reached

    def _levels(self) -> Iterator[int]:
        driver = self.driver
        builder = driver.build(driver.fit_scenario(self.scenario))
        start, total = builder.scenario.prompt, builder.scenario.total
        last_only, ports = driver.contract.last_logits_only, _ports(driver.contract)
        whole = self._logits(builder.reference(), builder, 1 if last_only else total)
        yield SHAPED
        if not self._is_causal(builder, whole, tuple(port for port in ports if port.role in (*MASKS, "logits"))):
            return
        yield CAUSAL
        size = builder.contract.step_tokens or 1
        prompt = self._run(builder.prefill(start))
        if not last_only and not self._agrees(prompt, whole, 0, start, builder):
            return
        past = builder.carry(None, prompt, "held")
        answer = self._run(builder.decode(start, start + size, past))
        past = builder.carry(past, answer, "held")
        yield PIECES
        # Token ids may agree by chance: a cache with more entries than tokens shows a wrong count.
        if builder.past_length(past) > start + size or not self._agrees(answer, whole, start, start + size, builder):
            return
        masks, first = any(port.role in MASKS for port in ports), ports == self.first
        hidden = False
        if ports not in self.shown:
            padded = replace(builder, padding=(1,) * builder.scenario.batch)
            hidden = masks and not self._counts(padded)
            # A mask that hides what may be seen: sums with large negative numbers make all entries equal.
            if not first and not (self._counts(builder) and (hidden or not masks or self._counts(padded, 1))):
                return
            yield AGREES  # operators that count their tokens hide none at the start
            if not first and masks and not hidden:
                return
            self.shown.add(ports)
        yield STEPS
        yield from self._compare_more(builder, whole, past, hidden)

    def _is_causal(self, builder: "FeedBuilder", whole: Array, ports: tuple[Port, ...]) -> bool:
        """Whether another last token leaves the logits before it; a call for each reading of masks and logits."""
        total = builder.scenario.total
        if gives_all_logits(builder.contract) is None and ports and ports not in self.causal:
            later = self._logits(builder.with_other_tokens(total - 1).reference(), builder, total)
            self.causal[ports] = same_logits(later[:, :-1], whole[:, :-1], builder.tolerance)
        return self.causal.get(ports, True)

    def _compare_more(self, builder: "FeedBuilder", whole: Array, past: Past, hidden: bool) -> Iterator[int]:
        """A row alone, and the tokens after the first step in one call."""
        row, start = builder.scenario.batch - 1, builder.scenario.prompt
        if row:
            alone = self._logits(builder.row(row).reference(), builder.row(row), whole.shape[1])
            if not same_logits(whole[builder.logits_rows((row,))], alone, builder.tolerance):
                return
        yield ROWS
        begin = start + (builder.contract.step_tokens or 1)
        stop = builder.scenario.total if builder.contract.step_tokens is None else begin
        if stop > begin:
            answer = self._run(builder.decode(begin, stop, past))
            if not self._agrees(answer, whole, begin, stop, builder):
                return
        yield HIDDEN if hidden else CONSISTENT

    def _counts(self, builder: "FeedBuilder", at: int = 0) -> bool:
        """Whether another token changes the last logits: a mask hides the first one where it is padding."""
        other = builder.tokens.copy()
        other[:, at] += 1
        last, changed = (
            self._run(each.reference()).logits[:, -1:] for each in (builder, replace(builder, tokens=other))
        )
        return not same_logits(last, changed, builder.tolerance)

    def _agrees(self, answer: Answer, whole: Array, begin: int, stop: int, builder: "FeedBuilder") -> bool:
        """Whether the logits of a call are those of one call over all tokens, or over those so far."""
        if not builder.contract.last_logits_only:
            return same_logits(answer.logits, whole[:, begin:stop], builder.tolerance)
        right = whole if stop == builder.scenario.total else self._run(builder.reference(stop)).logits[:, -1:]
        return same_logits(answer.logits[:, -1:], right, builder.tolerance)

    def _logits(self, call: Call, builder: "FeedBuilder", count: int) -> Array:
        """The logits of a call, where there is a row for each token, and they are numbers."""
        answer = self._run(call)
        rows = len(builder.logits_rows(range(builder.scenario.batch)))
        if answer.logits_shape[:2] != (rows, count) or not measurable(answer.logits):
            raise CannotCheck("the logits have no row for each token")
        return answer.logits

    def _run(self, call: Call) -> Answer:
        if self.calls >= self.most:
            raise _OutOfCalls
        self.calls += 1
        return self.driver.run_session(call)

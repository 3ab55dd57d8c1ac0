"""Settles the readings of a contract in the worker, before its experiments or after runs that show trouble."""

import re
from dataclasses import replace

from kvdoctor.contract import Ambiguity, CacheContract, MissingPart
from kvdoctor.decode.messages import Settled, SettleJob
from kvdoctor.decode.runs import Run
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import NotChecked
from kvdoctor.options import Options
from kvdoctor.report.wording import format_count
from kvdoctor.runtime.client import Runtime

CODE = "KV2-KV3"
MOST_NAMES = 4
FACTOR = re.compile(r"(?<![a-z])(bias|scal|temp|gain|alpha|factor|penal|strength|weight|ratio)", re.IGNORECASE)
MASK_NAMES = ("attention_mask", "attn_mask")
"""Ends of names of masks in which 1 marks an entry that may be seen, by the convention of transformers."""


Reading = tuple[CacheContract, tuple[NotChecked, ...]]
"""A contract whose readings were settled as well as runs allow, and why nothing can be run by it."""


def settle_unknown(context: ContractContext, options: Options, runtime: Runtime) -> Reading:
    """Settle what nothing in the file decides; the contract as it is where there is nothing of the kind."""
    contract = context.contract
    unknown = [one for one in contract.ambiguities if one.unknown and not one.settled]
    if not unknown or (contract.new_tokens is not None and all(map(_is_condition, unknown))):
        return contract, ()
    if contract.new_tokens is not None:
        count = format_count(contract.new_tokens, "new token")
        why = f"no run without a cache decides, since a call takes {count} only"
        return _leave_open(context, contract, unknown, why)
    settled, failed = _ask(context, options, runtime)
    if settled is None:
        return contract, (NotChecked(context.stack.name, CODE, f"not run: {failed}", essential=True),)
    unknown = [one for one in settled.contract.ambiguities if one.unknown and not one.settled]
    tried = settled.tried or all(FACTOR.search(one.subject) for one in unknown)
    known = all(_is_number(one) or _is_condition(one) for one in unknown)
    if settled.holds or (settled.runs and tried and known):
        return settled.contract, ()  # what differs differs under every number that a loop would feed
    why = "the logits with and without the cache differ" if settled.runs else "the runtime refuses the first call"
    ends = "" if settled.tried else f" (not all were tried in {settled.calls} calls)"
    return _leave_open(context, settled.contract, unknown, f"under each reading that was tried {why}{ends}")


def _is_condition(ambiguity: Ambiguity) -> bool:
    """Whether an input can only be what the caller has for a whole sequence: an encoder frame, a speaker."""
    return [reading.port.role for reading in ambiguity.readings] == ["condition"]


def _leave_open(context: ContractContext, contract: CacheContract, unknown: list[Ambiguity], why: str) -> Reading:
    """The contract with what is open, and the options that give it."""
    names = " and ".join(repr(one.subject) for one in unknown[:MOST_NAMES])
    ways = " ".join(f"--feed {one.subject}=VALUE" for one in unknown[:MOST_NAMES])
    reason = f"not run: nothing in the file says what to feed {names}, and {why}"
    reason += f"; {ways} gives a constant, --contract a role"
    return contract, (NotChecked(context.stack.name, CODE, reason, essential=True),)


def settle_after(
    context: ContractContext, runs: tuple[Run, ...], crashed: bool, options: Options, runtime: Runtime
) -> CacheContract | None:
    """The contract under other readings, where runs fail or differ, or `crashed`, and it comes further by them."""
    doubtful = [one for one in context.contract.ambiguities if not one.settled]
    rounds = context.contract.exactness.endswith("quantization")  # its noise decides between no readings
    outcomes = ("failed", "died") if rounds else ("failed", "differs", "inconclusive", "died")
    trouble = crashed or any(run.outcome in outcomes for run in runs)
    if not doubtful or not trouble:
        return None
    settled, _ = _ask(context, options, runtime)
    if settled is None:
        return None
    before = [one.readings[0] for one in context.contract.ambiguities]
    changed = [one.readings[0] for one in settled.contract.ambiguities] != before
    return with_contradictions(settled.contract) if changed else None


def _ask(context: ContractContext, options: Options, runtime: Runtime) -> tuple[Settled | None, str]:
    job = SettleJob(context.side, seed=options.seed, provider=options.provider)
    found, failed = runtime.answer(job, Settled)
    return (found[0] if found else None), failed


def _is_number(ambiguity: Ambiguity) -> bool:
    """Whether an input takes one number, for all sequences or for each; of a float its name tells what it means."""
    port, named = ambiguity.readings[0].port, any(reading.basis == "name" for reading in ambiguity.readings)
    floats = port.dtype.startswith(("float", "bfloat", "double"))
    if floats and not named and FACTOR.search(port.name) is None:
        return False
    return {*port.axes} <= {"batch", "fixed"} and port.role != "condition"


def with_contradictions(contract: CacheContract) -> CacheContract:
    """The contract with the masks whose name says that 1 marks what may be seen, where runs show that 1 hides."""
    reason = "its name says that 1 marks an entry that may be seen, and runs show that 1 hides it"
    masks = [one for one in contract.ambiguities if one.settled and one.readings[0].port.role == "padding_mask"]
    misnamed = (MissingPart(one.subject, reason) for one in masks if one.subject.endswith(MASK_NAMES))
    return replace(contract, contradictions=(*contract.contradictions, *misnamed))

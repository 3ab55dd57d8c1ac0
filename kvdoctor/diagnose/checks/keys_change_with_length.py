"""From a number of tokens on, the keys in the cache are not those that the model computes.

What it means: the graph rotates keys by one set of rotary factors in short sequences and by another one in long ones
(LongRoPE: `original_max_position_embeddings` of Phi-3 and its kin), or by a base that depends on the number of tokens
(dynamic NTK scaling). Keys that a step before that length wrote stay rotated as they were. A loop that goes over the
length decodes other tokens than a call without a cache does. Where each further token changes the keys again, no loop
with this cache gives the logits of such a call; a checkpoint that generates with a cache has the same difference.

How it is decided: around each length that the graph compares with a number, a call without a cache of a few more tokens
gives the first tokens other logits, and other keys in the first layer. Single steps over it are compared with calls
without a cache of their own length, and the calls of each length with each other. Without a run: the graph selects one
of two sets of constants by a length.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `near-thresholds`, or `far-thresholds` with `--thorough`.

Repair: empty the cache at that length and prefill all tokens again, or export with one set of factors. Where the keys
change with each token, use no cache from that length on, or export with a fixed rotary base. `--require full-context`
makes the finding an error.
"""

from kvdoctor.analysis.thresholds import find_selected_constants
from kvdoctor.decode.runs import KEYS_CHANGE
from kvdoctor.diagnose.checks._attribution import AT_LENGTHS, cause_at_length, find_faulty_uses, leave_to_other
from kvdoctor.diagnose.checks._faults import CauseText, build_fault, describe_effect
from kvdoctor.diagnose.context import ContractContext, RunContext
from kvdoctor.findings import Advice, Fault, Faults, check

DECLARED = "a key that does not change with the number of tokens after it"
AND_AGAIN = ", and more tokens change them again: no loop with this cache gives the logits of such a call"


@check("KV319", KEYS_CHANGE, "runs")
def keys_change_with_length(context: RunContext) -> Faults:
    """Steps over a length that differ from calls without a cache of the same length."""
    leave_to_other(context)
    for run, _ in find_faulty_uses(context, "differs"):
        if run.cause is not None and run.cause.name == KEYS_CHANGE:
            others = [one for one, _ in find_faulty_uses(context, "differs") if one.experiment in AT_LENGTHS]
            wrong = [one for one in others if one.cause is None and cause_at_length(context, one) == KEYS_CHANGE]
            effects = tuple(map(describe_effect, wrong))
            first, again = run.cause.from_length, run.cause.again
            text = CauseText(_cause(first) + AND_AGAIN * again, DECLARED, advice="")
            fault = build_fault(context, run, text, "warning", effects)
            yield fault.also(use="full-context", repair=_advise(first, again=again))
            return


@check("KV319", KEYS_CHANGE, "contract")
def keys_select_constants(context: ContractContext) -> Faults:
    """Keys of the first layer that are made of constants selected by a length that no run went over."""
    dataflow, graph = context.stack.main.dataflow, context.contract.graph("decode")
    first = next((slot for slot in context.contract.of_kind("self-attention") if slot.used_as != "value"), None)
    if first is None or first.present is None or dataflow is None:
        return
    found = find_selected_constants(dataflow.flow, graph, first.present)
    if found is None or any(step.past_length > found.length for run in context.runs for step in run.steps):
        return
    if not any(run.cause is not None and run.cause.name == KEYS_CHANGE for run in context.runs):
        fault = Fault("warning", (first.present,), _cause(found.length + 1), _advise(found.length + 1))
        observed = f"{first.present} is computed of constants that {found.node} selects by the number of tokens"
        yield fault.compare(DECLARED, observed).also(confidence="suspected", use="full-context")


def _cause(first: int) -> str:
    made = f"from {first} tokens on, a call without a cache computes other keys for all tokens"
    return f"{made}, as LongRoPE does, and the cache still holds the earlier ones"


def _advise(first: int, *, again: bool = False) -> Advice:
    once = f"empty the cache at {first} tokens and prefill all of them again, or export with one set of rotary factors"
    never = f"use no cache from {first} tokens on, or export with a fixed rotary base"
    return Advice("caller", never if again else once)

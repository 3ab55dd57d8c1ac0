"""The graph has a cache, but its contract cannot be read.

What it means: some inputs or outputs look like a cache, but kvdoctor could not read from the graph what a loop must
feed, feed back and keep. No decode step was run: the exit code is 3, and the line says what is missing and which option
gives it. It is an error only where the graph contradicts itself.

The same code stands for a cache that the module holds in an attribute or buffer, which the export stored as constants:
the graph has neither past inputs nor present outputs, and every call starts from the same cache.

Reproduce: `kvdoctor inspect MODEL` lists what was found and what is missing.

Repair: write the contract to a file (`kvdoctor contract MODEL --format json`), add the missing parts, and pass it to
`step-test --contract`. Or export with the names of Hugging Face Optimum (`past_key_values.N.key`, `present.N.key`). A
cache inside the module must become inputs and outputs of `forward`.
"""

from kvdoctor.analysis.completeness import NO_PAST, find_constant_caches, find_unfilled, returns_logits
from kvdoctor.contract import MissingPart
from kvdoctor.diagnose.checks._dataflow import refuse_unread, unread_in_loops
from kvdoctor.diagnose.context import ContractContext, FileContext
from kvdoctor.errors import CannotCheck
from kvdoctor.findings import Advice, Fault, Faults, check
from kvdoctor.report.wording import format_count, shorten_names

HAND_OVER = Advice(
    "re-export", "make the cache inputs of forward() and return it with the new entries as outputs, then export again"
)
DESCRIBE = (
    "add the missing parts: `kvdoctor contract MODEL --format json` prints the contract, `step-test --contract FILE` "
    "takes the file that you edited; or export again with the names of Optimum for past and present"
)
GIVE_HEADS = (
    "add num_attention_heads to config.json of the model, the number of heads that one sequence has in the cache; "
    "or write it as `heads` into the contract: `kvdoctor contract MODEL --format json` prints one, `step-test "
    "--contract FILE` takes the file that you edited"
)


@check("KV101", "contract-unknown", "contract")
def contract_unknown(context: ContractContext) -> Faults:
    """Contracts with something missing."""
    contract = context.contract
    empty = {*find_unfilled(contract)}  # past-without-present names these
    unread = unread_in_loops(context)
    left_out = [lack for lack in contract.missing if lack.subject in unread]
    known = {*empty, *left_out} | ({MissingPart(context.decode_file, NO_PAST)} if left_out else set())
    missing = [lack for lack in contract.missing if lack not in known]
    if not missing:
        refuse_unread(unread, [lack.subject for lack in left_out if lack not in empty])
        return
    presents = any(port.role == "present" for graph in contract.graphs.values() for port in graph.outputs)
    if context.stack.kind == "unpaired" and (contract.slots or presents):
        return  # past-without-present and present-without-past name this fault
    counted = [slot.past for slot in contract.slots if "batch_heads" in slot.axes]
    lacks_heads = contract.heads is None and {lack.subject for lack in missing} <= {*counted}
    found = format_count(len(contract.slots), "slot") if contract.slots else "no slot"
    advice = GIVE_HEADS if lacks_heads else DESCRIBE
    refuted = [lack for lack in missing if lack.contradicts]
    reasons = [f"{lack.subject!r}: {lack.reason}" for lack in (refuted or missing)[:4]]
    observed = f"{found}; {'; '.join(reasons)}" + ("; ..." if len(refuted or missing) > len(reasons) else "")
    if not refuted:
        raise CannotCheck(f"the cache contract cannot be read from the graph: {observed}; {advice}", essential=True)
    subject = tuple(dict.fromkeys(lack.subject for lack in refuted))
    fault = Fault("error", subject, "the graph contradicts itself", Advice("caller", DESCRIBE))
    yield fault.compare("a cache contract that a loop can follow", observed, where=f"file {context.decode_file}")


@check("KV101", "contract-unknown", "file")
def cache_inside_module(context: FileContext) -> Faults:
    """A constant prefix of keys and values, where no file of the folder has cache inputs or outputs."""
    file = context.file
    if context.folder.stacks or not returns_logits(file) or not (constants := find_constant_caches(file)):
        return
    cause = "the module holds the cache in an attribute, and the export stored it as constants"
    fault = Fault("error", constants, cause, HAND_OVER, file=file.name, confidence="suspected").compare(
        "a cache with past inputs and present outputs",
        "new keys and values are appended to constants; the graph has neither past inputs nor present outputs",
    )
    effects = ("every call starts from the same cache, and ignores all earlier tokens",)
    yield fault.also(where=f"file {file.name}, constant {shorten_names(constants)}", effects=effects)

"""A required use cannot work with this cache.

What it means: the model decodes token by token, but `--require` names a use that its inputs and outputs do not allow,
whatever the loop does. Speculative decoding needs the logits of each draft, and takes refused drafts back: the logits
of the last token alone, states of recurrent layers and convolutions, and windows that drop old tokens stand in the way.
A prefix that several sequences share is repeated along the batch, which the cache must have.

How it is decided: by the cache contract, without a run. Where nothing stands in the way, the experiments of that use
decide.

Reproduce: `kvdoctor inspect MODEL --require speculation`, or `prefix-sharing`.

Repair: as the finding says. Without `--require` nothing is reported.

Source: speculative decoding, Leviathan et al. 2023 (arXiv 2211.17192), verifies all drafts in one call; transformers
refuses to crop a sliding-window layer that has seen more tokens than its window (`DynamicSlidingWindowLayer.crop`).
"""

from kvdoctor.contract import describe
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Advice, Fault, Faults, check
from kvdoctor.report.wording import shorten_names


@check("KV115", "use-impossible", "contract")
def use_impossible(context: ContractContext) -> Faults:
    """What in the contract stands in the way of the uses that are required."""
    if not context.required or context.contract.missing or not context.contract.slots:
        return
    ports = {port.name: port for graph in context.contract.graphs.values() for port in (*graph.inputs, *graph.outputs)}
    for use in context.uses.values():
        if use.required not in context.required or use.obstacles is None:
            continue
        for obstacle in use.obstacles(context.contract):
            port, cause = ports.get(obstacle.names[0]), f"{use.required} cannot work: {obstacle.reason}"
            fault = Fault("error", obstacle.names, cause, Advice("re-export", obstacle.advice), use=use.required)
            observed = describe(port.dtype, port.shape) if port is not None else "no such input or output"
            fault = fault.compare(f"--require {use.required}", observed)
            yield fault.also(where=shorten_names(obstacle.names), apart=(use.required or "",))

"""A required use cannot work with this cache.

What it means: the model decodes token by token, but `--require` names a use that its inputs and outputs do not allow,
whatever the loop does. Speculative decoding needs the logits of each draft, and takes refused drafts back: the logits
of the last token alone, states of recurrent layers and convolutions, and windows that drop old tokens stand in the way.
A prefix that several sequences share is repeated along the batch: a cache without such an axis cannot be.

How it is decided: by the cache contract, without a run. Where nothing stands in the way, the experiments of that use
decide.

Reproduce: `kvdoctor inspect MODEL --require speculation`, or `prefix-sharing`.

Repair: as the finding says. Without `--require` nothing is reported.

Source: speculative decoding, Leviathan et al. 2023 (arXiv 2211.17192), verifies all drafts in one call; transformers
refuses to crop a sliding-window layer that has seen more tokens than its window (`DynamicSlidingWindowLayer.crop`).
"""

from collections.abc import Iterator

from kvdoctor.contract import describe
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Advice, Fault, check
from kvdoctor.report.wording.units import shorten_names


@check("KV114", "use-impossible", "contract")
def use_impossible(context: ContractContext) -> Iterator[Fault]:
    """What in the contract stands in the way of the uses that are required."""
    if not context.required or context.contract.missing or not context.contract.slots:
        return
    from kvdoctor.decode.experiments import uses  # with numpy, which no inspection needs

    ports = {port.name: port for graph in context.contract.graphs.values() for port in (*graph.inputs, *graph.outputs)}
    for use in uses().values():
        if use.required not in context.required or use.obstacles is None:
            continue
        for obstacle in use.obstacles(context.contract):
            port = ports.get(obstacle.names[0])
            yield Fault(
                severity="error",
                file=context.decode_file,
                subject=obstacle.names,
                where=shorten_names(obstacle.names),
                declared=f"--require {use.required}",
                observed=describe(port.dtype, port.shape) if port is not None else "no such input or output",
                cause=f"{use.required} cannot work: {obstacle.reason}",
                repair=Advice("re-export", obstacle.advice),
                use=use.required,
                apart=(use.required or "",),
            )

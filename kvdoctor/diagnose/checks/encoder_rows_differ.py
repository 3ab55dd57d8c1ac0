"""The number of rows that an encoder returns differs from the number of placeholders.

What it means: a processor puts as many placeholder tokens into the prompt as its config says, and a loop replaces their
embeddings by the rows of the encoder. With fewer rows some placeholders stay, or the loop stops with an error about
tokens and features that do not match.

How it is decided: the encoder is run once, on noise in the size of one image (or one audio clip) that the graph or
the config gives. Its rows are counted, and compared with the number in processor_config.json or config.json.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `encoder-rows`.

Repair: take the encoder and the config from one export; or correct the number in the config.
"""

from collections.abc import Iterator

from kvdoctor.contract import Graph
from kvdoctor.decode.experiments.encoder_rows import DIFFERENT
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Advice, Fault, check


@check("KV210", "encoder-rows-differ", "runs")
def encoder_rows_differ(context: RunContext) -> Iterator[Fault]:
    """Encoders whose rows were counted, and differ from what the config declares."""
    run = context.find_run("encoder-rows")
    if run is None or run.cause is None or run.cause.name != DIFFERENT:
        return
    if any(problem.subject == one.file for problem in context.stack.problems for one in _encoders(context)):
        return  # the declared number of rows differs already
    returned, _, wanted = run.cause.evidence.partition(", and ")
    file = next((one.file for one in _encoders(context) if returned.startswith(one.file)), context.decode_file)
    yield Fault(
        severity="error",
        file=file,
        subject=(file,),
        where=f"file {file}, experiment encoder-rows",
        declared=wanted,
        observed=returned,
        cause=run.cause.evidence,
        repair=Advice("caller", "take the encoder and the config from one export, or correct the number in the config"),
        effects=("placeholders without a row keep their own embedding, or the loop refuses the prompt",),
    )


def _encoders(context: RunContext) -> Iterator[Graph]:
    """The graphs of the encoders of images and audio."""
    yield from (context.contract.graph(one.phase) for one in context.contract.features)

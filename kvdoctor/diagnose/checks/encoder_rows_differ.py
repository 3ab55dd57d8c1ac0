"""The number of rows that an encoder returns differs from the number of placeholders.

What it means: a processor puts as many placeholder tokens into the prompt as its config says, and a loop replaces their
embeddings by the rows of the encoder. With fewer rows some placeholders stay, or the loop stops with an error about
tokens and features that do not match.

How it is decided: the encoder is run once, on noise in the size of one image (or one audio clip) that the graph or
the config gives. Its rows are counted, and compared with the number in processor_config.json or config.json.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `encoder-rows`.

Repair: take the encoder and the config from one export; or correct the number in the config.
"""

from kvdoctor.decode.runs import ROWS_DIFFER
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Advice, Fault, Faults, check

CAUSE = "the encoder returns another number of rows than the prompt has placeholders for them"
ONE_EXPORT = Advice("caller", "take the encoder and the config from one export, or correct the number in the config")


@check("KV210", "encoder-rows-differ", "runs")
def encoder_rows_differ(context: RunContext) -> Faults:
    """Encoders whose rows were counted, and differ from what the config declares."""
    run = context.find_run("encoder-rows")
    if run is None or run.cause is None or run.cause.name != ROWS_DIFFER:
        return
    encoders = [context.contract.graph(one.phase).file for one in context.contract.features]
    if any(problem.subject in encoders for problem in context.stack.problems):
        return  # the declared number of rows differs already
    returned, _, wanted = run.cause.evidence.partition(", and ")
    file = next((one for one in encoders if returned.startswith(one)), context.decode_file)
    fault = Fault("error", (file,), CAUSE, ONE_EXPORT, file=file).compare(wanted, returned)
    effect = "placeholders without a row keep their own embedding, or the loop refuses the prompt"
    yield fault.also(where=f"file {file}, experiment encoder-rows", effects=(effect,))

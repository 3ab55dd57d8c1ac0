"""A file that the decoder needs is missing, or does not fit it.

What it means: the model is made of several files (stages of a pipeline, an embedding graph, an encoder of images or
audio), and one of them is missing, or makes values of another type or width than the next one takes. A loop cannot
call them one after the other.

How it is decided: by the inputs and outputs that the files declare, by the layer numbers of their caches, by the files
that genai_config.json names, and by the placeholders of config.json and processor_config.json: their number, and their
token. Where a stage of a pipeline is missing or does not fit, nothing was run. An encoder that config.json describes
and that is not there is a note, since text can be decoded without it.

Reproduce: `kvdoctor inspect MODEL -v` lists the inputs and outputs of all files.

Repair: put a missing file in the folder of the others; take all files and configs from one export.
"""

import itertools

from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Advice, Fault, Faults, check

ONE_EXPORT = "take all files and configs from one export"
MISSING = f"put the missing file in the folder of the others, or {ONE_EXPORT}"


@check("KV021", "parts-do-not-fit", "contract")
def parts_do_not_fit(context: ContractContext) -> Faults:
    """Parts that are missing or do not fit, as the search for them found it."""
    names = {file.name for file in context.folder.files}
    before = itertools.takewhile(lambda stack: stack.name != context.stack.name, context.folder.stacks)
    reported = {(problem.subject, problem.observed) for stack in before for problem in stack.problems}
    for problem in context.stack.problems:
        if problem.declared and (problem.subject, problem.observed) not in reported:
            advice = Advice("caller", ONE_EXPORT if problem.subject in names else MISSING)
            fault = Fault(problem.severity, (problem.subject,), problem.cause, advice)
            file = problem.subject if problem.subject in names else context.stack.members[0].name
            fault = fault.compare(problem.declared, problem.observed)
            yield fault.also(file=file, where=f"the files of stack {context.stack.name}")

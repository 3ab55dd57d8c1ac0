"""A config file and the graph disagree.

What it means: a number or a name in config.json, generation_config.json, genai_config.json, export.json,
inference_metadata.yaml or the tokenizer differs from the graph. A program that allocates the cache, sizes the logits,
counts the layers or binds inputs by the config is refused by the runtime, or reads past the end of a table; a program
that reads the graph is right.

How it is decided: compared are layers, kv heads and head width, vocabulary, and the context with the rows of the
position table; of onnxruntime-genai also names, templates, the attention window and whether past and present can share
a buffer; of generation_config.json the token ids with the logits and the embedding table, and the longest sequence with
the position table; of export.json the files and the traced inputs; of inference_metadata.yaml (onnx-genai; the form
proposed in onnx/onnx#8184) also files, ports, which present is the next past, and the axis that counts tokens; of the
tokenizer its end, start and padding tokens and its ordinary vocabulary with the logits and the embedding table. Only
what both sides state counts. Differences that a correct config may have are not reported: a vocabulary padded to a
round number, added tokens (for images) that generation does not use, a table longer than the context, layers without a
cache of their own, several kinds of attention, a config of another model in the same folder.

Reproduce: `kvdoctor contract MODEL` shows names and sizes as the graph has them.

Repair: take sizes and names from the graph, and correct the config; export again if the graph is wrong. The right token
ids are those of the tokenizer of the checkpoint.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.diagnose.checks.side_cars.config_json import config_json, has_usual_name, meant_for
from kvdoctor.diagnose.checks.side_cars.disagreement import MOST_SHOWN, Disagreement
from kvdoctor.diagnose.checks.side_cars.export_json import export_json
from kvdoctor.diagnose.checks.side_cars.genai_config import genai_config
from kvdoctor.diagnose.checks.side_cars.generation_config import generation_config
from kvdoctor.diagnose.checks.side_cars.inference_metadata import inference_metadata
from kvdoctor.diagnose.checks.side_cars.tokenizer import special_tokens, vocabulary
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Advice, Fault, check

Compare = Callable[[ContractContext], list[Disagreement]]

COMPARED: dict[str, Compare] = {
    "config.json": config_json,
    "generation_config.json": generation_config,
    "genai_config.json": genai_config,
    "export.json": export_json,
    "inference_metadata.yaml": inference_metadata,
    "tokenizer.json": vocabulary,
    "tokenizer_config.json": special_tokens,
}
SHOWN_BY_THE_GRAPH = ("config.json", "genai_config.json")
"""The files whose right values a graph shows; the others say how it was traced, or which tokens are meant."""


@check("KV020", "config-disagrees", "contract")
def config_disagrees(context: ContractContext) -> Iterator[Fault]:
    """Compare each config file with the stack that it belongs to."""
    for name, compare in COMPARED.items():
        found = compare(context)
        if found and not _is_reported_elsewhere(context, found, compare):
            yield _fault(context, name, found)


def _is_reported_elsewhere(context: ContractContext, found: list[Disagreement], compare: Compare) -> bool:
    """Whether an earlier stack has the same finding, or config.json is that of a stack which it agrees with."""
    earlier = True
    for stack in context.folder.stacks:
        if stack.name == context.stack.name:
            earlier = False
            continue
        other = replace(context, stack=stack, contract=read_contract(stack, context.folder.side_cars))
        theirs = compare(other)
        if earlier and theirs == found:
            return True
        if compare is config_json and not theirs and not has_usual_name(context) and meant_for(other):
            return True
    return False


def _fault(context: ContractContext, name: str, found: list[Disagreement]) -> Fault:
    shown = found[:MOST_SHOWN]
    rest = [f"{len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
    keys = [*dict.fromkeys(one.key.rpartition(".")[2] for one in shown), *rest]
    right = "; ".join([*(f"{one.key} {one.right}" for one in shown), *rest])
    advice = f"take names and sizes from the graph; correct in {name}: {right}"
    return Fault(
        severity="warning",
        file=name,
        subject=tuple(one.key for one in found),
        where=name,
        apart=(name,),
        declared="; ".join([*(f"{one.key} {one.declared}" for one in shown), *rest]),
        observed="; ".join([*(one.observed for one in shown), *rest]),
        cause=f"{name} and the graph disagree on {', '.join(keys)}",
        repair=context.advise_graph_repair(f"or {advice}") if name in SHOWN_BY_THE_GRAPH else Advice("caller", advice),
        effects=tuple(dict.fromkeys(one.so for one in shown if one.so)),
    )

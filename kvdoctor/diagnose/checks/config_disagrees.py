"""A config file and the graph disagree.

What it means: a number or a name in config.json, generation_config.json, genai_config.json, export.json,
inference_metadata.yaml or the tokenizer differs from the graph. A program that goes by the config is refused by the
runtime, or reads past the end of a table; or the export lost what the checkpoint has, and every text comes out worse.

How it is decided: compared are layers, kv heads and head width, vocabulary, and the context with the rows of the
position table; of config.json also, with constants of the graph, window, rotary base, width and scaling, epsilon,
activation, scale and cap of the scores, factors and cap of the logits, embeddings and residuals, tied embeddings,
biases, feed-forward width, experts and encoder layers; of onnxruntime-genai also names, templates, the attention window
and whether past and present can share a buffer; of generation_config.json the token ids with the logits and the
embedding table, and the longest sequence with the position table; end tokens with the tokenizer's; of export.json the
files and the traced inputs; of inference_metadata.yaml (onnx-genai; the form proposed in onnx/onnx#8184) also files,
ports, which present is the next past, and the axis that counts tokens; of the tokenizer its end, start and padding
tokens and its vocabulary. Only what both sides state counts. No difference are a vocabulary padded to a round number,
added tokens (for images), a longer table, layers without a cache of their own, several kinds of attention, a config of
another model in the folder.

Reproduce: `kvdoctor contract MODEL` shows names and sizes as the graph has them.

Repair: take sizes and names from the graph, and correct the config. Where the arithmetic differs, the config.json of
the checkpoint decides: where it has the value too, the export lost it. Token ids are the tokenizer's.
"""

from collections.abc import Callable
from dataclasses import replace

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.diagnose.checks.side_cars.config_json import (
    config_json,
    export_json,
    generation_config,
    has_usual_name,
    meant_for,
)
from kvdoctor.diagnose.checks.side_cars.disagreement import MOST_SHOWN, Disagreement
from kvdoctor.diagnose.checks.side_cars.genai_config import genai_config, inference_metadata
from kvdoctor.diagnose.checks.side_cars.tokenizer import generation_stops, special_tokens, vocabulary
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Advice, Fault, Faults, check

Compare = Callable[[ContractContext], list[Disagreement]]
COMPARED: dict[str, Compare] = {
    "config.json": config_json,
    "generation_config.json": lambda context: [*generation_config(context), *generation_stops(context)],
    "genai_config.json": genai_config,
    "export.json": export_json,
    "inference_metadata.yaml": inference_metadata,
    "tokenizer.json": vocabulary,
    "tokenizer_config.json": special_tokens,
}
SHOWN_BY_THE_GRAPH = ("config.json", "genai_config.json")
"""The files whose right values a graph shows; the others say how it was traced, or which tokens are meant."""


@check("KV020", "config-disagrees", "contract")
def config_disagrees(context: ContractContext) -> Faults:
    """Compare each config file with the stack that it belongs to."""
    for name, compare in COMPARED.items():
        found = compare(context)
        if found and not _is_reported_elsewhere(context, found, compare):
            for kind in dict.fromkeys((one.by_graph, one.against) for one in found):
                yield _fault(context, name, [one for one in found if (one.by_graph, one.against) == kind])


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
    """The advice corrects the config where the graph shows the right value, else lets the checkpoint decide."""
    shown, against = found[:MOST_SHOWN], found[0].against
    rest = [f"{len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
    declared = "; ".join([*(f"{one.key} {one.declared}" for one in shown), *rest])
    if found[0].by_graph:
        keys = [*dict.fromkeys(one.key.rpartition(".")[2] for one in shown), *rest]
        cause = f"{name} and {against} disagree on {', '.join(keys)}"
        right = "; ".join([*(f"{one.key} {one.right}" for one in shown), *rest])
        of_graph = against == "the graph"
        advice = f"{'take names and sizes from the graph; ' * of_graph}correct in {name}: {right}"
        repaired = name in SHOWN_BY_THE_GRAPH or not of_graph
        repair = context.advise_graph_repair(f"or {advice}") if repaired else Advice("caller", advice)
    else:
        keys = [*dict.fromkeys(one.key for one in shown), *rest]
        cause = f"{name} has {declared}, and the graph computes with other values"
        again = "with the config.json of the checkpoint: where that is the same, export again with an exporter that has"
        repair = Advice("re-export", f"compare {', '.join(keys)} {again} the value; else correct {name}")
    fault = Fault("warning", tuple(one.key for one in found), cause, repair, file=name, where=name, apart=(name,))
    fault = fault.compare(declared, "; ".join([*(one.observed for one in shown), *rest]))
    nodes = tuple(dict.fromkeys(one.node for one in shown if one.node))
    return fault.also(effects=tuple(dict.fromkeys(one.so for one in shown if one.so)), nodes=nodes)

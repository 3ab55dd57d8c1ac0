"""A side-car config and the graph disagree.

What it means: a number or a name in config.json, genai_config.json or export.json is not what the graph declares. Who
allocates the cache, sizes the logits, counts the layers or binds ports by the config is refused by the runtime, or
reads past the end of a table; who goes by the graph is right.

Compared are layers, kv heads and their width, vocabulary, and the context with the rows of the table of positions; of
onnxruntime-genai also names, templates, the window of the attention and whether past and present can share a buffer; of
export.json the files and the traced inputs. Only what both sides state counts. Nothing is said where a config may mean
the same: a vocabulary padded to a round number, a table longer than the context, layers that keep no cache of their
own, several kinds of attention, a config of another model in the same folder.

Reproduce: `kvdoctor contract MODEL` shows names and sizes as the graph has them.

Repair: take sizes and names from the graph, and correct the config; export again where the graph is the wrong one.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvdoctor.case import Case
from kvdoctor.checks.side_cars.config_json import config_json, has_usual_name, meant_for
from kvdoctor.checks.side_cars.disagreement import MOST_SHOWN, Disagreement
from kvdoctor.checks.side_cars.export_json import export_json
from kvdoctor.checks.side_cars.genai_config import genai_config
from kvdoctor.findings import Advice, Fault, check
from kvdoctor.reading import read_contract

Compare = Callable[[Case], list[Disagreement]]


@check("KV020", "config-disagrees", "contract")
def config_disagrees(case: Case) -> Iterator[Fault]:
    """Hold each side-car file against the stack that it belongs to."""
    compared = (("config.json", config_json), ("genai_config.json", genai_config), ("export.json", export_json))
    for name, compare in compared:
        found = compare(case)
        if found and not _said_of_another(case, found, compare):
            yield _fault(case, name, found)


def _said_of_another(case: Case, found: list[Disagreement], compare: Compare) -> bool:
    """Whether an earlier stack has the same finding, or config.json is that of a stack which it agrees with."""
    earlier = True
    for stack in case.folder.stacks:
        if case.stack is None or stack.name == case.stack.name:
            earlier = False
            continue
        other = replace(case, stack=stack, contract=read_contract(stack, case.folder.side_cars))
        theirs = compare(other)
        if earlier and theirs == found:
            return True
        if compare is config_json and not theirs and not has_usual_name(case) and meant_for(other):
            return True
    return False


def _fault(case: Case, name: str, found: list[Disagreement]) -> Fault:
    shown = found[:MOST_SHOWN]
    rest = [f"{len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
    keys = [*dict.fromkeys(one.key.rpartition(".")[2] for one in shown), *rest]
    right = "; ".join([*(f"{one.key} {one.right}" for one in shown), *rest])
    advice = f"take names and sizes from the graph; what agrees with it in {name}: {right}"
    return Fault(
        severity="warning",
        file=name,
        subject=tuple(one.key for one in found),
        where=name,
        apart=(name,),
        promised="; ".join([*(f"{one.key} {one.promised}" for one in shown), *rest]),
        observed="; ".join([*(one.observed for one in shown), *rest]),
        cause=f"{name} and the graph disagree on {', '.join(keys)}",
        advice=case.re_export(f"or {advice}") if name != "export.json" else Advice("caller", advice),
        follows=tuple(dict.fromkeys(one.so for one in shown if one.so)),
    )

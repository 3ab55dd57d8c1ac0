"""Opens an operator that runs the whole loop: its subgraphs become models of a private folder, which a loop can call.

The weights are copied from file to file, never held; the user's files are only read.
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvdoctor.analysis.search_operators import read_search, read_search_graph
from kvdoctor.analysis.stacks import FileRole, OnnxFile, operator_bodies
from kvdoctor.contract import CacheContract, Phase
from kvdoctor.decode.search import SearchPlan
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.errors import UnreadableError, UsageError
from kvdoctor.model.output_folder import copy_whole
from kvdoctor.model.skeleton import read_skeleton
from kvdoctor.model.subgraph import NotClosed, cut_out
from kvdoctor.model.view import GraphView
from kvdoctor.model.write import write_model
from kvdoctor.records import record

GENERATOR = "generator"
"""The name of the whole model among the graphs of a contract."""


class CannotOpen(Exception):
    """No loop of ours can call the graphs inside the operator; the message says why."""


@record(slots=False)
class OpenedOperator:
    """A stack with its graphs as files of a private folder, and how the operator is called.

    `shown` is the name of a file in reports by its name in the contract.
    """

    context: ContractContext
    search: SearchPlan
    shown: Mapping[str, str]


def open_operator(context: ContractContext, folder: Path) -> OpenedOperator:
    """Write the graphs inside the operator of a stack into a folder.

    Raises:
        CannotOpen: they cannot be written, or the operator feeds them otherwise than a loop does. Source of the latter:
            ONNX Runtime, subgraph_t5_decoder.cc (`use_sequence_as_input_ids_`).
    """
    stack, model = context.stack, _find_model(context)
    search, ids = read_search(model), context.contract.graph("decode").port("token_ids")
    if search.prompts and stack.operator == "BeamSearch" and ids is not None and (ids.shape or ())[-1:] != (1,):
        raise CannotOpen(f"BeamSearch feeds {ids.name!r} all tokens so far, since its axis is not fixed at 1")
    parts: dict[FileRole, OnnxFile] = {}
    try:
        _demand_room(model, len(stack.files), folder)
        located = read_skeleton(model.path, located=True).model
        for external in model.external:
            if not (target := folder / external.location).exists():
                copy_whole(external.path, target)
        for role, body in operator_bodies(located).items():
            own, name = stack.files[role], f"{role}-of-{model.path.name}"
            write_model(cut_out(located, body), model.path, folder / name)
            part = read_skeleton(folder / name)
            parts[role] = replace(own, path=folder / name, name=name, skeleton=part, view=GraphView(part.model))
    except OSError as error:
        raise CannotOpen(
            f"the graphs inside {stack.operator} cannot be written out: {error.strerror or error}"
        ) from None
    except (NotClosed, UnreadableError, UsageError) as error:
        raise CannotOpen(f"the graphs inside {stack.operator} cannot be written out: {error}") from None
    opened = replace(
        context,
        folder=replace(context.folder, root=folder, files=tuple(parts.values())),
        stack=replace(stack, files=parts),
        contract=_rename(context.contract, parts, model),
    )
    shown = {part.name: stack.files[role].name for role, part in parts.items()}
    return OpenedOperator(opened, search, {**shown, str(model.path.absolute()): model.name})


def _find_model(context: ContractContext) -> OnnxFile:
    """The file around the graphs of a stack."""
    path = context.stack.main.path
    return next(file for file in context.folder.files if file.path == path)


def _demand_room(model: OnnxFile, parts: int, folder: Path) -> None:
    size = model.path.stat().st_size * parts + sum(external.bytes or 0 for external in model.external)
    if size * 1.1 > shutil.disk_usage(folder).free:
        raise CannotOpen(f"{folder.parent} has no room for a copy of {size >> 20} MiB")


def _rename(contract: CacheContract, parts: Mapping[FileRole, OnnxFile], model: OnnxFile) -> CacheContract:
    """The contract with the files of the private folder, and the whole model as a graph of its own."""
    roles: dict[str, FileRole] = {"encoder": "encoder", "decoder": "decoder", "first-step": "decoder"}
    if "decoder-with-past" in parts:
        roles["decoder"] = "decoder-with-past"
    graphs = {name: replace(graph, file=parts[roles[name]].name) for name, graph in contract.graphs.items()}
    graphs[GENERATOR] = read_search_graph(model, str(model.path.absolute()))
    return replace(contract, graphs=graphs, phases={**contract.phases, "generate": Phase(GENERATOR)})

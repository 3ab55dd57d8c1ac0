"""Finds the inputs that carry the new tokens: by name, by the embedding table they index, or as hidden states."""

from collections.abc import Iterator

from kvdoctor.analysis.dialects import inputs
from kvdoctor.analysis.port_roles import FEW_ROWS, InputFlow, find_hidden_states, role_by_name
from kvdoctor.analysis.stacks import OnnxFile, StackParts
from kvdoctor.contract import MissingPart
from kvdoctor.model.view import GraphView
from kvdoctor.records import record

LOGITS_RANK = 3
"""Of float[batch, new, vocabulary]."""


@record(slots=False)
class TokenInputs:
    """The inputs that carry new tokens.

    `ids` has the input of token ids by file name, None where a graph has none. `names` are all inputs of the decode
    graph that carry tokens or embeddings; `hidden` is the one that is not named so but replaces tokens.
    """

    ids: dict[str, str | None]
    names: set[str]
    hidden: str | None
    missing: tuple[MissingPart, ...]


def find_token_inputs(parts: StackParts) -> TokenInputs:
    """Find the inputs that carry tokens in the graphs of the first step and of decode steps."""
    ids: dict[str, str | None] = {}
    missing = []
    for file in {parts.decode.name: parts.decode, parts.first.name: parts.first}.values():
        candidates = _find_candidates(file, parts)
        ids[file.name] = candidates[0] if len(candidates) == 1 else None
        if len(candidates) > 1:
            names = " and ".join(map(repr, candidates[:3]))
            reason = f"{names} index tables of the same size, and nothing shows which one carries the token ids"
            missing.append(MissingPart(candidates[1], reason))
    view = parts.decode.graph
    embedded = {name for name, port in view.inputs.items() if role_by_name(port, parts.input_rules) == "embeddings"}
    own, hidden = ids[parts.decode.name], None
    if not own and not embedded and parts.first is parts.decode and parts.decode.dataflow is not None:
        hidden = find_hidden_states(view, parts.decode.dataflow)
    names_found = embedded | {name for name in (own, hidden) if name is not None}
    return TokenInputs(ids, names_found, hidden, tuple(missing))


def _find_candidates(file: OnnxFile, parts: StackParts) -> list[str]:
    """The inputs that may carry token ids: one by name, else those that index the embedding table."""
    view = file.graph
    known = [(name, role_by_name(port, parts.input_rules)) for name, port in view.inputs.items()]
    tokens = [name for name, role in known if role in ("token_ids", "token_and_position")]
    if tokens or any(role == "embeddings" for _, role in known):
        return tokens[:1]
    dataflow = file.first_dataflow
    if dataflow is None:
        return []
    flow = InputFlow(dataflow, view.inputs, find_logits_widths(view))
    found = flow.find_token_ids([name for name, role in known if role is None])
    if len(found) == 1 and flow.table_rows(found[0]) not in flow.widths and find_hidden_states(view, dataflow):
        return []  # beside embeddings, integers that index another table than that of the tokens are positions
    return found


def find_swapped_inputs(decode: OnnxFile) -> Iterator[MissingPart]:
    """Token ids and positions whose names are swapped, by the tables that they index."""
    view, flow = decode.graph, decode.first_dataflow
    roles = {role_by_name(port, inputs.INPUTS): name for name, port in view.inputs.items()}
    ids, positions = roles.get("token_ids"), roles.get("position_ids") or roles.get("cache_position")
    if flow is None or ids is None or positions is None or "logits" not in view.outputs:
        return
    by_flow = InputFlow(flow, view.inputs, find_logits_widths(view))
    rows, others = by_flow.table_rows(ids), by_flow.table_rows(positions)
    if rows is not None and others in by_flow.widths and rows > max(by_flow.widths) + FEW_ROWS:
        reason = f"it indexes a table of {rows} rows, while {positions!r} indexes that of the {others} tokens"
        yield MissingPart(ids, reason)


def find_logits_widths(view: GraphView) -> frozenset[int]:
    """Widths of the outputs that may be logits: of `logits`, else of all of float[batch, new, width]."""
    named = view.outputs.get("logits")
    ports = [named] if named is not None else [p for p in view.outputs.values() if len(p.shape or ()) == LOGITS_RANK]
    return frozenset(size for port in ports if port.shape and isinstance(size := port.shape[-1], int))

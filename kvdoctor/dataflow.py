"""What a graph does with its inputs, whatever they are called."""

from kvdoctor.graph import GraphView
from kvdoctor.onnx_schema import NodeProto

KEEPS_CONTENT = {"Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze"}
FLOATS = {"float", "float16", "bfloat16", "double"}


def appended_states(view: GraphView) -> dict[str, str]:
    """Float inputs that new entries are appended to and that leave the graph again: input name -> output name.

    That is what a growing cache does: the input runs into a Concat, whose result is a graph output, with nothing
    between but operators that keep the content.
    """
    consumers = _consumers(view)
    found = {}
    for name, port in view.inputs.items():
        if port.dtype in FLOATS and port.shape is not None and len(port.shape) >= 3:
            output = _follow(name, consumers, set(view.outputs))
            if output is not None:
                found[name] = output
    return found


def _consumers(view: GraphView) -> dict[str, list[NodeProto]]:
    consumers: dict[str, list[NodeProto]] = {}
    for node in view.model.graph.node:
        if node.op_type in KEEPS_CONTENT or node.op_type == "Concat":
            for name in node.input if node.op_type == "Concat" else node.input[:1]:
                consumers.setdefault(name, []).append(node)
    return consumers


def _follow(start: str, consumers: dict[str, list[NodeProto]], outputs: set[str]) -> str | None:
    """Walk forward over one Concat to a graph output."""
    waiting, seen = [(start, False)], {(start, False)}
    while waiting:
        name, appended = waiting.pop()
        if appended and name in outputs:
            return name
        for node in consumers.get(name, ()):
            if node.op_type == "Concat" and appended:
                continue
            state = (node.output[0] if node.output else "", appended or node.op_type == "Concat")
            if state not in seen:
                seen.add(state)
                waiting.append(state)
    return None

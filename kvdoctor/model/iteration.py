"""How the values of a Loop or Scan go into its body and come out: carried, as scan inputs, or as scan outputs.

Sources: the operators Loop and Scan of ONNX, and "If, Loop and Scan" in its IR.md. A Scan before opset 9 has a batch in
front of everything and is not described here.
"""

from kvdoctor.model.proto import GraphProto, NodeProto
from kvdoctor.model.traverse import find_attribute, normalize_domain
from kvdoctor.records import record


@record
class ScanInput:
    """An input of a Scan of which each iteration gets one entry along an axis: shape without that axis.

    `reversed` says that the first iteration gets the last one.
    """

    input: int
    body_input: int
    axis: int
    reversed: bool


@record
class ScanOutput:
    """An output that holds the values which an output of the body has in all iterations, along a new axis.

    `reversed` says that the value of the first iteration comes last.
    """

    body_output: int
    axis: int
    reversed: bool = False


@record
class Iteration:
    """The ports of one Loop or Scan, by their numbers.

    Attributes:
        carried: An input of the node, the input of the body that has its value in the first iteration, and the output
            of the body that has the value of the next one. The outputs of the node begin with their last values.
        scan_inputs: The inputs of which each iteration gets one entry.
        scan_outputs: Each other output of the node, in their order.
        number: The input of the body that is the number of the iteration, if it has one.
        condition: The input of node and body that says whether another iteration follows, if it has one.
    """

    carried: tuple[tuple[int, int, int], ...]
    scan_inputs: tuple[ScanInput, ...]
    scan_outputs: tuple[ScanOutput, ...]
    number: int | None = None
    condition: int | None = None


def read_iteration(node: NodeProto, body: GraphProto) -> Iteration | None:
    """How a Loop or Scan goes together with its body; None for another node, and for one of an unknown form."""
    if normalize_domain(node.domain) or node.op_type not in ("Loop", "Scan"):
        return None
    return _read_loop(node, body) if node.op_type == "Loop" else _read_scan(node, body)


def _read_loop(node: NodeProto, body: GraphProto) -> Iteration | None:
    """A Loop: trip count, condition and initial values; its body has the number, the condition and the values."""
    count = len(body.input) - 2
    if count < 0 or max(len(node.input), 2) != len(body.input) or len(body.output) < count + 1:
        return None
    carried = tuple((at + 2, at + 2, at + 1) for at in range(count))
    return Iteration(carried, (), tuple(ScanOutput(at, 0) for at in range(count + 1, len(body.output))), 0, 1)


def _read_scan(node: NodeProto, body: GraphProto) -> Iteration | None:
    """A Scan: initial values and inputs that are taken apart; its body has the same."""
    attribute = find_attribute(node, "num_scan_inputs")
    taken = int(attribute.i) if attribute is not None else 0
    count = len(body.input) - taken
    if taken < 1 or count < 0 or len(node.input) != len(body.input) or len(body.output) < count:
        return None  # before opset 9 the node has one input more
    stacked = range(count, len(body.output))
    apart = _pair_up(node, "scan_input", taken)
    together = _pair_up(node, "scan_output", len(stacked))
    return Iteration(
        carried=tuple((at, at, at) for at in range(count)),
        scan_inputs=tuple(ScanInput(count + at, count + at, axis, turned) for at, (axis, turned) in enumerate(apart)),
        scan_outputs=tuple(ScanOutput(at, axis, turned) for at, (axis, turned) in zip(stacked, together, strict=True)),
    )


def _pair_up(node: NodeProto, ports: str, count: int) -> list[tuple[int, bool]]:
    """The axis of each of some ports of a Scan, and whether its entries come last first."""
    axes, directions = _listed(node, f"{ports}_axes", count), _listed(node, f"{ports}_directions", count)
    return [(axis, direction == 1) for axis, direction in zip(axes, directions, strict=True)]


def _listed(node: NodeProto, name: str, count: int) -> tuple[int, ...]:
    """The number of each of some ports; 0 where the node says nothing."""
    attribute = find_attribute(node, name)
    given = tuple(attribute.ints) if attribute is not None else ()
    return given if len(given) == count else (0,) * count

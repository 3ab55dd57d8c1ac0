"""Which input sizes of a node do not fit together, by the rule of its operator (ONNX operator schemas)."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

from kvdoctor.diagnose.locate.origins import Origins
from kvdoctor.diagnose.locate.runnable import RunnableNode
from kvdoctor.records import record
from kvdoctor.report.wording.units import format_count

ELEMENTWISE = {
    *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Where", "And", "Or", "Xor", "Equal", "Less", "LessOrEqual", "Greater"),
    *("GreaterOrEqual", "Min", "Max", "Sum", "Mean", "PRelu", "BitShift"),
}


@record(slots=False)
class Suspect:
    """An axis of a value, or a number in it, that the node cannot take; `fits` is a size that it would take."""

    value: str
    axis: int
    is_number: bool = False
    fits: int | None = None


def find_conflict(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str]:
    """The sizes or numbers that do not fit together, and in one clause why; nothing where no rule is known."""
    rule = _RULES.get(node.op) if not node.domain else None
    if node.op in ELEMENTWISE and not node.domain:
        rule = _elementwise
    found = rule(node, o) if rule is not None else None
    empty = find_empty_axes(node, o)
    return found or (([*empty], "an input has an axis of length 0") if empty else ([], ""))


def find_empty_axes(node: RunnableNode, o: Origins) -> list[Suspect]:
    """Axes of length 0: the standard allows them, and a kernel may still refuse them."""
    sizes = [(name, axis, size) for name in node.inputs if name for axis, size in enumerate(o.shape(name) or ())]
    return [Suspect(name, axis, fits=1) for name, axis, size in sizes if size == 0]


def _elementwise(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str] | None:
    return _broadcast([(name, o.shape(name) or ()) for name in node.inputs if name], 0)


def _broadcast(given: list[tuple[str, tuple[int, ...]]], kept: int) -> tuple[list[Suspect], str] | None:
    """Sizes that cannot be broadcast; the last `kept` axes of each are left out."""
    longest = max((len(shape) for _, shape in given), default=0)
    for back in range(kept + 1, longest + 1):
        sizes = [(name, len(shape) - back, shape[-back]) for name, shape in given if len(shape) >= back]
        wide = [entry for entry in sizes if entry[2] != 1]
        if len({size for _, _, size in wide}) > 1:
            first = wide[0]
            other = next(entry for entry in wide if entry[2] != first[2])
            suspects = [Suspect(*first[:2], fits=other[2]), Suspect(*other[:2], fits=first[2])]
            return suspects, f"{first[2]} and {other[2]} cannot be broadcast"
    return None


def _concat(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str] | None:
    given = [(name, o.shape(name) or ()) for name in node.inputs if name]
    rank = max((len(shape) for _, shape in given), default=0)
    joined = node.number("axis", 0) % max(rank, 1)
    for axis in (axis for axis in range(rank) if axis != joined):
        for name, shape in given[1:]:
            if len(shape) == len(given[0][1]) and shape[axis] != given[0][1][axis]:
                first, other = given[0][1][axis], shape[axis]
                suspects = [Suspect(given[0][0], axis, fits=other), Suspect(name, axis, fits=first)]
                return (
                    suspects,
                    f"inputs joined along axis {joined} must agree in axis {axis}, and have {first} and {other}",
                )
    return None


def _matmul(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str] | None:
    left, right = (
        (node.inputs[0], o.shape(node.inputs[0])),
        (node.inputs[1], o.shape(node.inputs[1])),
    )
    if not left[1] or not right[1]:
        return None
    inner = max(len(right[1]) - 2, 0)
    if left[1][-1] != right[1][inner]:
        last = len(left[1]) - 1
        suspects = [Suspect(left[0], last, fits=right[1][inner]), Suspect(right[0], inner, fits=left[1][last])]
        columns, rows = format_count(left[1][-1], "column"), format_count(right[1][inner], "row")
        return suspects, f"{columns} {'does' if left[1][-1] == 1 else 'do'} not fit {rows}"
    return _broadcast([(left[0], left[1]), (right[0], right[1])], 2)


def _reshape(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str] | None:
    data, target = node.inputs[0], node.inputs[1]
    into, numbers = o.shape(data), o.numbers(target)
    if into is None or numbers is None:
        return None
    copies = not node.number("allowzero", 0)
    wrong = [i for i, n in enumerate(numbers) if n == 0 and copies and i >= len(into)]
    if wrong:
        return [
            Suspect(target, i, True) for i in wrong
        ], f"the target {list(numbers)} copies an axis that does not exist"
    wanted = [into[i] if n == 0 and copies else n for i, n in enumerate(numbers)]
    fixed, total = prod(n for n in wanted if n != -1), prod(into)
    if (-1 not in wanted and fixed == total) or (-1 in wanted and fixed and total % fixed == 0):
        return None
    needed = f"{'a multiple of ' if -1 in wanted else ''}{fixed} elements"
    clause = f"the target {list(numbers)} needs {needed}, the input has {total}"
    suspects = [
        Suspect(data, i, fits=wanted[i] if len(wanted) == len(into) and wanted[i] > 0 else None)
        for i, size in enumerate(into)
        if i >= len(wanted) or wanted[i] not in (-1, size)
    ]
    suspects = suspects or [Suspect(data, i) for i, size in enumerate(into) if size != 1]
    unlike = len(into) != len(numbers)
    fixing = [i for i, n in enumerate(numbers) if n > 0 and (unlike or into[i] != n)]
    return [*suspects, *(Suspect(target, i, True) for i in fixing)], clause


def _expand(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str] | None:
    data, target = node.inputs[0], node.inputs[1]
    into, numbers = o.shape(data), o.numbers(target)
    if into is None or numbers is None:
        return None
    found = _broadcast([(data, into), (target, numbers)], 0)
    if found is None:
        return None
    return [replace(suspect, is_number=suspect.value == target) for suspect in found[0]], found[1]


def _gather(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str] | None:
    data, picks = o.shape(node.inputs[0]), o.numbers(node.inputs[1])
    if data is None or picks is None:
        return None
    axis = node.number("axis", 0) % max(len(data), 1)
    outside = [i for i, pick in enumerate(picks) if not -data[axis] <= pick < data[axis]]
    if not outside:
        return None
    suspects = [Suspect(node.inputs[1], outside[0], True), Suspect(node.inputs[0], axis)]
    return suspects, f"index {picks[outside[0]]} is outside an axis of length {data[axis]}"


def _split(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str] | None:
    data = o.shape(node.inputs[0])
    sizes = o.numbers(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    sizes = sizes or node.numbers("split")
    if data is None or sizes is None:
        return None
    axis = node.number("axis", 0) % max(len(data), 1)
    if sum(sizes) == data[axis]:
        return None
    return [Suspect(node.inputs[0], axis)], f"parts of {list(sizes)} do not add up to {data[axis]}"


def _einsum(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str] | None:
    equation = node.attribute("equation")
    terms = equation.s.decode("utf-8", "replace").partition("->")[0].replace(" ", "").split(",") if equation else []
    first: dict[str, tuple[Suspect, int]] = {}
    for name, term in zip(node.inputs, terms, strict=False):
        shape = o.shape(name) or ()
        if "." in term or len(term) != len(shape):
            return None
        for axis, letter in enumerate(term):
            known = first.setdefault(letter, (Suspect(name, axis), shape[axis]))
            if known[1] != shape[axis] and 1 not in (known[1], shape[axis]):
                suspects = [replace(known[0], fits=shape[axis]), Suspect(name, axis, fits=known[1])]
                return suspects, f"{letter!r} cannot be {known[1]} and {shape[axis]}"
    return None


def _conv(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str] | None:
    data, weight = o.shape(node.inputs[0]), o.shape(node.inputs[1])
    if data is None or weight is None or len(data) != len(weight):
        return None
    padding, places = node.attribute("auto_pad"), len(data) - 2
    if padding is not None and padding.s not in (b"", b"NOTSET"):
        return None
    pads, spread = node.numbers("pads") or (0,) * 2 * places, node.numbers("dilations") or (1,) * places
    for place in range(places):
        reach = (weight[place + 2] - 1) * spread[place] + 1
        if data[place + 2] + pads[place] + pads[place + places] < reach:
            size = data[place + 2]
            return [
                Suspect(node.inputs[0], place + 2, fits=reach)
            ], f"an axis of length {size} is shorter than the reach of the kernel, {reach}"
    return None


_RULES: dict[str, Callable[[RunnableNode, Origins], tuple[list[Suspect], str] | None]] = {
    "Concat": _concat,
    "Conv": _conv,
    "MatMul": _matmul,
    "Reshape": _reshape,
    "Expand": _expand,
    "Gather": _gather,
    "Split": _split,
    "Einsum": _einsum,
}

"""Whole attentions and rotations: operators that join the past and the new entries, mask, and combine in one node."""

from collections.abc import Sequence

from kvdoctor.analysis.proof.call import Made, NotKnown, Reading, Rule, is_calm, known, refuse
from kvdoctor.analysis.proof.masks import hides_later, is_hiding
from kvdoctor.analysis.proof.types import UNKNOWN, Axis, Term, Type, axis_of, constant_of, is_fixed, number, size_of
from kvdoctor.model.operators import CONTRIB, CachePorts, ports_of

COUNTED = (number(0), ((-1, 1),))
"""The absolute position of each token."""
PAIR = number(2)


def attention(call: Reading) -> list[Made]:
    """Attention of ONNX; MultiHeadAttention and Attention of ONNX Runtime, the latter with packed weights and past.

    Source: https://onnx.ai/onnx/operators/onnx__Attention.html, ContribOperators.md of ONNX Runtime.
    """
    ports = known(ports_of(call.node.domain, call.node.op))
    others, filled = (*ports.roles, ports.fixed_with or len(call.inputs)), call.node.attribute("mask_filter_value")
    # Before release 1.27 a cap also limited what a mask adds.
    refuse(
        call.node.attribute("softcap") is not None or any(map(call.has, others)) or (filled and not is_hiding(filled.f))
    )
    query, entries = call.axes(0, 3), [_entries(call, (*at, 0)[0]) for at in (ports.keys, ports.values)]
    pasts = [at for at in ports.pasts if call.has(at)]
    for past, (batch, heads, tokens, width) in zip(pasts, entries, strict=False):
        axes = (batch, heads, (call.lengths.past,), width)
        refuse(not call.input(past).past or call.axes(past)[-4:] != axes or tokens != (call.lengths.new,))
    # Groups of heads are as long as the numbers of heads say: no tokens may stand in their place.
    refuse(not all(is_fixed(axes[1]) for axes in (*entries, query) if len(axes) == len(entries[0])))
    columns = known(size_of(entries[1][3]).number)
    if len(query) == len(("batch", "tokens", "columns")):
        columns *= call.node.number("q_num_heads", call.node.number("num_heads", 1))
    masks = [one for at, one in enumerate(call.inputs) if one is not None and at in ports.mask and one.kind != "i"]
    rows = [one for at, one in enumerate(call.inputs) if one is not None and at not in (*pasts, *ports.mask)]
    shape = (*query[:-1], axis_of(number(columns)))
    tokens = entries[0][2]
    forgets = _forgets_later(call, tokens, bool(pasts), masks) and _pads_nothing(call, ports)
    forgets = forgets and (is_fixed(tokens) or query[-2] == (call.lengths.new,))
    made = [Made(call.opaque(shape, [*rows, *masks], "f", True) if forgets else Type("f", shape))]
    stacked = () if ports.keys else ((PAIR,),)
    for (past, (_, output)), (batch, heads, _, width) in zip(ports.pasts.items(), entries, strict=False):
        present = call.opaque((*stacked, batch, heads, (call.lengths.total,), width), rows, "f", True)
        made.append(Made(present, ("attended", past, output, tuple(ports.pasts))) if pasts else Made(UNKNOWN))
    return made


def _entries(call: Reading, index: int) -> tuple[Axis, ...]:
    """The axes [batch, heads, tokens, head width] of the keys or values of a call; `NotKnown` where they do not fit."""
    axes = call.axes(index, 3)
    if len(axes) == len(("batch", "heads", "tokens", "width")):
        return axes
    groups = call.node.number("kv_num_heads", call.node.number("num_heads", 0))
    columns = known(size_of(axes[2] if index else call.axes(1)[-1]).number)
    columns = columns if index else columns // len("qkv")
    if not groups or columns % groups or call.node.numbers("qkv_hidden_sizes"):
        raise NotKnown
    return (axes[0], axis_of(number(groups)), axes[1], axis_of(number(columns // groups)))


def _pads_nothing(call: Reading, ports: CachePorts) -> bool:
    """Whether no mask of whole numbers hides anything: that is padding, which the proof leaves out.

    One without an axis of all tokens lists lengths or places.
    """
    padding = [call.input(at) for at in ports.mask if call.has(at) and call.input(at).kind == "i"]
    return all(_is_true(one) and (call.lengths.total,) in (one.shape or ()) for one in padding)


def _forgets_later(call: Reading, tokens: Axis, joined: bool, masks: Sequence[Type]) -> bool:
    """Whether later tokens weigh exactly 0, and each token attends to itself."""
    lengths, causal = call.lengths, bool(call.node.number("is_causal", call.node.number("unidirectional", 0)))
    if is_fixed(tokens):
        return not joined and not causal
    # Without a past among its inputs the operator counts rows and columns from the first.
    if (causal and not joined and not lengths.first) or not (joined or tokens == (lengths.total,)):
        return False
    if any(axis != (call.lengths.total,) for one in masks for axis in known(one.shape)[-1:] if axis):
        return False  # Attention may take fewer columns than there are tokens
    hidden = [_hides(one) for one in masks]
    open_ones = [one for one, hides in zip(masks, hidden, strict=True) if not hides]
    calm = all(is_calm(one) if one.kind == "f" else _is_true(one) for one in open_ones)
    return calm and (causal or lengths.single or any(hidden))


def _hides(mask: Type) -> bool:
    """Whether a mask of numbers or booleans hides all later tokens, and not the token itself."""
    return hides_later(mask, -2, -1) or (mask.kind == "b" and dict(mask.regions).get((-2, -1), ())[:2] == (0.0, 1.0))


def _is_true(mask: Type) -> bool:
    value = constant_of(mask)
    return isinstance(value, Term) and bool(value.number)


def grouped_attention(call: Reading) -> list[Made]:
    """GroupQueryAttention of ONNX Runtime, with lengths as they are, without padding and masks.

    A window counts from each token in every release, though not the same number of tokens.
    """
    lengths, query, past = call.lengths, call.input(0), [call.input(3), call.input(4)]
    rounded = call.node.number("kv_cache_bit_width", 0) or not call.node.number("causal", 1)
    last, total = constant_of(call.input(5)), constant_of(call.input(6))
    whole = last is lengths.total - number(1) and total is lengths.total and all(one.past for one in past)
    refuse(any(call.has(index) for index in range(10, 15)) or rounded or not whole)
    shapes, taken = [call.axes(3), call.axes(4)], [call.input(at) for at in (0, 1, 2, 7, 8) if call.has(at)]
    joined = [call.axes(at) for at in (0, 1, 2) if call.has(at)]
    if any(len(shape) != 4 or shape[2] != (lengths.past,) for shape in shapes) or not query.shape:
        return []
    refuse(any(len(shape) != 3 or shape[1] != (lengths.new,) for shape in joined) or not is_fixed(query.shape[2]))
    refuse(call.has(9) and lengths.absolute(call.input(9)) != COUNTED)
    if call.node.number("do_rotary", 0):
        call.limits.append((known(size_of((call.input(7).shape or ((),))[0]).number), 7))
    heads, groups = call.node.number("num_heads", 1), call.node.number("kv_num_heads", 1)
    width = size_of(query.shape[2]).number
    if not call.has(1):
        heads += 2 * groups
    if not width or width % heads:
        return []
    columns = width // heads * call.node.number("num_heads", 1)
    out = call.opaque((*query.shape[:2], axis_of(number(columns))), taken, "f", True)
    presents = [call.opaque((*shape[:2], (lengths.total,), shape[3]), taken, "f", True) for shape in shapes]
    return [Made(out), Made(presents[0], ("attended", 3, 1, (3, 4))), Made(presents[1], ("attended", 4, 2, (3, 4)))]


def rotary(call: Reading) -> Made:
    """RotaryEmbedding of ONNX or ONNX Runtime: a rotation by positions, with a row of its tables for each."""
    taken, shape, lengths = call.input(0), call.axes(0, 1), call.lengths
    own = call.node.domain == CONTRIB
    at, first = (1, 2) if own else (3, 1)
    # [batch, tokens, heads x width], or [batch, heads, tokens, width].
    tokens = {3: 1, 4: 2}.get(len(shape))
    if tokens is None or shape[tokens] != (lengths.new,) or not is_fixed(shape[-1]):
        return Made(UNKNOWN)
    used = [taken, call.input(first), call.input(first + 1)]
    if not call.has(at):  # the tables have a row for each new token
        whole = all(call.axes(index, 2)[-2] == (lengths.new,) for index in (first, first + 1))
        return Made(call.opaque(shape, used, "f", is_calm(taken)) if whole else Type("f", shape))
    places, rows = call.input(at), known(size_of((call.input(first).shape or ((),))[0]).number)
    starts = own and places.shape in ((), ((),)) and constant_of(places) is lengths.past
    if not (lengths.absolute(places) == COUNTED or starts):
        return Made(Type("f", shape))
    call.limits.append((rows, first))
    return Made(call.opaque(shape, used, "f", is_calm(taken)), ("rotated", 0, first, first + 1))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Attention", "MultiHeadAttention"), attention),
    "GroupQueryAttention": grouped_attention,
    "RotaryEmbedding": rotary,
}

"""Compares the arithmetic that config.json declares with the constants of the graph, value by value.

Only what both sides show counts: a constant that is not found, or stands in a form that no reader knows, is no
difference. Where the layers of a model may differ, one layer with the declared value is enough.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from kvdoctor.analysis.arithmetic.reading import Arithmetic, read_arithmetic
from kvdoctor.analysis.arithmetic.rotary import Declared, are_close, divides_positions
from kvdoctor.analysis.arithmetic.scores import LONGEST, Attention
from kvdoctor.analysis.configs import declared_windows, decoder_config, is_count
from kvdoctor.analysis.thresholds import find_thresholds
from kvdoctor.diagnose.checks.side_cars import values
from kvdoctor.diagnose.checks.side_cars.disagreement import Disagreement, Disagreements, plain, quoted
from kvdoctor.diagnose.checks.side_cars.graph_sizes import cache_sizes, head_widths
from kvdoctor.diagnose.checks.side_cars.numbers import HEADS, RELATIVE, UNGROUPED
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.operators import operators_with
from kvdoctor.model.traverse import name_node
from kvdoctor.records import record

CLOSE = 0.02
"""The largest relative difference of two equal numbers: float16 rounds an epsilon of 1e-6 by 0.013."""
RIGHT = "the value of the checkpoint"
FEW = 3


@record(slots=False)
class Sides:
    """What is compared: the part of config.json for the decoder, the whole of it, the model type, and the graph."""

    part: dict[str, Any]
    config: dict[str, Any]
    kind: str
    context: ContractContext
    graph: Arithmetic
    width: int | None


def compare_values(context: ContractContext) -> Disagreements:
    """The values of config.json with which the graph does not compute."""
    sides = _read_sides(context)
    if sides is not None:
        for compare in COMPARED:
            yield from compare(sides)


def _read_sides(context: ContractContext) -> Sides | None:
    config = context.folder.side_cars.config
    if not config:
        return None
    widths = cache_sizes(context, "head_dim", ("key",)) or head_widths(context)
    width = next(iter(widths)) if len(widths) == 1 else None
    part = decoder_config(config)
    graph = read_arithmetic(context.stack.main, width, alone=not context.stack.stages)
    return Sides(part, config, str(part.get("model_type")), context, graph, width) if graph is not None else None


def _differs(key: str, declared: object, observed: str, node: FlatNode | None = None) -> Disagreement:
    """A difference. Which side is right, neither shows: a converter may have lost the value."""
    place = f" ({node.op} {quoted(name_node(node.proto))})" if node is not None else ""
    name = name_node(node.proto) if node is not None else ""
    return Disagreement(key, str(declared), f"{observed}{place}", RIGHT, by_graph=False, node=name)


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=CLOSE)


def _most(found: Iterable[tuple[Hashable, FlatNode]]) -> tuple[Any, FlatNode]:
    """The value that occurs most often, and the first node that has it."""
    listed = list(found)
    value = Counter(value for value, _ in listed).most_common(1)[0][0]
    return value, next(node for one, node in listed if one == value)


def _unless(
    right: Callable[[Any], bool], key: str, declared: object, seen: Iterable[tuple[Any, FlatNode]], text: str
) -> Disagreements:
    """A difference where some values are seen, and none is right: as text, the one that occurs most often."""
    seen = list(seen)
    if seen and not any(right(value) for value, _ in seen):
        yield _differs(key, declared, *_most((text.format(value), node) for value, node in seen))


def _unless_close(
    claim: tuple[str, float] | tuple[str, str, float] | None, seen: Iterable[tuple[float, FlatNode]], text: str
) -> Disagreements:
    """The same for numbers, by a key, the value there, and the number that it stands for."""
    if claim is not None:
        declared = claim[1] if isinstance(claim[1], str) else f"{claim[1]:g}"
        yield from _unless(lambda value: _is_close(value, claim[-1]), claim[0], declared, seen, text)


def _epsilon(sides: Sides) -> Disagreements:
    if sides.kind in values.ROTATED:  # others have a key that their norms ignore
        given, norms = values.first_number(sides.part, values.EPSILONS), sides.graph.norms
        yield from _unless_close(given, ((norm.epsilon, norm.node) for norm in norms), "epsilon {:.3g}")


def _activation(sides: Sides) -> Disagreements:
    part, found = sides.part, sides.graph.activations
    key = next((key for key in values.ACTIVATIONS if isinstance(part.get(key), str)), None)
    if sides.kind == "falcon" and isinstance(part.get("activation"), str):
        key = "activation"
    name = values.ACTIVATION_NAMES.get(part[key]) if key is not None else None
    kinds = {one.kind for one in found}
    # The first configs of Gemma say "gelu" and mean its approximation, which runtimes fuse in for speed elsewhere.
    loose = sides.kind == "gemma" or any(one.node.op in ("FastGelu", "BiasGelu") for one in found)
    if loose and name in ("gelu", "gelu by tanh"):
        kinds |= {"gelu", "gelu by tanh"} if kinds & {"gelu", "gelu by tanh"} else set()
    if key is not None and name is not None and sides.kind in values.ACTIVATED:
        seen = ((one.kind, one.node) for one in found)
        yield from _unless(lambda _: name in kinds, key, quoted(part[key]), seen, "{}")


def _scale(sides: Sides) -> Disagreements:
    claim = values.score_scale(sides.part, sides.kind, sides.width)
    usual = sides.width**-0.5 if sides.width else None
    seen = [(one.scale if one.scale is not None else usual, one) for one in sides.graph.attentions if one.is_scaled]
    known = [(scale, one.node) for scale, one in seen if scale is not None]
    # Without a scale in the graph the weights of the queries may hold it.
    if claim is None or not known or any(_is_close(scale, claim[2]) or _is_close(scale, 1.0) for scale, _ in known):
        return
    scale, node = _most((float(f"{scale:.4g}"), node) for scale, node in known)
    key, declared, right = claim
    declared += f" (a scale of {right:.4g})" if key == "model_type" else ""
    more = f", of {scale**-2:.4g}" if key == "query_pre_attn_scalar" else ""
    yield _differs(key, declared, f"a scale of scores of {scale:g}{more}", node)


def _caps(sides: Sides) -> Disagreements:
    """The caps of the scores and of the logits, each by the first node that has another one, or none."""
    for key, what in (("attn_logit_softcapping", "scores"), ("final_logit_softcapping", "logits")):
        given = values.first_number(sides.part, (key,))
        meant = given[1] if given is not None else None
        if key not in sides.part or (meant is None and sides.part[key] is not None):
            continue
        head = sides.graph.find_head(sides.context.logits_name) if what == "logits" else None
        for one in sides.graph.attentions if what == "scores" else (head,) if head is not None else ():
            same = one.cap is meant or (one.cap is not None and meant is not None and _is_close(one.cap, meant))
            if not same:
                shown = f"{what} capped at {one.cap:g}" if one.cap is not None else f"no cap of {what}"
                yield _differs(key, "null" if meant is None else f"{meant:g}", shown, one.node)
                break


def _rotation(sides: Sides) -> Disagreements:
    alibi = sides.part.get("alibi") is True
    declared = values.rotations(sides.part) if not alibi else []
    found, whole = sides.graph.frequencies if declared or (alibi and sides.kind == "falcon") else ([], False)
    if alibi and found:
        yield _differs("alibi", "true", "a rotary embedding", found[0].node)
    if not found or not whole:
        return
    for one in declared:
        if not one.dim_key and one.dim != sides.width:  # the width of a head has a comparison of its own
            continue
        lists = one.frequencies(one.dim or found[0].dim)
        if lists is None:
            continue
        factor = one.scaling.get("factor") if one.kind == "linear" else None
        flow, fixed = sides.graph.flow, sides.graph.fixed
        if isinstance(factor, int | float) and divides_positions(flow, fixed, found[0].node, factor):
            continue
        missing = [meant for meant in lists if not any(are_close(meant, seen.numbers) for seen in found)]
        if missing:
            yield _explain_rotation(sides, one, len(missing) < len(lists))
            return
        if len(lists) > 1:
            yield from _switch(sides, one)


def _switch(sides: Sides, one: Declared) -> Disagreements:
    """The length from which a graph rotates by the second set of frequencies."""
    key = "original_max_position_embeddings"
    declared, flow = one.scaling.get(key), sides.graph.flow
    lengths = {limit.length for limit in find_thresholds(flow, sides.context.contract.graph("decode"))}
    if is_count(declared) and lengths and not lengths & {declared, declared + 1}:
        shown = ", ".join(map(str, sorted(lengths)[:FEW]))
        yield _differs(key, declared, f"lengths compared with {shown}", sides.graph.frequencies[0][0].node)


def _explain_rotation(sides: Sides, one: Declared, partly: bool) -> Disagreement:
    """The difference of a rotation, by the key that shows it."""
    found = sides.graph.frequencies[0]
    seen = next((each for each in found if each.dim != one.dim), found[0])
    text = f"{one.base:g}"
    if partly:
        return _differs("rope_scaling", quoted(one.kind), "one set of frequencies for all lengths", seen.node)
    if one.dim is not None and seen.dim != one.dim:
        shown = f"{seen.dim} rotated numbers of each head, not {one.dim}"
        value = sides.part.get(one.dim_key, one.scaling.get(one.dim_key))
        return _differs(one.dim_key or "head_dim", plain(str(value)) if one.dim_key else one.dim, shown, seen.node)
    if seen.base is not None and one.kind in ("default", "mrope"):
        return _differs(one.key, text, f"base {_rounded(seen.base)}", seen.node)
    if seen.base is not None:
        factor = one.scaling.get("factor")
        declared = quoted(one.kind) + (f" with factor {factor:g}" if isinstance(factor, int | float) else "")
        return _differs("rope_scaling", declared, f"base {_rounded(seen.base)} without scaling", seen.node)
    shown = ", ".join(f"{number:.4g}" for number in seen.numbers[:FEW])
    meant = ", ".join(f"{number:.4g}" for number in (one.frequencies(seen.dim) or [()])[0][:FEW])
    key = one.key if one.kind in ("default", "mrope") else "rope_scaling"
    return _differs(key, f"{quoted(one.kind)} of base {text}: {meant}, ...", f"frequencies {shown}, ...", seen.node)


def _rounded(number: float) -> str:
    """A number as a person wrote it: tables in half precision give 499870 for 500000."""
    short, longer = (float(f"{number:.{digits}g}") for digits in (2, 3))
    return f"{short if math.isclose(short, number, rel_tol=CLOSE / 4) else longer:.10g}"


def _window(sides: Sides) -> Disagreements:
    """The window of each layer. One that no sequence reaches is none, nor does a buffer of another form show one."""
    part, found = sides.part, sides.graph.attentions
    key, window = "sliding_window", part.get("sliding_window")
    growth = {slot.layer: slot.growth for slot in sides.context.contract.of_kind("self-attention")}
    kinds = part.get("layer_types")
    known = {str(kind) for kind in kinds} <= KINDS if isinstance(kinds, list) else sides.kind in values.PLAIN
    if key not in part or not known or set(growth) != set(range(len(found))):
        return
    meant = declared_windows(sides.config)
    limit = min(sides.context.contract.context_limit or LONGEST, LONGEST)
    for layer, one in enumerate(found):
        seen, width = _seen_windows(one, growth[layer]), meant.get(layer)
        if seen is None or (width is not None and width >= limit):
            continue
        shown = " or ".join(map(str, sorted(seen)[:FEW]))
        if width is not None and not any(abs(width - number) <= 1 for number in seen):
            window = plain(str(window))
            there = f"a window of {shown}" if seen else "no window"
            yield _differs(key, window, f"{there} in layer {layer}", one.node)
            return
        if width is None and seen:
            declared = f'"full_attention" in layer {layer}' if window is not None else "null"
            named = "layer_types" if window is not None and "layer_types" in part else key
            yield _differs(named, declared, f"a window of {shown} in layer {layer}", one.node)
            return


def _seen_windows(one: Attention, growth: str) -> frozenset[int] | None:
    """The numbers that may be the window of an attention, none without one; None where that is not known."""
    if one.local is not None and one.local > 0:
        return frozenset([one.local])
    if growth not in GROWING or (one.local is not None and one.windows):
        return None
    return one.windows


GROWING = ("grow", "shared")
KINDS = {"full_attention", "sliding_attention"}


def _tied(sides: Sides) -> Disagreements:
    key = "tie_word_embeddings"
    declared = sides.part.get(key, sides.config.get(key) if "text_config" in sides.config else None)
    embedding = sides.graph.find_embedding(_token_inputs(sides)) if isinstance(declared, bool) else None
    head = sides.graph.find_head(sides.context.logits_name) if embedding is not None else None
    tied = sides.graph.are_tied(embedding, head) if embedding and head else None
    if tied is not None and head is not None and tied is not declared:
        shown = "logits by the table of the tokens" if tied else "logits by other weights than the table of the tokens"
        yield _differs(key, str(declared).lower(), shown, head.node)


def _token_inputs(sides: Sides) -> frozenset[str]:
    ports = sides.context.contract.graph("decode").inputs
    return frozenset(port.name for port in ports if port.role == "token_ids")


def _embedding(sides: Sides) -> Disagreements:
    embedding = sides.graph.find_embedding(_token_inputs(sides))
    if embedding is None or embedding.factor is None:
        return
    claim = values.embedding_factor(sides.part, sides.kind, embedding.table.dims[0 if embedding.is_transposed else 1])
    yield from _unless_close(claim, [(embedding.factor, embedding.node)], "embeddings multiplied by {:.6g}")


def _logits(sides: Sides) -> Disagreements:
    claim = values.logits_factor(sides.part, sides.kind)
    head = sides.graph.find_head(sides.context.logits_name) if claim else None
    if head is not None:
        yield from _unless_close(claim, [(head.before * head.after, head.node)], "logits multiplied by {:.6g}")


def _residual(sides: Sides) -> Disagreements:
    given = values.first_number(sides.part, ("residual_multiplier",)) if sides.kind == "granite" else None
    found = sides.graph.residual_factors() if given else {}
    if len(found) == 1:
        yield from _unless_close(given, found.items(), "residuals multiplied by {:.6g}")


def _experts(sides: Sides) -> Disagreements:
    found = sides.graph.routers if sides.kind in values.MIXED else []
    active, counts = ([(getattr(one, name), one.node) for one in found] for name in ("active", "count"))
    for keys, seen, what in ((values.ACTIVE, active, "active experts"), (values.EXPERTS, counts, "experts")):
        if (given := values.first_number(sides.part, keys)) is not None:
            known = [pair for pair in seen if pair[0] is not None]
            yield from _unless(given[1].__eq__, given[0], f"{given[1]:g}", known, f"{{}} {what}")


def _inner(sides: Sides) -> Disagreements:
    keys = ("moe_intermediate_size",) if sides.graph.routers else values.INNER
    key = next((key for key in values.OTHER_INNER.get(sides.kind, keys) if is_count(sides.part.get(key))), None)
    seen = [(one.width, one.node) for one in sides.graph.activations if one.width is not None]
    if key is not None and sides.kind in values.PLAIN:
        meant = sides.part[key]
        yield from _unless(lambda width: width == meant, key, meant, seen, "feed-forward layers of width {}")


def _heads(sides: Sides) -> Disagreements:
    """The number of query heads, by the operator or by the width of the queries, where the cache has other heads."""
    key = next((key for key in HEADS if is_count(sides.part.get(key))), None)
    if key is None or sides.kind not in values.PLAIN - UNGROUPED - RELATIVE:
        return
    declared, width = sides.part[key], sides.width
    for one in sides.graph.attentions:
        heads = one.node.number("num_heads", 0) or one.node.number("q_num_heads", 0)
        if heads and heads != declared:
            yield _differs(key, declared, f"{heads} query heads", one.node)
            return
        projection = one.projection if not heads else None
        weight = sides.graph.flow.constants.get(projection.input(1)) if projection is not None else None
        queries = None
        if weight is not None and projection is not None and len(weight.dims) == 2:
            queries = int(weight.dims[1 - projection.number("transB", 0)])
        kv_heads = values.first_number(sides.part, ("num_key_value_heads", "num_kv_heads"))
        packed = declared + 2 * int(kv_heads[1] if kv_heads else declared)
        if width and queries and not queries % width and queries // width not in (declared, packed, declared + 2):
            yield _differs(key, declared, f"queries of {queries // width} heads", one.projection)
            return


def _biases(sides: Sides) -> Disagreements:
    key, found = "attention_bias", [one for one in sides.graph.attentions if one.projection is not None]
    declared = sides.part.get(key)
    compared = isinstance(declared, bool) and found and sides.kind in values.BIASED
    if compared and all(one.is_biased != declared for one in found):
        shown = "queries without a bias" if declared else "queries with a bias"
        yield _differs(key, str(declared).lower(), shown, found[0].projection)


def _buckets(sides: Sides) -> Disagreements:
    """The relative positions of T5: a bias for each bucket and head; the last half of the buckets grow by logarithm."""
    key, farthest = "relative_attention_num_buckets", "relative_attention_max_distance"
    heads, count = sides.part.get("num_heads"), sides.part.get(key)
    if sides.kind not in values.UNSCALED or not is_count(count):
        return
    flow, fixed = sides.graph.flow, sides.graph.fixed
    tables = [(flow.constant(node.input(0)), node) for node in fixed.nodes(operators_with("embed"))]
    rows = [(int(table.dims[0]), node) for table, node in tables if table is not None and table.dims[1:] == [heads]]
    for seen, node in rows:
        if seen != count:
            yield _differs(key, count, f"a table of {seen} buckets", node)
            return
    declared = sides.part.get(farthest)
    if not is_count(declared):
        return
    for node in fixed.nodes(("Div",)) if rows else ():
        logarithm = flow.producers.get(fixed.source(node.input(0)))
        growth = fixed.one(node.input(1)) if logarithm is not None and logarithm.op == "Log" else None
        if growth is not None and 0 < growth < 50 and not _is_close(math.exp(growth) * (count // 2), declared):
            yield _differs(farthest, declared, f"a largest distance of {math.exp(growth) * (count // 2):.4g}", node)
            return


def _encoder_layers(sides: Sides) -> Disagreements:
    given, file = values.first_number(sides.part, values.ENCODER_LAYERS), sides.context.stack.files.get("encoder")
    graph = read_arithmetic(file, None, alone=False) if file is not None else None
    family = sides.part is sides.config and sides.kind in values.ENCODER_DECODERS - {"bigbird_pegasus"}
    if given is None or graph is None or not family:
        return
    layers = len(graph.attentions)
    if layers and layers != given[1]:
        yield _differs(given[0], f"{given[1]:g}", f"{layers} attentions in the encoder")


COMPARED: tuple[Callable[[Sides], Disagreements], ...] = (
    *(_epsilon, _activation, _scale, _caps, _rotation, _window, _tied, _embedding, _logits),
    *(_residual, _experts, _inner, _heads, _biases, _buckets, _encoder_layers),
)
"""One comparison for each value, in the order of the report."""

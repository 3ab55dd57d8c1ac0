"""The operators by what they do: one entry for each, and every walk over a graph asks it by trait.

Sources: the operator schemas of ONNX up to opset 28 and of ONNX Runtime 1.31 (docs/ContribOperators.md). Operators of
both are listed by name alone: those of one name do the same, at other ports. Their versions are in
`kvdoctor.model.validity`.
"""

from collections.abc import Mapping
from dataclasses import field
from functools import cache
from typing import Any, Literal

from kvdoctor.contract import Growth
from kvdoctor.model.traverse import normalize_domain
from kvdoctor.records import record

CONTRIB = "com.microsoft"

Moving = Literal["copy", "cast", "view", "permute", "repeat", "pick", "dropout", "reinterpret"]
"""What comes out is what went in: as it is, in another element type, under another shape, under permuted axes, several
times, some of it, as it is or with noise in training, as the same bits of another type."""

Rounding = Literal["quantize", "quantize-dynamically", "dequantize", "static", "dynamic"]
"""Floats as integers, or back. `static` and `dynamic` compute with integers inside, at a scale that the graph holds or
that the input decides."""

Joining = Literal["join", "pad", "write", "select"]
"""Several inputs become one: along an axis, with entries around, with new ones over some, each from one of two."""

Computing = Literal["elementwise", "broadcast", "arithmetic", "activation", "compare", "logic"]
"""Each entry is computed from those at the same place: `elementwise` are all such operators, `broadcast` those of
several inputs, `arithmetic` those that add, scale, raise, limit or round."""

Arithmetic = Literal["add", "subtract", "scale", "multiply", "divide", "sign", "power", "clamp", "modulo", "round"]
Bending = Literal["exponential", "wave", "cap"]
"""Exponentials and logarithms, sines and cosines, and what bounds scores before a softmax."""

Along = Literal["product", "reduce", "sum", "accumulate", "normalize", "softmax", "convolve", "recurrent", "triangle"]
"""Entries along axes are combined, or cut off by their places. A `sum` reduces or accumulates."""

Attending = Literal["attend", "rotate", "rotary", "counted", "search"]
"""A whole attention; a rotation by positions, and what may be part of one; attentions that count the entries of their
cache from the start, where no mask hides padding; a whole decode loop."""

Weighing = Literal["embed", "rows", "weights"]
"""Takes rows of a table by token; multiplies each row of its first input with weights; may have weights of few bits."""

Making = Literal["constant", "measure", "sizes", "fill", "generate", "range", "random"]
"""Values from something else: from the shape of the input (`sizes`: each), one number in a shape that an input gives,
numbers by the shape or size that an input gives, numbers that count up, noise."""

Control = Literal["branch", "loop", "sequence", "listed", "insert", "element"]
"""Nodes with bodies; what makes a sequence, of all inputs or with one more; what takes an element of one."""

Trait = Literal[Moving, Rounding, Joining, Computing, Arithmetic, Bending, Along, Attending, Weighing, Making, Control]

AxisRule = Literal["", "first", "broadcast", "reduce"]
"""How the axes of the outputs follow from those of the inputs; `kvdoctor.model.operator_axes` has the rules.

`first`: the first output has the axes of the first input; `broadcast`: those of all inputs, broadcast to each other;
`reduce`: those of the first input, without or with one entry along some.
"""


PortPart = Literal["key", "value", "key-value", "conv", "recurrent", ""]
"""What a port holds; empty where only the rest of the graph can tell."""


@record
class CachePorts:
    """The ports of an operator that takes a past and gives a present, or keys and values.

    `pasts` maps an input to the part it holds and the output that carries it on.

    `keys`, `values` and `mask` are further inputs that take keys, values and a mask or bias; `growth` says what becomes
    of the length. `fixed_with` is an input whose presence makes the cache a buffer of fixed size. `roles` are inputs
    whose meaning the operator fixes. `batch` is the axis of the past that counts the batch.
    """

    pasts: dict[int, tuple[PortPart, int]] = field(default_factory=dict)
    growth: Growth = "grow"
    keys: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    mask: tuple[int, ...] = ()
    fixed_with: int | None = None
    roles: dict[int, str] = field(default_factory=dict)
    batch: int = 0


@record
class Operator:
    """What an operator does.

    Attributes:
        traits: What it does in kind.
        axes: The rule for the axes of its outputs; empty where it is the only one of its kind.
        keeps: The inputs whose content the outputs hold.
        buffers: The inputs that may be the buffer which new entries are written into.
        operands: The operands of a product of matrices.
        shapes: The inputs that give a shape or axes, and no content.
        bounds: The inputs that give bounds, sizes of parts, pads or a diagonal, and no content.
        places: The inputs that say where entries are read or written, or at which positions they stand.
        new: The input with the entries that are written into a buffer; 0 where it writes none.
        weight: The input that holds the weights, where one does.
        scale: The input with the scale of quantized weights or activations.
        axis: The default of its attribute `axis`, of operators that join or write along one.
        ports: The ports of an operator that holds a cache, by its domain.
    """

    traits: frozenset[str] = frozenset()
    axes: AxisRule = ""
    keeps: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()
    operands: tuple[int, ...] = ()
    shapes: tuple[int, ...] = ()
    bounds: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    new: int = 0
    weight: int | None = None
    scale: int | None = None
    axis: int | None = None
    ports: Mapping[str, CachePorts] = field(default_factory=dict)

    def takes_content(self, index: int) -> bool:
        """Whether an input has content: it is no shape, axis or place."""
        return index not in (*self.shapes, *self.bounds, *self.places)


UNKNOWN = Operator()
"""An operator that the table does not have: one of somebody's own."""

OPERATORS: dict[str, Operator] = {}
"""Every operator by name."""


def _add(names: str, traits: str = "", axes: AxisRule = "", **facts: Any) -> None:
    """Enter operators of one kind."""
    entry = Operator(frozenset(traits.split()), axes, **facts)
    OPERATORS.update(dict.fromkeys(names.split(), entry))


def _hold(names: str, traits: str, ports: CachePorts, *domains: str) -> None:
    """Enter operators that hold a cache, of ONNX Runtime or of some domains."""
    _add(names, traits, ports=dict.fromkeys(domains or (CONTRIB,), ports))


# What comes out is what went in.
_add("Identity", "copy", "first", keeps=(0,))
_add("Cast CastLike", "cast", "first", keeps=(0,))
_add("Reshape Squeeze Unsqueeze", "view", keeps=(0,), shapes=(1,))
_add("Flatten", "view", keeps=(0,))
_add("Transpose", "permute", keeps=(0,))
_add("Expand Tile", "repeat", keeps=(0,), shapes=(1,))
_add("Slice", "pick", keeps=(0,), bounds=(1, 2, 3, 4))
_add("Split", "pick", keeps=(0,), bounds=(1,))
_add("Gather", "pick embed", keeps=(0,), places=(1,))
_add("GatherND GatherElements", "pick", keeps=(0,), places=(1,))
_add("Compress", "pick", keeps=(0,))
_add("QuantizeLinear", "quantize", "first", keeps=(0,), scale=1)
_add("DynamicQuantizeLinear", "quantize-dynamically dynamic", "first", keeps=(0,))
_add("DequantizeLinear", "dequantize weights", "first", keeps=(0,), weight=0, scale=1)
_add("Dropout", "dropout random", "first", keeps=(0,))
_add("BitCast", "reinterpret")

# Several inputs become one.
_add("Concat", "join", axis=0)
_add("Pad CenterCropPad", "pad", bounds=(1,))
_add("ScatterND", "write", "first", buffers=(0,), places=(1,), new=2)
_add("ScatterElements Scatter", "write", "first", buffers=(0,), places=(1,), new=2, axis=0)
_add(
    "TensorScatter",
    "write",
    "first",
    buffers=(0,),
    places=(2,),
    new=1,
    axis=-2,
    ports={"": CachePorts({0: ("", 0)}, growth="static", roles={2: "write_index"})},
)
_add("Where", "elementwise broadcast select", "broadcast", buffers=(1, 2))

# Each entry is computed from the entries at the same place.
_add("Add Sum", "elementwise broadcast arithmetic add", "broadcast")
_add("Sub", "elementwise broadcast arithmetic subtract", "broadcast")
_add("Mean", "elementwise broadcast arithmetic", "broadcast")
_add("Mul", "elementwise broadcast arithmetic scale multiply", "broadcast")
_add("Div", "elementwise broadcast arithmetic scale divide", "broadcast")
_add("Pow", "elementwise broadcast arithmetic power", "broadcast")
_add("Min Max", "elementwise broadcast arithmetic clamp", "broadcast")
_add("Mod", "elementwise broadcast arithmetic modulo", "broadcast")
_add("Neg Abs Sign", "elementwise arithmetic sign", "first")
_add("Sqrt Reciprocal", "elementwise arithmetic power", "first")
_add("Clip", "elementwise arithmetic clamp", "first")
_add("Floor Ceil Round", "elementwise arithmetic round", "first")
_add("Exp Log", "elementwise exponential", "first")
_add("Sin Cos", "elementwise wave rotary", "first", places=(0,))
_add("Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh Erf", "elementwise", "first")
_add("Relu LeakyRelu ThresholdedRelu Elu Celu Selu Shrink Sigmoid", "elementwise activation", "first")
_add("Tanh", "elementwise activation cap", "first")
_add("HardSigmoid HardSwish Softplus Softsign Gelu Swish Mish", "elementwise activation", "first")
_add("Silu FastGelu QuickGelu BiasGelu", "elementwise activation", "first")
_add("PRelu", "elementwise broadcast activation", "broadcast")
_add("Equal Less LessOrEqual Greater GreaterOrEqual", "elementwise broadcast compare", "broadcast")
_add("IsNaN IsInf", "elementwise", "first")
_add("And Or Xor", "elementwise broadcast logic", "broadcast")
_add("Not", "elementwise logic", "first")
_add("BitwiseAnd BitwiseOr BitwiseXor BitShift", "elementwise broadcast", "broadcast")
_add("BitwiseNot", "elementwise", "first")

# Entries along axes are combined.
_add("MatMul FusedMatMul TransposeMatMul", "product rows", operands=(0, 1), weight=1)
_add("Gemm FusedGemm GemmFastGelu GemmFloat8", "product", operands=(0, 1), weight=1)
_add("MatMulInteger", "product rows weights", operands=(0, 1), weight=1)
_add("MatMulIntegerToFloat", "product weights", operands=(0, 1), weight=1, scale=3)
_add("DynamicQuantizeMatMul", "product rows dynamic weights", operands=(0, 1), weight=1, scale=2)
_add("MatMulNBits MatMulBnb4 MatMulFpQ4", "product rows weights", operands=(0,), weight=1, scale=2)
_add("QLinearMatMul", "product static rows weights", operands=(0, 3), weight=3, scale=4)
_add("QGemm", "product static weights", operands=(0, 3), weight=3, scale=4)
_add("Einsum", "product", operands=(0, 1, 2, 3))
_add("MoE")
_add("QMoE", "weights")
_add("ReduceSum", "reduce sum", "reduce", shapes=(1,))
_add("ReduceMean ReduceMax ReduceMin ReduceProd", "reduce", "reduce", shapes=(1,))
_add("ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare", "reduce", "reduce", shapes=(1,))
_add("CumSum", "accumulate sum", "first", shapes=(1,))
_add("CumProd", "accumulate", "first", shapes=(1,))
_add("LayerNormalization SimplifiedLayerNormalization RMSNormalization", "normalize", "first")
_add("SkipLayerNormalization SkipSimplifiedLayerNormalization", "normalize", "first")
_add("LpNormalization BatchNormalization InstanceNormalization GroupNormalization", "normalize", "first")
_add("MeanVarianceNormalization LRN GroupNorm SkipGroupNorm", "normalize", "first")
_add("Softmax LogSoftmax BiasSoftmax Hardmax", "softmax", "first")
_add("Conv FusedConv NhwcConv ConvInteger", "convolve", weight=1)
_add("QLinearConv", "convolve static", weight=3, scale=4)
_add("ConvTranspose DeformConv", "convolve", weight=1)
_hold("LSTM", "recurrent", CachePorts({5: ("recurrent", 1), 6: ("recurrent", 2)}, growth="replace", batch=1), "")
_hold("GRU RNN", "recurrent", CachePorts({5: ("recurrent", 1)}, growth="replace", batch=1), "")
_add("DynamicQuantizeLSTM", "recurrent dynamic")
_hold("CausalConvWithState", "recurrent", CachePorts({3: ("conv", 1)}, growth="replace"), "", CONTRIB)
_hold("LinearAttention", "recurrent", CachePorts({3: ("recurrent", 1)}, growth="replace"), "", CONTRIB)
_hold("VarlenCausalConvWithState", "recurrent", CachePorts({4: ("conv", 1)}, growth="replace"))
_hold("GatedDeltaNet", "recurrent", CachePorts({6: ("recurrent", 1)}, growth="replace"))
_add("RotaryEmbedding", "rotate rotary", "first", places=(1, 3))
_add("Trilu", "triangle", "first", bounds=(1,))
_add(
    "Attention",
    "attend",
    ports={
        "": CachePorts({4: ("key", 1), 5: ("value", 2)}, keys=(1,), values=(2,), mask=(3,), roles={6: "total_length"}),
        CONTRIB: CachePorts({4: ("key-value", 1)}, mask=(3, 5), fixed_with=6, roles={6: "past_length"}),
    },
)
_hold("QAttention", "attend dynamic weights", CachePorts({8: ("key-value", 1)}, mask=(5,)))
_hold("DecoderAttention", "attend", CachePorts({6: ("key", 1), 7: ("value", 2)}))
_hold(
    "MultiHeadAttention",
    "attend",
    CachePorts(
        {6: ("key", 1), 7: ("value", 2)},
        keys=(1,),
        values=(2,),
        mask=(4, 5),
        fixed_with=8,
        roles={8: "past_length", 9: "beam_input"},
    ),
)
_hold(
    "DecoderMaskedSelfAttention",
    "attend counted",
    CachePorts(
        {4: ("key-value", 1)}, growth="static", mask=(3, 5), roles={6: "past_length", 7: "beam_input", 8: "beam_input"}
    ),
)
_hold(
    "DecoderMaskedMultiHeadAttention",
    "attend counted",
    CachePorts(
        {5: ("key", 1), 6: ("value", 2)},
        growth="static",
        keys=(1,),
        values=(2,),
        mask=(3, 4),
        roles={7: "past_length", 8: "beam_input", 9: "beam_input"},
    ),
)
_hold(
    "GroupQueryAttention",
    "attend rotary counted",
    CachePorts(
        {3: ("key", 1), 4: ("value", 2)},
        growth="shared",
        keys=(1,),
        values=(2,),
        mask=(10,),
        roles={5: "last_index", 6: "total_length", 9: "position_ids", 12: "scale", 13: "scale"},
    ),
)
_hold(
    "SparseAttention",
    "attend rotary counted",
    CachePorts({3: ("key", 1), 4: ("value", 2)}, growth="static", roles={7: "total_length", 8: "total_length"}),
)
_hold(
    "PagedAttention",
    "attend rotary counted",
    CachePorts({3: ("key", 1), 4: ("value", 2)}, growth="paged", roles={6: "past_length", 7: "block_table"}),
)
_add("PackedAttention PackedMultiHeadAttention LongformerAttention", "attend")
_add("EmbedLayerNormalization", "embed", places=(0,))
_add("GatherBlockQuantized", "embed weights", places=(1,), scale=2)

_add("QLinearAdd QLinearMul QLinearSigmoid QLinearLeakyRelu QLinearWhere QLinearReduceMean", "static")
_add("QLinearAveragePool QLinearGlobalAveragePool QEmbedLayerNormalization", "static")
_add("QLinearSoftmax", "softmax static", "first")
_add("QLinearConcat", "static")

# Values come from something else.
_add("Constant", "constant")
_add("Shape", "measure sizes")
_add("Size", "measure")
_add("ConstantOfShape", "fill", shapes=(0,))
_add("EyeLike", "generate")
_add("Range", "range")
_add("RandomNormal RandomUniform", "random")
_add("RandomNormalLike RandomUniformLike Bernoulli", "random", "first")
_add("Multinomial", "random")
_add("HannWindow HammingWindow BlackmanWindow MelWeightMatrix", "generate", shapes=(0,))

# Nodes with bodies, and other kinds of values.
_add("If", "branch")
_add("Loop Scan", "loop")
_add("BeamSearch GreedySearch Sampling WhisperBeamSearch", "search")
_add("SplitToSequence SequenceErase SequenceMap", "sequence")
_add("SequenceConstruct SequenceEmpty", "sequence listed")
_add("SequenceInsert", "sequence insert")
_add("SequenceAt", "element")
_add("Optional OptionalGetElement", "sequence")

# No walk asks what these do.
_add("AffineGrid ArgMax ArgMin AveragePool Col2Im ConcatFromSequence DFT DepthToSpace Det GlobalAveragePool SwiGLU")
_add("GlobalLpPool GlobalMaxPool GridSample ImageDecoder LpPool MaxPool MaxRoiPool MaxUnpool")
_add("NegativeLogLikelihoodLoss NonMaxSuppression NonZero OneHot OptionalHasElement RegexFullMatch Resize")
_add("ReverseSequence RoiAlign STFT SequenceLength SoftmaxCrossEntropyLoss SpaceToDepth StringConcat")
_add("StringNormalizer StringSplit TfIdfVectorizer TopK Unique Upsample")


def operator_of(name: str) -> Operator:
    """The entry of an operator; UNKNOWN where there is none."""
    return OPERATORS.get(name, UNKNOWN)


def has(name: str, *traits: Trait) -> bool:
    """Whether an operator has one of some traits."""
    return name in operators_with(*traits)


def places_of(*traits: Trait) -> dict[str, tuple[int, ...]]:
    """The inputs of operators with one of some traits that say where or at which positions, by operator."""
    return {name: OPERATORS[name].places for name in operators_with(*traits)}


@cache
def operators_with(*traits: Trait) -> frozenset[str]:
    """The operators that have one of some traits."""
    return frozenset(name for name, entry in OPERATORS.items() if not entry.traits.isdisjoint(traits))


def ports_of(domain: str, name: str) -> CachePorts | None:
    """The ports of an operator that holds a cache, or None."""
    return operator_of(name).ports.get(normalize_domain(domain))

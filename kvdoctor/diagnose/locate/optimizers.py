"""The single pass of the optimizer at fault: passes are disabled by name, until one alone makes the step right.

The names are those that `disabled_optimizers` of `InferenceSession` takes. A name that a release does not have is
ignored by it, and no pass is named that was not shown by a run with it disabled. Source: the names of the graph
transformers and rewrite rules in onnxruntime 1.16 to 1.31, `core/optimizer`.
"""

from collections.abc import Callable

from kvdoctor.diagnose.locate.graph_runner import TrialFailed
from kvdoctor.errors import CannotCheck

Holds = Callable[[tuple[str, ...]], bool]
"""Whether the step is right with these passes disabled."""
PASSES: tuple[str, ...] = (
    *("ConstantFolding", "CommonSubexpressionElimination", "ConstantSharing", "ShapeInputMerge", "PropagateCastOps"),
    *("RemoveDuplicateCastTransformer", "CastFloat16Transformer", "CastElimination", "CastChainElimination"),
    *("EliminateIdentity", "EliminateSlice", "EliminateDropout", "UnsqueezeElimination", "ExpandElimination"),
    *("NoopElimination", "PreShapeNodeElimination", "DivMulFusion", "GemmSumFusion", "GemmTransposeFusion"),
    *("NotWhereFusion", "ConvAddFusion", "ConvMulFusion", "ConvBNFusion", "PadFusion", "FuseReluClip"),
    *("ReluQuantRewrite", "ClipQuantRewrite", "MatMul_BatchNormalization_Fusion", "LabelEncoderFusion"),
    *("MatMulAddFusion", "ReshapeFusion", "GatherToSplitFusion", "GatherToSliceFusion", "GemmActivationFusion"),
    *("TransposeOptimizer", "DoubleQDQPairsRemover", "QDQPropagationTransformer", "WeightBiasQuantization"),
    *("EnsureUniqueDQForNodeUnit", "FuseFp16InitializerToFp32NodeTransformer", "LayerNormFusion"),
    *("LayerNormFusionL1", "LayerNormFusionL2", "SimplifiedLayerNormFusion", "SkipLayerNormFusion"),
    *("BiasSkipLayerNormFusion", "EmbedLayerNormFusion", "AttentionFusion", "GroupQueryAttentionFusion"),
    *("GroupQueryAttentionPreNormFusion", "GeluFusion", "GeluFusionL1", "GeluFusionL2", "BiasGeluFusion"),
    *("FastGeluFusion", "QuickGeluFusion", "GeluApproximation", "SwiGluFusion", "BiasSoftmaxFusion"),
    *("BiasDropoutFusion", "MatmulTransposeFusion", "MatMulScaleFusion", "MatMulActivationFusion"),
    *("MatMulIntegerToFloatFusion", "DynamicQuantizeMatMulFusion", "DQMatMulNBitsFusion", "MatMulNBitsFusion"),
    *("MatMulNBitsMlpFusion", "MatMulNBitsQkvFusion", "MatMulNBitsQLoRAFusion", "QDQSelectorActionTransformer"),
    *("QDQS8ToU8Transformer", "QDQFinalCleanupTransformer", "Avx2WeightS8ToU8Transformer", "ConvActivationFusion"),
    *("ConvAddActivationFusion", "NchwcTransformer", "NhwcTransformer"),
)


def find_pass(is_right: Holds) -> str | None:
    """The single pass without which the step is right, found by halving in about seven sessions; None where none is."""
    left = PASSES
    try:
        if not is_right(left):
            return None
        while len(left) > 1:
            first, second = left[: len(left) // 2], left[len(left) // 2 :]
            left = first if is_right(first) else second
        return left[0] if is_right(left) else None
    except (CannotCheck, TrialFailed):
        return None


def name_pass(found: str | None) -> str:
    """The end of a sentence on a level that breaks a step."""
    return f"; it is right with the pass {found} disabled (disabled_optimizers)" if found else ""

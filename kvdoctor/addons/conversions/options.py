"""The options of `convert`: the forms that a decoder can be given."""

from typing import Any

from kvdoctor.choices import (
    ATTENTION_OPERATORS,
    AXIS_NAMES,
    CACHE_TYPES,
    LOGITS_ROWS,
    AttentionOperator,
    AxisNames,
    CacheType,
    Choice,
    Kind,
    LogitsRows,
    Names,
    Numbers,
    Text,
    Whole,
)
from kvdoctor.options import FORM, option
from kvdoctor.records import record


def form(kind: Kind, default: Any, meaning: str, **more: Any) -> Any:
    """An option of `convert`."""
    return option(kind, default, meaning, ("convert",), group=FORM, **more)


@record
class ConvertChoices:
    """The forms that are asked for."""

    layout: str | None = form(
        Text("the name of a layout", "NAME"),
        None,
        "Convert to this layout: genai, merged, pair, optimum, optimum-pair, shared, single (docs/layouts.md).",
    )
    axes: AxisNames = form(Choice.of(AXIS_NAMES), "kept", "Keep the names of open axes, or give them readable ones.")
    ir_version: int | None = form(Whole.of(4), None, "Change the IR version to N.")
    opset: int | None = form(Whole.of(7, 40), None, "Change the opset to N.", unset="the opset of PATH")
    attention: AttentionOperator | None = form(
        Choice.of(ATTENTION_OPERATORS),
        None,
        "Compute each causal attention by GroupQueryAttention of ONNX Runtime, whose cache may be one buffer, or that "
        "operator by plain ones (docs/conversions.md).",
        unset="as PATH does",
    )
    cache: str | None = form(
        Text("static, static=N or growing", "static[=N]|growing"),
        None,
        "Make a cache that grows a buffer of N tokens, written in place, or such a buffer a cache that grows; growing "
        "also gives a cache to a decoder without one (docs/conversions.md).",
        unset="as PATH has it",
    )
    cache_type: CacheType | None = form(
        Choice.of(CACHE_TYPES),
        None,
        "Carry the cache in a narrower type; with --dry-run, show what that costs (docs/conversions.md).",
        unset="as PATH has it",
    )
    exact_layers: tuple[int, ...] = form(
        Numbers(takes="numbers of layers, as in 0,11", metavar="LAYERS"),
        (),
        "With --cache-type: the layers whose cache stays as it is, separated by commas.",
    )
    logits: LogitsRows | None = form(
        Choice.of(LOGITS_ROWS),
        None,
        "Compute the logits of the last token alone, or of as many as the loop asks for (docs/conversions.md).",
        unset="those of every new token",
    )
    sizes: tuple[str, ...] = form(
        Names("sizes, as in batch=1,new=1,past=128", "SIZES"),
        (),
        "Fix sizes: batch=N, new=N, past=N, encoder=N, separated by commas (docs/conversions.md).",
    )

    @property
    def has_layout(self) -> bool:
        """Whether other files, names or versions are asked for."""
        return self.layout is not None or self.axes == "readable" or self.has_versions

    @property
    def has_versions(self) -> bool:
        """Whether an IR version or an opset is asked for by number."""
        return self.ir_version is not None or self.opset is not None


STRUCTS = (ConvertChoices,)

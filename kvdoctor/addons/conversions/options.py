"""The options of `convert`: the forms that a decoder can be given."""

from kvdoctor.choices import (
    ATTENTIONS,
    AXIS_NAMES,
    CACHE_TYPES,
    LOGITS_ROWS,
    Attentions,
    AxisNames,
    CacheType,
    Choice,
    LogitsRows,
    Names,
    Numbers,
    Text,
    Whole,
)
from kvdoctor.options import FORM, option
from kvdoctor.records import record


@record
class ConvertChoices:
    """The forms that are asked for."""

    layout: str | None = option(
        Text("the name of a layout", "NAME"),
        None,
        "Convert to this layout: genai, merged, pair, optimum, optimum-pair, shared, single (docs/layouts.md).",
        ("convert",),
        group=FORM,
    )
    axes: AxisNames = option(
        Choice.of(AXIS_NAMES),
        "kept",
        "Keep the names of open axes, or give them readable ones.",
        ("convert",),
        group=FORM,
    )
    ir_version: int | None = option(Whole.of(4), None, "Change the IR version to N.", ("convert",), group=FORM)
    opset: int | None = option(
        Whole.of(7, 40),
        None,
        "Change the opset to N.",
        ("convert",),
        unset="the opset of PATH",
        group=FORM,
    )
    attentions: Attentions | None = option(
        Choice.of(ATTENTIONS),
        None,
        "Return the weights of the cross-attention, for word timestamps (docs/conversions.md).",
        ("convert",),
        unset="as PATH does",
        group=FORM,
    )
    cache: str | None = option(
        Text("static, static=N or growing", "static[=N]|growing"),
        None,
        "Make a cache that grows a buffer of N tokens, written in place, or such a buffer a cache that grows; growing "
        "also gives a cache to a decoder without one (docs/conversions.md).",
        ("convert",),
        unset="as PATH has it",
        group=FORM,
    )
    cache_type: CacheType | None = option(
        Choice.of(CACHE_TYPES),
        None,
        "Carry the cache in a narrower type; with --dry-run, show what that costs (docs/conversions.md).",
        ("convert",),
        unset="as PATH has it",
        group=FORM,
    )
    exact_layers: tuple[int, ...] = option(
        Numbers(takes="numbers of layers, as in 0,11", metavar="LAYERS"),
        (),
        "With --cache-type: the layers whose cache stays as it is, separated by commas.",
        ("convert",),
        group=FORM,
    )
    logits: LogitsRows | None = option(
        Choice.of(LOGITS_ROWS),
        None,
        "Compute the logits of the last token alone, or of as many as the loop asks for (docs/conversions.md).",
        ("convert",),
        unset="those of every new token",
        group=FORM,
    )
    sizes: tuple[str, ...] = option(
        Names("sizes, as in batch=1,new=1,past=128", "SIZES"),
        (),
        "Fix sizes: batch=N, new=N, past=N, separated by commas (docs/conversions.md).",
        ("convert",),
        group=FORM,
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

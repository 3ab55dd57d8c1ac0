"""Go, with github.com/yalue/onnxruntime_go."""

from kvdoctor.loops import plan_questions
from kvdoctor.loops.language import Language
from kvdoctor.loops.languages.go import expressions, needs

LANGUAGE = Language(
    name="go",
    title="Go",
    files={
        "go.mod": "go.mod.j2",
        "go.sum": "go.sum.j2",
        "main.go": "main.go.j2",
        "run.go": "run.go.j2",
        "probe.go": "probe.go.j2",
        "decoder/decoder.go": "decoder.go.j2",
        "decoder/trace.go": "trace.go.j2",
    },
    filters={
        "literal": expressions.literal,
        "type": expressions.go_type,
        "element": expressions.element,
        "dims": expressions.dims,
        "put": expressions.put,
        "shape": expressions.shape,
        "source_axis": plan_questions.source_axis,
        "used": expressions.used,
        **{
            question.__name__: question
            for question in (
                needs.inputs,
                needs.axes,
                needs.sizes,
                needs.carry,
                needs.scalars,
                needs.scalar_types,
                needs.bound,
                needs.slot_room,
                needs.logits_room,
                needs.reserved,
                needs.reserved_first,
                needs.reserved_words,
                needs.encoder_room,
                needs.encoder_reads,
                needs.embed_room,
                needs.embed_reads,
                needs.uses,
                needs.by_length,
                needs.types,
                needs.cache_types,
                needs.zero_types,
                needs.widths,
                needs.trace_widths,
            )
        },
    },
    build=(("go", "build"),),
    run=("./decode",),
    tools=("go", "gcc"),
    environment={"ONNXRUNTIME_LIB": "{onnxruntime}"},
    refuses=needs.refuses,
)

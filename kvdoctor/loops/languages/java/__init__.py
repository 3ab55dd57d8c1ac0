"""Java 17, with the binding of Microsoft (`com.microsoft.onnxruntime`); its jar holds the runtime."""

from kvdoctor.loops.language import Language
from kvdoctor.loops.languages.java import expressions

CLASSES = ("Arguments", "Decoder", "Main", "Probe", "Providers", "Run")

LANGUAGE = Language(
    name="java",
    title="Java",
    files={
        "pom.xml": "pom.xml.j2",
        **{f"src/main/java/decodeloop/{name}.java": f"{name}.java.j2" for name in CLASSES},
    },
    filters={
        "literal": expressions.literal,
        "assigned": expressions.assigned,
        "put": expressions.put,
        "encoder_run": expressions.encoder_run,
        "embed_run": expressions.embed_run,
        "embedded": expressions.embedded,
        "kept": expressions.kept,
        "value": expressions.value,
        "javadoc": expressions.javadoc,
        "layout_record": expressions.layout_record,
        "layouts": expressions.layouts,
        "readers": expressions.readers,
        "slots": expressions.slots,
        "locals": expressions.local_variables,
    },
    build=(("mvn", "-q", "package"),),
    run=("java", "-jar", "target/decode-loop.jar"),
    tools=("java", "mvn"),
    refuses=expressions.refuses,
)

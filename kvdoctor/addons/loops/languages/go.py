"""Go, with github.com/yalue/onnxruntime_go."""

from kvdoctor.addons.loops.languages import Language
from kvdoctor.addons.loops.plan import refuses_in_c

LANGUAGE = Language(
    name="go",
    title="Go",
    build=(("go", "build", "-o", ".", "./cmd/decode"),),
    run=("./decode",),
    tools=("go", "gcc"),
    environment={"ONNXRUNTIME_LIB": "{onnxruntime}"},
    refuses=refuses_in_c,
)

"""C# with Microsoft.ML.OnnxRuntime; values are passed on as `OrtValue`."""

from kvdoctor.loops import plan_questions
from kvdoctor.loops.language import Language
from kvdoctor.loops.languages.csharp import expressions

CLASSES = ("Arguments", "Decoder", "Probe", "Program", "Providers", "Run")

LANGUAGE = Language(
    name="csharp",
    title="C#",
    files={f"{name}.cs": f"{name}.cs.j2" for name in CLASSES} | {"decode.csproj": "decode.csproj.j2"},
    filters={
        "literal": expressions.literal,
        "element": expressions.element,
        "element_type": expressions.element_type,
        "element_size": expressions.element_size,
        "value": expressions.value,
        "source_type": expressions.source_type,
        "carry": expressions.carry,
        "first_shape": expressions.first_shape,
        "locals": expressions.local_names,
        "needs_states": expressions.needs_states,
        "is_fed_zeros": plan_questions.is_fed_zeros,
        "fills": plan_questions.fills,
        "follows": plan_questions.follows,
        "source_axis": plan_questions.source_axis,
        "takes_other_outputs": plan_questions.takes_other_outputs,
    },
    build=(("dotnet", "build", "--configuration", "Release", "--nologo", "--verbosity", "quiet"),),
    run=("dotnet", "bin/Release/net8.0/decode.dll"),
    tools=("dotnet",),
    refuses=expressions.refuses,
)

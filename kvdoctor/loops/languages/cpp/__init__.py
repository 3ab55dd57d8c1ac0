"""C++ with the runtime's own C++ interface; values are passed on by their handles."""

from kvdoctor.loops import plan_questions
from kvdoctor.loops.language import Language
from kvdoctor.loops.languages.cpp import expressions, headers

LANGUAGE = Language(
    name="cpp",
    title="C++",
    files={
        "decoder.hpp": "decoder.hpp.j2",
        "decoder.cpp": "decoder.cpp.j2",
        "trace.hpp": "trace.hpp.j2",
        "trace.cpp": "trace.cpp.j2",
        "run.hpp": "run.hpp.j2",
        "run.cpp": "run.cpp.j2",
        "probe.hpp": "probe.hpp.j2",
        "probe.cpp": "probe.cpp.j2",
        "main.cpp": "main.cpp.j2",
        "CMakeLists.txt": "CMakeLists.txt.j2",
        ".clang-format": "clang-format.j2",
    },
    filters={
        "literal": expressions.literal,
        "path": expressions.path,
        "element": expressions.element,
        "onnx_type": expressions.onnx_type,
        "shape": expressions.shape,
        "value": expressions.value,
        "source_type": expressions.source_type,
        "is_fed_zeros": plan_questions.is_fed_zeros,
        "fills": plan_questions.fills,
        "first_shape": expressions.first_shape,
        "first_size": expressions.first_size,
        "axis": expressions.axis,
        "carry": expressions.carry,
        "locals": expressions.local_names,
        "follows": plan_questions.follows,
        "needs_states": expressions.needs_states,
        "source_axis": plan_questions.source_axis,
        "takes_other_outputs": plan_questions.takes_other_outputs,
    },
    build=(
        ("cmake", "-S", ".", "-B", "build", "-DCMAKE_BUILD_TYPE=Release"),
        ("cmake", "--build", "build"),
    ),
    run=("build/decode",),
    tools=("cmake", "c++"),
    environment={"ONNXRUNTIME_LIB": "{onnxruntime}"},
    prepare=headers.prepare,
    refuses=expressions.refuses,
)

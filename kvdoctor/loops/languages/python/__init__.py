"""Python, with onnxruntime's values passed on as they are (`run_with_ort_values`)."""

import sys

from kvdoctor.loops.language import Language
from kvdoctor.loops.languages.python import expressions

LANGUAGE = Language(
    name="python",
    title="Python",
    files={
        "loop.py": "loop.py.j2",
        "main.py": "main.py.j2",
        "pyproject.toml": "pyproject.toml.j2",
    },
    filters={
        "literal": expressions.literal,
        "dtype": expressions.dtype,
        "shape": expressions.shape,
        "value": expressions.value,
        "used": expressions.used,
    },
    build=(),
    run=(sys.executable, "main.py"),  # where kvdoctor is installed, so are the packages that the program needs
    tools=(),
)

"""The protobuf classes of ONNX, without the rest of the onnx package.

`import onnx` also loads numpy, a C++ library and its helpers: three quarters of the time of an inspection, for nothing
that it uses. The generated module of the same package, `onnx/onnx_ml_pb2.py`, is all that is needed to read a model; it
is loaded under its own name, so that a later `import onnx` finds it and everyone shares the same classes.
"""

import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx import (
        AttributeProto,
        FunctionProto,
        GraphProto,
        ModelProto,
        NodeProto,
        TensorProto,
        TensorShapeProto,
        ValueInfoProto,
    )

GENERATED = "onnx.onnx_ml_pb2"
DIST_INFO = re.compile(r"onnx-([0-9][0-9A-Za-z.+!]*)\.dist-info")


def _generated() -> Any:
    """Load the generated module alone; where that does not work, with the package around it."""
    if GENERATED in sys.modules:
        return sys.modules[GENERATED]
    package = importlib.util.find_spec("onnx")
    file = Path(package.origin).with_name("onnx_ml_pb2.py") if package and package.origin else None
    spec = importlib.util.spec_from_file_location(GENERATED, file) if file and file.is_file() else None
    if spec is None or spec.loader is None:
        return importlib.import_module(GENERATED)
    module = importlib.util.module_from_spec(spec)
    sys.modules[GENERATED] = module
    spec.loader.exec_module(module)
    return module


def onnx_version() -> str:
    """The version of the onnx package, without loading it.

    The folder `onnx-VERSION.dist-info` next to the package has it in its name. `importlib.metadata` would say the same,
    but loads the email package for it, a tenth of the time of an inspection.
    """
    package = importlib.util.find_spec("onnx")
    folders = Path(package.origin).parent.parent.iterdir() if package and package.origin else ()
    versions = [match[1] for folder in folders if (match := DIST_INFO.fullmatch(folder.name))]
    if len(versions) == 1:
        return versions[0]
    from importlib import metadata

    return metadata.version("onnx")


__all__ = [
    "AttributeProto",
    "FunctionProto",
    "GraphProto",
    "ModelProto",
    "NodeProto",
    "TensorProto",
    "TensorShapeProto",
    "ValueInfoProto",
    "onnx_version",
]
if not TYPE_CHECKING:
    globals().update({name: getattr(_generated(), name) for name in __all__ if name.endswith("Proto")})

"""Where a node of the graph comes from in the source of a PyTorch model: its module, and the line that computes it.

The dynamo exporter of torch.onnx writes metadata: `pkg.torch.onnx.name_scopes` lists the modules around the operation,
`pkg.torch.onnx.class_hierarchy` their classes and `pkg.torch.onnx.stack_trace` the Python calls, the innermost last.
TorchScript and the model builder write the path of the module into the name of the node (`/model/layers.0/mlp/Mul`). A
node that a tool made has neither. All of it is data of the model: what does not have that form, or is far too long, is
left out. Source: torch 2.13, torch/onnx/_internal/exporter/_core.py, `_set_node_metadata`.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

from kvdoctor.findings import NodeSource
from kvdoctor.model.proto import NodeProto
from kvdoctor.model.traverse import all_nodes
from kvdoctor.model.view import GraphView

NAME_SCOPES = "pkg.torch.onnx.name_scopes"
CLASS_HIERARCHY = "pkg.torch.onnx.class_hierarchy"
STACK_TRACE = "pkg.torch.onnx.stack_trace"
MOST_METADATA = 64 << 10
"""Characters of a value that is read: the trace of a deep model has a few thousand."""
LONGEST_NAME = 200
"""Characters of a module, a class, a file or a function; none of a real model has as many."""
SHOWN_PARTS = 2
"""Last parts of a path that are shown: `llama/modeling_llama.py`."""
FRAME = re.compile(r'^ *File "(?P<path>[^"\n]+)", line (?P<line>\d{1,7}), in (?P<function>\S+)', re.MULTILINE)
INSTALLED = ("site-packages", "dist-packages")


def find_sources(nodes: Iterable[str], views: Iterable[GraphView]) -> tuple[NodeSource, ...]:
    """The sources of nodes, by name or first value, in the first graph that has them and where all agree."""
    views, found = list(views), list[NodeSource]()
    for name in dict.fromkeys(nodes):
        named = next(filter(None, ([node for node in all_nodes(v.model) if name_of(node) == name] for v in views)), [])
        places = {source_of(node) for node in named}
        if len(places) == 1 and (source := places.pop()) is not None:
            found.append(source)
    return tuple(found)


def name_of(node: NodeProto) -> str:
    """The name of a node, or the first value that it makes."""
    return str(node.name) or next(iter(node.output), "")


def source_of(node: NodeProto) -> NodeSource | None:
    """The module and the line of a node; None where neither is known."""
    metadata = _read_metadata(node)
    module, line = module_of(node), _find_line(metadata.get(STACK_TRACE, ""))
    if module is None and line is None:
        return None
    classes = _read_list(metadata.get(CLASS_HIERARCHY, "")) if module is not None else []
    # Of the innermost module, without the module of Python that defines it.
    kind = _fitting(classes[-2].rpartition(".")[2]) or None if len(classes) > 1 else None
    return NodeSource(name_of(node), module, kind, line)


def module_of(node: NodeProto) -> str | None:
    """The dotted path of the module that a node stands in, empty for the model itself; None where nothing tells."""
    metadata = _read_metadata(node)
    if NAME_SCOPES in metadata:
        names = _read_list(metadata[NAME_SCOPES])
        # The last entry is the operation itself; nodes outside of the model begin with the name of a hook.
        return _fitting(names[-2]) if len(names) > 1 and not names[0] else None
    parts = str(node.name).split("/")
    return _fitting(".".join(parts[1:-1])) if len(parts) > 2 and not parts[0] else None


def _read_metadata(node: NodeProto) -> Mapping[str, str]:
    """The values of a node's metadata that are read; onnx before 1.16 does not know the field."""
    wanted = (NAME_SCOPES, CLASS_HIERARCHY, STACK_TRACE)
    entries = [entry for entry in getattr(node, "metadata_props", ()) if entry.key in wanted]
    return {str(entry.key): str(entry.value) for entry in entries}


def _read_list(text: str) -> list[str]:
    """The texts of a list as Python writes it; empty for anything else."""
    if len(text) > MOST_METADATA:
        return []
    try:
        listed = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return listed if isinstance(listed, list) and all(isinstance(name, str) for name in listed) else []


def _find_line(trace: str) -> str | None:
    """`llama/modeling_llama.py:245 forward`: the innermost call that is none of PyTorch itself; None without one."""
    if len(trace) > MOST_METADATA:
        return None
    for frame in reversed(list(FRAME.finditer(trace))):
        parts = [part for part in re.split(r"[\\/]", frame["path"]) if part]
        # Installed, or as PyTorch names its own files, without a folder before them.
        own = any(before in INSTALLED and part == "torch" for before, part in pairwise(parts))
        if parts and not own and (parts[0] != "torch" or len(parts) == 1):
            return _fitting(f"{'/'.join(parts[-SHOWN_PARTS:])}:{frame['line']} {frame['function']}")
    return None


def _fitting(text: str) -> str | None:
    return text if len(text) <= LONGEST_NAME else None

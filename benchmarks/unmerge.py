"""Makes a merged decoder of any size, and converts it to a pair.

python benchmarks/unmerge.py make FOLDER        turns the model.onnx of models.py there into a merged decoder
python benchmarks/unmerge.py kvdoctor FOLDER OUT
python benchmarks/unmerge.py onnx FOLDER OUT    onnx.load and onnx.save of the same file, nothing more
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

MERGED = "decoder_model_merged.onnx"


def make(folder: str) -> None:
    """Put the graph into one branch of an `If`, and a copy without its past into the other; weights are shared."""
    import onnx
    from onnx import TensorProto, helper

    path = Path(folder, "model.onnx")
    model = onnx.load(str(path), load_external_data=False)
    graph, branches = model.graph, []
    for name in ("with_past", "no_past"):
        nodes = []
        for node in graph.node:
            joined = name == "no_past" and node.op_type == "Concat" and node.input[0].startswith("past_key_values.")
            nodes.append(helper.make_node("Identity", [node.input[1]], node.output, node.name) if joined else node)
        branches.append(helper.make_graph(nodes, name, [], graph.output))
    switch = helper.make_node(
        "If",
        ["use_cache_branch"],
        [value.name for value in graph.output],
        "optimum::if",
        then_branch=branches[0],
        else_branch=branches[1],
    )
    del graph.node[:]
    graph.node.append(switch)
    graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
    path.with_name(MERGED).write_bytes(model.SerializeToString())
    path.unlink()


def by_kvdoctor(folder: str, out: str) -> None:
    """Convert it as `convert --layout pair` does, without the diagnoses before and after."""
    from kvdoctor.addons.conversions.layouts.registry import LayoutSource, load
    from kvdoctor.analysis.contract_reader import read_contract
    from kvdoctor.analysis.model_folder import open_folder

    found = open_folder(folder)
    stack = found.stacks[0]
    pair = next(layout for layout in load() if layout.name == "pair")
    pair.make(LayoutSource(found.root, stack, read_contract(stack, found.side_cars))).write(found.root, Path(out))


def by_onnx(folder: str, out: str) -> None:
    """What any script with the onnx package does to change a model."""
    import onnx

    beside = any(Path(folder).glob("*_data"))
    Path(out).mkdir()
    model = onnx.load(str(Path(folder, MERGED)))
    onnx.save(model, str(Path(out, MERGED)), save_as_external_data=beside, location="weights")


if __name__ == "__main__":
    for made in sys.argv[3:]:
        shutil.rmtree(made, ignore_errors=True)
    commands: dict[str, Callable[..., None]] = {"make": make, "kvdoctor": by_kvdoctor, "onnx": by_onnx}
    commands[sys.argv[1]](*sys.argv[2:])

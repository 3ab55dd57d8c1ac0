"""Mutated models: no command ends with a traceback, hangs, changes the model or leaves anything."""

from pathlib import Path

import onnx
import pytest
from support.bad_models import as_json, call
from support.sampling import thinned
from support.text_fixtures import load_all

from evidence.mutations.mutate import CONVERSIONS, try_mutation

CASES = [
    *(("inspect", number) for number in range(400)),
    *(("step-test", 20_000 + number) for number in range(60)),
    *(("re-export", 40_000 + number) for number in range(30)),
    *((command, 60_000 + number) for number in range(10) for command in ("contract", "diff", "loop", "repro")),
    *(("convert", 50_000 + number) for number in range(3 * len(CONVERSIONS))),
]

WENT_WRONG = [("inspect", 200_658)]  # an Add of one input


@pytest.mark.parametrize(("command", "number"), [*WENT_WRONG, *thinned(CASES, 40, 8)])
def test_a_mutated_model_is_answered(command: str, number: int) -> None:
    """`python -m evidence.mutations.mutate inspect 10000` tries as many."""
    assert try_mutation(number, command) is None


def test_the_declared_length_of_a_list_of_numbers_costs_nothing(tmp_path: Path) -> None:
    """A Slice whose ends are declared as 2^63 - 1 numbers, and are one."""
    folder = load_all()["layout-mamba-states-healthy"].write(tmp_path / "model")
    (file,) = folder.glob("*.onnx")
    model = onnx.load(file)
    ends = {node.input[2] for node in model.graph.node if node.op_type == "Slice"}
    lists = [one for one in model.graph.initializer if one.name in ends]
    for one in lists:
        one.dims[0] = (1 << 63) - 1
    assert lists
    file.write_bytes(model.SerializeToString())
    assert call("inspect", folder).code in (0, 1, 3)


@pytest.mark.parametrize(("offset", "length"), [("-1", "-2147483648"), ("x", "4"), (str(1 << 62), "4")])
def test_weights_that_point_out_of_their_own_file(tmp_path: Path, offset: str, length: str) -> None:
    """A repair of something else leaves the entry as it is, and the finding stays."""
    folder = load_all()["cache-dtype-mismatch"].write(tmp_path / "model")
    file = folder / "model.onnx"
    model = onnx.load(file)
    (weight,) = (one for one in model.graph.initializer if one.name == "w_logits")
    weight.data_location, weight.raw_data = onnx.TensorProto.EXTERNAL, b""
    for key, value in (("location", file.name), ("offset", offset), ("length", length)):
        weight.external_data.add(key=key, value=value)
    file.write_bytes(model.SerializeToString())
    assert "external-data-missing" in as_json("re-export", folder, "-o", tmp_path / "out").findings

"""A cache that is one sequence of tensors: its elements are slots; no graph with tensors instead is written."""

from pathlib import Path

import pytest
from onnx import TensorProto, helper
from support.command_line import run
from support.text_fixtures import load_all

from kvdoctor.model.sequence_ports import MOST_ELEMENTS, take_apart


@pytest.mark.parametrize(
    ("fixture", "command", "code"),
    [
        ("sequence-cache-healthy", ("convert", "--logits", "last", "--dry-run"), 2),
        ("sequence-cache-healthy", ("loop", "--language", "rust", "-o", "never"), 3),
        ("layers-swapped-sequence", ("re-export", "--dry-run"), 1),
    ],
)
def test_no_graph_with_other_ports_is_written(
    fixture: str, command: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    model = load_all()[fixture].write(tmp_path / "model")
    done = run(command[0], model, *command[1:], cwd=tmp_path)
    assert "are sequences of tensors" in done.stdout + done.stderr
    assert done.returncode == code


@pytest.mark.parametrize("inserted", [1, MOST_ELEMENTS + 8])
def test_elements_of_a_chain_are_counted_up_to_a_limit(inserted: int) -> None:
    chain = [helper.make_node("SequenceInsert", [f"s{n}", "x"], [f"s{n + 1}"]) for n in range(inserted)]
    kind = helper.make_tensor_sequence_value_info(f"s{inserted}", TensorProto.FLOAT, [1])
    nodes = [helper.make_node("SequenceEmpty", [], ["s0"]), *chain]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])], [kind])
    taken = take_apart(helper.make_model(graph))
    assert taken == ((f"s{inserted}",) if inserted == 1 else ())


def test_a_chain_in_a_circle_stays_a_sequence() -> None:
    node = helper.make_node("SequenceInsert", ["s", "x"], ["s"])
    kind = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [1])
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])], [kind])
    assert take_apart(helper.make_model(graph)) == ()

"""Paged caches: the blocks that our loop gives out, and what it says of a graph that it cannot call."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from support.text_fixtures import compile_text, load_all

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.decode.experiments.paged_loop import BlockPool, NewTokens, feed_paged, read_paged_inputs
from kvdoctor.diagnose.pipeline import step_test

FIXTURES = load_all()


def change(folder: Path, name: str, **others: str) -> Path:
    """A fixture with other inputs: `old=new`, a name, or a number of the first size in place of a name."""
    text = FIXTURES[name].files["model.onnx"]
    for old, new in others.items():
        assert old in text
        text = text.replace(old, new)
    onnx.save(compile_text(text), folder / "model.onnx")
    return folder


def contract_of(folder: Path) -> object:
    found = open_folder(str(folder))
    return read_contract(found.stacks[0], found.side_cars)


def test_the_tokens_of_two_sequences_stand_in_one_axis(tmp_path: Path) -> None:
    contract = contract_of(FIXTURES["layout-paged-packed-healthy"].write(tmp_path))
    inputs = read_paged_inputs(contract)  # type: ignore[arg-type]
    assert inputs.takes_several
    assert not inputs.unknown
    feeds = feed_paged(inputs, [NewTokens((5, 2), 3, (7, 8)), NewTokens((9,), 0, (6,))], 4)
    assert {name: value.tolist() for name, value in feeds.items()} == {
        "input_ids": [7, 8, 6],
        "position_ids": [3, 4, 0],
        "slot_mapping": [23, 8, 36],
        "block_tables": [[5, 2], [9, 9]],
        "cumulative_sequence_lengths": [0, 2, 3],
    }
    assert all(value.dtype == np.int64 for value in feeds.values())


def test_blocks_are_given_once_and_shared_on_request() -> None:
    pool = BlockPool(4, 12)
    first = pool.take(11)
    second = pool.take(11, first[:1])
    assert second[0] == first[0]
    assert len({*first, *second}) == len(first) + len(second) - 1 == 5
    assert list(first) != sorted(first) or list(second) != sorted(second)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"seq_lens": "context_lens"}, "'context_lens'"),
        ({"seq_lens": "max_seq_len"}, "'max_seq_len'"),
        ({"int64[num_tokens] slot_mapping": "int64[1] slot_mapping"}, "'slot_mapping' has a fixed size"),
        ({"int64[num_sequences] seq_lens": "int64[4] seq_lens"}, "'seq_lens' has a fixed size"),
    ],
)
def test_an_input_of_unknown_meaning_is_never_healthy(others: dict[str, str], reason: str, tmp_path: Path) -> None:
    report = step_test(str(change(tmp_path, "layout-paged-pool-healthy", **others)))
    assert (report.verdict, report.runs) == ("incomplete", ())
    assert reason in report.not_checked[0].reason


@pytest.mark.parametrize(
    "others",
    [
        {"[num_sequences, max_blocks]": "[1, 8]", "int64[num_sequences] seq_lens": "int64[1] seq_lens"},
        {"num_blocks": "9"},
    ],
)
def test_fixed_sizes_that_fit_are_kept(others: dict[str, str], tmp_path: Path) -> None:
    report = step_test(str(change(tmp_path, "layout-paged-pool-healthy", **others)))
    assert report.verdict == "healthy", report.not_checked


def test_an_operator_without_a_kernel_is_said_to_be_not_run(tmp_path: Path) -> None:
    report = step_test(str(FIXTURES["layout-paged-healthy"].write(tmp_path)))
    assert (report.verdict, report.runs) == ("incomplete", ())
    assert "PagedAttention has no kernel for the CPU" in report.not_checked[0].reason

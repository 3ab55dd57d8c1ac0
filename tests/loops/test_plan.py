"""What a plan says of a model, and what the expressions of a language make of it."""

import ast

import pytest
from hypothesis import given
from support import text_fixtures
from support.hostile import any_text
from support.isolated import EXPORTS

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.loops.languages.python.expressions import literal, shape
from kvdoctor.loops.make_plan import make_plan
from kvdoctor.loops.plan import LoopPlan
from kvdoctor.loops.project import comment


def plan_of(path: str) -> LoopPlan:
    folder = open_folder(path)
    return make_plan(read_contract(folder.stacks[0], folder.side_cars), "model")


def test_the_plan_of_a_merged_decoder_holds_the_cross_attention_cache() -> None:
    plan = plan_of(str(EXPORTS / "marian-4.57.6"))
    assert plan.encode is not None
    assert plan.encode.states == "last_hidden_state"
    assert [slot.present for slot in plan.slots if "encoder" in slot.past] == [None] * 4
    assert [slot.carry for slot in plan.slots if "decoder" in slot.past] == ["feed-back"] * 4
    (switch,) = (one for one in plan.decode.inputs if one.name == "use_cache_branch")
    assert (switch.rule, switch.count) == ("number", "cached")
    assert "present.0.encoder.key" in plan.prefill.outputs
    assert "present.0.encoder.key" not in plan.decode.outputs


def test_the_plan_of_a_decoder_only_model_counts_positions_and_pads() -> None:
    plan = plan_of(str(EXPORTS / "llama-gqa"))
    assert plan.one_graph
    assert plan.pads
    assert plan.rewinds
    assert plan.source is None
    assert {one.rule for one in plan.decode.inputs} == {"tokens", "attention-mask", "positions"}


@pytest.mark.parametrize(
    ("name", "carry"), [("layout-delta-appended-healthy", "append"), ("layout-delta-healthy", "write")]
)
def test_entries_alone_are_put_behind_the_others(name: str, carry: str, tmp_path: object) -> None:
    plan = plan_of(str(text_fixtures.load_all()[name].write(tmp_path)))  # type: ignore[arg-type]
    assert {slot.carry for slot in plan.slots} == {carry}
    assert plan.copies


@given(any_text)
def test_any_name_is_a_literal_of_python(text: str) -> None:
    written = literal(text)
    assert ast.literal_eval(written) == text
    assert written.isascii()
    assert "\n" not in written


@given(any_text)
def test_a_name_in_a_comment_ends_no_comment(text: str) -> None:
    written = comment(text)
    assert written.isascii()
    assert len(written) <= 80
    assert not set(written) & set("\n\r*/\\\"'`{}<>")


def test_a_shape_is_a_tuple_of_its_own_axes() -> None:
    assert shape((1,)) == "(1,)"
    assert shape(("batch", 3, "new")) == "(batch, 3, new)"
    assert shape(("fixed",)) == "(1,)"

"""What a plan says of a model."""

import pytest
from support import text_fixtures
from support.loop_programs import plan_of

from kvdoctor.addons.loops.contract_file import find_generation_ids
from kvdoctor.analysis.configs import SideCars


def test_the_plan_of_a_merged_decoder_holds_the_cross_attention_cache() -> None:
    plan = plan_of("marian-4.57.6")
    assert plan.encode is not None
    assert [take.value for take in plan.encode.takes] == ["encoder last_hidden_state"]
    assert [slot.present for slot in plan.slots if "encoder" in slot.past] == [None] * 4
    assert [slot.carry for slot in plan.slots if "decoder" in slot.past] == ["feed-back"] * 4
    switches = [one for call in (plan.prefill, plan.decode) for one in call.inputs if one.name == "use_cache_branch"]
    assert [one.inside for one in switches] == [{"one": 0}, {"one": 1}]
    assert "present.0.encoder.key" in plan.prefill.outputs
    assert "present.0.encoder.key" not in plan.decode.outputs


def test_the_plan_of_a_decoder_only_model_counts_positions_and_pads() -> None:
    plan = plan_of("llama-gqa")
    assert plan.prefill == plan.decode
    assert plan.pads
    assert plan.rewinds
    assert plan.source is None
    tokens, mask, positions = plan.decode.inputs
    assert tokens.copy == "tokens"
    assert (mask.begin, mask.end, mask.inside, mask.outside) == ({"padding": 1}, {"total": 1}, {"one": 1}, 0)
    assert (positions.inside, positions.step) == ({"past": 1, "padding": -1}, 1)


@pytest.mark.parametrize(
    ("name", "carry"), [("layout-delta-appended", "append"), ("layout-delta", "write"), ("prepended", "feed-back")]
)
def test_entries_come_to_their_place(name: str, carry: str, tmp_path: object) -> None:
    plan = plan_of(text_fixtures.load_all()[f"{name}-healthy"].write(tmp_path))
    assert {slot.carry for slot in plan.slots} == {carry}
    assert plan.rewinds == (carry == "append")
    assert {slot.copies for slot in plan.slots} == {carry != "feed-back"}


def test_ids_are_those_of_the_configs_that_the_model_has() -> None:
    """What is no id of the vocabulary is left out, and generation_config.json goes before config.json."""
    generation = {
        "eos_token_id": [2, 999, True, "x"],
        "decoder_start_token_id": None,
        "suppress_tokens": list(range(5000)),
        "forced_decoder_ids": [[1, 7], [2, None], ["x", 3], 4, [1]],
    }
    config = {
        "eos_token_id": 5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "forced_bos_token_id": 9,
        "suppress_tokens": [-1, 8],
    }
    found = find_generation_ids(SideCars(config, generation=generation), plan_of("llama-gqa"))
    assert found == {"start": [1], "end": [2], "suppress": [8], "begin_suppress": [], "forced": [[1, 7]]}

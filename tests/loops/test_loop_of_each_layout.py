"""Which models have a loop, and what is said where they have none. The programs run in test_programs.py."""

from pathlib import Path

import pytest
from support import text_fixtures
from support.isolated import EXPORTS
from support.loop_programs import written
from support.sampling import sampled

NO_LOOP = {
    "bare-attention-contrib-healthy": "not a decoder",
    "bare-attention-past-healthy": "not a decoder",
    "bare-grouped-query-attention-healthy": "not a decoder",
    "bare-multihead-attention-healthy": "not a decoder",
    "caller-transducer-healthy": "of the kind 'condition'",
    "decoder-only-embeds-language-healthy": "embeddings",
    "decoder-only-token-ids-healthy": "token ids in place of logits",
    "encoders-two-widths-healthy": "two encoders",
    "layout-aihub-trocr-healthy": "no logits",
    "layout-beam-search-healthy": "contains the whole loop",
    "layout-beam-search-plain-healthy": "contains the whole loop",
    "layout-beam-search-t5-healthy": "contains the whole loop",
    "layout-canary-healthy": "no call without a cache one token is clearly likelier",
    "layout-cross-given-healthy": "made by an encoder that is not there",
    "layout-ep-context-healthy": "compiled for a device",
    "layout-four-tokens-healthy": "exactly 4 new tokens",
    "layout-genai-pipeline-healthy": "pipeline of 2 files",
    "layout-greedy-search-healthy": "contains the whole loop",
    "layout-llama2-msft-layers-healthy": "embeddings",
    "layout-llama2-msft-stacked-healthy": "embeddings",
    "layout-llama2-msft-stacked-whole-healthy": "embeddings",
    "layout-mask-switch-healthy": "token ids in place of logits",
    "layout-paged-healthy": "block",
    "layout-paged-packed-healthy": "block",
    "layout-paged-pool-healthy": "block",
    "layout-pinto-whisper-healthy": "another length",
    "layout-pipeline-stage-healthy": "embeddings",
    "layout-pipeline-two-stages-healthy": "pipeline of 2 files",
    "layout-qnn-window-healthy": "not a decoder",
    "layout-shift-left-healthy": "rotary_cos",
    "layout-shift-left-prompt-healthy": "4 new tokens only",
    "layout-transducer-joint-healthy": "of the kind 'condition'",
    "layout-transducer-lstm-healthy": "not a decoder",
    "layout-transducer-stateless-healthy": "no decoder",
    "layout-voice-activity-healthy": "not a decoder",
    "layout-wenet-stream-healthy": "not a decoder",
    "readings-ids-and-embeddings-healthy": "embeddings",
    "readings-last-ids-healthy": "prev_ids",
    "rotation-given-healthy": "token_states",
    "sequence-cache-healthy": "sequences of tensors",
}
"""Healthy models without a loop, and a part of the reason that is given."""

FIXTURES = text_fixtures.load_all()
HEALTHY = [name for name, fixture in FIXTURES.items() if fixture.healthy and fixture.platform is None]
LOOPS = [name for name in HEALTHY if name not in NO_LOOP]


@pytest.mark.parametrize("name", sampled(NO_LOOP, 5))
def test_what_has_no_loop_says_why(name: str, tmp_path: Path) -> None:
    made = written(FIXTURES[name].write(tmp_path))
    assert made.exit_code == 3
    assert NO_LOOP[name] in str(made.reason or made.unchecked)


@pytest.mark.parametrize("name", sampled(["marian-4.57.6", "llama-gqa", "whisper", "gpt2", "t5", "marian-4.46.3"], 3))
def test_an_export_is_decoded_sick_or_not(name: str) -> None:
    made = written(EXPORTS / name)
    assert (made.exit_code, made.reason) == (0, None)
    padded = ["2-sequences-of-unequal-length"] if name in ("llama-gqa", "gpt2") else []
    runs = ["one-sequence", "2-sequences", *padded, "rewind", "reorder", "one-sequence-again"]
    assert [result.vector for result in made.results] == runs
    kept = [remark for remark in made.remarks if "feeding every present back" in remark]
    assert bool(kept) is (name in ("marian-4.57.6", "whisper", "t5", "marian-4.46.3"))


@pytest.mark.parametrize("name", ["past-ignored", "step-fails", "worker-died"])
def test_a_model_that_no_loop_can_decode_right_gets_none(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = written(FIXTURES[name].write(tmp_path / "model"), out=out)
    assert made.exit_code == 1
    assert "kvdoctor step-test" in str(made.reason)
    assert not out.exists()

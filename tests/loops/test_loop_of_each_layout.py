"""Every layout that is driven gets a loop whose program prints the tokens of calls without a cache."""

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
    "decoder-only-embeds-language-healthy": "embeddings",
    "layout-aihub-trocr-healthy": "no logits",
    "layout-beam-search-healthy": "contains the whole loop",
    "layout-beam-search-plain-healthy": "contains the whole loop",
    "layout-beam-search-t5-healthy": "contains the whole loop",
    "layout-canary-healthy": "length of the encoder's input",
    "layout-cross-given-healthy": "made by an encoder that is not there",
    "layout-decoder-masked-mha-healthy": "beam_input",
    "layout-ep-context-healthy": "compiled for a device",
    "layout-four-tokens-healthy": "exactly 4 new tokens",
    "layout-genai-pipeline-healthy": "pipeline of 2 files",
    "layout-greedy-search-healthy": "contains the whole loop",
    "layout-llama2-msft-layers-healthy": "embeddings",
    "layout-llama2-msft-stacked-healthy": "embeddings",
    "layout-llama2-msft-stacked-whole-healthy": "embeddings",
    "layout-ort-whisper-shared-healthy": "beam_input",
    "layout-paged-healthy": "block",
    "layout-paged-packed-healthy": "block",
    "layout-paged-pool-healthy": "block",
    "layout-pinto-whisper-healthy": "another length",
    "layout-pipeline-stage-healthy": "embeddings",
    "layout-pipeline-two-stages-healthy": "pipeline of 2 files",
    "layout-qnn-window-healthy": "not a decoder",
    "layout-shift-left-healthy": "rotary_cos",
    "layout-shift-left-prompt-healthy": "4 new tokens only",
    "layout-transducer-joint-healthy": "not a decoder",
    "layout-transducer-lstm-healthy": "not a decoder",
    "layout-transducer-stateless-healthy": "no decoder",
    "layout-voice-activity-healthy": "not a decoder",
    "layout-wenet-stream-healthy": "not a decoder",
    "layout-window-in-mask-healthy": "a window of fixed length",
}
"""Healthy models without a loop, and a part of the reason that is given."""

FIXTURES = text_fixtures.load_all()
HEALTHY = [name for name, fixture in FIXTURES.items() if fixture.healthy and fixture.platform is None]
LOOPS = [name for name in HEALTHY if name not in NO_LOOP]


# The slow tests of probes run the same programs of all layouts.
@pytest.mark.parametrize("name", sampled(LOOPS, 6, pytest.mark.exhaustive))
def test_a_layout_is_decoded(name: str, tmp_path: Path) -> None:
    made = written(FIXTURES[name].write(tmp_path))
    assert made.reason is None
    assert made.results
    assert not [result.problem for result in made.results if result.problem]


@pytest.mark.parametrize("name", sampled(NO_LOOP, 5))
def test_what_has_no_loop_says_why(name: str, tmp_path: Path) -> None:
    made = written(FIXTURES[name].write(tmp_path))
    assert made.exit_code == 3
    assert NO_LOOP[name] in str(made.reason)


@pytest.mark.parametrize("name", sampled(["marian-4.57.6", "llama-gqa", "whisper", "gpt2", "t5", "marian-4.46.3"], 3))
def test_an_export_is_decoded_sick_or_not(name: str) -> None:
    made = written(EXPORTS / name)
    assert (made.exit_code, made.reason) == (0, None)
    padded = ["2 sequences of unequal length"] if name in ("llama-gqa", "gpt2") else []
    assert [result.vector for result in made.results] == ["one sequence", "2 sequences", *padded]
    kept = [remark for remark in made.remarks if "feeding every present back" in remark]
    assert bool(kept) is (name in ("marian-4.57.6", "whisper", "t5", "marian-4.46.3"))


@pytest.mark.parametrize("name", ["past-ignored", "step-fails", "worker-died"])
def test_a_model_that_no_loop_can_decode_right_gets_none(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = written(FIXTURES[name].write(tmp_path / "model"), out=out)
    assert made.exit_code == 1
    assert "kvdoctor step-test" in str(made.reason)
    assert not out.exists()

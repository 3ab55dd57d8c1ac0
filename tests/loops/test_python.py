"""The library of the program in Python: several models in one process, all logits, sampling, cancelling, failures."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.loop_programs import Materials, materials
from test_programs import scratch

from kvdoctor.addons.loops.project import PROGRAMS

assert scratch  # a fixture
LIBRARY = PROGRAMS / "python"


@pytest.fixture(scope="module")
def library() -> Iterator[ModuleType]:
    """The package as it is written, imported."""
    sys.path.insert(0, str(LIBRARY))
    try:
        import decode_loop
        import decode_loop.beam

        yield decode_loop
    finally:
        sys.path.remove(str(LIBRARY))


def opened(library: ModuleType, made: Materials, **given: Any) -> Any:
    return library.Decoder(made.model, made.folder / "contract.json", **given)


PROMPT = [[5, 6, 7]]


def test_two_models_decode_in_one_process(library: ModuleType, scratch: Path) -> None:
    llama, marian = (materials(name, scratch) for name in ("llama-gqa", "marian-4.46.3"))
    alone = opened(library, llama).generate(PROMPT, 6)
    one, other, again = opened(library, llama), opened(library, marian), opened(library, llama)
    other.encode(np.array([[5, 6, 7, 8]]))
    steps = zip(one.stream(PROMPT, 6), other.stream([[3]], 6), again.stream([[9, 8]], 6), strict=True)
    assert [tokens[0] for tokens, _, _ in steps] == alone[0]


def test_the_logits_of_all_new_tokens_are_those_of_single_steps(library: ModuleType, scratch: Path) -> None:
    decoder = opened(library, materials("llama-gqa", scratch))
    decoder.prefill(PROMPT)
    single = [decoder.step([[token]])[0] for token in (8, 9, 10)]
    decoder.rewind(3)
    last = decoder.step([[8, 9, 10]])
    np.testing.assert_allclose(decoder.logits[0], single, atol=1e-5)
    np.testing.assert_allclose(last[0], single[-1], atol=1e-5)


def test_an_iterator_that_is_left_and_a_callback_that_throws_leave_the_decoder_usable(
    library: ModuleType, scratch: Path
) -> None:
    decoder = opened(library, materials("llama-gqa", scratch))
    whole = decoder.generate(PROMPT, 6)[0]
    for tokens in decoder.stream(PROMPT, 6):
        if tokens == [whole[1]]:
            break
    assert decoder.length == 4
    assert int(decoder.step([[whole[1]]]).argmax()) == whole[2]

    def throws(_logits: Any, so_far: list[int]) -> int:
        raise RuntimeError(f"after {so_far}")

    with pytest.raises(RuntimeError, match=r"after \[5, 6, 7\]"):
        decoder.generate(PROMPT, choose=throws)
    assert decoder.generate(PROMPT, 6)[0] == whole


def test_a_second_turn_goes_on_from_the_cache(library: ModuleType, scratch: Path) -> None:
    decoder = opened(library, materials("llama-gqa", scratch))
    first = decoder.generate(PROMPT, 3)[0]
    second = decoder.generate([[first[-1], 8, 9]], 3, continued=True)[0]
    assert second == decoder.generate([[*PROMPT[0], *first, 8, 9]], 3)[0]


def test_a_step_that_fails_changes_nothing(library: ModuleType, scratch: Path) -> None:
    decoder = opened(library, materials("llama-gqa", scratch))
    first = decoder.prefill(PROMPT)
    due = decoder.step([[int(first.argmax())]])
    decoder.rewind(1)
    for wrong in ([[128]], [[-1]], [[1], [2]], [[]], [[1.5]], [[1] * 100], []):
        with pytest.raises(ValueError, match=r"token|sequence"):
            decoder.step(wrong)
    with pytest.raises(ValueError, match="cannot forget 3 tokens"):
        decoder.rewind(3)
    np.testing.assert_allclose(decoder.step([[int(first.argmax())]]), due, atol=1e-5)


def test_sampling_draws_from_the_tokens_that_it_is_given(library: ModuleType) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))

    def drawn(**given: Any) -> set[int]:
        choose = library.Sampling(**{"temperature": 1, **given}).chooser()
        return {choose(logits, [0]) for _ in range(200)}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(temperature=0) == drawn(top_k=1) == drawn(top_p=0.4) == drawn(min_p=0.7) == {0}
    assert drawn(top_k=2) == drawn(top_p=0.7) == drawn(min_p=0.5) == {0, 1}
    assert drawn(temperature=0, repetition_penalty=9.0) == {1}
    with pytest.raises(ValueError, match="top_p is above 0"):
        library.Sampling(top_p=0)


def test_the_beam_search_is_that_over_whole_sequences(library: ModuleType, scratch: Path) -> None:
    """Each beam, scored by a call without its cache, has the scores that the search found with reordered rows."""
    decoder = opened(library, materials("gpt2", scratch))
    found = library.beam.beam_search(decoder, PROMPT[0], beams=3, most=5)
    greedy = decoder.generate(PROMPT, 5)[0]

    def score(tokens: list[int]) -> float:
        decoder.prefill([PROMPT[0] + tokens[:-1]])
        logits = decoder.logits[0, len(PROMPT[0]) - 1 :]
        logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return float(sum(row[token] for row, token in zip(logits, tokens, strict=True)))

    assert len(found) == 5
    assert score(found) >= score(greedy) - 1e-4


def test_a_buffer_is_written_in_place(library: ModuleType, scratch: Path) -> None:
    decoder = opened(library, materials("layout-delta-healthy", scratch))
    decoder.prefill([[5]])
    before = dict(decoder._cache.values)
    decoder.step([[6]])
    written = [take.value for take in decoder.contract.calls["decode"][0].takes if take.carry == "write"]
    assert written
    assert all(decoder._cache.values[past] is before[past] for past in written)


@pytest.mark.slow
def test_the_package_is_typed_strictly(tmp_path: Path) -> None:
    """In a folder of its own, as a project has it."""
    project = shutil.copytree(LIBRARY, tmp_path / "project")
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "decode_loop", "main.py"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

"""Closeness of logits: what passes, what fails, and what no number is given for."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdoctor.decode.parity import compare, judge, measurable, slot_difference
from kvdoctor.decode.tolerances import TOLERANCES

RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((2, 3, 16)).astype(np.float32)


def describe_difference(fraction: float) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    """The logits with one entry moved by a fraction of their spread."""
    moved = LOGITS.astype(np.float64)
    moved[1, 2, 5] += fraction * float(LOGITS.astype(np.float64).std(axis=-1).mean())
    return moved


def test_the_noise_of_the_model_at_hand_moves_the_line() -> None:
    expected = LOGITS.astype(np.float64)
    difference = compare(describe_difference(0.5), expected)
    assert judge(difference, TOLERANCES["dynamic-quantization"]) == "fail"
    assert judge(difference, TOLERANCES["dynamic-quantization"], noise=0.2) == "ambiguous"
    assert judge(difference, TOLERANCES["dynamic-quantization"], noise=0.4) == "pass"


def test_equal_logits_have_no_difference() -> None:
    difference = compare(LOGITS, LOGITS)
    assert (difference.max_abs, difference.relative, difference.same_top1) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("exactness", sorted(TOLERANCES))
def test_the_table_decides(exactness: str) -> None:
    table = TOLERANCES[exactness]
    expected = LOGITS.astype(np.float64)
    assert judge(compare(describe_difference(table.passes * 0.9), expected), table) == "pass"
    assert judge(compare(describe_difference((table.passes + table.fails) / 2), expected), table) == "ambiguous"
    assert judge(compare(describe_difference(table.fails * 1.1), expected), table) == "fail"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_undefined_logit_is_a_failure(bad: float) -> None:
    broken = LOGITS.copy()
    broken[0, 0, 0] = bad
    difference = compare(broken, LOGITS)
    assert not difference.finite
    assert measurable(broken) == (bad == -np.inf)
    assert judge(difference, TOLERANCES["float"]) == "fail"


MASKS = {
    "-inf": lambda logits: np.where(WORDS < 3, -np.inf, logits),
    "the least": lambda logits: np.where(WORDS < 3, np.finfo(np.float32).min, logits),
    "put in their place": lambda logits: np.where(WORDS < 3, -1e9, logits),
    "added": lambda logits: logits + np.where(WORDS < 3, np.float32(-1e9), np.float32(0)),
    "of float16": lambda logits: np.where(WORDS < 12, -65504.0, logits),
    "small": lambda logits: logits + np.where(WORDS < 3, np.float32(-1e4), np.float32(0)),
    "two": lambda logits: np.where(WORDS < 3, -1e9, np.where(WORDS < 6, -1e4, logits)),
}
WORDS = np.arange(16)


@pytest.mark.parametrize("mask", MASKS)
def test_masked_words_hide_nothing(mask: str) -> None:
    masked = MASKS[mask](LOGITS).astype(np.float32)
    for off, verdict in ((1e-6, "pass"), (2e-3, "fail"), (0.5, "fail")):
        moved = MASKS[mask](LOGITS * (1 + off)).astype(np.float32)
        assert judge(compare(moved, masked), TOLERANCES["float"]) == verdict
    assert judge(compare(LOGITS, masked), TOLERANCES["float"]) == "fail"
    assert judge(compare(masked, LOGITS), TOLERANCES["float"]) == "fail"
    assert measurable(masked)


def test_a_model_that_is_sure_of_a_few_words_masks_none() -> None:
    """Else the spread would be that of the few alone, and the rounding of their large numbers no longer small."""
    sure = np.where(WORDS < 12, LOGITS, 60 + 0.01 * LOGITS).astype(np.float32)
    assert compare(np.nextafter(sure, np.float32(100)), sure).relative < 1e-6


@given(st.integers(2, 60), st.integers(0, 2**32 - 1))
def test_without_a_mask_every_word_counts(words: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    expected = rng.standard_normal((1, 2, words)) * 10 ** rng.uniform(-3, 3)
    moved = expected.copy()
    moved[..., rng.integers(words)] += expected.std()
    assert judge(compare(moved, expected), TOLERANCES["float"]) == "fail"


def test_vocabulary_masked_on_both_sides_is_no_fault() -> None:
    masked = LOGITS.copy()
    masked[..., 3] = -np.inf
    assert judge(compare(masked, masked), TOLERANCES["float"]) == "pass"


def test_all_masked_is_a_fault() -> None:
    nothing = np.full_like(LOGITS, -np.inf)
    assert not compare(nothing, nothing).finite


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        compare(LOGITS[:, :1], LOGITS)


def test_a_near_tie_is_told_from_a_changed_word() -> None:
    expected = np.array([[[1.0, 1.0 - 1e-6, 0.0, -1.0]]])
    swapped = np.array([[[1.0 - 1e-6, 1.0, 0.0, -1.0]]])
    assert compare(swapped, expected).near_ties == 1.0
    assert compare(expected[..., ::-1], expected).near_ties == 0.0


@given(st.floats(1e-3, 1e3), st.floats(-100, 100))
def test_scale_and_shift_do_not_change_the_verdict(scale: float, shift: float) -> None:
    actual, expected = describe_difference(0.01), LOGITS.astype(np.float64)
    plain = compare(actual, expected).relative
    assert compare(actual * scale + shift, expected * scale + shift).relative == pytest.approx(plain, rel=1e-2)


def probabilities(logits: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> "np.ndarray[Any, Any]":
    """Softmax as everyone writes it."""
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


@given(st.integers(0, 1000), st.sampled_from([1e-4, 1e-2, 1.0, 10.0]))
def test_the_divergence_is_that_of_the_definition(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    want, gap = rng.standard_normal((2, 3, 16)) * 3, rng.standard_normal((2, 3, 16)) * scale
    got, difference = want + gap, compare(want + gap, want)
    p, q = probabilities(want), probabilities(got)
    assert difference.kl == pytest.approx((p * np.log(p / q)).sum(-1).max(), rel=1e-2)


def test_what_softmax_does_not_see_is_no_divergence() -> None:
    difference = compare(LOGITS.astype(np.float64) + 100, LOGITS.astype(np.float64))
    assert (difference.kl, difference.same_top1) == (0, 1)
    assert difference.relative > 1


def test_a_wide_vocabulary_is_compared_as_a_narrow_one() -> None:
    rng = np.random.default_rng(3)
    want = rng.standard_normal((1, 3, 70_000)).astype(np.float32)
    got = want + rng.standard_normal(want.shape).astype(np.float32)
    rows = [compare(got[:, i : i + 1], want[:, i : i + 1]) for i in range(3)]
    together = compare(got, want)
    assert together.max_abs == max(row.max_abs for row in rows)
    assert together.kl == max(row.kl for row in rows)


def test_slots_are_held_against_their_own_spread() -> None:
    keys = RNG.standard_normal((1, 4, 5, 8)).astype(np.float32) * 100
    moved = keys + np.float32(0.001) * keys.std()
    assert slot_difference(moved, keys) == pytest.approx(1e-3, rel=2e-2)
    assert slot_difference(keys, keys) == 0.0
    assert slot_difference(keys[:, :, 1:], keys) is None
    assert slot_difference(np.full_like(keys, np.nan), keys) is None

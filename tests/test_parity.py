"""Closeness of logits: what passes, what fails, and what no number is given for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdoctor.parity import TOLERANCES, compare, judge, spread

RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((2, 3, 16)).astype(np.float32)


def off_by(fraction: float) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    """The logits with one entry moved by a fraction of their spread."""
    moved = LOGITS.astype(np.float64)
    moved[1, 2, 5] += fraction * spread(LOGITS.astype(np.float64))
    return moved


def test_the_noise_of_the_model_at_hand_moves_the_line() -> None:
    expected = LOGITS.astype(np.float64)
    difference = compare(off_by(0.5), expected)
    assert judge(difference, "dynamic-quantisation") == "fail"
    assert judge(difference, "dynamic-quantisation", noise=0.2) == "ambiguous"
    assert judge(difference, "dynamic-quantisation", noise=0.4) == "pass"


def test_equal_logits_have_no_difference() -> None:
    difference = compare(LOGITS, LOGITS)
    assert (difference.max_abs, difference.relative, difference.same_top1) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("exactness", sorted(TOLERANCES))
def test_the_table_decides(exactness: str) -> None:
    table = TOLERANCES[exactness]
    expected = LOGITS.astype(np.float64)
    assert judge(compare(off_by(table.passes * 0.9), expected), exactness) == "pass"
    assert judge(compare(off_by((table.passes + table.fails) / 2), expected), exactness) == "ambiguous"
    assert judge(compare(off_by(table.fails * 1.1), expected), exactness) == "fail"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_undefined_logit_is_a_failure(bad: float) -> None:
    broken = LOGITS.copy()
    broken[0, 0, 0] = bad
    difference = compare(broken, LOGITS)
    assert not difference.finite
    assert judge(difference, "float") == "fail"


def test_vocabulary_masked_on_both_sides_is_no_fault() -> None:
    masked = LOGITS.copy()
    masked[..., 3] = -np.inf
    assert judge(compare(masked, masked), "float") == "pass"


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
    actual, expected = off_by(0.01), LOGITS.astype(np.float64)
    plain = compare(actual, expected).relative
    assert compare(actual * scale + shift, expected * scale + shift).relative == pytest.approx(plain, rel=1e-2)

"""Masks that differ from head to head, in an abstract run: one number is broadcast along the heads of other values."""

from collections.abc import Sequence

from kvdoctor.analysis.abstract_run.values import Abstract


def differs_by_head(values: Sequence[Abstract], shape: tuple[int, ...]) -> bool:
    """Whether exact numbers differ along an axis of heads, along which another value is broadcast.

    Heads whose windows differ see the same in a short sequence: there they would be one number again, and in a longer
    one as many as there are heads. Heads stand before the rows and columns of the scores.
    """
    for value in values:
        data = value.data
        if not value.exact or data is None or data.ndim < 3 or data.size < 2:
            continue
        for back in range(3, data.ndim + 1):
            if data.shape[-back] > 1 and any(
                other.data is not None
                and other.data.ndim >= back
                and other.data.shape[-back] == 1 < (other.shape or shape)[-back]
                and not other.exact
                for other in values
            ):
                first = data[(slice(None),) * (data.ndim - back) + (slice(0, 1),)]
                if not bool((data == first).all()):
                    return True
    return False

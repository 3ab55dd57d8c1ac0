"""What a person reads of a runtime's message: its end says what is wrong; no cause is decided by it."""

import re

SHORTEST, LONGEST = 30, 150


def quote_error(error: str) -> str:
    """The end of a runtime's message, which says what is wrong; paths and names of functions stand before it."""
    sentences = [part for part in re.split(r"(?<=[.:]) ", error.strip()) if part]
    quoted = ""
    while sentences and len(quoted) < SHORTEST:
        quoted = f"{sentences.pop()} {quoted}".strip()
    return quoted if len(quoted) <= LONGEST else f"... {quoted[4 - LONGEST :]}"

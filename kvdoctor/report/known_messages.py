"""Looks up an error message in the tables of faq.md: what decides between its causes, and the command.

The file is also the page docs/faq.md (`python docs/make_faq.py`).
"""

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

from kvdoctor.records import record

SAME = "the same"
"""Begins the first column of a row whose message is that of the row above."""
ROW = re.compile(r"^\| (?P<seen>.+?) \| (?P<question>.+?) \| (?P<answer>.+?) \|$", re.MULTILINE)
QUOTED = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\[([^\]]+)\]\((\w+\.md)\)")
LEAST_QUOTE = 12
"""Characters that a text must have to be looked for within a message."""
LEAST_WORD, MOST_BY_WORDS = 4, 3


@record
class KnownMessage:
    """A row of faq.md: what is `seen`, the `messages` quoted in it, the `question` that decides, and the `answer`."""

    seen: str
    question: str
    answer: str
    messages: tuple[str, ...]


def read_page() -> str:
    """The whole of faq.md."""
    return files("kvdoctor.report").joinpath("faq.md").read_text(encoding="utf-8")


@cache
def list_messages() -> tuple[KnownMessage, ...]:
    """All rows, those of one message with the message of the first."""
    found: list[KnownMessage] = []
    for row in ROW.finditer(read_page()):
        seen, question, answer = row["seen"], row["question"], LINK.sub(r"\1 (docs/\2)", row["answer"])
        if set(seen) == {"-"} or seen == "you see":
            continue
        messages = tuple(QUOTED.findall(seen))
        if seen.startswith(SAME) and found:
            messages = found[-1].messages
            seen = ", ".join(f"`{message}`" for message in messages) + seen.removeprefix(SAME)
        found.append(KnownMessage(seen, question, answer, messages))
    return tuple(found)


def find_messages(text: str) -> tuple[KnownMessage, ...]:
    """The rows whose message is in a text, or that a text is part of; else the few that share most of its words."""
    wanted = _normalize(text)
    rows = tuple(row for row in list_messages() if any(_contains(wanted, message) for message in row.messages))
    return rows or tuple(_find_by_words(wanted))


def _contains(text: str, message: str) -> bool:
    """Whether a text holds a message, whatever its numbers are, or is a part of it."""
    known = _normalize(message)
    pattern = re.sub(r"\\?-?(?:\d+|\bn\b)", r"-?\\d+", re.escape(known))
    return re.search(pattern, text) is not None or (len(text) >= LEAST_QUOTE and text in known)


def _find_by_words(text: str) -> Iterator[KnownMessage]:
    words = _list_words(text)
    shares = [(len(words & _list_words(_normalize(f"{row.seen} {row.question}"))), row) for row in list_messages()]
    best = max((share for share, _ in shares), default=0)
    if words and best >= min(2, len(re.findall(r"\w+", text))):
        yield from [row for share, row in shares if share == best][:MOST_BY_WORDS]


def _list_words(text: str) -> set[str]:
    return {word for word in re.findall(r"\w+", text) if len(word) >= LEAST_WORD}


def _normalize(text: str) -> str:
    return " ".join(text.lower().split())

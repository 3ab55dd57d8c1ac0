"""Names from a model are data: made harmless for the place where they are printed."""

import re
import unicodedata

BIDI = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C}
LONGEST = 400


def printable(text: str) -> str:
    """One line without control, format or direction characters, which are written as escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if _harmless(c) else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}" for c in text)


def shortened(text: str, longest: int = LONGEST) -> str:
    """A text of bearable length: the middle of a longer one is left out."""
    if len(text) <= longest:
        return text
    half = (longest - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def markdown(text: str) -> str:
    """Text in which Markdown and HTML see nothing to act on, links and mentions included."""
    return re.sub(r"([\\`*_{}\[\]#!|<>&~@]|:(?=//))", r"\\\1", printable(text))


def code(text: str) -> str:
    """A Markdown code span that the text cannot end, also inside a table."""
    text = printable(text).replace("|", "\u00a6")
    fence = "`" * (max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}" if text else ""


def _harmless(character: str) -> bool:
    if ord(character) in BIDI:
        return False
    return character == " " or (character.isprintable() and unicodedata.category(character)[0] != "C")

"""Names from a model are data: they are escaped for the format in which they are printed."""

import re
import unicodedata

BIDI = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C}
COMMANDS = (
    *("add-mask", "add-matcher", "add-path", "debug", "echo", "endgroup", "error", "group", "notice", "remove-matcher"),
    *("save-state", "set-env", "set-output", "stop-commands", "warning"),
)
OBEYED = re.compile(rf"^(?=\s*::)\s*:|:(?=:\s*(?:{'|'.join(COMMANDS)}))|#(?=#[a-z]*\[)", re.IGNORECASE)
"""Commands to a runner of workflows: `::error::` where a line begins, also one that a terminal broke, and
`##[error]`, `##vso[...]` anywhere in a line (GitHub's runner, ActionCommand; Azure Pipelines, logging commands)."""

LONGEST = 400
LONGEST_QUOTED = 1200


def printable(text: str) -> str:
    """One line without control, format or direction characters, nor commands to a runner (`OBEYED`): escaped."""
    if not (text.isascii() and text.isprintable()):
        hidden = {c for c in set(text) - {" "} if not c.isprintable() or unicodedata.category(c)[0] == "C"}
        text = "".join(_escaped(c) if c in hidden or ord(c) in BIDI else c for c in text)
    return OBEYED.sub(lambda found: found[0][:-1] + _escaped(found[0][-1]), text)


def shortened(text: str, longest: int = LONGEST) -> str:
    """A text of at most `longest` characters: the middle of a longer one is left out."""
    if len(text) <= longest:
        return text
    half = (longest - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def cut(text: str, longest: int) -> str:
    """The beginning of a text, cut at a blank if it has one: a fact on the first screen, of which -v has all."""
    if len(text) <= longest:
        return text
    words = text[: longest - 4].rpartition(" ")[0]
    return f"{words} ..." if len(words) > longest // 2 else shortened(text, longest)


def markdown(text: str) -> str:
    """Text without any Markdown or HTML, also for GitHub, which looks for links in the rendered text once more.

    A mention, an address or the number of an issue is found in what was rendered, where a backslash is gone: a comment
    between its characters hides it. Math is found before.
    """
    text = printable(shortened(text, LONGEST_QUOTED))
    text = re.sub(r"([\\`*_{}\[\]#!|<>&~@$^]|:(?=//)|/(?=/)|(?<=www)\.)", r"\\\1", text)
    text = re.sub(r"(\\[@#]|\bGH-)(?=\w)", r"\1<!-- -->", text, flags=re.IGNORECASE)
    return re.sub(r"^(\s*)([-+=])(?=[\s=-]|$)|^(\s*\d+)([.)])(?=\s|$)", r"\1\3\\\2\4", text)


def code(text: str) -> str:
    """A Markdown code span that the text cannot end, also inside a table."""
    text = printable(shortened(text, LONGEST_QUOTED)).replace("|", "\u00a6")
    fence = "`" * (max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}" if text else ""


def _escaped(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"

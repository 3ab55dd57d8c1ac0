"""Words that pages and messages do not use: metaphors and private words, for which the field has a term."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
SHOWN = ("diagnose/checks", "decode/experiments", "repair/repairs", "repair/conversions")
"""Packages whose docstrings are text of pages and of `explain`."""
BETTER = {
    r"mend(s|ed|ing)?": "fix, fixed in",
    r"(?<!# )twins?": "counterpart, copy",
    r"held against": "compared with",
    r"elsewhere": "at other positions, in another file",
    r"lack(s|ed|ing)?": "does not have, does not contain",
    r"the pasts": "the past inputs",
    r"yardstick": "reference",
    r"here and there": "locally and on the other machine",
    r"spread": "standard deviation, range",
    r"sick": "faulty",
    r"the rooms?": "packages",
    r"no pass": "not a pass",
    r"no power": "control failed",
    r"sound": "audio, valid",
    r"rounded otherwise": "quantized differently",
    r"tables? of tokens": "embedding table",
    r"lies? apart": "differ, vary",
    r"(is|are) said": "is reported",
}
WORDS = re.compile(r"\b(?:" + "|".join(BETTER) + r")\b", re.IGNORECASE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_terms_of_the_field(page: Path) -> None:
    found = [
        f"{page.name}:{number}: {match[0]!r} (better: {_better(match[0])})"
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        for match in WORDS.finditer(re.sub(r"`[^`]*`|\]\([^)]*\)|^\| [\w-]+(?= \|)", "", line))
    ]
    assert not found, "\n".join(found)


def test_messages_and_explanations_use_the_terms_of_the_field() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r} (better: {_better(match[0])})"
        for path in sorted((ROOT / "kvdoctor").rglob("*.py"))
        for line, text in _texts(path)
        for match in WORDS.finditer(text)
    ]
    assert not found, "\n".join(found)


def _better(word: str) -> str:
    return next(better for pattern, better in BETTER.items() if re.fullmatch(pattern, word, re.IGNORECASE))


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """The string literals of several words, and the docstrings that are shown, each with its line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    shown = path.relative_to(ROOT / "kvdoctor").as_posix().startswith(SHOWN)
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    documented = (tree, *(node for node in tree.body if isinstance(node, ast.FunctionDef) and _is_check(node)))
    for node in documented if shown else ():
        yield 1, ast.get_docstring(node) or ""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " in node.value
            and id(node) not in bare
        ):
            yield node.lineno, node.value


def _is_check(node: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Call) and getattr(one.func, "id", "") == "check" for one in node.decorator_list)

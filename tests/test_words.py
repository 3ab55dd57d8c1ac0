"""Words that pages and messages do not use: metaphors and private words, for which the field has a term."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "evidence" / "README.md",
]
SHOWN = ("diagnose/checks", "decode/experiments", "repair/repairs", "addons/conversions/graphs")
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
REFUSED = {
    r"behind": "after",
    r"beside": "next to, with",
    r"told": "known, said",
    r"kept": "retained, held, stored",
    r"alike": "equally, both",
    r"words?(?! (?:timestamps|boundar))": "text, token, name",
    r"turned": "transposed, reversed",
    r"spoilt": "corrupted",
    r"asked about": "requested",
    r"as far as": "where",
}
"""What the package and pages written by hand do not use either. Other pages are made of the package's texts."""
NOT_YET: tuple[str, ...] = ()
"""Packages whose texts still use such words."""
MADE = ("architecture", "checks", "experiments", "repairs", "known-issues", "faq", "CHANGELOG")
RECORDED = {"the repair was tried, but the copy was not proved and is not kept"}
"""Messages that recorded results contain (evidence/health)."""
WORDS = re.compile(r"\b(?:" + "|".join(BETTER) + r")\b", re.IGNORECASE)
PLAIN = re.compile(r"\b(?:" + "|".join(REFUSED).replace(" ", r"\s+") + r")\b", re.IGNORECASE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_terms_of_the_field(page: Path) -> None:
    found = [
        f"{page.name}:{number}: {match[0]!r} (better: {_better(match[0])})"
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        for match in WORDS.finditer(re.sub(r"`[^`]*`|\]\([^)]*\)|^\| [\w-]+(?= \|)", "", line))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in MADE], ids=lambda page: page.name)
def test_pages_by_hand_use_plain_words(page: Path) -> None:
    prose = re.sub(
        r"```.*?```|`[^`]*`|<!-- keys.*?end of keys -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    found = [match[0] for match in PLAIN.finditer(prose)]
    assert not found, f"{found}: {REFUSED}"


def test_texts_of_the_package_use_plain_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r} (better: {_better(match[0])})"
        for path in sorted((ROOT / "kvdoctor").rglob("*.py"))
        if path.relative_to(ROOT / "kvdoctor").parts[0] not in NOT_YET
        for line, text in _sentences(path)
        if text not in RECORDED
        for match in PLAIN.finditer(re.sub(r"`[^`\n]*`|^ *\w+:", "", text, flags=re.MULTILINE))
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
    return next(text for pattern, text in (BETTER | REFUSED).items() if re.match(rf"{pattern}\b", word, re.IGNORECASE))


def _sentences(path: Path) -> Iterator[tuple[int, str]]:
    """The docstrings, the string literals that contain a blank, and the comments, each with its line."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


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

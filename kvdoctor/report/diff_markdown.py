"""A diff as Markdown, to paste into an issue or a pull request."""

from collections.abc import Iterator

from kvdoctor.report import diff_words
from kvdoctor.report.diff_document import DiffReport
from kvdoctor.report.diff_words import Row
from kvdoctor.report.markdown import table
from kvdoctor.report.safe import code, markdown


def render(diff: DiffReport) -> str:
    """The whole diff as one Markdown text."""
    return "\n".join(_lines(diff)) + "\n"


def _lines(diff: DiffReport) -> Iterator[str]:
    yield f"# kvdoctor diff: {diff.verdict}"
    yield ""
    yield from table(["", "", ""], [_cells(row) for row in diff_words.sides(diff)])
    yield ""
    yield f"**{markdown(diff_words.verdict_line(diff))}**"
    if len(diff.reasons) > 1:
        yield ""
        yield from (f"- {markdown(reason)}" for reason in diff.reasons)
    for section in diff_words.sections(diff):
        if section.rows:
            yield ""
            yield f"## {markdown(section.title)}"
            yield ""
            yield from table(["", "", ""], [_cells(row) for row in section.rows])
    lines = [text for text, _ in diff_words.not_compared_lines(diff)] + list(diff.notes)
    lines += diff_words.measured_lines(diff)
    if lines:
        yield ""
        yield from (f"- {markdown(line)}" for line in lines)


def _cells(row: Row) -> list[str]:
    text = code(row.text)
    marks = {"worse": f"**worse** {text}", "better": f"**better** {text}"}
    return [code(row.mark), markdown(row.what), marks.get(row.effect, text)]

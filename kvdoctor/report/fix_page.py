"""The fix report as one HTML page: no script, nothing loaded from anywhere, every text escaped."""

from collections.abc import Iterable, Iterator
from html import escape

from kvdoctor import __version__
from kvdoctor.findings import Finding
from kvdoctor.report import cure_text, export_text, wording
from kvdoctor.report.document import RepairRecord, Report
from kvdoctor.report.safe import LONGEST_QUOTED, printable, shortened

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b;"
    "background:#fff}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse;width:100%}"
    "th,td{border:1px solid #d0d0d0;padding:.3rem .5rem;text-align:left;vertical-align:top;overflow-wrap:anywhere}"
    "code,pre{font:13px/1.45 ui-monospace,monospace}pre{overflow-x:auto;background:#f6f6f6;padding:.6rem}"
    ".minus{color:#a40000}.plus{color:#006400}.fails{color:#a40000;font-weight:bold}"
    "@media(prefers-color-scheme:dark){body{background:#161616;color:#e4e4e4}pre{background:#222}"
    "th,td{border-color:#444}.minus,.fails{color:#ff8a80}.plus{color:#8bd68b}}"
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render(report: Report) -> str:
    """The whole page; the document behind it is the one of the other formats."""
    return "\n".join(_page(report)) + "\n"


def _page(report: Report) -> Iterator[str]:
    title = f"kvdoctor {report.command}: {report.verdict}"
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>"
    yield f"<h1>{_text(title)}</h1>"
    versions = ", ".join(f"{name} {version}" for name, version in report.environment.items())
    yield f"<p>kvdoctor {_text(__version__)}; {_text(versions)}</p>"
    if report.repair is not None:
        yield from _record(report, report.repair)
    yield "<h2>Findings now</h2>"
    yield from _findings(report.findings)
    for entry in report.not_checked:
        yield f"<p>not checked: {_text(entry.code)} {_text(entry.reason)}</p>"
    yield "</body></html>"


def _record(report: Report, record: RepairRecord) -> Iterator[str]:
    out = record.out or "(nothing written)"
    yield f"<p>From {_code(record.source)} to {_code(out)}. The source was not changed.</p>"
    yield "<h2>What was found</h2>"
    yield from _findings(record.before.findings)
    if record.export is not None:
        yield f"<h2>How it was exported</h2><p>{_text(export_text.title(record.export))}</p>"
        told = export_text.rows(record.export, record.source)
        yield from _table(("", ""), ([_text(label), _text(text)] for label, text in told))
        yield "<p>What was found on the fresh export, before any repair:</p>"
        yield from _findings(record.export.findings)
    yield "<h2>What was done and why</h2>"
    yield from _list(f"{_code(r.name)} ({_text(r.stack)}): {_text(r.summary)}" for r in record.repairs)
    yield "<h2>What was changed</h2>"
    yield from _table(
        ("file", "where", "before", "after"),
        ([_code(c.file), _code(c.where), _code(c.before), _code(c.after)] for c in record.changes),
    )
    for found in record.diff:
        yield f"<p>The graph of {_code(found.file)}, line by line:</p><pre>"
        yield from map(_diff_line, found.lines)
        yield f"... and {found.left_out} lines more</pre>" if found.left_out else "</pre>"
    yield "<h2>What proves it</h2>"
    verdicts = {True: "holds", False: '<span class="fails">fails</span>'}
    yield from _table(
        ("stack", "claim", "", ""),
        ([_text(p.stack), _text(p.claim), verdicts[p.holds], _text(p.detail)] for p in record.proof),
    )
    yield "<h2>What it costs</h2>"
    yield from _list(map(_text, cure_text.cost_lines(report)))
    if lines := cure_text.caller_lines(record):
        yield "<h2>What is left to the caller</h2>"
        yield from _list(map(_text, lines))
    if report.notes:
        yield "<h2>Notes</h2>"
        yield from _list(map(_text, report.notes))
    if record.unmended:
        yield "<h2>What was not repaired</h2>"
        yield from _list(_text(cure_text.unmended_line(entry)) for entry in record.unmended)
    if record.advice:
        yield "<h2>A loop that cannot take the copy must change instead</h2>"
        yield from _list(map(_text, record.advice))
    if record.undo:
        yield "<h2>How to undo it</h2>"
        yield from _list(map(_text, record.undo))
        digests = ([_code(f.path), _code(f.before), _code(f.after)] for f in record.files)
        yield from _table(("written anew", "SHA-256 before", "SHA-256 after"), digests)


def _findings(found: tuple[Finding, ...]) -> Iterator[str]:
    if not found:
        yield "<p>None.</p>"
    for finding in found:
        yield f"<h3>{_text(wording.headline(finding))}</h3>"
        yield from _table(("", ""), ([_text(label), _code(text)] for label, text in wording.evidence(finding)))


def _diff_line(line: str) -> str:
    kind = {"-": "minus", "+": "plus"}.get(line[:1])
    return f'<span class="{kind}">{_text(line)}</span>' if kind else _text(line)


def _list(items: Iterable[str]) -> Iterator[str]:
    """A list; its items are HTML already."""
    yield "<ul>"
    yield from (f"<li>{item}</li>" for item in items)
    yield "</ul>"


def _table(header: tuple[str, ...], rows: Iterable[list[str]]) -> Iterator[str]:
    """A table; its cells are HTML already."""
    yield "<table>"
    if any(header):
        yield "<tr>" + "".join(f"<th>{_text(title)}</th>" for title in header) + "</tr>"
    yield from ("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    yield "</table>"


def _code(text: str) -> str:
    return f"<code>{_text(text)}</code>" if text else ""


def _text(text: str) -> str:
    return escape(printable(shortened(text, LONGEST_QUOTED)))

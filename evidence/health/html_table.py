"""The table of results.json as one HTML file with filters: nothing is loaded, and nothing but its script runs.

Without the script the whole table is shown, without the filters.
"""

import base64
import hashlib
from html import escape
from typing import Any

from evidence.health.rows import MEANINGS, STATES, Cell, Row, rows

STYLE = """
:root { color-scheme: light dark; --line: #8884; --quiet: #666; --head: #f3f3f6; --page: #fff; --text: #1b1b1f;
  --good: #14652f; --fixed: #0b5394; --bad: #a61b1b; --open: #7a5200; }
@media (prefers-color-scheme: dark) { :root { --quiet: #aaa; --head: #26262b; --page: #17171a; --text: #ececf0;
  --good: #6fd08c; --fixed: #8ab8f0; --bad: #ff9a8f; --open: #e8bd62; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 100rem; font: 15px/1.45 system-ui, sans-serif;
  color: var(--text); background: var(--page); }
h1 { font-size: 1.5rem; margin: 0 0 .4rem; }
p { max-width: 75ch; margin: .4rem 0; }
form { display: flex; flex-wrap: wrap; gap: .6rem 1rem; align-items: end; margin: 1rem 0 .4rem; }
form[hidden] { display: none; }
label { display: grid; gap: .15rem; font-size: .85rem; color: var(--quiet); }
input, select { font: inherit; color: inherit; background: var(--page); padding: .3rem .5rem;
  border: 1px solid #888; border-radius: .3rem; max-width: 100%; }
input { width: 20rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; max-width: 75ch; margin: .5rem 0; }
dd { margin: 0; }
table { border-collapse: collapse; width: 100%; margin-top: .6rem; table-layout: fixed; }
th, td { text-align: left; vertical-align: top; padding: .35rem .5rem; border-bottom: 1px solid var(--line);
  overflow-wrap: break-word; }
thead th:nth-child(-n+4) { width: 12%; }
thead th { position: sticky; top: 0; background: var(--head); border-bottom: 1px solid #888; }
tbody th { font-weight: 600; }
small { display: block; color: var(--quiet); overflow-wrap: break-word; }
b { font-weight: 600; }
.healthy b { color: var(--good); } .repaired b { color: var(--fixed); } .refused b { color: var(--bad); }
.not-checked b { color: var(--open); } .not-exportable b, .not-run b { color: var(--quiet); }
@media (max-width: 960px) {
  input { width: 100%; } form label { width: 100%; }
  table, tbody, tr, th, td { display: block; width: 100%; } thead { display: none; }
  tr { border: 1px solid var(--line); border-radius: .4rem; margin: .6rem 0; padding: .3rem 0; }
  tr[hidden] { display: none; }
  th, td { border: 0; padding: .15rem .6rem; }
  td::before { content: attr(data-label) ": "; color: var(--quiet); }
  dl { grid-template-columns: 1fr; } dd { margin-left: 1rem; }
}
"""
SCRIPT = """
const form = document.querySelector("form"), found = document.querySelector("output");
const lines = [...document.querySelectorAll("tbody tr")];
const texts = lines.map(line => line.textContent.toLowerCase());
function filter() {
  const words = form.text.value.toLowerCase().split(/\\s+/).filter(word => word);
  let shown = 0;
  lines.forEach((line, number) => {
    const fits = words.every(word => texts[number].includes(word))
      && (!form.exporter.value || line.dataset.exporter === form.exporter.value)
      && (!form.result.value || line.dataset.results.split(" ").includes(form.result.value));
    line.hidden = !fits;
    shown += fits;
  });
  found.value = `${shown} of ${lines.length} lines`;
}
form.addEventListener("input", filter);
form.addEventListener("submit", event => event.preventDefault());
form.hidden = false;
filter();
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>kvdoctor: the health of exports</title>
<style>{style}</style>
</head>
<body>
<h1>The health of exports</h1>
<p>Each line is a <em>stack</em>: graphs that decode together. A cell is the result of
<code>kvdoctor step-test</code>, and of <code>kvdoctor re-export</code> where that found an error, in one release of
onnxruntime. A cell of an older release also has what is wrong in the newest one. Measured on {made}.</p>
<details>
<summary>What the results mean</summary>
<dl>
{meanings}
</dl>
</details>
<form hidden>
<label>Filter <input type="search" name="text" placeholder="llama past-axis-frozen" autocomplete="off"></label>
<label>Exporter <select name="exporter"><option value="">all</option>{exporters}</select></label>
<label>Result <select name="result"><option value="">all</option>{results}</select></label>
<output aria-live="polite"></output>
</form>
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
<script>{script}</script>
</body>
</html>
"""


def page(document: dict[str, Any]) -> str:
    """The whole file."""
    every, releases = rows(document), document["releases"]
    head = ["Export", "Exporter", "With", "Layout", *(f"onnxruntime {release}" for release in releases)]
    present = {cell.state for row in every for cell in row.cells.values()}
    policy = f"default-src 'none'; style-src '{_hash(STYLE)}'; script-src '{_hash(SCRIPT)}'; base-uri 'none'"
    return PAGE.format(
        policy=escape(policy + "; form-action 'none'", quote=False),
        style=STYLE,
        script=SCRIPT,
        made=escape(document["made"]),
        meanings="\n".join(f"<dt><b>{state}</b></dt><dd>{escape(MEANINGS[state])}</dd>" for state in STATES),
        exporters="".join(_option(name, name) for name in dict.fromkeys(row.exporter for row in every)),
        results="".join(_option(_id(state), state) for state in STATES if state in present),
        head="".join(f'<th scope="col">{escape(name)}</th>' for name in head),
        body="\n".join(_row(row, head) for row in every),
    )


def _row(row: Row, head: list[str]) -> str:
    results = " ".join(dict.fromkeys(_id(cell.state) for cell in row.cells.values()))
    stack = f"<small>{escape(row.stack)}</small>" if row.stack else ""
    cells = [f'<th scope="row">{escape(row.name)}{stack}</th>']
    plain = (row.exporter, row.span(), row.layout or "–")
    cells += [_cell(label, escape(text)) for label, text in zip(head[1:], plain, strict=False)]
    cells += [
        _cell(label, _result(cell), _id(cell.state)) for label, cell in zip(head[4:], row.cells.values(), strict=True)
    ]
    return f'<tr data-exporter="{escape(row.exporter)}" data-results="{results}">{"".join(cells)}</tr>'


def _cell(label: str, content: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<td data-label="{escape(label)}"{attribute}>{content}</td>'


def _result(cell: Cell) -> str:
    """The state, and below it what was found, done and said."""
    parts = [f"<b>{cell.state}</b>"]
    if cell.repairs:
        parts.append(f" by {escape(', '.join(cell.repairs))}")
    if cell.errors:
        parts.append(f"<small>error: {escape(', '.join(cell.errors))}</small>")
    if cell.warnings:
        parts.append(f"<small>warning: {escape(', '.join(cell.warnings))}</small>")
    if cell.why:
        parts.append(f"<small>{escape(cell.why)}</small>")
    return "".join(parts)


def _option(value: str, text: str) -> str:
    return f'<option value="{escape(value)}">{escape(text)}</option>'


def _id(state: str) -> str:
    return state.replace(" ", "-")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

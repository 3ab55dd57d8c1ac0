"""Writes docs/known-issues.md from the table of known issues: `python docs/make_known_issues.py`."""

from pathlib import Path

from kvdoctor.report.known_messages import KnownIssue, list_issues

HEAD = """# Known issues of other projects

Public issues that show up in decoders with a KV cache. A finding that one of them may explain names it (`issue`, and
`issues` in [JSON](formats.md)); `kvdoctor explain CODE` lists those of a check, `kvdoctor explain "MESSAGE"` those of a
message. The table is part of the package: nothing is looked up in the network. Made from
`kvdoctor/report/known_issues.json` by `python docs/make_known_issues.py`; to add one, add an entry with its address.

| what happens | findings | fixed in | source |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(map(row, list_issues()))


def row(known: KnownIssue) -> str:
    """One entry."""
    issue, checks = known.issue, ", ".join(f"`{name}`" for name in known.checks)
    project, number = issue.url.removeprefix("https://github.com/").split("/")[1:4:2]
    return f"| {issue.title} | {checks} | {issue.fixed_in or ''} | [{project} #{number}]({issue.url}) |\n"


if __name__ == "__main__":
    Path(__file__).with_name("known-issues.md").write_text(page(), encoding="utf-8")

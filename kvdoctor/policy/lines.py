"""The line of a TOML file on which a key stands: its reader (tomllib) gives values without places.

A line is told only where exactly one fits, so that none is told wrongly.
"""

import re

HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
KEY = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*[=.]""")


def line_of(text: str, table: str, key: str, number: int = 0) -> int | None:
    """The line of a key of a table, counted from 1; `number` is that of a table that stands several times, from 1."""
    seen: dict[str, int] = {}
    here, found = "", []
    for place, line in enumerate(text.splitlines(), 1):
        if header := HEADER.match(line):
            here = re.sub(r"[\"'\s]", "", header[2])
            seen[here] = seen.get(here, 0) + 1
            # [tool.kvdoctor.tolerances] is the key `tolerances` of [tool.kvdoctor]
            if here == ".".join(filter(None, (table, key))) and number in (0, seen.get(table, 0)):
                found.append(place)
        elif here == table and number in (0, seen.get(here, 0)):
            named = KEY.match(line)
            found += [place] if named and key in (named[1], named[2], named[3]) else []
    return found[0] if len(found) == 1 else None

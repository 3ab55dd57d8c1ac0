"""What is being done, on one line of the terminal, for as long as it lasts. Nothing where nobody watches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Told = Callable[[str, int, int], None]
"""Is told what begins: its name, which it is, counted from 1, and of how many."""


@contextmanager
def on_terminal(quiet: bool) -> Iterator[Told | None]:
    """Show progress on standard error if that is a terminal; None where it is none, or where `quiet` was asked for."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("starting") as line:
        yield lambda name, number, of: line.update(f"experiment {number} of {of}: {escape(name)}")

"""What is being done, on one line of the terminal, for as long as it lasts. Nothing where nobody watches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Told:
    """Is told what begins: an experiment by its name, which it is, counted from 1, and of how many; or anything."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.say = show

    def __call__(self, name: str, number: int, of: int) -> None:
        """Show an experiment."""
        self.say(f"experiment {number} of {of}: {name}")


@contextmanager
def on_terminal(quiet: bool) -> Iterator[Told | None]:
    """Show progress on standard error if that is a terminal; None where it is none, or where `quiet` was asked for."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("starting") as line:
        yield Told(lambda text: line.update(escape(text)))

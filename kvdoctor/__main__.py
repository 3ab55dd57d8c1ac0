"""`python -m kvdoctor`, and the start of the command."""

import _signal as signal  # type: ignore[import-not-found]  # the part of `signal` that is there at once
import gc
import os


def start() -> None:
    """Load the command line and run it."""
    gc.set_threshold(200_000)  # objects that imports make stay: collecting among them takes 5 % of a start
    # While Python loads modules, it would lose an interrupt that meets one of its callbacks, or print where it was.
    if waits := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)
    from kvdoctor.cli.main import main

    if waits:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    finally:
        gc.freeze()  # Python ends by a search for garbage among all objects, which takes 15 % of an inspection


def _end_at_once(_number: int, _frame: object) -> None:
    os.write(2, b"kvdoctor: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    start()

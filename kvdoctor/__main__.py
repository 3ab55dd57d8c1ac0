"""`python -m kvdoctor`, and the start of the command."""

import gc
import os
from typing import NoReturn


def start() -> NoReturn:
    """Load the command line and run it; an interrupt while Python loads it ends like any other."""
    gc.set_threshold(200_000)  # objects that imports make stay: collecting among them takes 5 % of a start
    try:
        from kvdoctor.cli.main import main
    except KeyboardInterrupt:
        os.write(2, b"kvdoctor: interrupted\n")
        os._exit(130)
    try:
        main()
    finally:
        gc.freeze()  # Python ends by a search for garbage among all objects, which takes 15 % of an inspection


if __name__ == "__main__":
    start()

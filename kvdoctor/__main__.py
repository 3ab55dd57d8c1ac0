"""`python -m kvdoctor`, and the start of the command."""

import os
from typing import NoReturn


def start() -> NoReturn:
    """Load the command line and run it; an interrupt while Python loads it ends like any other."""
    try:
        from kvdoctor.cli.main import main
    except KeyboardInterrupt:
        os.write(2, b"kvdoctor: interrupted\n")
        os._exit(130)
    main()


if __name__ == "__main__":
    start()

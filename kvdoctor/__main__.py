"""`python -m kvdoctor`."""

from kvdoctor.cli import main

main()

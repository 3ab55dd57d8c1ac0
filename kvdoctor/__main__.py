"""`python -m kvdoctor`."""

from kvdoctor.cli.main import main

main()

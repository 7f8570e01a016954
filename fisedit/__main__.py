"""`python -m fisedit`: the command line."""

from fisedit.cli import main

main()

"""`python -m fisedit`: the command line."""

from fisedit.cli import main

try:
    main()
finally:
    # An interrupt that passes through the exec of a text (dataclasses are made so, at imports) marks the process, and
    # Python would end it by SIGINT in place of its exit status, though it was caught. Any such exec forgets the mark.
    exec("")  # noqa: S102

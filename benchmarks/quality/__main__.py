"""`python -m benchmarks.quality`: edits of known truth, by every method."""

from benchmarks.commands import run

run("quality")

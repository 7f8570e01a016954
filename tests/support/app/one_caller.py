"""`python -m tests.support.app.one_caller`: starts the app, loads its page, generates, edits, and stops it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import uuid

import httpx

from tests.support.app.program import Program

PROMPTS = ("a cat and a cake on a beach", "a dog and a cake on a beach")


def main() -> int:
    """Run the app's whole way once; exit status 0 if every answer was as it should be."""
    command = [sys.executable, "-m", "fisedit", "app", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as app:
        assert app.stdout is not None
        found = re.search(r"http://\S+", app.stdout.readline())
        assert found
        page = httpx.get(found[0])
        program = Program(found[0], uuid.uuid4().hex)
        made = [program.ask("generate", PROMPTS[0], 7, 4, 4.0), program.ask("edit", PROMPTS[1])]
        app.send_signal(signal.SIGINT)
        assert app.wait(30) == 0
    assert page.status_code == 200 and [event.kind for event in made] == ["complete", "complete"], made
    return 0


if __name__ == "__main__":
    sys.exit(main())

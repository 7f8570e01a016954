"""Seconds of an edit for one user alone and for two at once: `python -m tests.support.app.two_users --rounds 5`.

Serves the demo model with `fisedit app`, as a process of its own, and asks for edits by its HTTP API.
Every round measures one user alone, then two at once. With `--checkout`, the apps of other checkouts are served as
well, and take turns, so that two versions are compared under the same load.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np

from tests.support.app.program import Program

SOURCE, EDITS = "a cat and a cake on a beach", ("a dog and a cake on a beach", "a fox and a cake on a beach")
STEPS, GUIDANCE, SIDE = 25, 4.0, 128


@dataclass
class Timings:
    """Seconds of single edits, and edits per second of each round.

    Attributes:
        alone: seconds of each edit of one user alone.
        together: seconds of each edit of two users at once.
        ratios: of each round, the median of `together` over that of `alone`.
        gains: of each round, the edits per second of two users over those of one.
    """

    alone: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)

    def add_round(self, alone: list[float], together: list[float], wall: tuple[float, float]) -> None:
        """Add the edits of one round; `wall` is the seconds of its two halves."""
        self.alone += alone
        self.together += together
        self.ratios.append(float(np.median(together) / np.median(alone)))
        self.gains.append((len(together) / wall[1]) / (len(alone) / wall[0]))

    def as_text(self) -> str:
        """Medians and 90th percentiles in two lines."""
        (alone, slow_alone), (together, slow) = (np.quantile(s, (0.5, 0.9)) for s in (self.alone, self.together))
        return (
            f"alone {alone:.2f} s (p90 {slow_alone:.2f}), two at once {together:.2f} s (p90 {slow:.2f}) per edit\n"
            f"  two at once over alone: {np.median(self.ratios):.2f} times the seconds, "
            f"{np.median(self.gains):.2f} times the edits per second"
        )


@contextmanager
def serve(checkout: Path, threads: int) -> Iterator[str]:
    """Serve the app of a checkout with OpenMP threads while the block runs; yields its address."""
    variables = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "fisedit", "app", "--port", "0"]
    app = subprocess.Popen(command, cwd=checkout, env=variables, stdout=subprocess.PIPE, text=True)
    try:
        assert app.stdout is not None
        found = re.search(r"http://\S+", app.stdout.readline())
        assert found
        yield found[0]
    finally:
        app.send_signal(signal.SIGINT)
        app.wait(60)


def open_session(url: str) -> Program:
    """A client with a source of its own, whose first edit is over."""
    client = Program(url, uuid.uuid4().hex, 600.0)
    made = client.ask("generate", SOURCE, 7, STEPS, GUIDANCE, SIDE, SIDE)
    assert made.kind == "complete", made
    edit(client, 0)
    return client


def edit(client: Program, number: int) -> float:
    """Seconds of one edit of the client's source."""
    client.ask("history", "0")
    began = perf_counter()
    made = client.ask("edit", EDITS[number % len(EDITS)])
    assert made.kind == "complete", made
    return perf_counter() - began


def edit_often(client: Program, count: int) -> list[float]:
    """Seconds of several edits, one after another."""
    return [edit(client, number) for number in range(count)]


def run_round(clients: Sequence[Program], count: int, timings: Timings) -> None:
    """One user alone, then all at once."""
    began = perf_counter()
    alone = edit_often(clients[0], count)
    middle = perf_counter()
    with ThreadPoolExecutor(len(clients)) as pool:
        together = [s for seconds in pool.map(lambda client: edit_often(client, count), clients) for s in seconds]
    timings.add_round(alone, together, (middle - began, perf_counter() - middle))


def main() -> None:
    """Print the timings of every checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--edits", type=int, default=4, help="edits of each user in a round")
    parser.add_argument("--threads", type=int, default=2, help="OpenMP threads of each app")
    parser.add_argument("--checkout", type=Path, action="append", help="folder of a checkout; this one without it")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        places = [path.resolve() for path in arguments.checkout or [Path(__file__).resolve().parents[3]]]
        urls = {place: stack.enter_context(serve(place, arguments.threads)) for place in places}
        clients = {place: [open_session(url) for _ in range(2)] for place, url in urls.items()}
        timings = {place: Timings() for place in places}
        for _ in range(arguments.rounds):
            for place in places:
                run_round(clients[place], arguments.edits, timings[place])
                sys.stderr.write(f"{place.name}: {timings[place].as_text()}\n")
    for place, result in timings.items():
        sys.stdout.write(f"{place.name}: {result.as_text()}\n")


if __name__ == "__main__":
    main()

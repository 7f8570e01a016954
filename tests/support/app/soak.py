"""People who come and go for a long time, two at work at once, and what the app's process holds meanwhile.

    python -m tests.support.app.soak --minutes 60

serves two models of which one is in memory at a time, and two LoRAs. Everybody makes a picture, edits it, goes back,
branches, opens a picture of their own or leaves in the middle; what two people ask for alike must come out alike.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from time import monotonic

import httpx
import numpy as np
import psutil

from fisedit import Editor
from tests.support.app.models import derived
from tests.support.app.program import Program, picture
from tests.support.app.uploads import png
from tests.support.lora import Lora

AT_ONCE, EVERY, SIDE, STEPS = 2, 5.0, 64, 4
"""People at work; seconds between two looks; pixels and steps of pictures, so that many people come."""

PROMPTS = ("a cat and a cake on a beach", "a dog and a castle on a beach", "a rabbit in the snow")
EDITS = ("a fox and a cake on a beach", "a dog and a cake at night", "a cat and a tree on a beach")
OFFERED = (("", {}), ("another", {}), ("", {"ink": 0.6}), ("", {"ink": 0.6, "oil": 0.5}), ("another", {"oil": 1.0}))
PATIENCE = 900.0
"""Seconds without a word; the machine may have other work."""

WARM, MOST = 0.25, 1.05
"""Share of the time that does not count; how many times what was held then may be held at the end."""


@dataclass(frozen=True)
class ProcessSample:
    """What the process holds: resident MiB, file descriptors, threads; and how many people had come."""

    minute: float
    people: int
    mib: float
    files: int
    threads: int


@dataclass
class Soak:
    """What was seen.

    Args:
        looks: one every few seconds. alike: digests of what was asked for alike.
    """

    looks: list[ProcessSample] = field(default_factory=list)
    people: int = 0
    left: int = 0
    alike: dict[str, bytes] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def same(self, asked: object, made: np.ndarray) -> None:
        """Checks that what was asked for before comes out as before."""
        key, now = json.dumps(asked), made.tobytes()
        with self.lock:
            assert self.alike.setdefault(key, now) == now, f"another picture than before: {key}"

    def report(self) -> dict[str, float]:
        """Growth after the warm-up: of the means of the first and the last third, and by a line through all."""
        counted = [look for look in self.looks if look.minute >= WARM * self.looks[-1].minute]
        third = max(1, len(counted) // 3)
        told: dict[str, float] = {"minutes": self.looks[-1].minute, "people": self.people, "left": self.left}
        for name in ("mib", "files", "threads"):
            values = [float(getattr(look, name)) for look in counted]
            first, last = np.mean(values[:third]), np.mean(values[-third:])
            told |= {f"{name}_first": first, f"{name}_last": last, f"{name}_ratio": last / first}
        line = np.polyfit([look.minute for look in counted], [look.mib for look in counted], 1)
        return {name: round(float(value), 3) for name, value in (told | {"mib_per_hour": line[0] * 60}).items()}


@contextmanager
def started(command: Sequence[str], folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A command that serves the app, as a process of its own: its address, and the process."""
    running = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        found = re.search(r"http://\S+", running.stdout.readline())
        assert found
        yield found[0], psutil.Process(running.pid)
    finally:
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 0


@contextmanager
def app(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """`fisedit app` as a process of its own: its address, and the process."""
    pipe = Editor.from_pretrained("demo").pipe
    loras = [Lora(pipe, seed).kohya(folder / f"{name}.safetensors") for seed, name in enumerate(("ink", "oil"))]
    command = [sys.executable, "-m", "fisedit", "app", "--port", "0", "--loaded", "1", "--model", "demo"]
    command += ["--model", str(derived(folder / "another")), "--lora", str(loras[0]), "--lora", str(loras[1])]
    with started(command, folder) as there:
        yield there


def visit(url: str, soak: Soak, chance: random.Random) -> None:
    """One person's visit."""
    program, seed = Program(url, uuid.uuid4().hex, PATIENCE), chance.randrange(3)
    prompt, edit, (model, loras) = chance.choice(PROMPTS), chance.choice(EDITS), chance.choice(OFFERED)
    wanted = (seed, STEPS, 4.0, SIDE, SIDE, "ddim", "", model, loras)
    if chance.random() < 0.15:
        return _leave(program, soak, prompt, *wanted)
    soak.same((prompt, wanted), picture(program.ask("generate", prompt, *wanted)))
    seen = program.ask("preview", edit)
    assert seen.kind == "complete" or "error[busy]" in str(seen.data), seen
    soak.same((prompt, wanted, edit), picture(program.ask("edit", edit)))
    program.ask("history", "0")
    again = chance.choice(EDITS)
    soak.same((prompt, wanted, again), picture(program.ask("edit", again)))
    if chance.random() < 0.3:
        sent = httpx.post(f"{url}gradio_api/upload", files={"files": ("a.png", png())}).json()[0]
        given = {"path": sent, "meta": {"_type": "gradio.FileData"}}
        soak.same("opened", picture(program.ask("open", given, prompt, 0, STEPS, 4.0, model, loras)))
        program.ask("history", "", True)
    return None


def _leave(program: Program, soak: Soak, prompt: str, *wanted: object) -> None:
    seed, _, *rest = wanted
    events = program.events("generate", program.send("generate", prompt, seed, 60, *rest))
    while next(events).data[0]["step"] < 2:
        pass
    events.close()
    soak.left += 1


def run(minutes: float, every: float = EVERY, seed: int = 0) -> Soak:
    """Let people come and go for so long, and look."""
    soak, over = Soak(), Event()
    with tempfile.TemporaryDirectory(prefix="fisedit-soak-") as name, app(Path(name)) as (url, process):
        began = monotonic()

        def come(number: int) -> None:
            chance = random.Random(seed + number)
            while not over.is_set():
                visit(url, soak, chance)
                with soak.lock:
                    soak.people += 1

        with ThreadPoolExecutor(AT_ONCE) as everybody:
            work = [everybody.submit(come, number) for number in range(AT_ONCE)]
            try:
                while (passed := (monotonic() - began) / 60) < minutes and not any(one.done() for one in work):
                    soak.looks.append(_sample(process, passed, soak.people))
                    say(f"{soak.looks[-1]}")
                    over.wait(every)
            finally:
                over.set()
            for one in work:
                one.result()
    return soak


def _sample(process: psutil.Process, minute: float, people: int) -> ProcessSample:
    held = process.memory_info().rss / 2**20
    return ProcessSample(round(minute, 2), people, round(held, 1), process.num_fds(), process.num_threads())


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a look now and then, and what grew; 1 where it was more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    soak = run(asked.minutes, seed=asked.seed)
    told = soak.report()
    say(json.dumps(told, indent=2))
    return int(max(told[f"{name}_ratio"] for name in ("mib", "files", "threads")) > MOST)


if __name__ == "__main__":
    sys.exit(main())

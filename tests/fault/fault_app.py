"""The app under many people: a hundred at once, ten times over."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from app.server import MAX_WAITING
from fisedit import Editor
from tests.support.app import crowd

PEOPLE, ROUNDS, WARM = 100, 10, 3
MOST_GROWN = 64 << 20
"""Bytes, from the third round to the tenth."""


@pytest.fixture
def app(tmp_path) -> Iterator[tuple[str, psutil.Process]]:
    """`fisedit app` as a process of its own: its address, and the process."""
    command = [sys.executable, "-m", "fisedit", "app", "--port", "0"]
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    found = re.search(r"http://\S+", running.stdout.readline())
    assert found
    yield found[0], psutil.Process(running.pid)
    running.send_signal(signal.SIGINT)
    assert running.wait(30) == 0


def test_a_hundred_people_ten_times_over(app, record_property):
    url, process = app
    wanted = crowd.expected(Editor.from_pretrained("demo"), PEOPLE)
    held, served = [], []
    for _ in range(ROUNDS):
        served.append(crowd.served(crowd.ask(url, PEOPLE), wanted))
        held.append(process.memory_info().rss)
    assert all(MAX_WAITING <= some < PEOPLE for some in served)
    assert held[-1] - held[WARM - 1] < MOST_GROWN
    assert process.num_fds() < 256 and process.num_threads() < 128
    told = ", ".join(f"{size >> 20}" for size in held)
    record_property("measured", f"{sum(served)} of {PEOPLE * ROUNDS} served; resident after each round: {told} MiB")

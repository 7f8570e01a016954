"""The app under many people: a hundred at once, ten times over; and what it sends into the network."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.server import MAX_WAITING
from fisedit import Editor
from tests.support.app import crowd

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs `unshare -rn`",
)
def test_no_packet_leaves_the_server(tmp_path):
    """In a network without a way out, whose kernel counts what has no route; the test's own try is counted."""
    script = """
        ip link set lo up
        python -m tests.support.app.one_caller > caller 2>&1; echo $? > status
        cat /proc/net/snmp > before
        python -c "import socket; socket.socket(type=socket.SOCK_DGRAM).connect_ex(('198.51.100.1', 9))"
        cat /proc/net/snmp > after
    """.replace("python ", f"{sys.executable} ")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(["unshare", "-rn", "bash", "-c", script], cwd=tmp_path, env=environment, check=True, timeout=300)
    assert (tmp_path / "status").read_text() == "0\n", (tmp_path / "caller").read_text()
    before, after = (without_route((tmp_path / name).read_text()) for name in ("before", "after"))
    assert before == 0 < after


def without_route(snmp: str) -> int:
    """How many packets and connections had no route, of /proc/net/snmp."""
    names, values = (line.split() for line in snmp.splitlines() if line.startswith("Ip:"))
    return int(values[names.index("OutNoRoutes")])

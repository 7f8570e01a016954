"""What a Ray cluster does to a batch: machines that go, items that kill or hang, tokens that do not fit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.support.folders import lines, pictures, tree
from tests.support.processes import until
from tests.support.ray_clusters import AFTER, BEFORE, RAY, batch, cluster, killer, working

__all__ = ["batch", "cluster"]  # fixtures


def test_an_item_that_kills_is_named(cluster, batch, tmp_path):
    pictures(tmp_path / "in", 1)
    with killer(2) as killed:
        run = batch("ray", *RAY, steps=60)
    assert (len(killed), run.status) == (2, 1)
    assert [line["reason"] for line in lines(tmp_path / "ray")] == ["2 workers were lost over it"]


def test_a_worker_that_hangs(cluster, batch, tmp_path):
    pictures(tmp_path / "in", 3)
    with killer(1, signal.SIGSTOP) as stopped:
        run = batch("ray", *RAY, "--timeout", "15", steps=20)
    assert json.loads(run.out)["counts"]["done"] == 2 and run.status == 1
    reasons = {line["reason"] for line in lines(tmp_path / "ray")} - {""}
    assert reasons == {"took longer than 15 seconds and did not stop"}
    until(lambda: not psutil.pid_exists(stopped[0]))


def test_a_token_that_does_not_fit(cluster, process, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    pictures(tmp_path / "in", 1)
    run = process("batch", "in", "out", "--prompt", AFTER, *RAY, "--num-inference-steps", "2")
    run.refused("input", "RAY_ADDRESS must lead to a Ray cluster with our token")


def test_no_cluster_there(process, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    pictures(tmp_path / "in", 1)
    run = process("batch", "in", "out", "--prompt", AFTER, *RAY, "--num-inference-steps", "2")
    run.refused("input", "RAY_ADDRESS must lead to a Ray cluster with our token, got 127.0.0.1:9")


def test_a_lost_machine_leaves_its_items_to_the_rest(cluster, batch, tmp_path):
    """Those that share a source with the lost one too. The last with the cluster, which has one node then."""
    pictures(tmp_path / "in", 2)
    things = [(n, thing) for n in (0, 1) for thing in ("dog", "bird")]
    rows = [{"image": f"{n}.png", "prompt": f"a {thing} and a cake on a beach"} for n, thing in things]
    (tmp_path / "edits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    edits = ("--edits", "edits.jsonl")

    def lose() -> None:
        until(lambda: len(working()) == 2)
        cluster.remove_node(cluster.other)

    thread = threading.Thread(target=lose)
    thread.start()
    run = batch("ray", *RAY, said=edits, steps=20)
    thread.join()
    assert run.status == 0 and json.loads(run.out)["counts"]["done"] == 4
    assert batch("local", "--workers", "0", said=edits, steps=20).status == 0
    assert tree(tmp_path / "ray") == tree(tmp_path / "local")
    again = batch("ray", *RAY, said=edits, steps=20)
    assert json.loads(again.out)["counts"]["done before"] == 4


@pytest.fixture
def alone(model, tmp_path, monkeypatch):
    """Starts a batch by so many steps with a cluster of its own; returns it and its processes once two edit."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    started = []

    def start(steps: int) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        pictures(tmp_path / "in", 2)
        words = ("--prompt", AFTER, "--source-prompt", BEFORE, "--num-inference-steps", steps, "--model", model)
        command = [sys.executable, "-m", "fisedit", "batch", "in", "out", *map(str, words), *RAY, "--json"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        run = subprocess.Popen(command, cwd=tmp_path, **options)
        started.append(run)
        until(lambda: len({*working()} & {process.pid for process in children(run)}) == 2)
        return run, children(run)

    yield start
    for run in started:
        run.kill()
        run.communicate()


def children(run: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(run.pid).children(recursive=True)


def test_a_cluster_of_ones_own(alone, tmp_path):
    """Two workers, a token of the run's own, no dashboard; nothing stays in the user's home or runs on."""
    run, family = alone(steps=30)
    commands = [" ".join(process.cmdline()) for process in family]
    assert any("gcs_server" in command for command in commands)
    assert all("--disable-frontend" in command for command in commands if "dashboard.py" in command)
    out, err = run.communicate(timeout=120)
    assert (run.returncode, err) == (0, "") and json.loads(out)["counts"]["done"] == 2
    assert psutil.wait_procs(family, timeout=30)[1] == []
    assert not (tmp_path / "home" / ".ray").exists()


@pytest.mark.parametrize(("number", "times", "status"), [(signal.SIGINT, 2, 130), (signal.SIGKILL, 1, -9)])
def test_a_run_that_is_stopped_takes_its_cluster_along(alone, tmp_path, number, times, status):
    run, family = alone(steps=400)
    for _ in range(times):
        os.killpg(run.pid, number)
        time.sleep(0.5)
    run.communicate(timeout=60)
    assert run.returncode == status and tree(tmp_path / "out") == {}
    assert psutil.wait_procs(family, timeout=60)[1] == []

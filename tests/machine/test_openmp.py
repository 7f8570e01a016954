"""OpenMP's variables: what is set for it, and what a user set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fisedit.machine import openmp

NAMES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """A machine of 64 cores, none of the variables set; they are as before when a test ends."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("os.cpu_count", lambda: 64)


@pytest.mark.parametrize(("limit", "threads"), [(1.5, "2"), (0.2, "1"), (64.0, None), (None, None)])
def test_threads_are_no_more_than_the_limit_has_cpus(limit, threads, monkeypatch):
    monkeypatch.setattr(openmp, "cpu_limit", lambda: limit)
    openmp.set_up_threads()
    assert os.environ.get("OMP_NUM_THREADS") == threads
    assert os.environ["GOMP_SPINCOUNT"] == str(openmp.SPINS)


def test_what_a_user_set_stays(monkeypatch):
    monkeypatch.setattr(openmp, "cpu_limit", lambda: 1.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    openmp.set_up_threads()
    assert (os.environ["OMP_NUM_THREADS"], os.environ.get("GOMP_SPINCOUNT")) == ("5", None)


def test_a_command_sets_them_before_torch_is_there():
    code = (
        "import os, sys\nfrom fisedit.cli import main\nassert 'torch' not in sys.modules\n"
        "sys.argv = ['fisedit', '--version']\n"
        "try:\n    main()\nfinally:\n    print(os.environ['GOMP_SPINCOUNT'])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told.stdout.split()[-1] == str(openmp.SPINS), told.stderr

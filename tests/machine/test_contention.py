"""A machine that other programs use: how it is noticed, and how many threads compute on it."""

from __future__ import annotations

import pytest

from fisedit.errors import MeasurementError
from fisedit.machine import contention
from fisedit.machine.contention import ThreadChoice, busy_note, check_repeats, waited_seconds
from fisedit.machine.stopwatch import Stopwatch


def test_the_time_without_a_core_is_read_from_the_system(tmp_path, monkeypatch):
    account = tmp_path / "schedstat"
    monkeypatch.setattr(contention, "SCHEDSTAT", account)
    assert waited_seconds() == 0, "other systems do not tell"
    account.write_text("7000000000 2500000000 12\n")
    assert waited_seconds() == 2.5
    account.write_text("nothing\n")
    assert waited_seconds() == 0


def test_a_stage_tells_the_share_of_its_time_without_a_core():
    times, waits = iter((0.0, 1.0, 5.0, 5.0, 6.0)), iter((1.0, 4.0, 4.0, 4.0))
    watch = Stopwatch(lambda: next(times), lambda: next(waits))
    for _ in range(2):
        with watch.stage("denoise"):
            pass
    assert watch.seconds == {"denoise": 5.0} and watch.waited_share("denoise") == pytest.approx(3 / 5)
    assert watch.waited_share("decode") == 0


def test_a_busy_machine_is_told_of():
    assert busy_note(0.49) == "" and busy_note(0.6) == (
        "this machine is busy: the run waited for a core for 60% of its time"
    )


def test_one_thread_computes_while_the_machine_is_busy():
    choice, threads = ThreadChoice(4), []
    for waited in (0.1, 0.4, 0.6, 0.4, 0.3, 0.2, 0.4):
        choice.observe(waited)
        threads.append(choice.threads)
    assert threads == [4, 4, 1, 1, 1, 4, 4]


@pytest.mark.parametrize(
    ("seconds", "waited", "error"),
    [
        ((1.0, 1.1, 1.2, 1.1), 0.1, ""),
        ((1.0, 1.1, 9.0, 1.1, 1.2, 1.1), 0.1, ""),  # interrupted once
        ((1.0, 1.1, 3.0, 2.9), 0.1, r"got: runs that are alike took 1 to 3 s; stop it"),
        ((1.0, 1.1, 1.2, 1.1), 0.7, r"got: this machine is busy: the run waited for a core for 70% of its time;"),
    ],
)
def test_a_measurement_beside_other_programs_is_refused(seconds, waited, error, monkeypatch):
    monkeypatch.setattr(contention, "MAX_SPREAD", 1.6)
    if error:
        with pytest.raises(MeasurementError, match=error):
            check_repeats(seconds, waited)
    else:
        check_repeats(seconds, waited)

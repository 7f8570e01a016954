"""How those who paint at once share the processor's cores."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from app.thread_budget import Cores, apart
from fisedit.errors import Cancelled


@pytest.fixture
def cores() -> Iterator[Cores]:
    """Eight of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield Cores()
    torch.set_num_threads(before)


def test_a_job_runs_in_a_thread_that_ends_with_it():
    thread = apart(threading.current_thread)
    assert thread is not threading.current_thread() and not thread.is_alive()


def test_what_a_job_raises_is_raised_where_it_was_asked_for():
    def job() -> None:
        raise Cancelled("stopped")

    with pytest.raises(Cancelled, match="stopped"):
        apart(job)


def test_who_is_alone_has_all_cores_and_who_comes_later_a_share(cores):
    with cores.shared(quick=False) as all_of_them:
        assert all_of_them == torch.get_num_threads() == 8

        def later() -> tuple[int, int]:
            with cores.shared(quick=False) as team:
                return team, torch.get_num_threads()

        assert apart(later) == (4, 4)
        assert torch.get_num_threads() == 8, "who began first keeps what they have"
    with cores.shared(quick=False) as team:
        assert team == 8


def test_quick_steps_leave_a_core_to_the_page(cores):
    with cores.shared(quick=True) as team:
        assert team == 7


def test_nobody_is_left_without_a_core(cores):
    torch.set_num_threads(1)
    one = Cores()
    with one.shared(quick=True) as team, one.shared(quick=True) as another:
        assert (team, another) == (1, 1)

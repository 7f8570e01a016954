"""What the demo model made at the commit of `make.MADE_AT` is what it makes now: pixels, masks, and what an edit cost.

On the kind of CPU and the version of torch that made the set (golden.json tells both) pixels must be equal. On another
kind float32 sums differ in their last bits: there a pixel may be one grey level off,
in at most `ELSEWHERE.share` of a picture's pixels. Masks, counts and multiply-accumulates must be equal everywhere.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.golden.cases import CASES, Bench
from tests.golden.make import INDEX, PICTURES
from tests.golden.outcome import ELSEWHERE, EXACT, complaints, load, machine

SLOW = (
    "branch",
    "graphs",
    "graphs-many",
    "graphs-opened",
    "leak",
    "opened-otherwise",
    "rebuilt",
    "reference",
    "reweight",
    "schedulers",
    "search",
    "strength",
    "with-lora",
)
"""Cases that only `--all` runs: tests of their packages hold the same."""

GOLDEN = json.loads(INDEX.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """One model for all cases, on one thread, as the set was made."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Bench(tmp_path_factory.mktemp("golden"))
    torch.set_num_threads(threads)


def test_the_set_has_every_case():
    assert list(GOLDEN["cases"]) == list(CASES)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_as_before(bench, name):
    if name == "with-lora":
        pytest.importorskip("peft", reason="the package peft is not installed")
    stored, allowed = GOLDEN["cases"][name], EXACT if machine() == GOLDEN["machine"] else ELSEWHERE
    made = dict(CASES[name](bench))
    assert list(made) == list(stored)
    lines = [
        line
        for shot, ours in made.items()
        for line in complaints(
            f"{name}.{shot}",
            ours,
            load(PICTURES, f"{name}.{shot}", stored[shot]),
            allowed,
        )
    ]
    assert not lines, "\n".join(lines)

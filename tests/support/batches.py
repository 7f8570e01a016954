"""`fisedit batch` in this process and in an empty folder, and what it told."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.support.processes import Run

BEFORE, AFTER = "a cat and a cake on a beach", "a dog and a cake on a beach"
SAID = ("--prompt", AFTER, "--source-prompt", BEFORE)
QUICK = ("--num-inference-steps", "2", "--workers", "0")


class Told(Run):
    """What a run with --json left behind."""

    @property
    def told(self) -> dict:
        return json.loads(self.out)

    @property
    def counts(self) -> dict[str, int]:
        return {status: count for status, count in self.told["counts"].items() if count}

    @property
    def reasons(self) -> dict[str, str]:
        return {item["image"]: item["reason"] for item in self.told["items"] if item["reason"]}


@pytest.fixture
def arguments(model) -> tuple[str, ...]:
    """What every run of these tests is started with."""
    return ("batch", *QUICK, "--model", str(model))


@pytest.fixture
def batch(fisedit, arguments) -> Callable[..., Told]:
    """Runs `fisedit batch` in this process and in an empty folder."""
    return lambda *given: Told(**vars(fisedit(*arguments, *given)))

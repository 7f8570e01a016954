"""Coroutines of tests: playwright leaves an event loop running in a worker's main thread, so each gets a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_a_thread(coroutine: Coroutine[object, object, T]) -> T:
    """Run a coroutine in an event loop of its own; returns what it returns and raises what it raises."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, coroutine).result()

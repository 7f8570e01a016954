"""What a full run may leave out: tests that are skipped for a known reason, and no second attempts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

EXPECTED_SKIPS = (
    "needs CUDA: torch.cuda.is_available() is False",
    "needs the package xformers, and CUDA",
    "needs the package DeepCache",
    "needs the package openvino",
    "needs a ComfyUI that runs, at FISEDIT_COMFYUI",
    "there is a GPU: nothing is refused",
    "a device's memory is read by address in kernels alone",
    "Triton's assembler is that of x86-64 machines",
    "the repository's history is not here (a shallow clone or a source archive)",
    "needs root, to become someone who may not read everything",
)
"""Reasons that a machine can have although everything is installed."""

MAX_SECOND_ATTEMPTS = 2
"""Of tests that wait for browsers or clusters, on a machine that others use too; on a quiet one there are none."""


def is_exceeded(stats: Mapping[str, Sequence[Any]]) -> bool:
    """Whether a run fails for what it left out; argument as in `excesses`."""
    attempts = len(stats.get("rerun", ()))
    return attempts > MAX_SECOND_ATTEMPTS or len(list(excesses(stats))) > attempts


def excesses(stats: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """One line for every unexpected skip and every second attempt.

    Args:
        stats: pytest's reports by category, as its terminal reporter collects them.
    """
    for report in stats.get("skipped", ()):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if reason.removeprefix("Skipped: ") not in EXPECTED_SKIPS:
            yield f"skipped: {report.nodeid}: {reason}"
    for report in stats.get("rerun", ()):
        yield f"run twice: {report.nodeid}: {report.longreprtext}"

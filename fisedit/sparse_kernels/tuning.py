"""The measured tables behind the fast kernels, written from `bench` and `bench_gpu` beside this; and one wish."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from fisedit.errors import InputError
from fisedit.sparse_kernels.row_plan import KernelMap

CROP_WASTE = ((300, 0.0), (1500, 1.1), (1 << 62, 1.3))
"""(output rows up to, waste up to which one cropped_conv conv beats gather-then-linear): bf16 on two Zen 5 cores."""

TRITON_ROWS: dict[str, int] = {}
"""Kernel, by its name in `ops` ("linear" for one without a norm) -> rows of all items together up to which Triton was
measured to beat torch on CUDA. It is empty: nothing was measured on a GPU yet, so torch's kernels run there unless
`ops.use("triton")` asks for the others."""


def prefers_triton(kernel: str, rows: int) -> bool:
    """Whether Triton's form of a kernel is the faster one on CUDA for so many rows."""
    return rows <= TRITON_ROWS.get(kernel, 0)


@cache
def prefers_fp32() -> bool:
    """Whether this CPU multiplies faster in float32 than in bf16: Intel's without AMX do. A Xeon made 75 GMAC/s in bf16
    and 110 to 140 in float32; it took .7 of the time of torch's fused attention in bf16, and .6 of two products'."""
    told: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return "Intel" in told.get("cpu_name", "") and not told.get("amx_bf16", False)


def quantisation_setting() -> str:
    """Read from FISEDIT_CODED how recorded keys and values are quantised.

    Returns:
        A name of `reference.QUANTISED_DTYPES` (1 is int8), or "" for not at all. Triton's kernels read fp8 on GPUs from
        Ada and Hopper on.

    Raises:
        InputError: another value.
    """
    said = os.environ.get("FISEDIT_CODED", "")
    if said not in ("", "0", "1", "int8", "fp8"):
        raise InputError(
            f"FISEDIT_CODED must be 0, int8 or fp8, got {said!r}; unset it for keys and values as they were recorded"
        )
    return {"0": "", "1": "int8"}.get(said, said)


def prefers_cropped_conv(reads: KernelMap) -> bool:
    """Whether one dense conv over a crop is the faster form for these reads."""
    limit = next(waste for rows, waste in CROP_WASTE if reads.rows_out <= rows)
    return reads.waste <= limit

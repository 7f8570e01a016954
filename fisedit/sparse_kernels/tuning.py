"""Measured tables that choose among the fast kernels, and one setting.

The figures come from `benchmarks.triton_speed` and `triton_tuning`: see benchmarks/LOG.md. Knows sizes and devices;
no kernels.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fisedit.errors import InputError
from fisedit.sparse_kernels.row_plan import KernelMap

CROP_WASTE = ((300, 0.0), (1500, 1.1), (1 << 62, 1.3))
"""Upper bounds of (output rows, waste) up to which one dense conv over a crop is faster than gather-then-linear.

They were measured in bf16 on two Zen 5 cores."""

ANY = 1 << 62

TRITON_ROWS: dict[str, tuple[tuple[int, int], ...]] = {
    "group_norm_affine": ((ANY, ANY),),
    "norm_conv3x3": ((ANY, ANY),),
    "attention": ((320, 512), (ANY, 1024)),
    "norm_geglu": ((320, ANY), (ANY, 128)),
    "cross_attention": ((320, 4096), (640, 512)),
    "linear": ((ANY, 512),),
    "norm_linear": ((ANY, 512),),
    "time_projections": ((ANY, ANY),),
}
"""Kernel -> (channels up to, rows of all items together up to which Triton is faster than torch), fewest channels
first. A kernel is named as in `ops`, "linear" for one without a norm. Channels are those of the rows that it reads.

Measured on an H200 by `benchmarks.triton_tuning` up to 512 rows, and on an H100 by `triton_speed`; their
figures are in benchmarks/LOG.md. A kernel that is not named runs by torch's."""


SMALL_MAP = 1 << 17
"""Numbers of a map up to which its statistics are computed anew on a CPU: fewer rows are not worth more calls."""

SHORT_MAP = 100
"""Positions of such a map up to which torch's own norm is faster than sums on a CPU."""


def prefers_dense_norm(rows: Tensor, size: int) -> bool:
    """Return whether a norm's statistics are faster computed of the whole map than updated by the rows that changed.

    Args:
        rows: [B, R, C].
        size: positions of the map, H * W.
    """
    return not rows.is_cuda and len(rows) * size * rows.shape[2] <= SMALL_MAP


def prefers_triton(kernel: str, rows: int, channels: int, device: torch.device) -> bool:
    """Return whether Triton's form of a kernel is the faster one.

    Args:
        kernel: name in `TRITON_ROWS`.
        rows: rows of all items together, B * R.
        channels: The channels of each row.
        device: where they are.

    Returns:
        False off CUDA, and on GPUs of AMD, on which nothing was measured.
    """
    if device.type != "cuda" or torch.version.hip:
        return False
    return rows <= next((most for widest, most in TRITON_ROWS.get(kernel, ()) if channels <= widest), -1)


@cache
def prefers_fp32() -> bool:
    """Return whether this CPU multiplies faster in float32 than in bf16: Intel's without AMX do.

    A Xeon computed 75 GMAC/s in bf16 and 110 to 140 in float32. Attention in float32 took .7 of the time of torch's
    fused attention in bf16, and .6 of the time of two products.
    """
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return "Intel" in capabilities.get("cpu_name", "") and not capabilities.get("amx_bf16", False)


@cache
def prefers_onednn() -> bool:
    """Return whether oneDNN multiplies float32 faster than MKL, which torch takes: on AMD's CPUs.

    MKL leaves AVX-512 unused there. With it, on a Zen 5, oneDNN took .4 to .55 of the time of a product. Steps of SD
    1.5 at 5 and 25 % of the picture took .60 and .67 of theirs. With AVX2 alone they took .92 and .96.
    """
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return "AMD" in capabilities.get("cpu_name", "") and torch.backends.mkl.is_available()


def quantisation_setting() -> str:
    """Read from FISEDIT_CODED how recorded keys and values are quantised.

    Returns:
        A name of `operands.QUANTISED_DTYPES` (1 is int8), or "" for not at all. Triton's kernels read fp8 on GPUs from
        Ada and Hopper on.

    Raises:
        InputError: another value.
    """
    value = os.environ.get("FISEDIT_CODED", "")
    if value not in ("", "0", "1", "int8", "fp8"):
        raise InputError(
            f"FISEDIT_CODED must be 0, int8 or fp8, got {value!r}; unset it for keys and values as they were recorded"
        )
    return {"0": "", "1": "int8"}.get(value, value)


def prefers_cropped_conv(kernel_map: KernelMap) -> bool:
    """Return whether one dense conv over the crop is faster than gather-then-linear for a kernel map."""
    limit = next(waste for rows, waste in CROP_WASTE if kernel_map.rows_out <= rows)
    return kernel_map.waste <= limit

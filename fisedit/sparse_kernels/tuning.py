"""The measured table behind `cpu.conv3x3`; written from `python -m fisedit.sparse_kernels.bench`."""

from __future__ import annotations

from fisedit.plan import Reads

CROP_WASTE = ((300, 0.0), (1500, 1.1), (1 << 62, 1.3))
"""(output rows up to, waste up to which one cropped conv beats gather-then-linear): bf16 on two Zen 5 cores."""


def prefers_crop(reads: Reads) -> bool:
    """Whether the cropped dense conv is the faster form for these reads."""
    limit = next(waste for rows, waste in CROP_WASTE if reads.rows_out <= rows)
    return reads.waste <= limit

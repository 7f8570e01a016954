"""The measured table behind `cpu.conv3x3`; written from `python -m fisedit.sparse_kernels.bench`."""

from __future__ import annotations

from fisedit.plan import Reads

CROP_WASTE = ((192, 0.0), (768, 1.3), (1 << 62, 1.5))
"""(output rows up to, waste up to which one cropped conv beats gather-then-linear)."""


def prefers_crop(reads: Reads, channels: int) -> bool:
    """Whether the cropped dense conv is the faster form for these reads and input channels."""
    limit = next(waste for rows, waste in CROP_WASTE if reads.rows_out <= rows)
    return reads.waste <= limit

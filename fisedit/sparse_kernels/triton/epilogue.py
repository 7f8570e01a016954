"""The beginning of a program and the end of a GEMM's tile in Triton.

On GPUs from Hopper on a kernel is launched while the one before it runs (programmatic dependent launch), and waits for
that one's results. With split-K every program writes its partial sum, and the last one adds all of them in order. So
there is no second kernel, and every run gives the same bits. A counter for each tile begins and ends at zero. Needs
triton.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_prior_kernel(PDL: tl.constexpr):
    """Let the next kernel be launched, and wait until the one before is done; with `PDL` every kernel begins so."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def last_to_arrive(counter, programs):
    """Return whether all other programs of a tile have written their partial sums; every program calls it once."""
    tl.debug_barrier()  # one thread counts for all: theirs must be written
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def add_parts(src, step, programs, mask, PARTS: tl.constexpr):
    """The sum of all partial sums of a tile; `src` points into the first one, `step` elements are between two.

    Small tiles' are read at once, so that one wait serves all; `PARTS` is the power of two from `programs` on.
    """
    if PARTS * src.shape[0] * src.shape[1] <= 16384:
        part = tl.arange(0, PARTS)[:, None, None]
        present = (part < programs) & mask[None, :, :]
        parts = tl.load(src[None, :, :] + part * step, mask=present, other=0.0, cache_modifier=".cg")
        total = tl.sum(parts, 0)
    else:
        total = tl.load(src, mask=mask, other=0.0, cache_modifier=".cg")  # not from a stale cache of its own
        for part in range(1, programs):
            total += tl.load(src + part * step, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def finish(
    acc, out, offsets, stored, parts, counters, step, bias, n, N, residual,
    PARTS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Write a tile, with what is added to it, at `offsets` of `out`; if programs share it, the last one does.

    `PARTS` is 0, or the power of two from their number on; `bias` is of columns, `residual` lies as `out` does, `step`
    is between parts.
    """
    last = True
    if PARTS > 0:
        tl.store(parts + tl.program_id(2) * step + offsets, acc, mask=stored)
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        last = last_to_arrive(counters + tile, tl.num_programs(2))
        if last:
            acc = add_parts(parts + offsets, step, tl.num_programs(2), stored, PARTS)
    if last:
        if BIAS:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL:
            acc += tl.load(residual + offsets, mask=stored, other=0.0).to(tl.float32)
        tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=stored)

"""Torch's own counter of floating-point operations, with formulas for the kernels that it has none for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


@contextmanager
def count_flops() -> Iterator[FlopCounterMode]:
    """Count what the enclosed calls take; packed convs, which dense steps alone run, are not counted."""
    kernels: dict[Any, Callable[..., int]] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention  # noqa: SLF001 (its only name)
    }
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        kernels[torch.ops.mkldnn._linear_pointwise] = _linear  # noqa: SLF001 (its only name)
    with FlopCounterMode(display=False, custom_mapping=kernels) as counter:
        yield counter


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _linear(rows: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return int(2 * prod(rows) * out_shape[-1])

"""Multiply-accumulates as torch counts them."""

from __future__ import annotations

from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fisedit.sparse_kernels import prepacked, tuning


def counted(run) -> int:
    """Multiply-accumulates by torch; its plain attention and linear layers, for the counter knows no other ones."""
    linear = mock.patch.object(tuning, "prefers_onednn", return_value=False)
    unpacked = mock.patch.object(prepacked, "_packed", return_value=None)
    with linear, unpacked, torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() // 2


def time_macs(unet, batch) -> int:
    """The time embedding's linears, which have no positions: our own count leaves them out."""
    linears = [m for name, m in unet.named_modules() if "_emb" in name and isinstance(m, torch.nn.Linear)]
    return batch * sum(linear.weight.numel() for linear in linears)

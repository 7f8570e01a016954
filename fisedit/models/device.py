"""Chooses a model's device and precision. Knows torch and no model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fisedit.errors import InputError, ModelError

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
"""Name of a precision -> torch's."""


def memory_bytes(device: torch.device) -> int:
    """Total memory in bytes of a GPU, or of the machine for another device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def placement(pipe: StableDiffusionPipeline) -> tuple[torch.device, torch.dtype]:
    """The device and dtype of a pipeline.

    Args:
        pipe: The model.

    Raises:
        ModelError: Its UNet, VAE and text encoder differ in them.
    """
    parts = {"UNet": pipe.unet, "VAE": pipe.vae, "text encoder": pipe.text_encoder}
    first = {name: next(part.parameters()) for name, part in parts.items()}
    found = {name: (weight.device, weight.dtype) for name, weight in first.items()}
    if len(set(found.values())) > 1:
        got = ", ".join(
            f"{name} {str(dtype).removeprefix('torch.')} on {device}" for name, (device, dtype) in found.items()
        )
        raise ModelError(f"a pipeline must have one dtype and device, got {got}; move all of it by pipe.to(...)")
    return found["UNet"]


def to_pinned_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to contiguous host memory, pinned if the device is CUDA.

    Args:
        tensor: On any device.
        device: The device that will copy from it.
    """
    host = tensor.to("cpu").contiguous()
    return host.pin_memory() if device.type == "cuda" else host


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """Resolve a device.

    Args:
        device: Torch device or its name; None for CUDA if available, else the CPU.

    Raises:
        InputError: Torch knows no such device, or this machine has none.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device must be cpu, cuda or cuda:N, got {device!r}") from error
    if chosen.type == "cpu":
        return torch.device("cpu")
    available = torch.accelerator.device_count() if _accelerated(chosen) else 0
    if (chosen.index or 0) >= available:
        raise InputError(f"device {device} is not on this machine ({available} of its kind found); use cpu")
    return chosen


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Resolve a precision.

    Args:
        dtype: One of `DTYPES`; None for fp16 on CUDA, bf16 on CPUs with hardware products of it, else fp32.
        device: The device.

    Raises:
        InputError: The precision is unknown, or fp16 on a CPU.
    """
    chosen = _best_dtype(device) if dtype is None else DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        raise InputError(f"dtype must be fp32, bf16 or fp16, got {dtype!r}")
    if chosen is torch.float16 and device.type == "cpu":
        raise InputError("dtype fp16 takes minutes a step on a CPU; use bf16 or fp32, or leave dtype out")
    return chosen


def _best_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.float16
    fast = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001 (torch has no public name)
    return torch.bfloat16 if fast else torch.float32


def _accelerated(device: torch.device) -> bool:
    current = torch.accelerator.current_accelerator(check_available=True)
    return current is not None and current.type == device.type

"""Chooses a model's device and precision. Knows torch and no model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fisedit.errors import InputError, ModelError
from fisedit.machine.groups import memory_limit
from fisedit.prompts.chunks import added_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from fisedit.machine.model import Model

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
"""Name of a precision -> torch's."""

MIN_SPEEDUP = 1.15
"""Ratio of fp32's to bf16's seconds above which bf16 is a CPU's default; more than the noise of a busy machine."""

SLOWDOWN_LIMIT = 3
"""Ratio of bf16's to fp32's seconds above which bf16 is not measured further, as on a CPU without bf16 products."""

TIMING_REPEATS = 5
"""Timings of the products in either precision, of which the shortest counts."""


def memory_bytes(device: torch.device) -> int:
    """Total memory in bytes of a GPU, or of the machine for another device; in a container, its limit."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_limit()
    return total if limit is None else min(total, limit)


def device_and_dtype(pipe: Model) -> tuple[torch.device, torch.dtype]:
    """The device and dtype of a pipeline.

    Args:
        pipe: The model.

    Raises:
        ModelError: Its UNet, VAE and text encoder differ in them, or one is missing. A VAE may be in fp32 by itself.
    """
    parts = {"UNet": pipe.unet, "VAE": pipe.vae, "text encoder": pipe.text_encoder}
    if missing := [name for name, part in parts.items() if part is None]:
        raise ModelError(f"a pipeline must have a UNet, a VAE and a text encoder, got no {missing[0]}; load it whole")
    first = {name: next(part.parameters()) for name, part in parts.items()}
    found = {name: (weight.device, weight.dtype) for name, weight in first.items()}
    unet, vae = found["UNet"], found["VAE"]
    same = found if vae[1] is not torch.float32 else found | {"VAE": (vae[0], unet[1])}
    if len(set(same.values())) > 1:
        got = ", ".join(
            f"{name} {str(dtype).removeprefix('torch.')} on {device}" for name, (device, dtype) in found.items()
        )
        raise ModelError(f"a pipeline must have one dtype and device, got {got}; move all of it by pipe.to(...)")
    return unet


def weights_digest(pipe: Model) -> str:
    """SHA-256 of the weights that pictures are made with, LoRAs' aside, in hexadecimal digits.

    Args:
        pipe: The model.
    """
    digest = hashlib.sha256()
    added = sum(map(len, added_tokens(pipe.tokenizer).values()))  # textual inversions, which configs name
    for part in (pipe.unet, pipe.vae, pipe.text_encoder):
        for name, weight in part.named_parameters():
            if "lora_" not in name:
                own = weight[:-added] if added and name.endswith("token_embedding.weight") else weight
                digest.update(name.replace(".base_layer", "").encode())
                digest.update(own.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def write_count(tensor: Tensor) -> int:
    """Return how often torch wrote to a tensor in place; 0 for one of inference mode, where it counts none."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 (torch has no public name)


@contextmanager
def default_torch_state() -> Iterator[None]:
    """Switch off what the caller may have set for its thread: autocast, another default device than the CPU, and
    inference mode. Tensors of inference mode cannot be weights later."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


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
    if chosen.type == "mps":
        raise InputError("device mps has no float64, which exact group statistics need; use cpu")
    available = torch.accelerator.device_count() if _is_accelerator(chosen) else 0
    if (chosen.index or 0) >= available:
        raise InputError(f"device {device} is not on this machine ({available} of its kind found); use cpu")
    return chosen


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Resolve a precision.

    Args:
        dtype: One of `DTYPES`; None for fp16 on CUDA, and on a CPU for the faster of bf16 and fp32 (see
            `faster_cpu_dtype`).
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


def advice_on_overflow(dtype: torch.dtype) -> str:
    """Return what a user can do where numbers left a precision's range.

    Args:
        dtype: The precision.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return "use dtype fp32"
    return "use a lower guidance_scale or lower scales of LoRAs and adapters, or check the model's file"


def _best_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda":
        return torch.float16
    return faster_cpu_dtype() if device.type == "cpu" else torch.float32


@cache
def faster_cpu_dtype() -> torch.dtype:
    """bf16 where products of Stable Diffusion's widths are clearly faster in it than in fp32, else fp32.

    Measured once a process, in some milliseconds, unless FISEDIT_CPU_DTYPE names one of the two.

    Raises:
        InputError: FISEDIT_CPU_DTYPE names another precision.
    """
    name = os.environ.get("FISEDIT_CPU_DTYPE", "")
    if name and DTYPES.get(name) not in {torch.float32, torch.bfloat16}:
        raise InputError(f"FISEDIT_CPU_DTYPE must be fp32 or bf16, got {name!r}; unset it to have both measured")
    return DTYPES[name] if name else _faster_dtype(_products(torch.float32), _products(torch.bfloat16))


def _faster_dtype(
    fp32: Callable[[], object], bf16: Callable[[], object], clock: Callable[[], float] = perf_counter
) -> torch.dtype:
    """The precision whose products are faster, in turns.

    Args:
        fp32: products in single precision.
        bf16: the same in bfloat16.
        clock: returns seconds.
    """

    def seconds(products: Callable[[], object]) -> float:
        start = clock()
        products()
        return clock() - start

    fp32()  # the first call makes kernels
    fp32_seconds, bf16_seconds = seconds(fp32), seconds(bf16)
    if bf16_seconds > SLOWDOWN_LIMIT * fp32_seconds:
        bf16_seconds = min(bf16_seconds, seconds(bf16))  # the first one made kernels too
    if bf16_seconds > SLOWDOWN_LIMIT * fp32_seconds:
        return torch.float32
    for _ in range(TIMING_REPEATS):
        fp32_seconds, bf16_seconds = min(fp32_seconds, seconds(fp32)), min(bf16_seconds, seconds(bf16))
    return torch.bfloat16 if fp32_seconds > MIN_SPEEDUP * bf16_seconds else torch.float32


def _products(dtype: torch.dtype) -> Callable[[], object]:
    """A 3x3 convolution, channels-last, and a linear layer of Stable Diffusion's widths."""
    maps, kernel = torch.ones(2, 320, 12, 12, dtype=dtype), torch.ones(320, 320, 3, 3, dtype=dtype)
    rows, weight = torch.ones(256, 640, dtype=dtype), torch.ones(640, 640, dtype=dtype)
    maps, kernel = (t.to(memory_format=torch.channels_last) for t in (maps, kernel))

    @torch.inference_mode()
    def run() -> None:
        F.conv2d(maps, kernel, padding=1)
        F.linear(rows, weight)

    return run


def _is_accelerator(device: torch.device) -> bool:
    current = torch.accelerator.current_accelerator(check_available=True)
    return current is not None and current.type == device.type

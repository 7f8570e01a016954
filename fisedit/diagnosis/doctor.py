"""`fisedit doctor`: what a report of a fault needs to know of a machine, and what is wrong with it.

Measures and compares; changes nothing.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from fisedit import __version__
from fisedit.costs import store as cost_store
from fisedit.diagnosis.kernel_checks import ALLOWED, check_kernels
from fisedit.diagnosis.layer_times import slow_layers
from fisedit.diagnosis.transfer_rates import transfer_rates
from fisedit.machine.device import memory_bytes
from fisedit.machine.hardware import available_bytes, cpu_model, num_cores, this_machine
from fisedit.models.paths import expand_home

if TYPE_CHECKING:
    from fisedit.machine.model import Model
    from fisedit.values import OnStep

REQUIRED = ("torch", "diffusers", "transformers", "safetensors", "numpy", "pillow")
OPTIONAL = {
    "triton": "kernels on a GPU",
    "xformers": "attention on a GPU",
    "peft": "LoRAs",
    "gradio": "the app",
    "fastapi": "the app",
    "ray": "batches on a cluster",
}
"""Package -> what it is for."""

SLOW_MACHINE_RATIO = 1.5
"""Ratio of a rate at calibration to the rate now above which it is a finding."""

LOW_BYTES = 1 << 30
"""Free bytes of memory or disk below which that is a finding."""


def examine(pipe: Model, seconds: float = 2.0, on_step: OnStep | None = None) -> dict[str, Any]:
    """All that is known of a machine and a model on it.

    Args:
        pipe: the model.
        seconds: The approximate time that a round of layers takes.
        on_step: called before every part with (i, n, None).

    Returns:
        {"versions", "packages", "machine", "gpu", "memory", "disk", "threads", "kernels", "table", "rates", "layers",
        "findings"}, ready for JSON. Findings are lines; none where nothing is wrong.
    """
    progress = on_step or (lambda *_: None)
    device, dtype = pipe.unet.device, pipe.unet.dtype
    progress(0, 4, None)
    checks = check_kernels(device, dtype)
    kernels = [asdict(one) | {"right": one.right, "allowed": ALLOWED[dtype]} for one in checks]
    progress(1, 4, None)
    report: dict[str, Any] = {
        "versions": {"fisedit": __version__, "python": platform.python_version()} | _versions(REQUIRED),
        "packages": [{"package": name, "for": use, "version": _version(name)} for name, use in OPTIONAL.items()],
        "machine": this_machine(device).as_dict() | {"cpu_features": cpu_model()[1], "system": platform.platform()},
        "gpu": _gpu(device),
        "memory": {"total": memory_bytes(torch.device("cpu")), "available": available_bytes()},
        "disk": _disk(),
        "threads": thread_costs(),
        "kernels": kernels,
    }
    progress(2, 4, None)
    report |= _compare(pipe, seconds)
    progress(4, 4, None)
    return report | {"findings": findings(report)}


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    """Return the version of an installed package; "" where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _gpu(device: torch.device) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    index = device.index or 0
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    return {"name": name, "cuda": torch.version.cuda, "free": free, "total": total}


def _disk() -> list[dict[str, Any]]:
    """Free bytes where records and tables are kept."""
    places = {"temporary files": Path(tempfile.gettempdir()), "home": expand_home("~")}
    return [{"place": name, "free": shutil.disk_usage(path).free} for name, path in places.items() if path.is_dir()]


def thread_costs(size: int = 512, repeats: int = 15) -> dict[str, float]:
    """Seconds of a product with torch's threads, and with twice as many as there are cores.

    Args:
        size: rows and columns.
        repeats: The number of measurements; their median counts.
    """
    before, cores = torch.get_num_threads(), num_cores()
    matrix, taken = torch.ones(size, size), dict[str, float]()
    try:
        for name, threads in {"seconds": before, "seconds oversubscribed": 2 * cores}.items():
            torch.set_num_threads(threads)
            torch.mm(matrix, matrix)
            taken[name] = median(_seconds(matrix) for _ in range(repeats))
    finally:
        torch.set_num_threads(before)
    return {"threads": before, "cores": cores} | taken


def _seconds(matrix: torch.Tensor) -> float:
    start = perf_counter()
    torch.mm(matrix, matrix)
    return perf_counter() - start


def _compare(pipe: Model, seconds: float) -> dict[str, Any]:
    """This machine beside its own cost table: rates of memory and disk, and layers that are slower than their peers."""
    table, rates = cost_store.load_table(pipe), transfer_rates()
    if table is None:
        return {"table": {}, "rates": [{"rate": name, "now": now} for name, now in rates.items()], "layers": []}
    size = int(table.about["pixels"])
    compared = [{"rate": name, "now": now, "calibrated": table.rates.get(name)} for name, now in rates.items()]
    slow = slow_layers(pipe, table.layers, size, seconds)
    return {"table": dict(table.about), "rates": compared, "layers": [asdict(one) for one in slow]}


def findings(report: dict[str, Any]) -> list[str]:
    """Return the things that are wrong, a line each.

    Args:
        report: The report of `examine`, but for this.
    """
    found = [
        f"kernel {one['kernel']} is wrong in {one['dtype']}: error {one['error']:.3g}, {one['allowed']:g} allowed"
        f"{'; ' + one['failure'] if one['failure'] else ''}; report this"
        for one in report["kernels"]
        if not one["right"]
    ]
    found += [
        f"layer {one['layer']} ({one['kind']}, level {one['level']}) takes {one['slowdown']:.2f} times its peers' time"
        for one in report["layers"]
    ]
    found += [
        f"{one['rate']}: {one['now'] / 1e9:.2f} GB a second, {one['calibrated'] / 1e9:.2f} at calibration"
        for one in report["rates"]
        if (one.get("calibrated") or 0) > SLOW_MACHINE_RATIO * one["now"]
    ]
    threads, memory = report["threads"], report["memory"]
    if threads["threads"] > threads["cores"]:
        found.append(f"torch has {threads['threads']} threads for {threads['cores']} cores; set OMP_NUM_THREADS")
    if memory["available"] < LOW_BYTES:
        found.append(f"{memory['available'] >> 20} MiB of memory are left; edits need more")
    found += [
        f"{one['free'] >> 20} MiB are left for {one['place']}" for one in report["disk"] if one["free"] < LOW_BYTES
    ]
    if not report["table"]:
        found.append("this machine has no cost table for the model; run fisedit calibrate")
    return found

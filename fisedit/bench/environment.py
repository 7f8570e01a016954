"""The origin of a figure (commit, date, machine and command): the `environment` of every benchmark's JSON.

Knows this process, its machine and its repository; no measurement.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fisedit import __version__
from fisedit.machine.hardware import cpu_model, num_cores

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the repository, where there is one."""

_CODE = (".", ":(exclude)benchmarks/results", ":(exclude)*.md")
"""The paths that must be unchanged in a clean tree: all but results and documents."""


def with_environment(report: dict[str, Any]) -> dict[str, Any]:
    """A report with the environment that it was measured in, first.

    Args:
        report: ready for JSON; its settings name a dtype.
    """
    return {"environment": describe(report.get("settings", {}).get("dtype", ""))} | report


def describe(dtype: str) -> dict[str, Any]:
    """The commit, date, machine, precision and command of this process, ready for JSON.

    Args:
        dtype: The dtype that was measured, as torch names it.
    """
    cpu, features = cpu_model()
    return {
        "command": shlex.join([*_program(), *sys.argv[1:]]),
        **code_state(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cpu_features": features,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "versions": {"fisedit": __version__, "torch": torch.__version__, "python": platform.python_version()}
        | _baseline_versions(),
    }


def _baseline_versions() -> dict[str, str]:
    """Versions of the packages whose runs are baselines, where they are installed."""
    found = {}
    for name in ("openvino", "DeepCache"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _program() -> list[str]:
    """Return the words that run this process's program: a study's module, or the command line."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec else ""
    return ["python", "-m", name] if name.startswith("benchmarks") else ["fisedit"]


@cache
def code_state() -> dict[str, Any]:
    """{"commit", "clean"} of the code when it was first asked for; outside a clone of the repository FISEDIT_COMMIT,
    which may be "", and None."""
    if git("rev-parse", "--show-toplevel") != str(ROOT):
        return {"commit": os.environ.get("FISEDIT_COMMIT", ""), "clean": None}
    return {"commit": git("rev-parse", "HEAD"), "clean": git("status", "--porcelain", "--", *_CODE) == ""}


def git(*arguments: str) -> str | None:
    """Return what git prints about the repository, or None where it fails.

    Args:
        arguments: The arguments of git.
    """
    try:
        process = subprocess.run(  # noqa: S603 (constant arguments)
            ["git", "-C", ROOT, *arguments],  # noqa: S607 (the git that is on the path)
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()

"""What every test shares: one thread, no network, a fixed seed, and the random pipelines, each built on first use.

Heavy libraries are imported by the fixtures that need them, so that a test of plain values starts at once.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fisedit.decoder import tiles as vae_tiles
from fisedit.machine import contention
from tests.support import ceilings, sweeps
from tests.support.processes import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diffusers import StableDiffusionPipeline

    from benchmarks.classifier import SceneClassifier
    from fisedit import Editor
    from fisedit.history import EditResult

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tiny tensors lose more to thread hand-over than they gain
os.environ.setdefault("HF_HUB_OFFLINE", "1")
CPU_FLAGS = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
os.environ.setdefault("FISEDIT_CPU_DTYPE", "bf16" if "avx512_bf16" in CPU_FLAGS else "fp32")  # no timing decides here
os.environ.setdefault("FISEDIT_COSTS", "0")  # no table of this machine decides: tests have a fixed one
os.environ.setdefault("FISEDIT_PAGES", "0")  # features stay in memory but where a test gives them a folder
if not Path("/dev/nvidiactl").exists():  # no GPU: Triton's kernels run in its interpreter, chosen when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
contention.MAX_SPREAD, contention.SCHEDSTAT = float("inf"), Path("/nowhere")  # tests may run on a busy machine


class LazyPipelines(Mapping[str, "StableDiffusionPipeline"]):
    """The pipelines of `SHAPES`, each built on first use. They are shared: leave them as you found them."""

    def __init__(self) -> None:
        from tests.support.pipelines import SHAPES, build_pipeline

        self._names = tuple(SHAPES)
        self._build = cache(build_pipeline)

    def __getitem__(self, name: str) -> StableDiffusionPipeline:
        return self._build(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run whole sweeps, and the slow tests")
    parser.addoption("--full", action="store_true", help="fail for an unexpected skip or a second attempt")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hold the ceilings of a full run, where the reports of all workers are."""
    if (stats := full_run(session.config)) and ceilings.is_exceeded(stats):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what a full run left out, last of all."""
    for line in ceilings.excesses(full_run(config)):
        terminalreporter.write_line(line, red=True)


def full_run(config: pytest.Config) -> Mapping[str, Sequence[Any]]:
    """The reports of a full run by category; none in other runs and in workers."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if not config.getoption("--full") or reporter is None or hasattr(config, "workerinput"):
        return {}
    stats: Mapping[str, Sequence[Any]] = reporter.stats
    return stats


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `--all` runs. What waits for a browser or a cluster may be tried twice."""
    if not config.getoption("--all"):
        items[:], left_out = sweeps.split(items)
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        if {"chromium", "cluster"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_collection_finish() -> None:
    """Keep the garbage collector out of imported modules, which live to the end: a tenth of the time of all tests."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Give them back to the collector: Triton's bindings print what is not freed at the interpreter's end."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def pipelines() -> LazyPipelines:
    """Name of a shape -> its random pipeline, seed 0."""
    return LazyPipelines()


@pytest.fixture
def editor(pipelines: LazyPipelines) -> Editor:
    """An editor with no history, on a pipeline that is shared."""
    from fisedit import Editor

    return Editor(pipelines["shallow"])


@pytest.fixture
def source(editor: Editor) -> EditResult:
    """Its first picture, of three steps."""
    from tests.support.edits import CAT

    return editor.generate(CAT, seed=7, num_inference_steps=3)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test that has torch from the same random state."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _collected() -> Iterator[None]:
    """Give back what a module leaves: in cycles, and in a heap that a benchmark keeps from being trimmed.

    The libraries that it imported live on: they are kept from every later collection.
    """
    yield
    gc.collect()
    gc.freeze()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)


@pytest.fixture
def no_grad() -> Iterator[None]:
    """Without gradients, as editors run."""
    import torch

    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def judge() -> SceneClassifier:
    """The classifier of scenes with random weights."""
    import torch

    from benchmarks.classifier import SceneClassifier

    torch.manual_seed(0)
    return SceneClassifier().eval()


@pytest.fixture(scope="session")
def judge_file(judge: SceneClassifier, tmp_path_factory) -> Path:
    """The same as a file."""
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("judge") / "judge.safetensors"
    save_file(judge.state_dict(), path)
    return path


@pytest.fixture
def process(tmp_path):
    """Runs the command line as a process of its own, in an empty folder."""

    def run(*arguments: object) -> Run:
        command = [sys.executable, "-m", "fisedit", *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
        return Run(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def in_process(tmp_path, monkeypatch, capfd):
    """Runs a program in this process, which has torch already."""
    monkeypatch.chdir(tmp_path)

    def run(main: Callable[[], None], *arguments: object) -> Run:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Run(int(ended.value.code), *capfd.readouterr())

    return run


@pytest.fixture
def fisedit(in_process):
    """Runs the command line in this process."""
    from fisedit import cli

    return partial(in_process, cli.main)


@pytest.fixture
def study(in_process):
    """Runs a study of `benchmarks` in this process, by its name."""
    from benchmarks import commands

    return lambda name, *arguments: in_process(partial(commands.run, name), *arguments)


@pytest.fixture(scope="session")
def model(pipelines: LazyPipelines, tmp_path_factory) -> Path:
    """A tiny random model on disk; leave it as it is."""
    folder = tmp_path_factory.mktemp("cli") / "model"
    pipelines["demo"].save_pretrained(folder)
    return folder


FAR = 512


@pytest.fixture
def boxed(monkeypatch):
    """Boxes however large they are."""
    monkeypatch.setattr(vae_tiles, "DENSE_SHARE", np.inf)
    monkeypatch.setattr(vae_tiles, "DENSE_CELLS", 0)


@pytest.fixture
def far(monkeypatch):
    """Rows and a halo that reach everywhere."""
    monkeypatch.setattr(vae_tiles, "HALO", FAR)
    monkeypatch.setattr(vae_tiles, "DILATION", FAR)

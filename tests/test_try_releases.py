"""What tools/try-releases installs, refuses and counts."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[1] / "tools/try-releases"
PROJECT = {
    "project": {
        "dependencies": ["diffusers>=0.42,<0.43", "huggingface_hub>=1.0,<3", "torch>=2.10,<2.14"],
        "optional-dependencies": {
            "app": ["gradio>=6.31,<7"],
            "lora": ["peft>=0.17,<1"],
            "gpu": ["triton>=3.4,<4; sys_platform == 'linux'"],
            "dev": ["fisedit[app]", "mypy>=1.18", "pytest>=9.0"],
        },
    }
}


@pytest.fixture(scope="module")
def tool():
    loader = SourceFileLoader("try_releases", str(PATH))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("try_releases", loader))
    loader.exec_module(module)
    return module


def test_a_sets_packages_have_its_bounds_and_all_others_the_projects(tool):
    assert tool.asked(PROJECT, ["torch==2.15.*", "huggingface-hub==3.*", "python==3.14"]) == [
        "diffusers>=0.42,<0.43",
        "peft>=0.17,<1",
        "triton>=3.4,<4; sys_platform == 'linux'",
        "pytest>=9.0",
        "torch==2.15.*",
        "huggingface-hub==3.*",
    ]


def test_packages_of_cuda_are_found_among_those_to_install(tool):
    plan = " + cuda-bindings==13.5.0\n + numpy==2.4.6\n + nvidia-cudnn-cu13==9.26\n + torch==2.15.0\n"
    assert tool.cuda_packages(plan) == ["cuda-bindings", "nvidia-cudnn-cu13"]
    assert not tool.cuda_packages(" + torch==2.13.0+cpu\n - nvidia-cublas==13.1\n")


def test_a_set_that_comes_with_cuda_is_refused_in_its_row(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(
        tool, "uv", lambda *words: " + nvidia-nccl==2\n + nvidia-nvtx==1\n" if "--dry-run" in words else ""
    )
    row = tool.row("torch==2.15.*", tmp_path, [], with_cuda=False)
    assert row.startswith("| `torch==2.15.*` | - |") and row.count("|") == tool.HEAD.splitlines()[0].count("|")
    assert row.endswith("no build for CPUs in the index: it comes with nvidia-nccl and 1 more of CUDA |")


def test_results_are_counted_and_the_first_error_told_in_one_line(tool, pytester):
    pytester.makepyfile(
        """
        import pytest

        def test_right(): pass
        def test_wrong(): raise ValueError("a | b\\n  in two lines")
        def test_later(): assert 0, "the second one"
        @pytest.fixture
        def broken(): raise OSError
        def test_broken(broken): pass
        @pytest.mark.skip(reason="no GPU")
        def test_left_out(): pass
        """
    )
    results = pytester.path / "results.xml"
    pytester.inline_run(f"--junit-xml={results}")
    outcome = tool.read_results(results.read_text(encoding="utf-8"))
    assert (outcome.passed, outcome.failed, outcome.skipped) == (1, 3, 1)
    module = "test_results_are_counted_and_the_first_error_told_in_one_line"
    assert outcome.error == rf"3 of {module}: ValueError: a \| b in two lines"


def test_a_module_that_cannot_be_imported_is_a_failure_with_its_own_words(tool, pytester):
    pytester.makepyfile("import no_such_package")
    pytester.inline_run(f"--junit-xml={pytester.path / 'results.xml'}")
    outcome = tool.read_results((pytester.path / "results.xml").read_text(encoding="utf-8"))
    module = "test_a_module_that_cannot_be_imported_is_a_failure_with_its_own_words"
    assert outcome == (0, 1, 0, f"1 of {module}: ModuleNotFoundError: No module named 'no_such_package'")


def test_the_reason_of_a_refused_installation_is_its_last_sentence(tool):
    said = (
        "  x No solution found:\n  `-> Because only a<=1 is available\n      and you require a>1, it is impossible.\n"
    )
    assert tool.reason(said) == "Because only a<=1 is available and you require a>1, it is impossible."
    assert (
        tool.reason("error: No interpreter found\n  for Python 3.14\n") == "error: No interpreter found for Python 3.14"
    )

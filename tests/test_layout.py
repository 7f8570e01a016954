"""Where tests lie: a module's tests are found by its name, and what tests share lies in tests/support."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.documents import ROOT

TESTS = ROOT / "tests"
PACKAGES = {
    "app": ROOT / "app",
    "benchmarks": ROOT / "benchmarks",
    "training": ROOT / "training",
    "support": TESTS / "support",
}
"""Folders of tests for something else than a package of fisedit."""

ELSEWHERE = {
    "adapters/test_training": "the package adapters.training as one run",
    "app/test_adapter_pictures": "control pictures in handlers, arguments and components",
    "app/test_browser": "the page in a real browser",
    "app/test_docs": "the code in docs/app.md",
    "app/test_offers": "models, LoRAs and an adapter from the command line to the page",
    "app/test_page": "the page's scripts and styles in a real browser",
    "app/test_sizes": "sizes that XL is told, from the page and from programs",
    "app/test_safety": "hostile requests to a server that runs",
    "batch/test_images": "kinds of pictures and masks through a whole batch",
    "benchmarks/quality/test_quality_guard": "figures of the shipped model that must not fall",
    "integrations/test_comfyui": "the nodes in integrations/comfyui",
    "runners/test_captured_shallow": "steps that reuse deep features, as graphs and in whole edits",
    "runners/test_host_sync": "no operation of a captured step or decode makes the host wait",
    "sparse_kernels/test_triton": "the package sparse_kernels.triton through its backend",
    "sparse_kernels/test_triton_compiles": "the same, compiled for a GPU that is not here",
    "sparse_kernels/test_triton_count": "how many kernels a whole step takes",
    "support/test_oracle_by_hand": "the oracle against numpy",
    "test_docs_site": "the documents as a site",
    "test_extending": "the code in CONTRIBUTING.md",
    "test_imports": "the order of the packages",
    "test_layout": "this file",
    "test_language": "docstrings, by tools/check_language.py",
    "test_notebooks": "the notebooks",
    "test_readme": "the code in the documents",
    "test_reliability": "the table in docs/reliability.md",
    "test_trace_edit": "tools/trace_edit.py",
    "test_try_releases": "tools/try-releases",
}
"""Tests of no single module -> what they test."""

APART = ("contract", "fault", "golden")
"""Folders of tests that are arranged by clause, fault and format."""


def modules() -> list[Path]:
    """Every test module, relative to tests/ and without its suffix."""
    found = (*TESTS.rglob("test_*.py"), *TESTS.rglob("fault_*.py"))
    return sorted(path.relative_to(TESTS).with_suffix("") for path in found)


def has_its_module(module: Path) -> bool:
    """Whether a module of the same place has the test module's name, or, of the editor's, begins it."""
    top, *rest = module.parent.parts or ("",)
    folder = PACKAGES.get(top, ROOT / "fisedit" / top).joinpath(*rest)
    name = module.name.removeprefix("test_")
    names = [name, name.partition("_")[0]] if top == "editor" else [name]
    return any((folder / f"{one}.py").is_file() for one in names)


def test_test_modules_have_the_names_of_what_they_test():
    strange = {str(m) for m in modules() if m.parts[0] not in APART and not has_its_module(m)}
    assert strange == set(ELSEWHERE)


def test_no_test_module_imports_from_another():
    names = {".".join(("tests", *module.parts)) for module in modules()} | {
        ".".join(("tests", *path.relative_to(TESTS).with_suffix("").parts)) for path in TESTS.rglob("conftest.py")
    }
    found = []
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                imported = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                found += [f"{path.relative_to(TESTS)}: {name}" for name in imported & names]
            elif isinstance(node, ast.Import):
                found += [f"{path.relative_to(TESTS)}: {alias.name}" for alias in node.names if alias.name in names]
    assert found == []


def test_a_fixture_has_one_meaning_on_the_way_down():
    """What conftest.py gives, no conftest.py below it gives anew."""
    given = {
        path.parent: {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if is_fixture(node)}
        for path in TESTS.rglob("conftest.py")
    }
    twice = [
        f"{below.relative_to(TESTS)}: {name}"
        for above, names in given.items()
        for below, own in given.items()
        if above in below.parents
        for name in names & own
    ]
    assert twice == ["masking: editor"]  # on the demo model, whose masks mean something


def is_fixture(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any("fixture" in ast.unparse(mark) for mark in node.decorator_list)

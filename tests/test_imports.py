"""Imports point downwards, the front ends use the public face alone, and nothing heavy loads before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fisedit"

LAYERS = (
    "errors values",
    "capture devices feed files grammar graph heap hub metadata pictures scenes",
    "model_checks model_files model_places models origin random_model recipes",
    "boxes buckets heat judge masks plan profiling schedule textdiff things weighting",
    "sparse_kernels",
    (
        "adapters attention cache captured captured_decode decode ends executor fused fusible layers linear preview "
        "records stepping story wholes"
    ),
    "costs editor engine history inversion leaks localise loras memory planning references rendering session workshop",
    "batch",
    (
        "sheet options console captions demo bench_adapters bench_cuda bench_plot benchmark fidelity quality "
        "train_adapter cli __main__"
    ),
)
"""From the bottom to the top; a module imports from its own layer and from those below."""

MEASURING = set("bench_adapters bench_cuda bench_plot benchmark fidelity quality train_adapter".split())
FRONT = set(LAYERS[-1].split()) - MEASURING
PUBLIC = {"", "batch", "errors", "files", "heap", "metadata", "origin", "values"}
"""What front ends may import besides one another; "" is the package itself."""

APP = set("graph history model_files model_places models pictures session workshop".split())
"""What the app imports besides: a page that offers several models asks what one is before it is loaded."""

HEAVY = {"torch", "diffusers", "transformers", "skimage", "scipy", "gradio", "triton", "compel", "PIL", "numpy", "ray"}

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}
FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


def imported(path: Path) -> Iterator[str]:
    """Names within fisedit that a file imports when it runs, wherever in it, by `import_module` too; imports for types
    alone do not count."""
    todo = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            todo += node.orelse
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fisedit":
            inside = node.module.removeprefix("fisedit").removeprefix(".")
            for name in node.names:
                full = f"{inside}.{name.name}".removeprefix(".")
                yield full if full in FILES or f"{full}.__init__" in FILES else inside
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "import_module":
            named = (part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))
            yield from (name.removeprefix("fisedit.") for name in named if f"{name}".startswith("fisedit."))
        todo += ast.iter_child_nodes(node)


def modules() -> list[str]:
    return sorted(name for name in FILES if name != "__init__")


@pytest.mark.parametrize("name", modules())
def test_imports_point_downwards(name):
    top = name.split(".")[0]
    assert top in LEVEL, f"say in LAYERS where {name} belongs"
    for target in imported(FILES[name]):
        below = target.split(".")[0]
        if below:
            assert LEVEL[below] <= LEVEL[top], f"{name} imports {target}, which lies above it"


def test_no_import_runs_in_a_circle():
    graph = {name: {target for target in imported(FILES[name]) if target != name} for name in modules()}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", [name for name in modules() if name.split(".")[0] in FRONT])
def test_front_ends_use_the_public_face_alone(name):
    measured = MEASURING if name.startswith("cli.") else set()
    assert {target.split(".")[0] for target in imported(FILES[name])} <= PUBLIC | FRONT | measured


def test_the_app_uses_the_public_face_and_little_else():
    files = (path for folder in ("app", "notebooks") for path in (ROOT / folder).rglob("*.py"))
    used = {target.split(".")[0] for path in files for target in imported(path)}
    assert used - PUBLIC - FRONT == APP


@pytest.mark.parametrize("command", ["import fisedit; dir(fisedit); fisedit.Cancelled", "import fisedit.cli"])
def test_importing_is_instant(command):
    assert HEAVY.isdisjoint(loaded(command))


def test_help_is_instant():
    for verb in (
        [],
        ["generate"],
        ["edit"],
        ["batch"],
        ["train-adapter"],
        ["demo"],
        ["bench", "edit"],
        ["bench", "quality"],
    ):
        arguments = ["fisedit", *verb, "--help"]
        command = (
            f"import sys\nsys.argv = {arguments}\nfrom fisedit.cli import main\ntry: main()\nexcept SystemExit: pass"
        )
        assert HEAVY.isdisjoint(loaded(command))


def loaded(command: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `command`."""
    code = f"{command}\nimport sys\nprint('loaded', *(name for name in sys.modules if '.' not in name))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split()[1:])

"""Imports point one way, inside packages too; front ends use the public face; nothing heavy loads before it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from fisedit.cli import app

ROOT = Path(__file__).resolve().parents[1]

ORDER = (
    "errors              what is raised on purpose",
    "values              frozen values, checked once",
    "prompts             what do the words say?",
    "machine             what runs it: device, memory, time by stage",
    "models history      a diffusers model, loaded and checked | the tree of results",
    "metadata            what does a file say beside its pixels?",
    "storage             pictures, masks and tables as files",
    "sparse_kernels      kernels on compact rows, and their index tables",
    "features            what was recorded, how is it kept?",
    "sparse              how is a block computed on rows?",
    "decoder             how do rows become pixels?",
    "costs               what does it take?",
    "adapters            what changes a UNet's maps: inject, scale, eject",
    "runners             who executes a step?",
    "sampling            schedulers, inversion, the denoising loops",
    "masking             two prompts to a mask",
    "edits               a request to a result",
    "diagnosis           what a machine takes: calibration, plans, profiles",
    "sessions            saved and reopened",
    "editor              the public face",
    "clips               an edit of one source for every drive",
    "integrations        interfaces of other libraries",
    "batch               folders, resumable",
    "bench               edits beside dense runs, and a model's validation",
    "cli                 thin commands",
    "__main__            python -m fisedit",
)
"""fisedit from the bottom to the top. A module imports from its own package and from the rows above its own here."""

ENGINE = {"sparse_kernels", "features", "sparse", "decoder", "runners", "sampling", "masking", "edits"}
"""What the command line never imports: it uses the public face, files, and what measures."""

HEAVY = {"torch", "diffusers", "transformers", "skimage", "scipy", "gradio", "triton", "compel", "PIL", "numpy", "ray"}

RANK = {name: rank for rank, row in enumerate(ORDER) for name in row.partition("  ")[0].split()}

MAX_ARGUMENTS = 8
"""Arguments of a function, self and cls aside, but for those that users call and kernels."""

PUBLIC_FACE = (
    "fisedit.editor.",  # every argument is a choice of the user's, named and with a default
    "fisedit.integrations.diffusers_pipeline.FisEditPipeline.",  # diffusers' own arguments
    "app.api.Endpoints.",  # an endpoint's arguments are the fields of its JSON
)
"""Starts of the names of functions that may take more, as verbs may: their arguments are the command line's options."""

KERNEL = "triton.jit"
"""Decorator of functions that may take more: a kernel takes pointers, strides and sizes, and no objects."""


def files(package: str) -> dict[str, Path]:
    """Dotted name within a package -> its file."""
    folder = ROOT / package
    return {".".join(p.relative_to(folder).with_suffix("").parts): p for p in sorted(folder.rglob("*.py"))}


FISEDIT, APP = files("fisedit"), files("app")


def imported(path: Path, package: str = "fisedit") -> Iterator[str]:
    """Modules of a package that a file imports, wherever in it, for types alone or not, by `import_module` too."""
    known = files(package)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            inside = node.module.removeprefix(package).removeprefix(".")
            for name in node.names:
                full = f"{inside}.{name.name}".removeprefix(".")
                yield full if full in known or f"{full}.__init__" in known else inside
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "import_module":
            named = (part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant))
            yield from (name.removeprefix(f"{package}.") for name in named if f"{name}".startswith(f"{package}."))


def modules() -> list[str]:
    return [name for name in FISEDIT if name != "__init__"]


def test_imports_point_one_way():
    assert not [f"say in ORDER where {name} belongs" for name in modules() if name.split(".")[0] not in RANK]
    assert not [f"{name} imports {target}, which lies above it" for name in modules() for target in upward(name)]


def test_the_package_needs_nothing_beside_it():
    for package in ("benchmarks", "training", "tests", "tools"):
        assert not [name for name in modules() if list(imported(FISEDIT[name], package))]


def upward(name: str) -> list[str]:
    """What a module imports from its own row of `ORDER` or from a row below it there."""
    top, found = name.split(".", maxsplit=1)[0], []
    for target in imported(FISEDIT[name]):
        below = target.split(".")[0]
        allowed = not below or below == top
        if not allowed and RANK[below] >= RANK[top]:
            found.append(target)
    return found


@pytest.mark.parametrize("package", ["fisedit", "app"])
def test_no_import_runs_in_a_circle(package):
    known = files(package)
    graph = {
        name: {target for target in imported(path, package) if target not in (name, "")}
        for name, path in known.items()
        if name != "__init__"
    }
    TopologicalSorter(graph).prepare()


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of a file, by its name within it: `Class.method`, `outer.inner`."""

    def inside(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            yield from inside(child, f"{prefix}{child.name}." if named else prefix)

    yield from inside(ast.parse(path.read_text(encoding="utf-8")), "")


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of a function's arguments, self and cls aside."""
    taken = function.args
    several = [argument for argument in (taken.vararg, taken.kwarg) if argument]
    every = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, *several]
    return [argument.arg for argument in every if argument.arg not in ("self", "cls")]


def verbs() -> set[str]:
    """Names of the functions that the command line calls."""
    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    callbacks = [command.callback for group in groups for command in group.registered_commands]
    return {f"{callback.__module__}.{callback.__qualname__.replace('<locals>.', '')}" for callback in callbacks}


def test_no_function_behind_the_public_face_takes_many_arguments():
    many = {
        f"{package}.{module}.{name}": function
        for package in ("fisedit", "app")
        for module, path in files(package).items()
        for name, function in functions(path)
        if len(arguments(function)) > MAX_ARGUMENTS
    }
    kernels = {name for name, function in many.items() if KERNEL in map(ast.unparse, function.decorator_list)}
    face = {name for name in many if name.startswith(PUBLIC_FACE) and "._" not in name.removesuffix(".__call__")}
    assert kernels and face and not set(many) - kernels - face - verbs()


MAX_FILES = 14
"""Modules of a room. Kernels and adapters are many by nature: each is one kind."""

MAX_FIELDS = 12
"""Fields of a dataclass."""

MANY_FIELDS = {
    "TrainingSettings": 21,
    "ReceptiveField": 19,
    "EditStats": 16,
    "EditPlan": 13,
    "BatchSettings": 16,
    "GenerationConfig": 16,
    "SpeedSettings": 13,
    "EditRequest": 14,
    "Checked": 13,
}
"""Carriers with more -> how many. Numbers here may fall; the first, and all settings, are options of users."""

MAX_LEVELS = 2
"""Levels of inheritance among our own classes, below the lowest base."""


def class_definitions() -> dict[str, ast.ClassDef]:
    """Every class of the package by its name."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in FISEDIT.values())
    return {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def levels(name: str, classes: dict[str, ast.ClassDef]) -> int:
    """Levels of our own bases below a class."""
    bases = [ast.unparse(base).split("[")[0] for base in classes[name].bases]
    return max([levels(base, classes) + 1 for base in bases if base in classes and base != name], default=0)


def num_fields(node: ast.ClassDef) -> int:
    """Fields that a dataclass is made with; 0 for other classes."""
    if not any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
        return 0
    return sum(isinstance(each, ast.AnnAssign) and "init=False" not in ast.unparse(each) for each in node.body)


def over(counts: dict[str, int], limit: int) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count > limit}


def test_rooms_are_small():
    """But for those with families in folders of their own."""
    rooms = Counter(name.split(".")[0] for name in modules() if "." in name and not name.endswith("__init__"))
    assert over(rooms, MAX_FILES).keys() == {"adapters", "models", "sparse_kernels"}


def test_carriers_have_few_fields():
    assert over({name: num_fields(node) for name, node in class_definitions().items()}, MAX_FIELDS) == MANY_FIELDS


def own_names(node: ast.ClassDef) -> set[str]:
    """Names that a class defines: methods, fields, and what its methods assign to `self`."""
    names = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    for each in ast.walk(node):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            names.add(each.target.id)
        elif isinstance(each, ast.Assign):
            names |= {target.id for target in each.targets if isinstance(target, ast.Name)}
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            names.add(each.attr)
    return names


def upward_names(classes: dict[str, ast.ClassDef]) -> dict[str, set[str]]:
    """Names asked of `self` that neither a class nor its bases define; classes with outer bases are left out."""
    found = {}
    for name, node in classes.items():
        known, todo, outer = set[str](), [node], False
        while todo:
            now = todo.pop()
            known |= own_names(now)
            bases = {ast.unparse(base).split("[")[0] for base in now.bases}
            outer |= not bases <= {*classes, "ABC", "Protocol"}
            todo += [classes[base] for base in bases if base in classes]
        asked = {
            each.attr
            for each in ast.walk(node)
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"
        }
        if missing := asked - known - set(dir(object)):
            found |= {} if outer else {name: missing}
    return found


def test_no_class_calls_what_one_over_it_defines():
    assert upward_names(class_definitions()) == {}
    tree = ast.parse("class A:\n    def f(self): return self.g()\nclass B(A):\n    def g(self): self.x = 1; self.f()")
    assert upward_names({node.name: node for node in tree.body}) == {"A": {"g"}}


def test_inheritance_is_flat():
    classes = class_definitions()
    assert over({name: levels(name, classes) for name in classes}, MAX_LEVELS) == {}


def test_budgets_see_what_is_over_them():
    tree = ast.parse(
        "class A: pass\nclass B(A): pass\n@dataclass\nclass C(B):\n    x: int\n    y: int = field(init=False)"
    )
    classes = {node.name: node for node in tree.body}
    assert [levels(name, classes) for name in "ABC"] == [0, 1, 2] and num_fields(classes["C"]) == 1
    assert over({"C": 2}, 1) == {"C": 2} and not over({"C": 2}, 2)


def test_few_modules_lie_beside_the_packages():
    assert len([name for name in FISEDIT if "." not in name]) <= 8


def test_the_command_line_uses_the_public_face():
    commands = [name for name in modules() if name.startswith("cli.")]
    used = [(name, target) for name in commands for target in imported(FISEDIT[name]) if target.split(".")[0] in ENGINE]
    assert commands and not used


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

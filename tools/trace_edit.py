"""`python tools/trace_edit.py`: count the code that one edit enters.

The demo model generates a small picture and edits it once to import everything; then a second edit is traced. Files,
functions and classes are those of `fisedit/` whose code runs in it, on any thread. A class counts if a method of its
own body runs; methods that `dataclass` writes have no file and count nowhere. An edge is a file that calls another one
directly, or through code of other packages. It goes upward where the callee lies above the caller in `ORDER`.

At commit 4d08a3c there were 77 files with 16,538 lines, and 7 upward edges. There were 586 functions, 795 with lambdas
and comprehensions, and 64 classes.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fisedit"
FLAGS = {"FISEDIT_COSTS": "0", "FISEDIT_PAGES": "0", "FISEDIT_CPU_DTYPE": "fp32", "HF_HUB_OFFLINE": "1"}
"""Settings under which every machine takes the same path: no table of costs, no pages on disk, float32."""

SOURCE, WARM_UP, EDIT = (
    "a photo of a red cube on a green table",
    "a photo of a red ball on a green table",
    "a photo of a blue cube on a green table",
)
WORDS = {
    "erases": r"eras(e|es|ed|ing)\b",
    "regional": r"\bregional\b",
    "rim": r"\brim\b",
    "DENSE_GROWTH": r"\bDENSE_GROWTH\b",
    "injection/structure": r"\b(injection|structure)\b",
    "StableDiffusionPipeline": r"\bStableDiffusionPipeline\b",
}
"""Modes that run through the house -> the expression that finds them in a module's text."""


class CallTrace:
    """The calls of functions of `fisedit/` while it is entered.

    Attributes:
        codes: Every code object that ran.
        edges: Pairs of files, the caller's and the callee's.
    """

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.edges: set[tuple[str, str]] = set()

    def __enter__(self) -> Self:
        """Watch this thread and those that it starts."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no more."""
        sys.setprofile(None)
        threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or not (callee := name_of(frame.f_code)):
            return
        self.codes.add(frame.f_code)
        caller, outer = "", frame.f_back
        while outer is not None and not (caller := name_of(outer.f_code)):
            outer = outer.f_back
        if caller and caller != callee:
            self.edges.add((caller, callee))


def name_of(code: CodeType) -> str:
    """Return the path of a code's file within `fisedit/`, or "" for other code."""
    return code.co_filename[len(_START) :] if code.co_filename.startswith(_START) else ""


_START = f"{PACKAGE}{os.sep}"


def traced_edit() -> CallTrace:
    """Generate, edit once to import what an edit needs, and trace a second edit of the same picture."""
    from fisedit import Editor

    editor = Editor.from_pretrained("demo", device="cpu")
    source = editor.generate(SOURCE, seed=1, num_inference_steps=4, width=256, height=256)
    editor.edit(WARM_UP)
    editor.checkout(source.id)
    with CallTrace() as trace:
        editor.edit(EDIT)
    return trace


def functions(trace: CallTrace) -> list[CodeType]:
    """Return the functions and methods that ran, without lambdas, comprehensions and bodies of modules and classes."""
    return [code for code in trace.codes if not code.co_name.startswith("<")]


def classes(trace: CallTrace) -> set[tuple[str, str]]:
    """Return the file and the name of every class with a method that ran."""
    named = {(name_of(code), code.co_qualname.rpartition(".")[0]) for code in functions(trace)}
    return {(file, owner) for file, owner in named if owner and not owner.endswith("<locals>")}


def lines_of(codes: list[CodeType]) -> int:
    """Count the lines of functions; those of a function inside another one count once."""
    lines = set()
    for code in codes:
        source, first = inspect.getsourcelines(code)
        lines |= {(name_of(code), first + i) for i in range(len(source))}
    return len(lines)


def upward(edges: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the edges whose callee lies in a higher row of `ORDER` than the caller."""
    rank = ranks()
    return sorted(edge for edge in edges if rank[_room(edge[0])] < rank[_room(edge[1])])


def ranks() -> dict[str, int]:
    """Return the row of every room in the `ORDER` of tests/test_imports.py, which is read and not run."""
    tree = ast.parse((ROOT / "tests" / "test_imports.py").read_text(encoding="utf-8"))
    named = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    rows = ast.literal_eval(named["ORDER"])
    return {name: rank for rank, row in enumerate(rows) for name in row.partition("  ")[0].split()}


def _room(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py")


def naming(pattern: str) -> int:
    """Count the modules of `fisedit/` whose text a mode's expression finds."""
    texts = (path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    return sum(re.search(pattern, text) is not None for text in texts)


def report(trace: CallTrace) -> Iterator[str]:
    """Yield the lines that are printed."""
    files = {name_of(code) for code in trace.codes}
    entered, up = functions(trace), upward(trace.edges)
    yield f"{len(files):7,} files entered"
    yield f"{len(entered):7,} functions entered; {len(trace.codes):,} with lambdas and comprehensions"
    yield f"{len(classes(trace)):7,} classes whose methods were entered"
    texts = [(PACKAGE / file).read_text(encoding="utf-8") for file in files]
    yield f"{sum(len(text.splitlines()) for text in texts):7,} lines of these files"
    yield f"{lines_of(entered):7,} lines of these functions"
    yield f"{len(trace.edges):7,} call edges between files, {len(up)} of them upward:"
    yield from (f"        {caller} -> {callee}" for caller, callee in up)
    rooms = Counter(map(_room, files))
    by_room = ", ".join(f"{room} {count}" for room, count in rooms.most_common())
    yield f"        files by room: {by_room}"
    yield "Modules that name a mode:"
    yield from (f"{naming(pattern):7,} {word}" for word, pattern in WORDS.items())


def main() -> None:
    """Trace an edit and print what it entered."""
    os.environ |= FLAGS
    sys.path.insert(0, str(ROOT))
    sys.stdout.writelines(f"{line}\n" for line in report(traced_edit()))


if __name__ == "__main__":
    main()

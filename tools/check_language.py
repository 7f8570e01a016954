"""`python tools/check_language.py [PATH ...]`: hold docstrings and documents to plain English.

A docstring begins with a verb or a noun, with no word of `FIRST`. The description of an argument begins with no word of
`FRAGMENT`. A sentence has at most `WORDS` words. Code, comments and other strings are not read.

A document begins with a paragraph. Its sentences are as short; its code, tables and addresses are not read.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST = "what where of how whether that why which whose as by with when if in on for from after below while".split()
FRAGMENT = "of that whose as which".split()
WORDS = 25
CODE = "fisedit app integrations benchmarks tools".split()
DOCUMENTS = "docs README.md SECURITY.md integrations weights/README.md".split()
MADE = ["cli.md"]
"""Documents that a program writes from the code."""

_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields):$")
_FIELD = re.compile(r"\s{4}(?P<name>[\w*, `.]+): (?P<text>.*)$")
_ITEM = re.compile(r"\s*(- |\||\d\. |>>>|[\w*, `.]+: )")
_LISTED = re.compile(r"\s*([-*|] |\||\d+\. )")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`+[^`]*`+")
_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`\"'(\d])")
_STOP = re.compile(rf"(?<=[.!?])\s+|{_END.pattern}")


def main() -> int:
    """Print every fault of the files and folders that are named, else of all code and documents; return 1 for any."""
    names = sys.argv[1:]
    found = [*files(names or CODE, ".py"), *files(names or DOCUMENTS, ".md")]
    checks = {".py": check, ".md": check_document}
    faults = [
        f"{file}:{line}: {fault}\n"
        for file in found
        for line, fault in checks[file.suffix](file.read_text(encoding="utf-8"))
    ]
    sys.stdout.writelines(faults)
    return bool(faults)


def files(names: list[str], suffix: str) -> Iterator[Path]:
    """Yield the files of one kind, without those that are made.

    Args:
        names: Files and folders.
        suffix: The end of a file's name, with its dot.
    """
    for path in map(Path, names):
        for file in sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [path]:
            if file.suffix == suffix and file.name not in MADE:
                yield file


def check(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the fault of every docstring that breaks a rule.

    Args:
        source: The text of a module.
    """
    for first, text in docstrings(ast.parse(source)):
        word = re.split(r"\W", text.strip(), maxsplit=1)[0]
        if word.lower() in FIRST:
            yield first, f"a docstring must begin with a verb or a noun, got {word!r}"
        for offset, description in arguments(text):
            if description.split(" ")[0].strip(",").lower() in FRAGMENT:
                yield first + offset, f"an argument must be described by a noun or a verb, got {description[:40]!r}"
        for sentence in sentences(text):
            if (length := len(sentence.split())) > WORDS:
                yield first, f"a sentence must have at most {WORDS} words, got {length}: {sentence.strip()[:60]!r}"


def check_document(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the fault of a document's first block and of every sentence that is too long.

    Args:
        text: Markdown.
    """
    prose = [(line, words) for line, words in paragraphs(text) if not words.startswith("#")]
    if prose and _LISTED.match(prose[0][1]):
        yield prose[0][0], f"a document must begin with a paragraph, got {prose[0][1][:40]!r}"
    for line, words in prose:
        for sentence in _STOP.split(words):
            if (length := len(sentence.split())) > WORDS:
                yield line, f"a sentence must have at most {WORDS} words, got {length}: {sentence.strip()[:60]!r}"


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the words of every heading, paragraph, item of a list and, as "|", block that is no prose.

    Args:
        text: Markdown.
    """
    block: list[str] = []
    code = False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        code ^= fence
        apart = code or fence or line.lstrip().startswith(("|", "#", "<", "!", ":::"))
        if block and (apart or not line.strip() or _LISTED.match(line)):
            yield number - len(block), _CODE.sub("x", _LINK.sub(r"\1", " ".join(block).replace("**", "")))
            block = []
        if (fence and code) or line.lstrip().startswith("|"):
            yield number, "|"
        elif not apart and line.strip():
            block.append(line.strip())


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every string that stands alone: docstrings, and those below a constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def arguments(text: str) -> Iterator[tuple[int, str]]:
    """Yield the offset and the description of every line below Args or Attributes.

    Args:
        text: A docstring.
    """
    first, *rest = text.splitlines() or [""]
    base, section = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0), ""
    for offset, line in enumerate([first, *(line[base:] for line in rest)]):
        if found := _SECTION.match(line):
            section = found[1]
        elif line.strip() and not line.startswith(" "):
            section = ""
        elif section in ("Args", "Attributes") and (field := _FIELD.match(line)):
            yield offset, field["text"]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring; paragraphs, items of lists and arguments are told apart first.

    Args:
        text: A docstring.
    """
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        if not line.strip() or _ITEM.match(line) or _SECTION.match(line.strip()):
            yield from _END.split(" ".join(block))
            block = []
        block.append(line.strip())


if __name__ == "__main__":
    raise SystemExit(main())

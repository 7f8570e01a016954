"""Docstrings and documents are plain English, by the check that `make style` runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("check_language", ROOT / "tools/check_language.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.check


@pytest.fixture(scope="module")
def check_document(check):
    return check.__globals__["check_document"]


def function(text: str) -> str:
    return f'def f(x):\n    """{text}"""\n'


LONG = " ".join(["word"] * 26)


@pytest.mark.parametrize(
    ("text", "line", "fault"),
    [
        ("What it does.", 2, "begin with a verb or a noun, got 'What'"),
        ("Whether it is.", 2, "got 'Whether'"),
        ("Return it.\n\n    Args:\n        x: of the model.\n    ", 5, "an argument must be described by a noun"),
        ("Return it.\n\n    Args:\n        x: A number.\n        y: That is used.\n    ", 6, "got 'That is used.'"),
        (f"{LONG}.", 2, "at most 25 words, got 26"),
        (f"Short.\n\n    {LONG}.\n    ", 2, "got 26"),
    ],
)
def test_a_fault_is_found(check, text, line, fault):
    ((at, found),) = check(function(text))
    assert at == line and fault in found


@pytest.mark.parametrize(
    "text",
    [
        "Return what it is.",
        "The plan of an edit.",
        f"Some {LONG[:-10]}. Some {LONG[:-10]}.",
        "Return it.\n\n    Args:\n        x: The part of a model.\n\n    Returns:\n        Of the model, a part.\n    ",
        "- one\n    - two",
        "",
    ],
)
def test_plain_english_is_left(check, text):
    assert not list(check(function(text)))


def test_the_whole_package_is_held_to_it(check):
    files = [path for folder in ("fisedit", "app", "tools") for path in (ROOT / folder).rglob("*.py")]
    assert not [(path.name, fault) for path in files for fault in check(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("text", "line", "fault"),
    [
        ("# A page\n\n- an item\n", 3, "must begin with a paragraph"),
        ("# A page\n\n```bash\nls\n```\n", 3, "must begin with a paragraph"),
        ("# A page\n\n| a | b |\n", 3, "must begin with a paragraph"),
        (f"# A page\n\nIt is short. {LONG}.\n", 3, "at most 25 words, got 26"),
        (f"A page.\n\n- one\n- {LONG}\n", 4, "got 27"),
        (f"A page.\n\n**Bold.** [{LONG}](a.md).\n", 3, "got 26"),
    ],
)
def test_a_fault_of_a_document_is_found(check_document, text, line, fault):
    ((at, found),) = check_document(text)
    assert at == line and fault in found


@pytest.mark.parametrize(
    "text",
    [
        f"A page.\n\n```bash\n{LONG}\n```\n",
        f"A page.\n\n| {LONG} |\n",
        f"A page of `{LONG}`.\n",
        f"# {LONG}\n\nA page.\n",
        "",
    ],
)
def test_code_tables_and_headings_of_a_document_are_left(check_document, text):
    assert not list(check_document(text))


def test_the_documents_are_held_to_it(check_document):
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "weights/README.md", *(ROOT / "docs").rglob("*.md")]
    read = {page: page.read_text(encoding="utf-8") for page in pages if page.name != "cli.md"}
    assert len(read) > 15 and not [(page.name, fault) for page in read for fault in check_document(read[page])]

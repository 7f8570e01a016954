"""Fills the tables of other clients' fields into docs/app.md: `python -m tests.support.app.field_tables`."""

from __future__ import annotations

from pathlib import Path

from app.openai_fields import EDITS, GENERATIONS
from app.request_fields import as_markdown
from app.webui_fields import IMG2IMG, OVERRIDES, TXT2IMG

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "app.md"

TABLES = {
    "webui": ({"txt2img": TXT2IMG, "img2img": IMG2IMG}, {"both": OVERRIDES}),
    "openai": ({"generations": GENERATIONS, "edits": EDITS},),
}
"""Mark in the document -> the tables that follow it."""


def filled(text: str) -> str:
    """The document with today's tables."""
    for mark, tables in TABLES.items():
        start = text.index(f"<!-- {mark} -->\n") + len(f"<!-- {mark} -->\n")
        end = text.index("<!-- end -->", start)
        text = text[:start] + "\n\n".join(map(as_markdown, tables)) + "\n" + text[end:]
    return text


if __name__ == "__main__":
    GUIDE.write_text(filled(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")

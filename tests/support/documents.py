"""The project's documents, and the code that they show."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
APP_GUIDE = (ROOT / "docs" / "app.md").read_text(encoding="utf-8")
CLIENTS_GUIDE = (ROOT / "docs" / "guides" / "clients.md").read_text(encoding="utf-8")
APP_ADDRESS = "http://127.0.0.1:7860"
"""Where the guide's examples look for the app."""


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def well_formed(path: Path) -> int:
    """Check that a page's elements nest; returns its table's rows."""
    parser = _Nesting()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    assert parser.open == []
    return parser.rows - 1


class _Nesting(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.rows += tag == "tr"
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

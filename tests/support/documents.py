"""The project's documents, and the code that they show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
APP_GUIDE = (ROOT / "docs" / "app.md").read_text(encoding="utf-8")
APP_ADDRESS = "http://127.0.0.1:7860"
"""Where the guide's examples look for the app."""


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)

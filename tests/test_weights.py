"""The demo model that ships: complete, small enough, and the one whose checksums `weights/README.md` tells."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fisedit import model_places, models

WEIGHTS = Path(__file__).resolve().parents[1] / "weights"
README = WEIGHTS / "README.md"
START, END = "<!-- sha256 -->\n", "<!-- end -->\n"
MOST_BYTES = 60_000_000


def table() -> str:
    """The checksums of the demo model's weights as a Markdown table."""
    files = sorted((WEIGHTS / "demo").rglob("*.safetensors"))
    rows = [f"| `{f.relative_to(WEIGHTS)}` | `{hashlib.sha256(f.read_bytes()).hexdigest()}` |" for f in files]
    return "\n".join(["| file | SHA-256 |", "|---|---|", *rows]) + "\n"


def with_table(text: str) -> str:
    """`text` with the present table between its marks."""
    before, rest = text.split(START)
    return before + START + table() + END + rest.split(END)[1]


def test_the_readme_tells_the_checksums():
    text = README.read_text(encoding="utf-8")
    assert text == with_table(text), "run `python -m tests.test_weights`"


def test_the_demo_model_loads_and_is_small():
    folder = model_places.demo_folder()
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= MOST_BYTES
    pipe = models.load("demo", device="cpu", dtype="fp32")
    assert pipe.unet.config.in_channels == 4


def test_the_demo_model_is_found_in_a_wheel_and_in_a_checkout(monkeypatch, tmp_path):
    assert model_places.demo_folder() == WEIGHTS / "demo"
    monkeypatch.setattr(model_places, "_DEMO_HOMES", (tmp_path,))
    with pytest.raises(models.ModelError, match="not in this copy"):
        model_places.demo_folder()


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")

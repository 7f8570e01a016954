"""Every notebook runs from top to bottom, and is kept without outputs, which would go stale."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


RUN = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if number else ())
    for number, path in enumerate(NOTEBOOKS)
]
"""All notebooks, of which `make test` runs the first."""


@pytest.mark.parametrize("path", RUN)
def test_it_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear its outputs"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pictures = [out for cell in notebook.cells for out in cell.get("outputs", ()) if "image/png" in out.get("data", {})]
    assert len(pictures) >= 2

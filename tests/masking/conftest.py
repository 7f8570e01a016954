"""The demo model, and a picture that its masks are predicted on."""

from __future__ import annotations

import pytest

from fisedit import Editor
from tests.support.edits import CAT

QUICK = {"seed": 7, "num_inference_steps": 6, "guidance_scale": 4.0}


@pytest.fixture(scope="session")
def shipped():
    return Editor.from_pretrained("demo", local_files_only=True).pipe


@pytest.fixture
def editor(shipped):
    editor = Editor(shipped)
    editor.generate(CAT, **QUICK)
    return editor

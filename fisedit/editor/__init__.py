"""The public face: a source is made once, then edited by changing its prompt."""

from fisedit.editor.editor import Editor
from fisedit.editor.preview import Preview

__all__ = ["Editor", "Preview"]

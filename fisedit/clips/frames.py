"""The frames of a clip as edits of one source: by themselves, or in windows whose frames attend to one another.

Motion modules are trained on clips of a dozen frames. Neighbouring windows share a frame, which the later one keeps, as
HelloMeme's (arXiv 2410.22901) do. Modules that read a picture before and after a window get its first and last frame,
each rendered by itself. Knows the editor; no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fisedit.adapters.hellomeme.motion_adapter import MotionReader

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.editor import Editor
    from fisedit.masking.region import Region
    from fisedit.values import OnStep
    from fisedit.values.drive import Drive

WINDOW = 12
"""Most frames that attend to one another."""


@dataclass(frozen=True)
class FrameWindow:
    """Frames that are rendered together.

    Args:
        first: index of the first.
        last: index of the last.
        kept: indices of those that the clip takes from it.
    """

    first: int
    last: int
    kept: range


def windows(count: int) -> list[FrameWindow]:
    """The windows of so many frames, of nearly the same length."""
    number = max(1, -(-(count - 1) // (WINDOW - 1)))
    borders = [i * (count - 1) // number for i in range(number + 1)]
    ends = [*borders[1:-1], count]
    return [FrameWindow(borders[i], borders[i + 1], range(borders[i], ends[i])) for i in range(number)]


@dataclass(eq=False)
class FrameRenderer:
    """Renders the frames of a clip; the editor is left as it was.

    Args:
        editor: the editor whose current picture is the source.
        prompt: what the frames show.
        drives: one a frame.
        region: where they may change.
        options: `reference` and `quality`, as in `Editor.edit`.
    """

    editor: Editor
    prompt: str
    drives: Sequence[Drive]
    region: Region
    options: Mapping[str, Any]
    _ends: dict[int, Image] = field(default_factory=dict)

    def windows(self) -> list[FrameWindow]:
        """The windows: of one frame each where no motion modules are loaded."""
        count = len(self.drives)
        return windows(count) if self._motion else [FrameWindow(i, i, range(i, i + 1)) for i in range(count)]

    def drives_of(self, window: FrameWindow) -> Sequence[Drive]:
        """The drives on which a window's frames depend."""
        return self.drives[window.first : window.last + 1]

    def render(self, window: FrameWindow, on_step: OnStep | None) -> list[Image]:
        """The frames that the clip takes from a window.

        Args:
            window: one of `windows`.
            on_step: called before every step as in `Editor.edit`, counted over the window.
        """
        if not self._motion:
            return [self._frame(window.first, on_step)]
        pads = self._pads(window, on_step) if any(reader.reads_pictures for reader in self._motion) else ()
        drives = self.drives_of(window)
        frames = self.editor.edit_frames(self.prompt, drives, self.region, pads=pads, on_step=on_step, **self.options)
        return frames[: len(window.kept)]

    @property
    def _motion(self) -> list[MotionReader]:
        adapters = (loaded.adapter for loaded in self.editor.adapters)
        return [adapter for adapter in adapters if isinstance(adapter, MotionReader)]

    def _pads(self, window: FrameWindow, on_step: OnStep | None) -> list[Image]:
        """A window's first and last frame; a frame that the window before ended with is not rendered again."""
        waits = None if on_step is None else lambda i, n, preview: on_step(0, n, preview)
        ends = {i: self._ends.get(i) or self._frame(i, waits) for i in (window.first, window.last)}
        self._ends = ends
        return [ends[window.first], ends[window.last]]

    def _frame(self, i: int, on_step: OnStep | None) -> Image:
        with self.editor.transaction(keep=False):
            made = self.editor.edit(
                self.prompt, region=self.region, drive=self.drives[i], verify=False, on_step=on_step, **self.options
            )
        return made.image

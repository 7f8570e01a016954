"""Pictures on their way through a workflow, and the session of a model that has them. Knows no node.

A node's result depends on its inputs alone: an edit begins at the very picture that it is given, whatever else was made
of that. The last result of a node is kept by the node's id, so that a node whose inputs stayed runs nothing again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from .tensors import to_image, to_levels

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from fisedit import Editor, EditResult
    from fisedit.values import OnStep

Run = Callable[[int, "OnStep"], "EditResult"]
"""Make the picture of an index in its batch."""

KEPT_NODES = 64
"""Nodes whose last pictures are kept; beyond it the one that ran longest ago is forgotten."""


@dataclass(frozen=True, eq=False)
class PictureBatch:
    """A batch of pictures, on a wire of the type FISEDIT_PICTURE.

    Args:
        session: the session that has them.
        results: one a picture.
        images: the same as IMAGE [B, H, W, C]; pixels that no edit changed have the numbers that came in.
        parent: the batch that it was edited from; None for a source.
    """

    session: NodeSession
    results: tuple[EditResult, ...]
    images: Tensor
    parent: PictureBatch | None = None


@dataclass(eq=False)
class NodeSession:
    """A loaded model with what was made of it, on a wire of the type FISEDIT_MODEL.

    Args:
        editor: an editor, whose history has every picture that a workflow still holds.
        kept: id of a node -> its last inputs and their pictures.
    """

    editor: Editor
    kept: dict[str, tuple[Hashable, PictureBatch]] = field(default_factory=dict)
    _pictures: WeakSet[PictureBatch] = field(default_factory=WeakSet)

    def source(self, node: str, asked: Hashable, run: Run, count: int, given: Tensor | None = None) -> PictureBatch:
        """Sources, made by `run`, or kept where a node is asked the same again; `given` is what is opened, as IMAGE."""
        return self._keep(node, asked, lambda: self._make(run, count, None, given))

    def edit(self, node: str, asked: Hashable, run: Run, parent: PictureBatch) -> PictureBatch:
        """Edits of every picture of a batch, which is the editor's current one when `run` is called for it."""
        return self._keep(node, (parent, asked), lambda: self._make(run, len(parent.results), parent, parent.images))

    def _keep(self, node: str, asked: Hashable, make: Callable[[], PictureBatch]) -> PictureBatch:
        before, picture = self.kept.pop(node, (None, None))
        if picture is None or before != asked:
            del before, picture  # so that nothing here holds what the node made before
            held = {result.id for each in self._pictures for result in each.results}  # with all that they were made of
            while unused := next((result for result in self.editor.history if result.id not in held), None):
                self.editor.delete(unused.id)
            picture = make()
        self.kept[node] = asked, picture
        while len(self.kept) > KEPT_NODES:
            del self.kept[next(iter(self.kept))]
        return picture

    def _make(self, run: Run, count: int, parent: PictureBatch | None, given: Tensor | None) -> PictureBatch:
        results = []
        for i in range(count):
            if parent is not None:
                self.editor.checkout(parent.results[i].id)
            results.append(run(i, progress(i, count)))
        images = torch.cat([to_image(result.image) for result in results])
        if given is not None:
            stayed = (to_levels(images) == to_levels(given)).all(-1, keepdim=True).to(given.device)
            images = torch.where(stayed, given, images.to(given))
        picture = PictureBatch(self, tuple(results), images, parent)
        self._pictures.add(picture)
        return picture


def progress(index: int, count: int) -> OnStep:
    """Tell ComfyUI the steps of one of `count` pictures; it shows them on the node, and stops the run there."""
    from comfy.model_management import throw_exception_if_processing_interrupted
    from comfy.utils import ProgressBar

    bar = ProgressBar(count)

    def on_step(step: int, steps: int, preview: Image | None) -> None:
        throw_exception_if_processing_interrupted()
        shown = None if preview is None else ("JPEG", preview.convert("RGB"), 512)
        bar.update_absolute(index * steps + step, count * steps, shown)

    return on_step

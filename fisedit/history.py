"""The tree of results: what was made, from what, and which result is current. Knows pictures and lineage, no model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, overload

import numpy as np

from fisedit.errors import SessionError
from fisedit.values import AdapterUse, EditMask, EditMode, EditScript, EditStats, GenerationConfig, copy_on_read

if TYPE_CHECKING:
    from PIL.Image import Image

    from fisedit.values import BoolGrid


@copy_on_read("image", "painted")
@dataclass(frozen=True, eq=False)
class EditResult:
    """One picture of a session. Nothing of it can be written to: pictures are handed out as copies.

    Args:
        id: unique within the session, in the order of making: "0", "1", ...
        parent: id of the result it was edited from; None for a source.
        config: prompt, seed, sampler and size.
        image: the picture.
        mask: the latent cells whose pixels may differ from the parent's, and which of their pixels.
        diff: what the prompt edit changed.
        stats: what it cost and why.
        run: how it was computed.
        painted: what the model works on where that is not `image` itself: a canvas of the config's size, RGB.
        extends: id of the result whose picture this source continues; None for all that are a step of their own.
    """

    id: str
    parent: str | None
    config: GenerationConfig
    image: Image
    mask: EditMask
    diff: EditScript
    stats: EditStats
    run: EditMode = field(default_factory=EditMode)
    painted: Image | None = None
    extends: str | None = None

    @property
    def canvas(self) -> Image:
        """The picture that the model painted: RGB, of the config's width and height."""
        return self.painted or self.image

    @property
    def latent_cells(self) -> BoolGrid:
        """The cells [h, w] whose latents may differ from the parent's: of the mask without its rim."""
        return self.mask.grid if self.run.rim is None else self.mask.grid & ~self.run.rim

    def changed_outside(self, parent: EditResult) -> int:
        """The number of pixels outside the mask that differ from the parent's; 0 if the engine is correct.

        Raises:
            SessionError: a picture of another size, which no edit of it can have.
        """
        if parent.size != self.size:
            raise SessionError(f"parent must have this result's {self.size} pixels, got {parent.size}; pass its parent")
        different = np.asarray(parent.image) != np.asarray(self.image)
        pixels = different if different.ndim == 2 else different.any(axis=2)
        return int((pixels & ~self.mask.painted(self.size, self.config.crop)).sum())

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the picture in pixels."""
        image: Image = vars(self)["image"]  # a copy would be made for its size alone
        return image.size

    @property
    def image_bytes(self) -> int:
        """Bytes that its picture, its canvas and its mask's pixels take in memory."""
        images: list[Image | None] = [vars(self)[name] for name in ("image", "painted")]
        pixels = 0 if self.mask.pixels is None else self.mask.pixels.nbytes
        return pixels + sum(image.width * image.height * len(image.getbands()) for image in images if image is not None)

    @property
    def prompt(self) -> str:
        """The prompt of this picture."""
        return self.config.prompt


class History(Sequence[EditResult]):
    """All results of a session in the order of making, and the current one; undo and redo walk the tree.

    A picture that is made larger is opened as a source of its own, and painted by an edit of it. The two are one step.
    """

    def __init__(self) -> None:
        self._results: dict[str, EditResult] = {}
        self._visited: dict[str, str] = {}  # a step -> the next one that was current last
        self._current: str | None = None
        self._next = 0
        self._in_use = Counter[str]()  # parents of what runs now

    @property
    def current(self) -> EditResult:
        """The current result, from which the next edit branches.

        Raises:
            SessionError: nothing was generated yet.
        """
        if self._current is None:
            raise SessionError("there is no source to edit yet; call generate first")
        return self._results[self._current]

    def next_id(self) -> str:
        """The id of the next result; no id comes twice, whatever is deleted."""
        return str(self._next)

    def add(self, result: EditResult) -> EditResult:
        """Append a result and make it the current one."""
        self._results[result.id] = result
        self._next = max(self._next, int(result.id) + 1)
        self.checkout(result.id)
        return result

    def mark_as_extension(self, source: EditResult, of: EditResult) -> None:
        """Make a source, that was opened to continue another picture, and its edits one step after that picture.

        Args:
            source: an opened source of this history, without edits.
            of: the result whose picture it continues.
        """
        self._results[source.id] = replace(self.find(source.id), extends=self.find(of.id).id)

    @property
    def steps(self) -> list[EditResult]:
        """The results that a person made one by one: all but the sources that only continue another picture."""
        return [result for result in self if result.extends is None]

    def step_before(self, result: EditResult) -> EditResult | None:
        """Return the step to which undo goes from a result; None at a source."""
        begun = result if result.parent is None else self._results[result.parent]
        if begun.extends is not None:
            return self._results[begun.extends]
        return None if begun is result else begun

    def find(self, result_id: str) -> EditResult:
        """A result. Raises SessionError where there is no such."""
        if not isinstance(result_id, str) or result_id not in self._results:
            raise SessionError(f"no result {result_id!r} in this session; it has {', '.join(self._results) or 'none'}")
        return self._results[result_id]

    @contextmanager
    def mark_in_use(self, parent: EditResult | None) -> Iterator[None]:
        """Keep a result, from which something runs, from being deleted; None for a run of a source.

        Raises:
            SessionError: no such result.
        """
        result_ids = [] if parent is None else [self.find(parent.id).id]
        self._in_use.update(result_ids)
        try:
            yield
        finally:
            self._in_use.subtract(result_ids)

    def check_unused(self, *result_ids: str) -> None:
        """Raise SessionError where something runs from one of these results; from any, where none is named."""
        in_use = [name for name in result_ids or self._in_use if self._in_use[name]]
        if in_use:
            raise SessionError(f"result {in_use[0]} is being edited; wait for that, or stop it first")

    def checkout(self, result_id: str) -> EditResult:
        """Make a result the current one; the next edit branches from there.

        Raises:
            SessionError: no such result.
        """
        result = self.find(result_id)
        self._current = result_id
        while (before := self.step_before(result)) is not None:
            self._visited[before.id] = result.id
            result = before
        return self.current

    def redo_ids(self) -> dict[str, str]:
        """The child to which redo goes from every result that has one; for `restore_redo`."""
        return dict(self._visited)

    def restore_redo(self, redo_ids: Mapping[str, str]) -> None:
        """Let redo go where it went before, whatever was added and deleted since.

        Args:
            redo_ids: what `redo_ids` returned then.
        """
        self._visited = {parent: child for parent, child in redo_ids.items() if child in self._results}

    def delete(self, result_id: str) -> tuple[str, ...]:
        """Remove a result and all that was made from it; the step before is current where the current one is gone.

        Returns:
            The ids that are gone.

        Raises:
            SessionError: no such result, or something runs from one of them.
        """
        current_id, before = self.current.id, self.step_before(self.find(result_id))
        deleted = self.made_from(result_id)
        self.check_unused(*deleted)
        for name in deleted:
            del self._results[name]
            self._visited.pop(name, None)
        self._visited = {name: child for name, child in self._visited.items() if child not in deleted}
        next_current = (
            current_id
            if current_id not in deleted
            else before.id
            if before is not None
            else next(reversed(self._results), None)
        )
        self._current = None if next_current is None else self.checkout(next_current).id
        return tuple(deleted)

    def made_from(self, result_id: str) -> list[str]:
        """Return the ids of a result and of all that was made from it, and of the larger canvas that it alone is on."""
        found: list[str] = []
        for result in self:  # parents come before their children
            if result.id == result_id or {result.parent, result.extends} & set(found):
                found.append(result.id)
        canvas = self._results.get(self.find(result_id).parent or "")
        if (
            canvas is None
            or canvas.extends is None
            or any(one.parent == canvas.id for one in self if one.id not in found)
        ):
            return found
        return [canvas.id, *found]

    def without(self, result_ids: Collection[str]) -> History:
        """A copy that lacks some results, and what was made from them; as if they had been deleted."""
        left = History()
        left._results, left._visited = dict(self._results), dict(self._visited)
        left._current, left._next = self._current, self._next
        for result_id in result_ids:
            if result_id in left._results:
                left.delete(result_id)
        return left

    def undo(self) -> EditResult:
        """Make the step before the current result. Raises SessionError at a source."""
        before = self.step_before(self.current)
        if before is None:
            raise SessionError("nothing to undo; this is a source")
        return self.checkout(before.id)

    def redo(self) -> EditResult:
        """Make the next step that was visited last the current result. Raises SessionError where there is none."""
        if self.redo_id is None:
            raise SessionError("nothing to redo; this result has no later edit")
        return self.checkout(self.redo_id)

    @property
    def redo_id(self) -> str | None:
        """The step after the current one that was visited last, to which redo goes; None where there is none."""
        return self._visited.get(self.current.id)

    def lineage(self, result_id: str) -> list[EditResult]:
        """Return the results from the source to this one."""
        results = [self._results[result_id]]
        while (parent := results[-1].parent) is not None:
            results.append(self._results[parent])
        return results[::-1]

    @overload
    def __getitem__(self, index: int) -> EditResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[EditResult]: ...
    def __getitem__(self, index: int | slice) -> EditResult | list[EditResult]:
        """Return results by their order of making."""
        return list(self._results.values())[index]

    def __len__(self) -> int:
        """Number of results."""
        return len(self._results)

    def __iter__(self) -> Iterator[EditResult]:
        """Iterate over the results in the order of making."""
        return iter(self._results.values())


@dataclass(frozen=True, eq=False)
class SessionAssets:
    """The adapters and reference images that the results of a session refer to.

    Args:
        adapters: Path or hub id of an adapter -> how it takes part, and what it is loaded with.
        references: Digest of a reference image -> the image.
    """

    adapters: Mapping[str, AdapterUse]
    references: Mapping[str, Image]


NO_ASSETS = SessionAssets({}, {})

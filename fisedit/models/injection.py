"""Inject and eject: how anything of ours gets into a model, and out of it without a trace.

A layer is given another `forward` on the instance; its class, parameters, buffers and place in the module tree stay as
they are, so state_dict keys never change. The sparse executor, what records attention, and the adapters of
HelloMeme (arXiv 2410.22901) all come in this way. Knows nothing about what the new forward does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, Self

from torch import nn

from fisedit.errors import AdapterError

Forward = Callable[..., Any]
Replacement = tuple[nn.Module, Forward]
"""A module and the forward it gets."""

Around = Callable[[Forward], Forward]
"""Makes a forward of the one that is there."""

TURN = RLock()
"""Held while a model is injected or its tokenizer speaks: both keep state, and editors in threads may share them."""

_NONE = object()


class Injection:
    """New forwards for some modules of a model, which come and go together.

    Several may lie over one another; the last one in is the first one out, and what was there is there again, exactly.

    Args:
        changes: what makes each module's new forward, given the one it has when this is injected.
    """

    def __init__(self, changes: Iterable[tuple[nn.Module, Around]]) -> None:
        self._changes = tuple(changes)
        self._before: list[tuple[nn.Module, Any, Forward]] | None = None

    @property
    def injected(self) -> bool:
        """Whether it is in."""
        return self._before is not None

    def inject(self) -> Self:
        """Put the forwards in.

        Raises:
            AdapterError: they are in already.
        """
        if self._before is not None:
            raise AdapterError("this is injected already; eject it first")
        self._before = []
        try:
            for module, around in self._changes:
                old, new = module.__dict__.get("forward", _NONE), around(module.forward)
                self._before.append((module, old, new))
                module.forward = new
        except BaseException:
            self.eject()
            raise
        return self

    def eject(self) -> None:
        """Take them out, and leave what was there before.

        Raises:
            AdapterError: they are not in, or something was injected over them since.
        """
        if self._before is None:
            raise AdapterError("this is not injected; inject it first")
        tops = {module: new for module, _, new in self._before}
        if any(module.__dict__.get("forward") is not new for module, new in tops.items()):
            raise AdapterError("something was injected over this; eject that first")
        for module, old, _ in reversed(self._before):
            if old is _NONE:
                del module.__dict__["forward"]
            else:
                module.forward = old
        self._before = None

    def __enter__(self) -> Self:
        TURN.acquire()
        try:
            return self.inject()
        except BaseException:
            TURN.release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self.eject()
        finally:
            TURN.release()


@contextmanager
def injected(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Run the enclosed code with other forwards; ejects on the way out, exceptions included.

    Args:
        replacements: what gets which forward. Nesting is allowed: ejecting restores what was there. Other threads wait.
    """
    with Injection((module, _instead(forward)) for module, forward in replacements):
        yield


def _instead(forward: Forward) -> Around:
    return lambda _: forward

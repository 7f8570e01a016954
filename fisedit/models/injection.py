"""Inject and eject: how anything of ours gets into a model, and out of it without a trace.

A layer is given another `forward` on the instance. Its class, parameters, buffers and place in the module tree stay as
they are, so state_dict keys never change. The sparse executor, the recorder of attention, and the adapters of
HelloMeme (arXiv 2410.22901) all come in this way. While a model is injected other threads wait for that model, and for
no other. Knows nothing about what the new forward does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock, RLock
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from fisedit.errors import AdapterError

Forward = Callable[..., Any]
Replacement = tuple[nn.Module, Forward]
"""A module and the forward it gets."""

ForwardWrapper = Callable[[Forward], Forward]
"""Makes a forward of the one that is there."""

_MISSING = object()

_locks: WeakKeyDictionary[object, Any] = WeakKeyDictionary()
"""Owner -> its re-entrant lock; kept beside the owner, so that its state_dict and its copies know nothing of it."""
_locks_guard = Lock()

_injected: WeakSet[nn.Module] = WeakSet()
"""Modules that had a forward of their own class before one was injected."""


def is_injected(module: nn.Module) -> bool:
    """Return whether a module's forward is one of ours, over that of its own class."""
    return module in _injected


def _lock_of(owner: object) -> Any:
    with _locks_guard:
        return _locks.setdefault(owner, RLock())


@contextmanager
def exclusive(*owners: object) -> Iterator[None]:
    """Let one thread at a time use models, tokenizers, histories or references, which keep state and may be shared by
    editors or threads.

    Re-entrant. Several are locked in this order: UNet, autoencoder, text encoder, tokenizer, history. A preview's
    autoencoder and an engine's `References` are locked by themselves.

    Args:
        owners: the root modules, tokenizers, histories or references to lock, compared by identity.
    """
    with ExitStack() as stack:
        for owner in owners:
            stack.enter_context(_lock_of(owner))
        yield


class Injection:
    """New forwards for some modules of a model, which come and go together.

    Several may lie over one another; the last one in is the first one out, and what was there is there again, exactly.

    Args:
        owner: the root module, which other threads must not use in a `with` block over this.
        changes: what makes each module's new forward, given the one it has when this is injected.
    """

    def __init__(self, owner: nn.Module, changes: Iterable[tuple[nn.Module, ForwardWrapper]]) -> None:
        self._owner, self._changes = owner, tuple(changes)
        self._before: list[tuple[nn.Module, Any, Forward]] | None = None

    @property
    def injected(self) -> bool:
        """Return whether it is in."""
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
                old, new = module.__dict__.get("forward", _MISSING), around(module.forward)
                self._before.append((module, old, new))
                if old is _MISSING:
                    _injected.add(module)
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
        current = {module: new for module, _, new in self._before}
        if any(module.__dict__.get("forward") is not new for module, new in current.items()):
            raise AdapterError("something was injected over this; eject that first")
        for module, old, _ in reversed(self._before):
            if old is _MISSING:
                del module.__dict__["forward"]
                _injected.discard(module)
            else:
                module.forward = old
        self._before = None

    def __enter__(self) -> Self:
        lock = _lock_of(self._owner)
        lock.acquire()
        try:
            return self.inject()
        except BaseException:
            lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self.eject()
        finally:
            _lock_of(self._owner).release()


@contextmanager
def injected(owner: nn.Module, replacements: Iterable[Replacement]) -> Iterator[None]:
    """Run the enclosed code with other forwards; ejects on the way out, exceptions included.

    Args:
        owner: the root module of those below; other threads wait for it.
        replacements: what gets which forward. Nesting is allowed: ejecting restores what was there.
    """
    with Injection(owner, ((module, _replace_forward(forward)) for module, forward in replacements)):
        yield


def _replace_forward(forward: Forward) -> ForwardWrapper:
    return lambda _: forward

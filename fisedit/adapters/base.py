"""Inject and eject: how anything of ours gets into a model, and out of it without a trace.

A layer is given another `forward` on the instance; its class, parameters, buffers and place in the module tree stay as
they are, so state_dict keys never change. Knows nothing about what the new forward does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

from torch import Tensor, nn

Forward = Callable[..., Tensor]
Replacement = tuple[nn.Module, Forward]
"""A module and the forward it gets."""

TURN = RLock()
"""Held while a model is injected or its tokenizer speaks: both keep state, and editors in threads may share them."""


@contextmanager
def injected(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Run the enclosed code with other forwards; ejects on the way out, exceptions included.

    Args:
        replacements: what gets which forward. Nesting is allowed: ejecting restores what was there. Other threads wait.
    """
    with TURN:
        before: list[tuple[nn.Module, Any]] = []
        try:
            for module, forward in replacements:
                before.append((module, module.__dict__.get("forward")))
                module.forward = forward
            yield
        finally:
            for module, old in reversed(before):
                _restore(module, old)


def _restore(module: nn.Module, old: Any) -> None:
    if old is None:
        module.__dict__.pop("forward", None)
    else:
        module.forward = old

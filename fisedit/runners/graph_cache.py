"""Captured graphs of the two ends of an edit: the text encoder, and sparse decodes.

The encoder reads [1, 77] tokens whatever the prompt: one graph. A decode has graphs of few shapes, whatever the mask
(see `captured_decode`). Everything else, such as weighted prompts and dense decodes, runs uncaptured. The first replay
of every graph is compared with an eager run; where it fails or differs, everything goes on eagerly with a warning.
Knows an encoder and an autoencoder; neither prompts nor edits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fisedit.decoder.decode import DecoderCache, coarse_plan, decode_sparse, paste
from fisedit.decoder.tiles import Box, boxes
from fisedit.models.injection import exclusive, injected
from fisedit.runners.captured_decode import CapturedDecoder
from fisedit.runners.graph_capture import (
    LRUCache,
    Outputs,
    capture,
    capture_errors,
    check_replay,
    snapshot,
    state_of,
    warn_eager,
)

if TYPE_CHECKING:
    from diffusers import AutoencoderKL
    from PIL.Image import Image

    from fisedit.values import BoolGrid

MAX_SIZES = 2
"""Sizes of latents whose decoding graphs are kept: each has the memory that a decode works in."""


class GraphCache:
    """Captured text encoders and decodes; editors of one pipeline may share them.

    Args:
        is_enabled: whether they are used on a device.

    Attributes:
        reason: why none is used any more, or "".
    """

    def __init__(self, is_enabled: Callable[[torch.device], bool]) -> None:
        self._is_enabled_on, self.reason = is_enabled, ""
        self.encoders, self.decoders = LRUCache[_CapturedEncoder](1), LRUCache[CapturedDecoder](MAX_SIZES)

    def captured_encoder(self, encoder: nn.Module) -> AbstractContextManager[None]:
        """Replay the encoder's plain calls while this is open."""
        if not self._is_enabled(next(encoder.parameters()).device) or "forward" in vars(encoder):
            return nullcontext()
        return injected(encoder, [(encoder, partial(self._read, encoder, state_of(encoder)))])

    @torch.inference_mode()
    def _read(self, encoder: nn.Module, state: object, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        if args or any(value is not None for value in options.values()):
            return type(encoder).forward(encoder, input_ids, *args, **options)
        key = state, input_ids.shape
        try:
            return self.encoders.get(key, lambda: _CapturedEncoder(encoder, input_ids)).read(input_ids)
        except capture_errors() as error:
            self.reason = warn_eager(error)
            return type(encoder).forward(encoder, input_ids)

    @torch.inference_mode()
    def decode(
        self, vae: AutoencoderKL, latents: Tensor, grid: BoolGrid, cache: DecoderCache
    ) -> tuple[Image, DecoderCache]:
        """Decode by graphs where they are enabled; see `vae_decode.decode_sparse`."""
        found, shape = boxes(grid), (grid.shape[0], grid.shape[1])
        if self._is_enabled(vae.device) and found != [Box(0, 0, *shape)]:
            try:
                with exclusive(vae):
                    decoder = self.decoders.get((shape, state_of(vae)), lambda: CapturedDecoder(vae, shape))
                    return paste(*decoder.decode(latents, coarse_plan(vae, grid), grid, found, cache))
            except capture_errors() as error:
                self.reason = warn_eager(error)
        return decode_sparse(vae, latents, grid, cache)

    def _is_enabled(self, device: torch.device) -> bool:
        return not self.reason and self._is_enabled_on(device)


class _CapturedEncoder:
    """A text encoder's graph for tokens of one shape."""

    def __init__(self, encoder: nn.Module, tokens: Tensor) -> None:
        self._tokens = tokens.clone()

        def read() -> Outputs:
            return {"last": type(encoder).forward(encoder, self._tokens)[0]}

        self._captured, self._eager, self._verified = capture(read, tokens.device), read, False

    @torch.inference_mode()
    def read(self, tokens: Tensor) -> tuple[Tensor]:
        """The last hidden state [B, T, D], in memory of its own, where the encoder has its outputs."""
        self._tokens.copy_(tokens)
        self._captured.replay()
        if not self._verified:
            check_replay(snapshot(self._captured.outputs), self._eager())
            self._verified = True
        return (self._captured.outputs["last"].clone(),)

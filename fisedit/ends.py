"""The two ends of an edit by captured graphs: the text encoder, and sparse decodes of a mask that comes again.

The encoder reads [1, 77] tokens whatever the prompt: one graph. A decode's shapes follow from its mask: a mask's first
decode runs as it is, and from the second on a graph of that mask is replayed. Everything else, such as weighted
prompts, runs uncaptured. Knows an encoder and an autoencoder; neither prompts nor edits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fisedit.adapters.base import TURN, injected
from fisedit.boxes import ROWS, Box, boxes
from fisedit.cache import StepMaps, StepOverlay
from fisedit.capture import Captured, Once, Outputs, capture, snapshot, state_of
from fisedit.decode import DecoderRecord, SparseDecode, coarse_plan, decode_boxes, set_in
from fisedit.graph import decoder_sites

if TYPE_CHECKING:
    from diffusers import AutoencoderKL
    from PIL.Image import Image

    from fisedit.values import BoolGrid

MASKS_KEPT = 4
"""Masks whose decoding graphs are kept: each holds a copy of what a decode recorded."""

MASKS_SEEN = 64
"""Masks that are remembered as having been decoded."""


class Ends:
    """Captured text encoders and decodes; editors of one pipeline may share them.

    Args:
        wanted: whether they are wanted on a device.
    """

    def __init__(self, wanted: Callable[[torch.device], bool]) -> None:
        self.wanted = wanted
        self.texts, self.decodes, self._seen = Once[_Reader](1), Once[_Decoder](MASKS_KEPT), Once[bool](MASKS_SEEN)

    def forget(self) -> None:
        """Every mask is new again."""
        self.decodes, self._seen = Once(MASKS_KEPT), Once(MASKS_SEEN)

    def reading(self, encoder: nn.Module) -> AbstractContextManager[None]:
        """While this is open, the encoder's plain calls are replayed."""
        if not self.wanted(next(encoder.parameters()).device) or "forward" in vars(encoder):
            return nullcontext()
        return injected([(encoder, partial(self._read, encoder, state_of(encoder)))])

    @torch.inference_mode()
    def _read(self, encoder: nn.Module, state: object, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        if args or any(value is not None for value in options.values()):
            return type(encoder).forward(encoder, input_ids, *args, **options)
        key = state, input_ids.shape
        return self.texts.get(key, lambda: _Reader(encoder, input_ids)).read(input_ids)

    def decode(
        self, vae: AutoencoderKL, latents: Tensor, grid: BoolGrid, record: DecoderRecord, source: Image
    ) -> tuple[Image, DecoderRecord]:
        """See `decode.decode_boxes`."""
        found = boxes(grid)
        if not self.wanted(vae.device) or found == [Box(0, 0, *grid.shape)]:
            return decode_boxes(vae, latents, grid, record, source)
        with TURN:
            key = grid.shape, grid.tobytes(), state_of(vae)
            if key not in self._seen:
                self._seen.get(key, lambda: True)
                return decode_boxes(vae, latents, grid, record, source)
            graph = self.decodes.get(key, lambda: _Decoder(vae, grid, found, latents, record))
            return graph.decode(latents, record, source)


class _Reader:
    """A text encoder's graph for tokens of one shape."""

    def __init__(self, encoder: nn.Module, tokens: Tensor) -> None:
        self._tokens = tokens.clone()

        def read() -> Outputs:
            return {"last": type(encoder).forward(encoder, self._tokens)[0]}

        self._captured = capture(read, tokens.device)

    @torch.inference_mode()
    def read(self, tokens: Tensor) -> tuple[Tensor]:
        """The last hidden state [B, T, D], in memory of its own, where the encoder has its outputs."""
        self._tokens.copy_(tokens)
        self._captured.replay()
        return (self._captured.outputs["last"].clone(),)


class _Decoder:
    """The graph of one mask's decode, with buffers for what it reads of a record."""

    def __init__(
        self, vae: AutoencoderKL, grid: BoolGrid, found: list[Box], latents: Tensor, record: DecoderRecord
    ) -> None:
        self._vae, self._grid, self._found = vae, grid, found
        self._plan, self._latents = coarse_plan(vae, grid), latents.clone()
        self._levels = {site.name: site.level for site in decoder_sites(vae.decoder, ROWS)}
        self._reads = {name: tensor.clone() for name, tensor in self._whole(record).items()}
        self._boxes: list[tuple[Box, Box]] = []
        self._captured: Captured = capture(self._run, vae.device)

    @torch.inference_mode()
    def decode(self, latents: Tensor, record: DecoderRecord, source: Image) -> tuple[Image, DecoderRecord]:
        """See `decode.decode_boxes`."""
        self._latents.copy_(latents)
        for name, tensor in self._whole(record).items():
            self._reads[name].copy_(tensor)
        self._captured.replay()
        outputs = self._captured.outputs
        done = [(*there, outputs[f"box {i}"]) for i, there in enumerate(self._boxes)]
        kept = snapshot({name: tensor for name, tensor in outputs.items() if not name.startswith("box ")})
        return set_in(source, done, self._grid), _filled(DecoderRecord(StepOverlay(record.maps, self._plan)), kept)

    def _run(self) -> Outputs:
        record = _filled(DecoderRecord(StepMaps()), self._reads)
        run = SparseDecode(self._vae, self._grid, self._found, record, self._plan)
        run.decode(self._latents)
        self._boxes = [(box, outer) for box, outer, _ in run.done]
        return _tensors(run.record) | {f"box {i}": sample for i, (*_, sample) in enumerate(run.done)}

    def _whole(self, record: DecoderRecord) -> Outputs:
        """What a record holds, with whole maps where it lies over another."""
        held, step = _tensors(record), record.maps
        if isinstance(step, StepOverlay):
            held |= {f"map {name}": step.whole(name, self._levels[name]) for name in step.maps}
        return held


def _homes(record: DecoderRecord) -> dict[str, dict[str, Tensor]]:
    return {"map": record.maps.maps, "total": record.maps.totals, "sum": record.sums, "fine": record.totals}


def _tensors(record: DecoderRecord) -> Outputs:
    """A record's own tensors, by kind and layer."""
    return {f"{kind} {name}": t for kind, tensors in _homes(record).items() for name, t in tensors.items()}


def _filled(record: DecoderRecord, tensors: Outputs) -> DecoderRecord:
    """A record with such tensors put where they belong."""
    homes = _homes(record)
    for name, tensor in tensors.items():
        kind, _, layer = name.partition(" ")
        homes[kind][layer] = tensor
    return record

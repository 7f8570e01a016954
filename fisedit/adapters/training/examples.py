"""Triples as tensors: pictures are read and encoded on first use, and cached as latents.

Knows a pipeline's autoencoder and text encoder; no UNet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fisedit.adapters.insertion_points import insertion_points
from fisedit.errors import InputError
from fisedit.models.vae import encode
from fisedit.storage.canvas import to_canvas, to_editable
from fisedit.storage.images import decode, read_bytes
from fisedit.storage.mask_images import decode_mask
from fisedit.values import LATENT_FACTOR

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image

    from fisedit.adapters.training.triples import Triple
    from fisedit.machine.model import Model


MapReader = Callable[[Tensor, Tensor], dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """B examples.

    Args:
        targets: clean latents [B, 4, h, w].
        references: clean latents [B, 4, h, w].
        text: The embeddings of the prompts, [B, T, D].
        regions: weight of every cell's error, [B, 1, h, w], in [0, 1].
        controls: [B, C, h', w'] by insertion point.
        reference_maps: maps of no reference and of the B references, [1 + B, C, h', w'], by insertion point; empty
            if not cached.
    """

    targets: Tensor
    references: Tensor
    text: Tensor
    regions: Tensor
    controls: Mapping[str, Tensor]
    reference_maps: Mapping[str, Tensor] = field(default_factory=dict)


class TrainingExamples:
    """A folder's triples as square pictures.

    Args:
        pipe: A pipeline whose autoencoder and text encoder read them.
        triples: from `read_triples`.
        side: The side of a square, in pixels.
        read_maps: gives the maps by insertion point of latents [1, 4, h, w] and the empty prompt's embedding
            [1, T, D], to be cached; None caches none.
    """

    def __init__(self, pipe: Model, triples: Sequence[Triple], side: int, read_maps: MapReader | None = None) -> None:
        self._pipe, self.triples, self.side, self._read_maps = pipe, triples, side, read_maps
        self._latents_of: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._reference_maps: dict[int, dict[str, Tensor]] = {}
        self.empty_prompt = self._text([""])  # [1, T, D]

    def __len__(self) -> int:
        return len(self.triples)

    def batch(self, rows: Sequence[int]) -> TrainingBatch:
        """The examples of some rows.

        Args:
            rows: indices of triples.

        Raises:
            InputError: a control file cannot be read, or is for another UNet.
        """
        targets, references, regions = zip(*(self._latents(row) for row in rows), strict=True)
        text = self._text([self.triples[row].prompt for row in rows])
        controls, whole = self._controls(rows), torch.cat(references)
        return TrainingBatch(torch.cat(targets), whole, text, torch.cat(regions), controls, self._maps(rows, whole))

    def picture(self, path: Path) -> Image:
        """A file as the model sees it."""
        return to_canvas(to_editable(decode(read_bytes(path), f"picture {path}").image), (self.side, self.side))

    def _latents(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        if row not in self._latents_of:
            triple, vae = self.triples[row], self._pipe.vae
            target, reference = (encode(vae, self.picture(path)) for path in (triple.target, triple.reference))
            self._latents_of[row] = target, reference, self._region(triple).to(target)
        return self._latents_of[row]

    def _maps(self, rows: Sequence[int], references: Tensor) -> dict[str, Tensor]:
        """The maps of `TrainingBatch.reference_maps`; row -1 is no reference."""
        if self._read_maps is None:
            return {}
        blank = torch.zeros_like(references[:1])
        for row, latents in zip((-1, *rows), (blank, *references.split(1)), strict=True):
            if row not in self._reference_maps:
                self._reference_maps[row] = self._read_maps(latents, self.empty_prompt)
        each = [self._reference_maps[row] for row in (-1, *rows)]
        return {name: torch.cat([one[name] for one in each]) for name in each[0]}

    def _region(self, triple: Triple) -> Tensor:
        cells = self.side // LATENT_FACTOR
        if triple.region is None:
            return torch.zeros(1, 1, cells, cells)
        grey = decode_mask(read_bytes(triple.region), size=(self.side, self.side))
        shares = torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8).float().view(1, 1, self.side, self.side)
        return F.avg_pool2d(shares / 255, LATENT_FACTOR)

    @torch.no_grad()
    def _text(self, prompts: list[str]) -> Tensor:
        """[B, T, D]."""
        text: Tensor = self._pipe.encode_prompt(prompts, self._pipe.device, 1, do_classifier_free_guidance=False)[0]
        return text

    def _controls(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Controls by insertion point; zeros for triples that have none."""
        each = [_control(self.triples[row].control) for row in rows]
        points = insertion_points(self._pipe.unet)
        controls: dict[str, Tensor] = {}
        for name, like in {name: tensor for control in each for name, tensor in control.items()}.items():
            if name not in points or like.ndim != 3 or like.shape[0] != points[name].channels:
                raise InputError(
                    f"a control must be [C, h, w] by place ({', '.join(points)}), got {name} {list(like.shape)}"
                )
            controls[name] = torch.stack([control.get(name, torch.zeros_like(like)) for control in each])
            controls[name] = controls[name].to(self._pipe.device, self._pipe.unet.dtype)
        return controls


def _control(path: Path | None) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path is None:
        return {}
    try:
        return load_file(path)
    except SafetensorError as error:
        raise InputError(f"control {path} must be a whole .safetensors file, got another ({error})") from error

"""What makes a training step cheaper on a CPU and leaves its values as they are. Knows nothing of what is trained."""

from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from fisedit.machine.malloc import keep_freed_memory


class QuickResnet(ResnetBlock2D):  # type: ignore[misc]
    """A residual block of an autoencoder without the division by one, which took a thirteenth of a step."""

    def forward(self, maps: Tensor, temb: Tensor | None = None) -> Tensor:
        """Maps [B, C, h, w]; an autoencoder embeds no time."""
        between = self.conv1(self.nonlinearity(self.norm1(maps)))
        changed: Tensor = self.conv2(self.nonlinearity(self.norm2(between)))
        kept: Tensor = maps if self.conv_shortcut is None else self.conv_shortcut(maps)
        return kept + changed


def skip_divisions(autoencoder: nn.Module) -> None:
    """Turns the residual blocks of an autoencoder into quick ones; weights and their names stay."""
    blocks: list[Any] = list(autoencoder.modules())
    for block in blocks:
        if type(block) is ResnetBlock2D and block.time_emb_proj is None and block.output_scale_factor == 1:
            block.__class__ = QuickResnet


def prepare_cpu(products: str) -> None:
    """Keeps freed memory, takes numbers too small to matter as zero, and says what convolutions multiply.

    Products of bf16 are only asked for where the CPU has tiles for them: elsewhere they are slower than fp32.
    """
    keep_freed_memory()
    torch.set_flush_denormal(True)
    tiles = torch.cpu._is_amx_tile_supported()  # noqa: SLF001 - torch has no public name for it
    mkldnn: Any = torch.backends.mkldnn
    mkldnn.conv.fp32_precision = "bf16" if products == "bf16" and tiles else "none"

"""`python -m training.gamut MODEL`: which looks a model's autoencoder can paint, before an adapter is taught them.

Prints, for every hue and saturation, how far an object's mean colour is off after encoding and decoding (of 255, mean
over drawn objects). An adapter steers latents: it can't paint what the decoder can't.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL

from benchmarks.scenes.appearance import Appearance
from benchmarks.scenes.drawing import Bytes, Mask
from benchmarks.scenes.scene import render
from training.pictures import to_bytes, to_tensor
from training.references import sample_plain_scene

HUES = range(0, 360, 30)
SATURATIONS = (0.9, 0.45)


def drawn_objects(count: int, side: int) -> list[tuple[Bytes, Mask]]:
    """Pictures [S, S, 3] with one object each, and its mask [S, S]."""
    drawings = [render(sample_plain_scene(np.random.default_rng((2, n)), 1), side) for n in range(count)]
    return [(drawing.pixels, drawing.masks[0]) for drawing in drawings]


@torch.no_grad()
def colour_error(autoencoder: AutoencoderKL, objects: Sequence[tuple[Bytes, Mask]], look: Appearance | None) -> float:
    """How far objects' mean colours are off after encoding and decoding, of 255; None leaves them as they are."""
    pictures = np.stack([look.paint(pixels, mask) if look else pixels for pixels, mask in objects])
    latents = autoencoder.encode(to_tensor(pictures, autoencoder.device)).latent_dist.mode()
    decoded = to_bytes(autoencoder.decode(latents).sample)
    pairs = zip(pictures, decoded, objects, strict=True)
    return float(np.mean([np.abs(a[mask].mean(0) - b[mask].mean(0)).mean() for a, b, (_, mask) in pairs]))


def main() -> None:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser(prog="python -m training.gamut", description=__doc__)
    parser.add_argument("model", type=Path, help="a diffusers folder")
    parser.add_argument("--objects", type=int, default=16)
    chosen = parser.parse_args()
    autoencoder = AutoencoderKL.from_pretrained(chosen.model, subfolder="vae").float().eval()
    objects = drawn_objects(chosen.objects, int(autoencoder.config["sample_size"]))
    print(f"as they are  {colour_error(autoencoder, objects, None):.0f}")
    print(f"grey         {colour_error(autoencoder, objects, Appearance((0, 0), 0)):.0f}")
    for saturation in SATURATIONS:
        errors = [colour_error(autoencoder, objects, Appearance((hue, hue), saturation)) for hue in HUES]
        told = "  ".join(f"{hue}: {error:.0f}" for hue, error in zip(HUES, errors, strict=True))
        print(f"saturation {saturation}, by hue  {told}")


if __name__ == "__main__":
    main()

"""LoRAs (arXiv 2106.09685), in kohya's or diffusers' format: checked, and put into a pipeline by diffusers' own loader.

The weights stay beside the model's, so that taking them out leaves it exactly as it was. Knows files and pipelines.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fisedit.adapters.base import TURN
from fisedit.errors import AdapterError, ModelError
from fisedit.model_checks import pickled
from fisedit.model_files import read_shapes
from fisedit.models import quiet
from fisedit.recipes import check_scale

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffusers import StableDiffusionPipeline

FILE = "pytorch_lora_weights.safetensors"
"""The file that a folder of diffusers' holds."""


def load(pipe: StableDiffusionPipeline, source: str | Path, loaded: Mapping[str, float], scale: float) -> str:
    """Put a LoRA in, besides those that are there.

    Args:
        source: a .safetensors file, or a folder with diffusers' own. loaded: names of the others -> their scales.
        scale: how much it counts, -10 to 10.

    Returns:
        Its name.

    Raises:
        AdapterError: no such file, no LoRA, or one of another model. InputError: a scale out of range.
    """
    if find_spec("peft") is None:
        raise AdapterError("LoRAs need peft; pip install 'fisedit[lora]'")
    file, scale = _checked(Path(source).expanduser()), check_scale(scale)
    name = f"{file.stem.replace('.', '_')}_{len(loaded)}"
    with TURN, quiet():
        try:
            pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=name, local_files_only=True)
            set_scales(pipe, {**loaded, name: scale})
        except (ValueError, RuntimeError, KeyError, IndexError, AttributeError) as error:
            unload(pipe, loaded, name)
            why = next(iter(str(error).splitlines()), "")[:200]
            raise AdapterError(f"the LoRA {file} does not fit this model ({why}); load what it was made for") from error
    return name


def set_scales(pipe: StableDiffusionPipeline, scales: Mapping[str, float]) -> None:
    """Let every LoRA count as much as its scale says, in the UNet and in the text encoder."""
    if scales:
        pipe.set_adapters(list(scales), list(scales.values()))


def unload(pipe: StableDiffusionPipeline, kept: Mapping[str, float], name: str) -> None:
    """Take a LoRA out; of the last, nothing stays."""
    with TURN:
        if not kept:
            pipe.unload_lora_weights()
            return
        if any(name in names for names in pipe.get_list_adapters().values()):
            pipe.delete_adapters(name)
        set_scales(pipe, kept)


def _checked(path: Path) -> Path:
    file = path / FILE if path.is_dir() else path
    if refusal := pickled(file):
        raise AdapterError(str(refusal))
    if not file.is_file():
        raise AdapterError(f"LoRA must be a .safetensors file or a folder with {FILE}, got {path}")
    try:
        names = read_shapes(file)
    except ModelError as error:
        raise AdapterError(str(error)) from error
    if not any("lora" in name for name in names):
        raise AdapterError(f"{file} holds no LoRA; load an adapter with load_adapter, a model with from_pretrained")
    return file

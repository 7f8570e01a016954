"""LoRAs (arXiv 2106.09685), read in any layout by `lora_layouts`, and put into a pipeline as peft's layers.

Every layer is scaled by alpha / rank as its file has it, which diffusers' own loader does not do. The weights stay
beside the model's, so that taking them out leaves it exactly as it was. Knows files and pipelines.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from fisedit.adapters.lora_layouts import LORA_PARTS, LayerChange, read_changes
from fisedit.errors import AdapterError, ModelError, NumericsError
from fisedit.features.sites import base_layer
from fisedit.machine.device import default_torch_state
from fisedit.models.injection import exclusive
from fisedit.models.paths import DEMO_LORAS, demo_adapter_folder, expand_home
from fisedit.models.validation import pickled
from fisedit.models.weight_files import read_metadata
from fisedit.values import check_scale, make_generation_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from fisedit.machine.model import Model
    from fisedit.values import SchedulerName

FILE = "pytorch_lora_weights.safetensors"
"""The file that a folder of diffusers' holds."""

_PEFT_FILE = "adapter_model.safetensors"


_scales: WeakKeyDictionary[nn.Module, dict[str, float]] = WeakKeyDictionary()
"""UNet -> scales by name of the LoRAs that were loaded into its pipeline here, by whichever editor."""


def loaded_scales(pipe: Model) -> Mapping[str, float]:
    """Scales by name of the LoRAs that were loaded here.

    Args:
        pipe: The pipeline that has them.
    """
    return _scales.get(pipe.unet, {})


@dataclass(frozen=True)
class SuggestedSampling:
    """The sampling that suits a LoRA, as its file's metadata say: `python -m training.distill` writes them.

    Args:
        scheduler: its name.
        num_inference_steps: number of steps.
        guidance_scale: 1 for none.
    """

    scheduler: SchedulerName
    num_inference_steps: int
    guidance_scale: float


def weight_file(source: str | Path) -> Path:
    """The file of a LoRA.

    Args:
        source: one of `DEMO_LORAS`, a .safetensors file, or a folder with diffusers' or peft's.

    Raises:
        AdapterError: there is none, or it is pickled.
    """
    try:
        path = demo_adapter_folder(str(source)) if str(source) in DEMO_LORAS else expand_home(source)
    except ModelError as error:
        raise AdapterError(str(error)) from error
    files = [path / name for name in (FILE, _PEFT_FILE)] if path.is_dir() else [path]
    file = next((each for each in files if each.is_file()), files[0])
    if problem := pickled(file):
        raise AdapterError(str(problem))
    if not file.is_file():
        shipped = ", ".join(f'"{name}"' for name in DEMO_LORAS)
        raise AdapterError(
            f"LoRA must be {shipped}, a .safetensors file or a folder with {FILE} or {_PEFT_FILE}, got {path}"
        )
    return file


def suggested_sampling(source: str | Path) -> SuggestedSampling | None:
    """Return what a LoRA's file suggests; None for nothing, or values that no picture is made with.

    Args:
        source: A LoRA, as in `weight_file`.

    Raises:
        AdapterError: no such file, or a damaged one.
    """
    try:
        told = read_metadata(weight_file(source))
        scheduler, steps, guidance = (told[field.name] for field in fields(SuggestedSampling))
        settings = {"scheduler": scheduler, "num_inference_steps": int(steps), "guidance_scale": float(guidance)}
        config = make_generation_config("-", seed=0, negative_prompt="", width=512, height=512, **settings)
        return SuggestedSampling(config.scheduler, config.num_inference_steps, config.guidance_scale)
    except ModelError as error:
        raise AdapterError(str(error)) from error
    except (KeyError, ValueError):
        return None


@default_torch_state()
def load(pipe: Model, source: str | Path, scale: float) -> str:
    """Load a LoRA beside those that were loaded here; all other LoRAs in the pipeline are disabled.

    Args:
        pipe: The pipeline that gets it.
        source: A LoRA, as in `weight_file`.
        scale: The scale of the LoRA, -10 to 10.

    Returns:
        Its name.

    Raises:
        AdapterError: no such file, no LoRA, or one of another model.
        NumericsError: weights that are NaN or infinite.
        InputError: a scale out of range.
    """
    if find_spec("peft") is None:
        raise AdapterError("LoRAs need peft; pip install 'fisedit[lora]'")
    file, scale = weight_file(source), check_scale(scale)
    name = _name(file)
    with exclusive(pipe.unet, pipe.text_encoder):
        loaded = loaded_scales(pipe)
        if name in loaded:
            raise AdapterError(f"the LoRA {file} is loaded already; change its scale with scale_loras")
        changes = {
            (part, layer): _fitted(layer, _parts(pipe)[part].get_submodule(layer), change)
            for (part, layer), change in read_changes(file, _parts(pipe)).items()
        }
        try:
            for part, model in _parts(pipe).items():
                _insert(model, name, {layer: change for (of, layer), change in changes.items() if of == part})
            set_scales(pipe, {**loaded, name: scale})
        except BaseException:
            _take_out(pipe, loaded, name)
            raise
    return name


def set_scales(pipe: Model, scales: Mapping[str, float]) -> None:
    """Set the scales of LoRAs in the UNet and in text encoders; all others are disabled.

    Args:
        pipe: The pipeline that has them.
        scales: by name.
    """
    from diffusers.utils.peft_utils import set_adapter_layers

    active = {name: scale for name, scale in scales.items() if scale}
    with exclusive(pipe.unet, pipe.text_encoder):
        for part in _parts(pipe).values():
            set_adapter_layers(part, enabled=bool(active))
        if active:
            pipe.set_adapters(list(active), list(active.values()))
        _scales[pipe.unet] = dict(scales)


@default_torch_state()
def unload(pipe: Model, name: str) -> None:
    """Unload a LoRA; after the last one the pipeline is as it was.

    Args:
        pipe: The pipeline that has it.
        name: The name of the LoRA, one of `loaded_scales`.
    """
    with exclusive(pipe.unet, pipe.text_encoder):
        _take_out(pipe, {other: scale for other, scale in loaded_scales(pipe).items() if other != name}, name)


def _take_out(pipe: Model, remaining: Mapping[str, float], name: str) -> None:
    with exclusive(pipe.unet, pipe.text_encoder):
        loaded_names = {one for names in pipe.get_list_adapters().values() for one in names}
        if loaded_names <= {name}:
            pipe.unload_lora_weights()
        elif name in loaded_names:
            pipe.delete_adapters(name)
        _scales[pipe.unet] = dict(remaining)
        if remaining:
            set_scales(pipe, remaining)


def _parts(pipe: Model) -> dict[str, nn.Module]:
    return {part: pipe.components[part] for part in LORA_PARTS if part in pipe.components}


def _fitted(layer: str, module: nn.Module, change: LayerChange) -> LayerChange:
    """A change on a layer's device, in its precision. Raises NumericsError where it is not finite."""
    weight = base_layer(module).weight
    down, up = (half.to(weight.device, weight.dtype).contiguous() for half in (change.down, change.up))
    if not (down.isfinite().all() and up.isfinite().all()):
        raise NumericsError(f"the LoRA's {layer} holds NaN or infinity; download it again or use fp32")
    return LayerChange(down, up, change.alpha)


def _insert(model: Any, name: str, changes: Mapping[str, LayerChange]) -> None:
    """Put changes beside a model's layers. Ranks and alphas are set by layer: peft's patterns would cost minutes."""
    from peft import LoraConfig
    from torch import nn

    if not changes:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="peft")  # that there are several is meant
        model.add_adapter(LoraConfig(r=1, target_modules=list(changes), init_lora_weights=False), name)
    for layer, change in changes.items():
        module = model.get_submodule(layer)
        module.lora_A[name].weight = nn.Parameter(change.down, requires_grad=False)
        module.lora_B[name].weight = nn.Parameter(change.up, requires_grad=False)
        module.r[name], module.lora_alpha[name] = len(change.down), change.alpha
        module.set_scale(name, 1.0)


def _name(file: Path) -> str:
    """A readable name, unique by the file's content."""
    with file.open("rb") as content:
        return f"{file.stem.replace('.', '_')}_{hashlib.file_digest(content, 'sha256').hexdigest()[:8]}"

"""A LoRA's file, in whichever layout it was written, as changes of this model's own layers.

One table has the names that programs give to layers, one the ends of tensors' names, one the families that are no plain
LoRA. Every tensor is read, or the file is refused by what it is. Knows names and shapes; changes no model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fisedit.errors import AdapterError, ModelError, as_text
from fisedit.features.sites import base_layer
from fisedit.models.weight_files import read_json, read_metadata, read_shapes

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

PEFT_CONFIG = "adapter_config.json"
"""The file beside peft's weights that says how strong they are."""

Parts = Mapping[str, nn.Module]
"""The UNet and the text encoders, by diffusers' names of them."""


@dataclass(frozen=True, eq=False)
class LayerChange:
    """The product up @ down times alpha / rank, which is added to a layer's weight.

    Args:
        down: [r, C_in, ...], shaped as the layer's weight.
        up: [C_out, r, 1...].
        alpha: rank where the file tells none; of a DoRA's difference what makes the factor that of the file.
    """

    down: Tensor
    up: Tensor
    alpha: float


_MERGE = "merge it into a copy of the model with LyCORIS's tools/merge.py, and load that"
_FAMILIES = (
    (r"^(unet|text_encoder):\d+:(up|down)$", "is a LoRA of cloneofsimo's, whose layers have no names", "convert it"),
    (r"\.hada_[wt]", "is a LoHa of LyCORIS, which is not read", _MERGE),
    (r"\.lokr_[wt]", "is a LoKr of LyCORIS, which is not read", _MERGE),
    (r"(\.|_)b?oft_", "is an OFT or BOFT of LyCORIS, which is not read", _MERGE),
    (r"\.[abc][12]\.weight$", "is a GLoRA of LyCORIS, which is not read", _MERGE),
    (r"\.on_input$|ia3_l", "is an IA3 of LyCORIS, which is not read", _MERGE),
    (r"\.lora_mid\.", "has lora_mid, LyCORIS's Tucker form of LoCon, which is not read", _MERGE),
    (r"\.[wb]_norm$", "changes norms (w_norm and b_norm of LyCORIS), which is not read", _MERGE),
    (r"\.diff_b$", "changes biases (diff_b of LyCORIS), which is not read", _MERGE),
    (r"\.diff$", "has full differences (LyCORIS's full), which are not read", _MERGE),
    (
        r"\.lora_(A|B|up|down)(\.\w+)?\.bias$",
        "has biases (lora_bias), which sparse steps do not know",
        "train it without",
    ),
    (r"\.lora_embedding_", "changes the embeddings of words, which is not read", "train it without"),
    (r"\.lora_E(\.|$)", "is an AdaLoRA, which is not read", "load a LoRA"),
    (r"^lllite_", "is a ControlNet-LLLite, which is not read", "load a ControlNet"),
    (
        r"^bundle_emb\.",
        "has embeddings of words (bundle_emb), which are not read",
        "load them by load_textual_inversion",
    ),
)
"""The patterns of tensors' names, what each says that the file is, and what to do."""

_OTHER_MODELS = (
    (r"^lora_te2_|^text_encoder_2\.|clip_g|label_emb|^conditioner\.", "Stable Diffusion XL"),
    (r"double_blocks|single_blocks|single_transformer_blocks", "Flux"),
    (r"joint_blocks|^transformer\.|^lora_transformer_", "a transformer such as Stable Diffusion 3 or Flux"),
)

_LARGEST_ALPHA = 1e6

_PROCESSOR = re.compile(r"(?:\.processor)?\.(to_[qkv]|to_out)_lora\.")
_ENDS = re.compile(
    r"\.(?:(?P<down>lora_down|lora\.down|lora_linear_layer\.down|lora_A(?:\.\w+?)?)(?:\.weight)?"
    r"|(?P<up>lora_up|lora\.up|lora_linear_layer\.up|lora_B(?:\.\w+?)?)(?:\.weight)?"
    r"|(?P<alpha>(?:lora\.|lora_linear_layer\.)?alpha)"
    r"|(?P<magnitude>dora_scale|lora_magnitude_vector(?:\.\w+?)??(?:\.weight)?))$"
)
"""Kohya's, peft's and diffusers' names of a layer's tensors, in that order."""

_PREFIXES = {
    "unet": ("lora_unet_", "lycoris_", "unet.", "model.diffusion_model.", "diffusion_model.", ""),
    "text_encoder": (
        "lora_te_",
        "lora_te1_",
        "lycoris_",
        "text_encoder.",
        "cond_stage_model.transformer.",
        "conditioner.embedders.0.transformer.",
        "text_encoders.clip_l.transformer.",
        "clip_l.transformer.",
        "clip_l.",
        "",
    ),
    "text_encoder_2": (
        "lora_te2_",
        "text_encoder_2.",
        "text_encoders.clip_g.transformer.",
        "clip_g.transformer.",
        "clip_g.",
    ),
}
LORA_PARTS = tuple(_PREFIXES)
"""Names of the parts that LoRAs change."""

_PEFT_PREFIX = re.compile(r"^((?:unet|text_encoder(?:_2)?)\.)?base_model\.model\.")
"""The prefixes of layers' names in files of kohya, diffusers, Stable Diffusion and ComfyUI; peft's follows them."""


def read_changes(file: Path, parts: Parts) -> dict[tuple[str, str], LayerChange]:
    """The changes of a LoRA by part and layer, on the CPU, in the precision of the file; those of rank 0 are left out.

    Args:
        file: a .safetensors file.
        parts: The parts of the model.

    Raises:
        AdapterError: it is damaged, no LoRA, one of another model, or of a family that is not read.
    """
    from safetensors.torch import load_file

    try:
        names, metadata = tuple(read_shapes(file)), read_metadata(file)
    except ModelError as error:
        raise AdapterError(str(error)) from error
    places, strengths = _places(file, names, metadata, parts), _Strengths(file, metadata)
    if not strengths.told and any(map(_PEFT_PREFIX.match, names)) and not any(n.endswith(".alpha") for n in names):
        raise AdapterError(f"{file} is peft's, whose strength {PEFT_CONFIG} says; put that file beside it")
    tensors, found = load_file(file), dict[tuple[str, str], LayerChange]()
    for (part, layer), own in places.items():
        weight = base_layer(parts[part].get_submodule(layer)).weight
        told = partial(strengths.alpha, part, layer)
        found[part, layer] = _change(file, layer, weight, {role: tensors[name] for role, name in own.items()}, told)
        if "magnitude" in own and len(found[part, layer].down):
            found[part, layer] = _decomposed(file, own["magnitude"], tensors, weight, found[part, layer])
    if not any(change.alpha and len(change.down) for change in found.values()):
        raise AdapterError(f"{file} changes nothing, as all its layers have rank or alpha 0; load another LoRA")
    return {place: change for place, change in found.items() if len(change.down)}


def _change(
    file: Path, layer: str, weight: Tensor, own: Mapping[str, Tensor], told: Callable[[int], float]
) -> LayerChange:
    """A layer's change of its tensors by role; `told` has the alpha of a rank where there is no such tensor."""
    if missing := [role for role in ("down", "up") if role not in own]:
        raise AdapterError(f"{file} is incomplete: it has no {missing[0]} for {layer}; download it again")
    down, up = _fitted(file, layer, weight, own["down"], own["up"])
    numbers = own["alpha"].double().flatten().tolist() if "alpha" in own else [told(len(down))]
    if len(numbers) != 1:
        raise AdapterError(f"{file} must have one number as alpha of {layer}, got {len(numbers)}; convert it")
    alpha = float(numbers[0])
    if not abs(alpha) <= _LARGEST_ALPHA:  # not a number, too
        raise AdapterError(f"{file} must have alphas up to {_LARGEST_ALPHA:g}, got {alpha} for {layer}; convert it")
    return LayerChange(down, up, alpha)


def _places(
    file: Path, names: tuple[str, ...], metadata: Mapping[str, str], parts: Parts
) -> dict[tuple[str, str], dict[str, str]]:
    """Every tensor's place: part and layer -> "down", "up" and "alpha" -> its name. Raises AdapterError."""
    for pattern, what, advice in _FAMILIES:
        if count := sum(bool(re.search(pattern, name)) for name in names):
            raise AdapterError(f"{file} {what} ({count} of its {len(names)} tensors); {advice}")
    layers = {part: layer_names(part, model) for part, model in parts.items()}
    found, unread, unknown = dict[tuple[str, str], dict[str, str]](), list[str](), list[str]()
    for name in names:
        plain = _PROCESSOR.sub(r".\1.lora.", name)
        if (end := _ENDS.search(plain)) is None:
            unread.append(name)
        elif (place := _layer(plain[: end.start()], layers)) is None:
            unknown.append(plain[: end.start()])
        elif found.setdefault(place, {}).setdefault(str(end.lastgroup), name) != name:
            raise AdapterError(f"{file} changes {place[1]} twice, as {as_text(name, 160)} too; keep one of both")
    if not found and not unknown:
        raise AdapterError(f"{file} holds no LoRA; load an adapter with load_adapter, a model with from_pretrained")
    if unknown:
        raise AdapterError(_misfit(file, names, metadata, sorted(set(unknown))))
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise AdapterError(f"{file} has tensors that are no LoRA's, {as_text(unread[0], 160)}{more}; take them out")
    return found


def _misfit(file: Path, names: tuple[str, ...], metadata: Mapping[str, str], unknown: list[str]) -> str:
    """The message about layers that the model does not have."""
    other = next((model for pattern, model in _OTHER_MODELS if any(re.search(pattern, name) for name in names)), None)
    told = next((metadata[key] for key in ("modelspec.architecture", "ss_base_model_version") if key in metadata), None)
    told = None if told is None else f"its metadata name {as_text(told)}"
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    why = "; ".join(filter(None, (f"no layer {as_text(unknown[0], 160)}{more}", other and f"it is for {other}", told)))
    return f"the LoRA {file} does not fit this model ({why}); load what it was made for"


def _layer(name: str, layers: Mapping[str, Mapping[str, str]]) -> tuple[str, str] | None:
    """Part and layer that a file's name means, or None."""
    name = _PEFT_PREFIX.sub(r"\1", name)
    tried = ((part, prefix) for part, prefixes in _PREFIXES.items() for prefix in prefixes)
    fits = ((part, layers.get(part, {}).get(name[len(prefix) :])) for part, prefix in tried if name.startswith(prefix))
    return next(((part, layer) for part, layer in fits if layer is not None), None)


def layer_names(part: str, model: nn.Module) -> dict[str, str]:
    """Names that files give to a model's linear layers and convolutions -> the model's own.

    Args:
        part: One of `LORA_PARTS`.
        model: The model's part of that name.
    """
    found: dict[str, str] = {}
    spellings = _unet_spellings(model) if part == "unet" else _text_spellings(model)
    for path, names in spellings:
        for name in (*names, *(n.removesuffix(".0") for n in names if n.endswith("to_out.0"))):
            found[name] = found[name.replace(".", "_")] = path
    return found


def _paths(model: nn.Module) -> Iterator[str]:
    """Own names of the layers that LoRAs can change, whether there are some in them already or not."""
    for path, module in model.named_modules():
        inside_lora = ".base_layer" in path or ".lora_" in path
        if not inside_lora and isinstance(base_layer(module), nn.Linear | nn.Conv2d):
            yield path


def _text_spellings(model: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    for path in _paths(model):
        bare = path.removeprefix("text_model.")
        old = re.sub(r"(self_attn\.)(q|k|v|out)_proj$", r"\1to_\2", bare)  # diffusers' first
        yield path, tuple(f"{start}{name}" for start in ("", "text_model.") for name in (bare, old))


def _unet_spellings(unet: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    places = dict(_original_blocks(unet))
    for path in _paths(unet):
        words = path.split(".")
        starts = [".".join(words[:n]) for n in range(len(words), 0, -1)]
        block = next((start for start in starts if start in places), None)
        if block is None:
            yield path, (path,)
            continue
        rest = path[len(block) :].removeprefix(".")
        inner = _RESNET.get(rest, rest) if ".resnets." in block else rest
        yield path, (path, f"{places[block]}.{inner}".removesuffix("."))


_RESNET = {
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def _original_blocks(unet: UNet2DConditionModel | Any) -> Iterator[tuple[str, str]]:
    """Blocks of a UNet by diffusers' names, and by those of Stable Diffusion's own code, where they are numbered."""
    yield from (("conv_in", "input_blocks.0.0"), ("conv_out", "out.2"))
    yield from (("time_embedding.linear_1", "time_embed.0"), ("time_embedding.linear_2", "time_embed.2"))
    yield from (("add_embedding.linear_1", "label_emb.0.0"), ("add_embedding.linear_2", "label_emb.0.2"))
    count = 1
    for i, block in enumerate(unet.down_blocks):
        for j in range(len(block.resnets)):
            yield f"down_blocks.{i}.resnets.{j}", f"input_blocks.{count}.0"
            yield f"down_blocks.{i}.attentions.{j}", f"input_blocks.{count}.1"
            count += 1
        if block.downsamplers:
            yield f"down_blocks.{i}.downsamplers.0.conv", f"input_blocks.{count}.0.op"
            count += 1
    for kind, count in (("resnets.0", 0), ("attentions.0", 1), ("resnets.1", 2)):
        yield f"mid_block.{kind}", f"middle_block.{count}"
    count = 0
    for i, block in enumerate(unet.up_blocks):
        for j in range(len(block.resnets)):
            yield f"up_blocks.{i}.resnets.{j}", f"output_blocks.{count}.0"
            yield f"up_blocks.{i}.attentions.{j}", f"output_blocks.{count}.1"
            count += 1
        place = 2 if getattr(block, "attentions", None) else 1
        yield f"up_blocks.{i}.upsamplers.0.conv", f"output_blocks.{count - 1}.{place}.conv"


def _fitted(file: Path, layer: str, weight: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors in the shape that the layer needs; linear layers and 1x1 convolutions are written either way."""
    (out, *inner), rank = weight.shape, down.shape[0] if down.ndim > 1 else -1
    if up.ndim < 2 or up.shape[1] != rank or up.numel() != out * rank or down.numel() != rank * weight[0].numel():
        got = f"{list(up.shape)} times {list(down.shape)}"
        raise AdapterError(
            f"the LoRA {file} does not fit this model ({layer} is {list(weight.shape)}, got {got}); "
            "load what it was made for"
        )
    return down.reshape(rank, *inner), up.reshape(out, rank, *[1] * (len(inner) - 1))


def _decomposed(
    file: Path, name: str, tensors: Mapping[str, Tensor], weight: Tensor, change: LayerChange
) -> LayerChange:
    """The change that a DoRA (arXiv 2402.09353) makes.

    The sum of weight and product gets other norms, by output, or by input as LyCORIS has it too. The difference has
    full rank; one of its factors is the identity.
    """
    base, factor = weight.detach().cpu().float(), change.alpha / len(change.down)
    summed = base + factor * (change.up.float().flatten(1) @ change.down.float().flatten(1)).view_as(base)
    magnitude = tensors[name].float()
    by_input = name.endswith("dora_scale") and magnitude.ndim > 1 and len(magnitude) == 1
    rows = summed.transpose(0, 1) if by_input else summed
    if magnitude.numel() != len(rows):
        got = f"{list(weight.shape)} and {list(magnitude.shape)}"
        raise AdapterError(f"{file} must have a magnitude for each row as {as_text(name, 160)}, got {got}; convert it")
    norms = rows.flatten(1).norm(dim=1).clamp_min(1e-12)
    rows = rows * (magnitude.flatten() / norms).view(-1, *[1] * (rows.ndim - 1))
    factor = factor or 1.0
    difference = ((rows.transpose(0, 1) if by_input else rows) - base) / factor
    identity = torch.eye(len(base)).view(*[len(base)] * 2, *[1] * (base.ndim - 2))
    return LayerChange(difference, identity, factor * len(base))


_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Starts of peft's initialisations that change the model's own weights."""


class _Strengths:
    """Alphas that stand beside the tensors: in peft's configuration, or in the metadata that diffusers writes.

    Args:
        file: The file of the LoRA.
        metadata: its own.

    Raises:
        AdapterError: they are damaged, or of another method than LoRA.
    """

    def __init__(self, file: Path, metadata: Mapping[str, str]) -> None:
        beside = file.parent / PEFT_CONFIG
        self._file, self._config = file, dict[str, Any]()
        try:
            if "lora_adapter_metadata" in metadata:
                self._config = dict(json.loads(metadata["lora_adapter_metadata"]))
            elif file.name == "adapter_model.safetensors" and beside.is_file():
                self._config = read_json(beside)
        except (ModelError, ValueError, TypeError, RecursionError) as error:
            raise AdapterError(
                f"what {file} or {PEFT_CONFIG} says of the LoRA is damaged; download it again"
            ) from error
        if (method := self._config.get("peft_type", "LORA")) != "LORA":
            raise AdapterError(f"{file} is peft's {as_text(method)}, which is not read; load a LoRA")
        if str(started := self._config.get("init_lora_weights")).startswith(_OTHER_BASES):
            raise AdapterError(f"{file} is for weights that {as_text(started)} changed; save it converted to a LoRA")

    @property
    def told(self) -> bool:
        """Return whether there are any alphas."""
        return bool(self._config)

    def alpha(self, part: str, layer: str, rank: int) -> float:
        """Alpha of a layer without one of its own; its rank where nothing is said.

        Args:
            part: The part of the model.
            layer: its name there.
            rank: The rank of the layer.
        """
        prefixed = {name[len(part) + 1 :]: v for name, v in self._config.items() if name.startswith(f"{part}.")}
        config = prefixed or self._config
        if config.get("lora_alpha") is None:
            return float(rank)
        try:
            alpha = _by_pattern(self._file, config.get("alpha_pattern") or {}, layer, config["lora_alpha"])
            return float(alpha) * (rank**0.5 if config.get("use_rslora") else 1)
        except (TypeError, ValueError, AttributeError) as error:
            raise AdapterError(f"alphas of {self._file} must be numbers by layer, got others; save it anew") from error


def _by_pattern(file: Path, patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
    """The entry of the first pattern that a layer's name ends with.

    peft takes patterns as regular expressions. Those that it writes are names. Others, which could take for ever, are
    refused.
    """
    names = {key: key.removeprefix("^").removesuffix("$").replace("\\.", ".") for key in patterns}
    if unusual := next((key for key, name in names.items() if not re.fullmatch(r"[\w.]+", name)), None):
        raise AdapterError(
            f"alphas of {file} must be of layers by name, got the pattern {as_text(unusual)}; save it anew"
        )
    own = f".{layer.removeprefix('text_model.')}"
    fits = (key for key, name in names.items() if own.endswith(f".{name.removeprefix('text_model.')}"))
    return patterns.get(next(fits, ""), default)

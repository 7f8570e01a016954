"""Loading what conditions a UNet by a picture or a drive, of whatever kind: reference adapters, IP-Adapters,
T2I-Adapters, ControlNets, HelloMeme's control networks, and motion modules.

A kind is recognised by the class that a folder's configuration names, or by a file's tensors. Nothing is unpickled.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fisedit.adapters.hellomeme import drive_files
from fisedit.adapters.hellomeme.drive_files import is_control_network, load_control_network
from fisedit.adapters.hellomeme.motion_files import MOTION_ADAPTERS, is_motion_adapter, load_motion_adapter
from fisedit.adapters.network_files import NETWORKS, load_network, network_kind
from fisedit.adapters.picture_adapter import PictureAdapter
from fisedit.adapters.row_column.checkpoints import load_adapter
from fisedit.adapters.row_column.reader import RowColumnReader
from fisedit.errors import AdapterError, ModelError
from fisedit.models import paths
from fisedit.models.conversion import check_finite
from fisedit.models.loader import quiet_loaders
from fisedit.models.paths import expand_home
from fisedit.models.vae import is_inpainting
from fisedit.models.validation import pickled
from fisedit.models.weight_files import check_complete, is_safetensors, parts_of, read_json, read_shapes

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from fisedit.models.weight_files import Shapes

IMAGE_ENCODER = "image_encoder"
"""Folder of the image encoder beside an IP-Adapter's file."""


_HUB_FILE = re.compile(rf"({paths.HUB_ID.pattern})/(.+\.safetensors)")


def load_picture_adapter(
    source: str | Path,
    unet: UNet2DConditionModel,
    *,
    weight_name: str | None = None,
    image_encoder: str | Path | None = None,
    local_files_only: bool = False,
) -> PictureAdapter:
    """Load an adapter, checked, in the precision of its file.

    Args:
        source: a folder with config.json and weights, a .safetensors file, a hub id, or a file on the hub such as
            "h94/IP-Adapter/models/ip-adapter_sd15.safetensors".
        unet: The UNet that the adapter will condition.
        weight_name: The name of the file in a folder or on the hub, such as "models/ip-adapter_sd15.safetensors".
        image_encoder: folder of an IP-Adapter's encoder; None for "image_encoder" beside its file.
        local_files_only: never reach for the network.

    Raises:
        AdapterError: it is missing, damaged, unsafe to load or of another architecture.
        NumericsError: its weights hold NaN or infinity.
    """
    if weight_name is None and (named := _HUB_FILE.fullmatch(str(source))) and not expand_home(source).exists():
        source, weight_name = named.groups()
    if weight_name is not None:
        source = _named_file(source, weight_name, local_files_only=local_files_only)
    path = paths.adapter_path(source, local_files_only=local_files_only, is_wanted=_is_known_network)
    try:
        if _is_ip_adapter(path):
            return _load_ip_adapter(path, unet, image_encoder)
        if kind := _network_kind(path):
            with quiet_loaders():
                return load_network(path, kind, unet)
        if path.exists() and is_control_network(_class_name(path), partial(_shapes, path)):
            return load_control_network(source, local_files_only=local_files_only)
        if path.exists() and is_motion_adapter(_class_name(path), partial(_shapes, path)):
            return load_motion_adapter(path)
    except AdapterError:
        raise
    except ModelError as error:
        raise AdapterError(str(error)) from error
    reader = RowColumnReader(load_adapter(source, local_files_only=local_files_only))
    if is_inpainting(unet):
        raise AdapterError("a reference adapter needs a model that reads latents alone, got an inpainting model")
    return reader


def files_beside(source: str | Path) -> Path | None:
    """Return the files that are loaded from beside an adapter's file, if they are here.

    They are an IP-Adapter's image encoder, or a control network's projection.
    """
    path = expand_home(source)
    if _is_ip_adapter(path):
        return path.parent / IMAGE_ENCODER
    return drive_files.projection_of(path) if path.exists() else None


def _named_file(source: str | Path, weight_name: str, *, local_files_only: bool) -> Path:
    """A file of a folder or of the hub, with the image encoder beside it."""
    if problem := pickled(Path(weight_name)):
        raise AdapterError(str(problem))
    folder = expand_home(source)
    if not folder.is_dir() and paths.HUB_ID.fullmatch(str(source)):
        beside = (Path(weight_name).parent / IMAGE_ENCODER).as_posix()
        wanted = [weight_name, f"{beside}/config.json", f"{beside}/model.safetensors"]
        folder = paths.download_files(str(source), wanted, local_files_only=local_files_only)
    if not (folder / weight_name).is_file():
        raise AdapterError(f"the adapter must be {weight_name} in {source}, which has no such file")
    return folder / weight_name


def _is_known_network(folder: Path) -> bool:
    """Return whether a folder's configuration names the class of a network; `load_adapter` looks at others."""
    return _class_name(folder) in (*NETWORKS, *MOTION_ADAPTERS, *drive_files.NETWORKS, *drive_files.PROJECTIONS)


def _is_ip_adapter(path: Path) -> bool:
    is_file = path.is_file() and is_safetensors(path)
    return is_file and any(name.startswith("ip_adapter.") for name in read_shapes(path))


def _network_kind(path: Path) -> str | None:
    """The class of diffusers' of a folder or file with a network, or None."""
    if path.is_dir():
        return next((kind for kind in NETWORKS if kind == _class_name(path)), None)
    return network_kind(path, read_shapes(*parts_of(path))) if path.is_file() and is_safetensors(path) else None


def _class_name(folder: Path) -> object:
    return read_json(folder / "config.json").get("_class_name") if (folder / "config.json").is_file() else None


def _shapes(path: Path) -> Shapes:
    """The shapes of the tensors of a file, or of a folder's; none where there is no such file."""
    file = path / "diffusion_pytorch_model.safetensors" if path.is_dir() else path
    return read_shapes(file) if file.is_file() and is_safetensors(file) else {}


def _load_ip_adapter(path: Path, unet: UNet2DConditionModel, image_encoder: str | Path | None) -> PictureAdapter:
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import CLIPVisionModelWithProjection

    from fisedit.adapters.ip_adapter import build_ip_adapter

    folder = path.parent / IMAGE_ENCODER if image_encoder is None else expand_home(image_encoder)
    if not (folder / "config.json").is_file():
        raise AdapterError(f"an IP-Adapter needs its image encoder, got none in {folder}; name one with image_encoder")
    try:
        with quiet_loaders():
            encoder, report = CLIPVisionModelWithProjection.from_pretrained(
                folder, use_safetensors=True, local_files_only=True, dtype=unet.dtype, output_loading_info=True
            )
        check_complete(report, folder)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise AdapterError(
            f"an image encoder must be CLIP's vision model with safetensors, got {folder} ({why:.120})"
        ) from error
    tensors = load_file(path)
    check_finite("the adapter", tensors)
    return build_ip_adapter(tensors, unet, encoder.eval().requires_grad_(False))

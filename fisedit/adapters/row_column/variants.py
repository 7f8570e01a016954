"""The published families of HelloMeme's adapters (arXiv 2410.22901): how they differ, and which one a file is of.

Knows the names of insertion points and of tensors; neither weights nor what blocks compute.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fisedit.errors import AdapterError

if TYPE_CHECKING:
    from pathlib import Path

    from fisedit.models.weight_files import Shapes


@dataclass(frozen=True)
class AdapterFamily:
    """A published family of adapters, by its differences from the others.

    Args:
        name: "v1" to "v5b".
        kind: class that its configuration names.
        down: the outputs of all down blocks but the last, and of the middle, are changed too.
        first_up: the first up block whose input is changed.
        table: positions are stored, sine and cosine in turn, and end at 512 pixels.
        two_stage: the reference goes through a block of its own first, and both maps through a 3x3 conv.
    """

    name: str
    kind: str
    down: bool = False
    first_up: int = 0
    table: bool = False
    two_stage: bool = False

    def insertion_points(self, ups: int) -> tuple[str, ...]:
        """Names of the insertion points that are changed, in the order of the forward pass.

        Args:
            ups: up blocks of the UNet.
        """
        down = [*(f"down_{i}" for i in range(ups - 1)), "mid"] if self.down else []
        return (*down, *(f"up_{i}" for i in range(self.first_up, ups)))


FAMILIES = {
    family.name: family
    for family in (
        AdapterFamily("v1", "HMReferenceAdapter", down=True, first_up=1, table=True),
        AdapterFamily("v2", "HMReferenceAdapter", first_up=1, table=True),
        AdapterFamily("v3", "HM3ReferenceAdapter", table=True),
        AdapterFamily("v5", "HM5ReferenceAdapter"),
        AdapterFamily("v5b", "HM5bReferenceAdapter", two_stage=True),
    )
}
"""The families by name; v4's files are v3's."""

EXPERIMENTAL_FAMILIES = {"full": AdapterFamily("full", "FullAttentionAdapter")}
"""The classes that can be trained beside them, to compare (see `full_attention`), and are no published family."""

CLASS_NAMES = tuple(dict.fromkeys(family.kind for family in FAMILIES.values()))
EXPECTED = f"a reference adapter ({', '.join(CLASS_NAMES)})"

_MODULE = re.compile(r"reference_modules_(?:(down|up)\.(\d+)|(mid))\.")
_UNUSED = re.compile(r"reference_modules_\w+\.\d+\.time_emb_proj\.(?:weight|bias)")
_OTHER_ADAPTERS = {
    "lora_": "a LoRA, which load_lora loads",
    "unet.": "a LoRA, which load_lora loads",
    "model.diffusion_model.": "a whole model, which from_pretrained loads",
    "emb_params": "a textual inversion, which load_textual_inversion loads",
    "encoder.": "an autoencoder, which is given to a model as vae=",
    "first_stage_model.": "an autoencoder, which is given to a model as vae=",
    "blocks_down.": "a control network",
    "map": "a control projection",
    "conv_in.": "a UNet or a control network",
}
"""Start of a tensor's name -> what a file with such tensors is."""


def module_name(point: str, family: AdapterFamily) -> str:
    """An insertion point's name in files, where up blocks are counted from the first that is changed."""
    side, _, index = point.partition("_")
    if side == "mid":
        return "reference_modules_mid"
    return f"reference_modules_{side}.{int(index) - (family.first_up if side == 'up' else 0)}"


def class_name_of(config: Mapping[str, Any]) -> str | None:
    """The class that a configuration names, None for none. Raises AdapterError for one that is no reference adapter."""
    kind = config.get("_class_name")
    if kind is not None and kind not in CLASS_NAMES:
        raise AdapterError(f"adapter must be {EXPECTED}, got a {kind}")
    return kind


def family_of(config: Mapping[str, Any], shapes: Shapes, path: Path) -> AdapterFamily:
    """The family of a file, by its configuration, or by its tensors where that names none.

    Args:
        config: The configuration of the file.
        shapes: The shapes of its tensors by name.
        path: for messages.

    Raises:
        AdapterError: it is no reference adapter.
    """
    if not any(_MODULE.match(name) for name in shapes):
        found = (what for start, what in _OTHER_ADAPTERS.items() if any(name.startswith(start) for name in shapes))
        raise AdapterError(
            f"adapter must be {EXPECTED}, got {next(found, 'tensors of no adapter known here')} ({path})"
        )
    kind = class_name_of(config)
    if kind == "HMReferenceAdapter":
        version = config.get("version", "v1")
        if version not in ("v1", "v2"):
            raise AdapterError(f"the adapter's version must be v1 or v2, got {version!r}; download it again")
        return FAMILIES[version]
    if kind:
        return next(family for family in FAMILIES.values() if family.kind == kind)
    if any(".attn_ref." in name for name in shapes):
        return FAMILIES["v5b"]
    if any(name.startswith("reference_modules_mid.") for name in shapes):
        return FAMILIES["v1"]
    if not any(name.endswith(".pos_embed.pe") for name in shapes):
        return FAMILIES["v5"]
    return FAMILIES["v2" if len(indices(shapes, "up")) == 3 else "v3"]


def indices(shapes: Shapes, side: str) -> set[int]:
    """Numbers of the blocks of one side in a file.

    Args:
        shapes: The shapes of its tensors by name.
        side: "down" or "up".
    """
    matches = (_MODULE.match(name) for name in shapes)
    return {int(match[2]) for match in matches if match and match[1] == side}


def is_unused_tensor(name: str, family: AdapterFamily, ups: int) -> bool:
    """Return whether a tensor is in published files but read by nothing.

    Args:
        name: The name of the tensor.
        family: The family of its file.
        ups: up blocks of the UNet.
    """
    return bool(_UNUSED.fullmatch(name)) or (family.down and name.startswith(f"reference_modules_down.{ups - 1}."))

"""Loading what changes a model or conditions its pictures: LoRAs, textual inversions, adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fisedit.adapters import lora, textual_inversion
from fisedit.adapters.loading import load_picture_adapter
from fisedit.errors import AdapterError, InputError, as_text
from fisedit.values import (
    check_scale,
    make_adapter_use,
)

if TYPE_CHECKING:
    from fisedit.adapters.references import LoadedAdapter


from fisedit.editor.base import EditorBase, absolute_path


class AdapterMixin(EditorBase):
    """LoRAs, textual inversions and adapters of an editor."""

    def load_lora(self, source: str | Path, scale: float = 1.0) -> str:
        """Load a LoRA, which changes what is painted from now on.

        Args:
            source: "demo-fast", a .safetensors file or a folder of diffusers' or peft's. "demo-fast" ships for the demo
                model and paints in four steps of LCM without guidance. A file has the layout of kohya's scripts,
                diffusers, peft, ComfyUI or OneTrainer. LoCons and DoRAs are read too.
            scale: how much it counts in the UNet and in the text encoder, -10 to 10. Several LoRAs add up.

        Returns:
            Its name, for `unload_lora`.

        Raises:
            AdapterError: it is missing, damaged, no LoRA, of a family that is not read, or made for another model.
            NumericsError: it holds NaN or infinity. InputError: a scale out of range.
        """
        return lora.load(self.pipe, source, scale)

    def scale_loras(self, scales: Mapping[str, float]) -> None:
        """Set the scales of loaded LoRAs for later pictures, for all editors of the model.

        Args:
            scales: their names, from `load_lora`, -> -10 to 10. Those left out stay loaded with scale 0.

        Raises:
            AdapterError: one that is not loaded. InputError: a scale out of range.
        """
        if not isinstance(scales, Mapping):
            raise InputError(f"scales must be names of LoRAs -> numbers, got {as_text(scales)}")
        for name in scales:
            self._check_lora(name)
        others = dict.fromkeys(lora.loaded_scales(self.pipe), 0.0)
        if others:
            lora.set_scales(self.pipe, others | {name: check_scale(scale) for name, scale in scales.items()})

    def unload_lora(self, name: str) -> None:
        """Take a LoRA out; the model is as it was before. Raises AdapterError where there is none of that name."""
        self._check_lora(name)
        lora.unload(self.pipe, name)

    def _check_lora(self, name: str) -> None:
        if not isinstance(name, str) or name not in lora.loaded_scales(self.pipe):
            loaded = ", ".join(lora.loaded_scales(self.pipe)) or "none"
            raise AdapterError(f"no LoRA {as_text(name)} is loaded; loaded are {loaded}")

    def load_textual_inversion(self, source: str | Path, token: str | None = None) -> str:
        """Load a word's embeddings (textual inversion, arXiv 2208.01618), for prompts and negative prompts.

        Args:
            source: a .safetensors file in Automatic1111's or diffusers' format.
            token: the word; None for the file's name. Its case does not matter.

        Returns:
            The word, for `unload_textual_inversion`.

        Raises:
            AdapterError: it is missing, damaged, of another model, or a word that the model knows already.
            InputError: a word that is none.
        """
        return textual_inversion.load(self.pipe, source, token)

    def unload_textual_inversion(self, token: str) -> None:
        """Take a word's embeddings out. Raises AdapterError where no such word was loaded."""
        textual_inversion.unload(self.pipe, token)

    def load_adapter(
        self,
        source: str | Path,
        scale: float = 1.0,
        *,
        weight_name: str | None = None,
        image_encoder: str | Path | None = None,
        control_guidance_start: float = 0.0,
        control_guidance_end: float = 1.0,
        guess_mode: bool = False,
        local_files_only: bool = False,
    ) -> None:
        """Load an adapter that conditions pictures by another one, or by a drive.

        HelloMeme's reference adapters (arXiv 2410.22901) and IP-Adapters (arXiv 2308.06721) let pictures take the look
        of a `reference`; T2I-Adapters (arXiv 2302.08453) and ControlNets (arXiv 2302.05543) let a `control` say where
        things are; HelloMeme's control networks let a `drive` say how a head is held and what its face does. Those of
        two parts are loaded by their base, ..._base, with the projection, ..._proj, beside it. Motion modules,
        HelloMeme's and AnimateDiff's (arXiv 2307.04725), are at work in clips alone (see `edit_frames`).

        Args:
            source: "demo-look" or "demo-pose", which ship for the demo model, a published folder, a .safetensors file,
                or a hub id such as "songkey/hm3_reference".
            scale: factor of its effect, -10 to 10. Several adapters add up.
            weight_name: a file in a folder or on the hub: "models/ip-adapter_sd15.safetensors" of "h94/IP-Adapter".
            image_encoder: folder of an IP-Adapter's image encoder; None for "image_encoder" beside its file.
            control_guidance_start: share of the steps before which the adapter does nothing, 0 to 1.
            control_guidance_end: share of the steps after which it does nothing.
            guess_mode: a ControlNet takes part in the branch with the prompt alone, and its finer maps are fainter.
            local_files_only: never reach for the network.

        Raises:
            AdapterError: it is missing, damaged, loaded already, of another architecture or made for another model.
            InputError: a number out of range, or guess_mode for another kind than a ControlNet.
        """
        use = make_adapter_use(scale, control_guidance_start, control_guidance_end, guess_mode)
        adapter = load_picture_adapter(
            source,
            self.pipe.unet,
            weight_name=weight_name,
            image_encoder=image_encoder,
            local_files_only=local_files_only,
        )
        encoder = absolute_path(image_encoder) if image_encoder else ""
        self._engine.references.load(adapter, _adapter_name(source, weight_name), use, encoder)

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Those that are loaded and read pictures."""
        return tuple(self._engine.references.adapters.values())

    def scale_adapter(self, scale: float, source: str | Path | None = None) -> None:
        """Set a loaded adapter's scale for later references; of all adapters where no source is named.

        Raises:
            AdapterError: it is not loaded. InputError: a scale outside -10 to 10.
        """
        self._engine.references.set_scale(None if source is None else absolute_path(source), scale)

    def unload_adapter(self, source: str | Path | None = None) -> None:
        """Unload an adapter, or all. Later edits of a picture that was made with it run without.

        Raises:
            AdapterError: it is not loaded.
        """
        self._engine.references.unload(None if source is None else absolute_path(source))


def _adapter_name(source: str | Path, weight_name: str | None) -> str:
    """Return the name of an adapter: its path or hub id, and its file there if that was named."""
    return absolute_path(source) if weight_name is None else f"{absolute_path(source)}/{weight_name}"

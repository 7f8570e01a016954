"""Captions an image with a model of transformers such as BLIP (arXiv 2201.12086).

Optional, and never part of an edit. Knows transformers and pictures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fisedit.errors import ModelError
from fisedit.models.weight_files import check_complete

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_TOKENS = 40
"""Greatest length of a caption in tokens."""


def caption(picture: Image, model: str, *, local_files_only: bool = False) -> str:
    """Caption an image.

    Args:
        picture: Any PIL image.
        model: Folder or hub id of an image-to-text model with its processor. No code of it is run, no kernels that it
            names are fetched, and pickled weights are refused.
        local_files_only: Whether the network is never used.

    Raises:
        ModelError: No such model, one of another kind, or an empty caption.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForImageTextToText, AutoProcessor

    options = {"local_files_only": local_files_only, "trust_remote_code": False}
    try:
        processor = AutoProcessor.from_pretrained(model, **options)
        captioner, report = AutoModelForImageTextToText.from_pretrained(
            model, use_safetensors=True, output_loading_info=True, attn_implementation="eager", **options
        )
        check_complete(report, model)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        kind = "an image-to-text model that transformers knows, with safetensors"
        raise ModelError(f"caption model must be {kind}, got {model} ({reason})") from error
    try:
        inputs = processor(images=picture.convert("RGB"), return_tensors="pt")
        with torch.inference_mode():
            tokens = captioner.eval().generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:  # one that wants words
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"caption model must tell of a picture without being asked, as BLIP and GIT do, got {model} ({reason:.200})"
        ) from error
    text = " ".join(processor.batch_decode(tokens, skip_special_tokens=True)[0].split())
    if not text:
        raise ModelError(f"caption model {model} has nothing to say of this picture; give --source-prompt instead")
    return text

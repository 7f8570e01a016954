"""What a picture shows, said by a captioning model of transformers' such as BLIP (arXiv 2201.12086).

Optional, and never part of an edit. Knows transformers and pictures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fisedit.errors import ModelError

if TYPE_CHECKING:
    from PIL.Image import Image

LONGEST = 40
"""Tokens of a caption at most."""


def caption(picture: Image, model: str, *, local_files_only: bool = False) -> str:
    """A caption of a picture.

    Args:
        picture: any PIL image.
        model: a folder or hub id of an image-to-text model with its processor. No code of it is run, and pickled
            weights are refused.
        local_files_only: never reach for the network.

    Raises:
        ModelError: no such model, one of another kind, or one that has nothing to say.
    """
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    options = {"local_files_only": local_files_only, "trust_remote_code": False}
    try:
        processor = AutoProcessor.from_pretrained(model, **options)
        captioner = AutoModelForImageTextToText.from_pretrained(model, use_safetensors=True, **options).eval()
    except (OSError, ValueError, KeyError, ImportError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        kind = "an image-to-text model that transformers knows, with safetensors"
        raise ModelError(f"caption model must be {kind}, got {model} ({why})") from error
    inputs = processor(images=picture.convert("RGB"), return_tensors="pt")
    with torch.inference_mode():
        tokens = captioner.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
    said = " ".join(processor.batch_decode(tokens, skip_special_tokens=True)[0].split())
    if not said:
        raise ModelError(f"caption model {model} has nothing to say of this picture; give --source-prompt instead")
    return said

"""Names of the files of a session."""

from __future__ import annotations

import re

IMAGE_ENDINGS = (".png", ".tif")
MASK_ENDING, CANVAS_ENDING, PIXELS_ENDING = ".mask.png", ".canvas.png", ".pixels.png"
ENDINGS = (*IMAGE_ENDINGS, MASK_ENDING, CANVAS_ENDING, PIXELS_ENDING)
"""The endings of a result's files.

They are for its picture, its mask, and the canvas of a picture that is no canvas itself. The last is for the pixels of
a mask that takes not all of every cell."""

PAGE_ENDING = ".safetensors"
"""Ending of a page of recorded features, which a session may have or lose: they are made again without it."""


def file_name(stem: str, ending: str, sha256: str) -> str:
    """The name of a session's file.

    Args:
        stem: Id of a result, or "reference-DIGEST".
        ending: One of `ENDINGS`.
        sha256: SHA-256 of the file's bytes.
    """
    return f"{stem}-{sha256[:16]}{ending}"


def page_name(result: str, i: int, sha256: str) -> str:
    """The name of a page's file.

    Args:
        result: Id of the result.
        i: The page.
        sha256: SHA-256 of the file's bytes.
    """
    return file_name(f"{result}.{i:04}", PAGE_ENDING, sha256)


def is_page_name(name: str) -> bool:
    """Return whether a file has a page's name."""
    return re.fullmatch(rf"\d+\.\d{{4}}-[0-9a-f]{{16}}{re.escape(PAGE_ENDING)}", name) is not None

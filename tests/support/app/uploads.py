"""Files that are sent to an app that runs."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

import httpx
from PIL import Image

if TYPE_CHECKING:
    from tests.support.app.site import LayerSite


def upload(site: LayerSite, data: bytes) -> dict[str, object]:
    """Sends a file; what a request calls it by then."""
    sent = httpx.post(f"{site.url}gradio_api/upload", files={"files": ("a.png", data)})
    assert sent.status_code == 200, sent.text
    return {"path": sent.json()[0], "meta": {"_type": "gradio.FileData"}}


def png(image: Image.Image | None = None) -> bytes:
    file = BytesIO()
    (image or Image.new("RGB", (64, 64), "teal")).save(file, "PNG")
    return file.getvalue()

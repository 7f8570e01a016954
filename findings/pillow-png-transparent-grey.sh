#!/usr/bin/env bash
# Pillow 12.3.0: levels of a 2-bit grey PNG are scaled to 8 bits, its transparent level (tRNS) is not.
# Guess: the level that tRNS names is clear after convert("RGBA"), as in browsers.
# Seen: of a PNG with levels 0 to 3 and tRNS 3, white (3, read as 255) stays opaque, as info["transparency"] is still 3.
set -euo pipefail
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
python3 -m venv "$trial/env"
"$trial/env/bin/python" -m pip install -qq --disable-pip-version-check pillow==12.3.0
"$trial/env/bin/python" - <<'PYTHON'
import io
import struct
import zlib

import PIL
from PIL import Image


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


header = struct.pack(">IIBBBBB", 4, 1, 2, 0, 0, 0, 0)  # 4x1 pixels, 2 bits, grey
row = bytes([0, 0b00011011])  # no filter; levels 0, 1, 2, 3
png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"tRNS", struct.pack(">H", 3))
png += chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")
image = Image.open(io.BytesIO(png))
levels, alpha = list(image.tobytes()), list(image.convert("RGBA").getchannel("A").tobytes())
print(PIL.__version__, image.mode, levels, image.info["transparency"], alpha)
assert (levels, image.info["transparency"], alpha) == ([0, 85, 170, 255], 3, [255] * 4), "this has changed"
PYTHON

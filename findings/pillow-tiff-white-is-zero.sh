#!/usr/bin/env bash
# Pillow 12.3.0: grey TIFFs whose white is zero are inverted in 1 and 8 bits, and not in 16.
# Guess: a picture is opened as it is seen, whatever its number of bits.
# Seen: a white page of PhotometricInterpretation 0 is 255 in 8 bits and 0, black, in 16.
set -euo pipefail
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
python3 -m venv "$trial/env"
"$trial/env/bin/python" -m pip install -qq --disable-pip-version-check pillow==12.3.0
"$trial/env/bin/python" - <<'PYTHON'
import io
import struct

import PIL
from PIL import Image


def white_page(bits: int) -> bytes:
    """Return a little-endian TIFF of 4x4 pixels, all 0, where 0 is white."""
    pixels = bytes(16 * bits // 8)
    tags = [(256, 4), (257, 4), (258, bits), (259, 1), (262, 0), (273, 8), (277, 1), (278, 4), (279, len(pixels))]
    table = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return struct.pack("<2sHI", b"II", 42, 8 + len(pixels)) + pixels + table + struct.pack("<I", 0)


seen = {bits: Image.open(io.BytesIO(white_page(bits))).getpixel((0, 0)) for bits in (8, 16)}
print(PIL.__version__, seen)
assert seen == {8: 255, 16: 0}, "this has changed"
PYTHON

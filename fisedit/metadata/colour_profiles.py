"""Makes ICC profiles of other ways in which files say what their colours are.

Those are a PNG's cICP, gAMA and cHRM chunks, and EXIF's mark of Adobe RGB. Knows numbers, no image library.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]
Chromaticities = tuple[float, float, float, float, float, float, float, float]
"""x and y of white, red, green and blue."""

_D65, _C, _DCI = (0.3127, 0.329), (0.31, 0.316), (0.314, 0.351)
SRGB: Chromaticities = (*_D65, 0.64, 0.33, 0.30, 0.60, 0.15, 0.06)

_PRIMARIES: Mapping[int, Chromaticities] = {
    1: SRGB,
    4: (*_C, 0.67, 0.33, 0.21, 0.71, 0.14, 0.08),
    5: (*_D65, 0.64, 0.33, 0.29, 0.60, 0.15, 0.06),
    6: (*_D65, 0.63, 0.34, 0.31, 0.595, 0.155, 0.07),
    7: (*_D65, 0.63, 0.34, 0.31, 0.595, 0.155, 0.07),
    8: (*_C, 0.681, 0.319, 0.243, 0.692, 0.145, 0.049),
    9: (*_D65, 0.708, 0.292, 0.17, 0.797, 0.131, 0.046),
    11: (*_DCI, 0.68, 0.32, 0.265, 0.69, 0.15, 0.06),
    12: (*_D65, 0.68, 0.32, 0.265, 0.69, 0.15, 0.06),
    22: (*_D65, 0.63, 0.34, 0.295, 0.605, 0.155, 0.077),
}
"""Colour primaries of ITU-T H.273."""

_REFERENCE_WHITE, _PQ_PEAK, _HLG_PEAK = 203.0, 10_000.0, 1_000.0
"""Candelas per square metre (ITU-R BT.2408); what is brighter than white is white to a model."""


def _srgb(x: Curve) -> Curve:
    return np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)


def _bt709(x: Curve) -> Curve:
    return np.where(x < 0.081, x / 4.5, ((x + 0.099) / 1.099) ** (1 / 0.45))


def _smpte_240m(x: Curve) -> Curve:
    return np.where(x < 0.0913, x / 4, ((x + 0.1115) / 1.1115) ** (1 / 0.45))


def _pq(x: Curve) -> Curve:
    power = x ** (1 / 78.84375)
    light = (np.maximum(power - 0.8359375, 0) / (18.8515625 - 18.6875 * power)) ** (1 / 0.1593017578125)
    return light * _PQ_PEAK / _REFERENCE_WHITE


def _hlg(x: Curve) -> Curve:
    scene = np.where(x <= 0.5, x**2 / 3, (np.exp((x - 0.55991073) / 0.17883277) + 0.28466892) / 12)
    return scene**1.2 * _HLG_PEAK / _REFERENCE_WHITE


def _power(exponent: float) -> Callable[[Curve], Curve]:
    return lambda x: x**exponent


_TRANSFERS: Mapping[int, Callable[[Curve], Curve]] = {
    **dict.fromkeys((1, 6, 11, 14, 15), _bt709),
    4: _power(2.2),
    5: _power(2.8),
    7: _smpte_240m,
    8: _power(1.0),
    13: _srgb,
    16: _pq,
    17: lambda x: x**2.6 * 52.37 / 48,
    18: _hlg,
}
"""Transfer characteristics of ITU-T H.273, from stored values to light."""

_HDR = {16: "PQ", 18: "HLG"}
_ENTRIES = 1024
_GAMMAS = (0.1, 10.0)
"""Exponents that a gAMA chunk may tell."""

_BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
_D50 = np.array([0.9642, 1.0, 0.8249])


@dataclass(frozen=True)
class ColourSpace:
    """The meaning of a file's numbers.

    Args:
        profile: An ICC profile; b"" for sRGB, or where it is not known.
        note: A remark for the user, or "".
    """

    profile: bytes = b""
    note: str = ""


def of_cicp(code: bytes, *, grey: bool = False) -> ColourSpace:
    """The colour space of a cICP chunk.

    Args:
        code: Primaries, transfer characteristics, matrix, and whether the range is full, a byte each.
        grey: Whether the picture is grey.
    """
    primaries, transfer, matrix, full = code
    curve, points = _TRANSFERS.get(transfer), _PRIMARIES.get(primaries)
    if curve is None or points is None or matrix or full > 1:
        told = "/".join(map(str, code))
        return ColourSpace(note=f"its colours (cICP {told}) are not known here: the model saw them as sRGB")
    if (points, transfer, full) == (SRGB, 13, 1):
        return ColourSpace()
    x = np.linspace(0, 1, _ENTRIES)
    light = curve(x if full else ((x * 255 - 16) / 219).clip(0, 1))
    hdr = _HDR.get(transfer)
    note = f"HDR colours ({hdr}): what is brighter than white was white to the model" if hdr else ""
    return ColourSpace(_profile(points, light, grey=grey, cicp=code), note)


def of_gamma(gamma: float | None, points: Chromaticities | None, *, grey: bool = False) -> ColourSpace:
    """The colour space of gAMA and cHRM chunks.

    Args:
        gamma: The exponent that the file was encoded with, as 0.45455; None for sRGB's curve.
        points: Chromaticities; None for sRGB's.
        grey: Whether the picture is grey.
    """
    if gamma is not None and not _GAMMAS[0] <= gamma <= _GAMMAS[1]:
        return ColourSpace(note=f"its gamma (gAMA {gamma:g}) is none: the model saw it as sRGB")
    own = SRGB if points is None else points
    is_usual = gamma is None or abs(gamma - 1 / 2.2) < 0.001  # what programs write for sRGB
    if is_usual and np.allclose(own, SRGB, atol=0.002):
        return ColourSpace()
    x = np.linspace(0, 1, _ENTRIES)
    try:
        return ColourSpace(_profile(own, _srgb(x) if gamma is None else x ** (1 / gamma), grey=grey))
    except (np.linalg.LinAlgError, ZeroDivisionError, struct.error, OverflowError):
        return ColourSpace(note="its chromaticities (cHRM) are none: the model saw it as sRGB")


def adobe_rgb(*, grey: bool = False) -> ColourSpace:
    """The colour space that cameras mark in EXIF as R03."""
    points = (*_D65, 0.64, 0.33, 0.21, 0.71, 0.15, 0.06)
    return ColourSpace(_profile(points, np.linspace(0, 1, _ENTRIES) ** (563 / 256), grey=grey))


def _profile(points: Chromaticities, light: Curve, *, grey: bool, cicp: bytes = b"") -> bytes:
    """An ICC profile of version 4.3 with a matrix and one curve, or with the curve alone for a grey picture."""
    values = np.rint(light.clip(0, 1) * 65535).astype(">u2")
    curve = b"curv" + bytes(4) + struct.pack(">I", len(values)) + values.tobytes()
    tags = {b"desc": _text("Colours of the file"), b"cprt": _text("CC0"), b"wtpt": _xyz(_D50)}
    if grey:
        tags[b"kTRC"] = curve
    else:
        columns = _to_d50(points).T
        tags |= {name: _xyz(column) for name, column in zip((b"rXYZ", b"gXYZ", b"bXYZ"), columns, strict=True)}
        tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)
        tags |= {b"cicp": b"cicp" + bytes(4) + cicp} if cicp else {}
    at, table, data = 132 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    places: dict[bytes, int] = {}
    for name, content in tags.items():
        if content not in places:
            places[content] = at + len(data)
            data += content + bytes(-len(content) % 4)
        table += name + struct.pack(">II", places[content], len(content))
    head = struct.pack(
        ">I4sI4s4s4s6H4s4sIII8sI", at + len(data), b"", 0x04300000, b"mntr", b"GRAY" if grey else b"RGB ", b"XYZ ",
        *(2000, 1, 1, 0, 0, 0), b"acsp", b"", 0, 0, 0, b"", 0,
    )  # fmt: skip
    return head + _xyz(_D50)[8:] + bytes(48) + table + data


def _to_d50(points: Chromaticities) -> NDArray[np.float64]:
    """The matrix from linear RGB to XYZ of white D50."""
    white, *colours = ([x / y, 1.0, (1 - x - y) / y] for x, y in zip(points[::2], points[1::2], strict=True))
    primaries = np.array(colours).T
    matrix = primaries * np.linalg.solve(primaries, np.array(white))
    scale = (_BRADFORD @ _D50) / (_BRADFORD @ np.array(white))
    adapted: NDArray[np.float64] = np.linalg.inv(_BRADFORD) @ (scale[:, None] * (_BRADFORD @ matrix))
    return adapted


def _xyz(values: NDArray[np.float64]) -> bytes:
    return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(float(value) * 65536) for value in values))


def _text(words: str) -> bytes:
    encoded = words.encode("utf-16-be")
    return b"mluc" + bytes(4) + struct.pack(">II2s2sII", 1, 12, b"en", b"US", len(encoded), 28) + encoded

"""A head's pose as a picture, as HelloMeme's control networks read it (arXiv 2410.22901).

A square before the face is turned, moved and seen through a camera; its edges have four colours. Knows numbers and
pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SIDE, _THICKNESS = 0.1, 15 / 512
"""The side of the square, in the camera's units, and the thickness of its edges, as a share of the picture's side."""

_FOCAL = 4828.598603909635 * 0.05 / 512
"""The focal length of the camera, in sides of the picture."""

_EDGES = ((0, 255, 0), (0, 0, 255), (255, 0, 0), (255, 0, 255))
"""The left one's colour, the upper's, the right one's and the lower's, red first; a face's own left is on the right."""


def corners(pose: Sequence[float], size: tuple[int, int]) -> NDArray[np.float64]:
    """The corners of the square as the camera sees them.

    Args:
        pose: The pose, as in `Drive`.
        size: width and height of the picture in pixels.

    Returns:
        x and y [4, 2] in pixels: lower left, upper left, upper right, lower right.
    """
    pitch, yaw, roll, x, y, scale = pose
    sines, cosines = np.sin(angles := np.radians([pitch, yaw, roll])), np.cos(angles)
    about_x = np.array([[1, 0, 0], [0, cosines[0], -sines[0]], [0, sines[0], cosines[0]]])
    about_y = np.array([[cosines[1], 0, sines[1]], [0, 1, 0], [-sines[1], 0, cosines[1]]])
    about_z = np.array([[cosines[2], -sines[2], 0], [sines[2], cosines[2], 0], [0, 0, 1]])
    flat = np.array([[-1, -1, 0], [-1, 1, 0], [1, 1, 0], [1, -1, 0]]) * _SIDE / 2
    turned = flat @ (about_z @ about_y @ about_x).T
    side, distance = min(size), _FOCAL * _SIDE / scale
    middle = np.array([x * size[0], -y * size[1]]) / 2 * distance / (_FOCAL * side)
    seen = side * _FOCAL * (turned[:, :2] + middle) / (distance - turned[:, 2:])
    found: NDArray[np.float64] = np.array(size) / 2 + seen * [1, -1]
    return found


def draw_pose(pose: Sequence[float], size: tuple[int, int]) -> Image.Image:
    """The picture of a pose, mode RGB; arguments as in `corners`."""
    picture = Image.new("RGB", size)
    draw, points = ImageDraw.Draw(picture), [(int(x), int(y)) for x, y in corners(pose, size)]
    width = max(1, round(_THICKNESS * min(size)))
    for i, colour in enumerate(_EDGES):
        ends = points[i], points[(i + 1) % len(points)]
        draw.line(ends, colour, width)
        for end in ends:
            draw.circle(end, width / 2, colour)
    return picture

"""The thing under a point: segments of a picture, joined where they are alike, of which the node that stands out.

Cells of one thing attend to the same places, as DiffSeg (arXiv 2308.12469) has it. So segments of the picture
(Felzenszwalb and Huttenlocher 2004) are joined in the order of how alike their attention and colours are. Of the nodes
above a point the one is taken whose last join was cheap and whose next one is dear. Knows arrays alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from fisedit.values import BoolGrid

    Point = tuple[int, int]
    """Row and column of a pixel."""

_ATTENTION_WEIGHT, _COLOUR_UNIT = 3.0, 50.0
_SCALE, _MIN_SHARE = 20, 6 / 128**2
_SIDE, _UNITS = 128, 256
"""The side in pixels to which a picture is reduced, or up to twice as many; and its size in units.

The units let pictures of all sizes be segmented alike."""
_LEAST, _MOST = 0.015, 0.5
"""Shares of the picture that the thing under the first point has, at least and at most."""
_BORDER_PENALTY, _FLOOR = 16.0, 0.02
"""Chosen on 143 things of 60 drawn scenes (demo model of 128 px, development seed 9500)."""

_LARGER = 1.2
"""Share of the picture over that of the thing below it, of the next larger one."""


@dataclass(frozen=True, eq=False)
class SegmentTree:
    """Segments of a picture and the nodes that join them, leaves first; every node covers a range of leaves.

    Args:
        leaves: leaf of every pixel, ints [H, W], numbered so that nodes cover ranges.
        parents: [M], -1 for the root.
        costs: The costs of the dearest join within every node [M], 0 for leaves.
        ranges: first leaf of every node and the one behind its last [M, 2].
        shares: The shares of the picture that every node covers [M].
        border: share of the picture's border that every node covers [M].
    """

    leaves: NDArray[np.int64]
    parents: NDArray[np.int64]
    costs: NDArray[np.float64]
    ranges: NDArray[np.int64]
    shares: NDArray[np.float64]
    border: NDArray[np.float64]

    def pick(self, inside: Sequence[Point], outside: Sequence[Point] = ()) -> BoolGrid:
        """The pixels of the things under some points: booleans [H, W].

        A point in the same segment as one before it picks the next larger thing. Of a segment with points of both kinds
        each pixel is the nearest point's.

        Args:
            inside: points of what is picked, one or more.
            outside: points of what is not.
        """
        picked, left_out = ([int(self.leaves[at]) for at in points] for points in (inside, outside))
        marked = np.zeros(int(self.leaves.max()) + 1, bool)
        for i, leaf in enumerate(dict.fromkeys(picked)):
            others = [other for other in left_out if other != leaf]
            first, end = self.ranges[self._node(leaf, others, 0.0 if i else _LEAST, picked.count(leaf))]
            marked[first:end] = True
        for leaf in dict.fromkeys(left_out):
            if leaf not in picked:
                first, end = self.ranges[self._node(leaf, picked, 0.0, left_out.count(leaf))]
                marked[first:end] = False
        found: BoolGrid = marked[self.leaves]
        for leaf in set(picked) & set(left_out):
            found &= (self.leaves != leaf) | _nearer(found.shape, inside, outside)
        return found

    def _node(self, leaf: int, without: Collection[int], least: float, times: int) -> int:
        """The node above a leaf that stands out most, without some other leaves; for every time more a larger one."""
        nodes, scores, node = [leaf], [-np.inf], leaf
        while (parent := int(self.parents[node])) >= 0:
            first, end = self.ranges[node]
            if any(first <= other < end for other in without):
                break
            score = np.log((self.costs[parent] + _FLOOR) / (self.costs[node] + _FLOOR))
            score -= _BORDER_PENALTY * self.border[node] + 10.0 * (not least <= self.shares[node] <= _MOST)
            nodes.append(node)
            scores.append(score)
            node = parent
        best = nodes[int(np.argmax(scores))]
        for _ in range(times - 1):
            best = next((node for node in nodes if self.shares[node] >= _LARGER * self.shares[best]), best)
        return best


def _nearer(shape: tuple[int, ...], inside: Sequence[Point], outside: Sequence[Point]) -> BoolGrid:
    """The pixels that are nearer to a point inside than to any outside."""
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    distances = [np.min([np.hypot(rows - y, columns - x) for y, x in points], axis=0) for points in (inside, outside)]
    nearer: BoolGrid = distances[0] <= distances[1]
    return nearer


def segment_tree(pixels: NDArray[np.uint8], affinity: NDArray[np.float32], grid: tuple[int, int]) -> SegmentTree:
    """Segment a picture and join its segments.

    Args:
        pixels: uint8 [H, W, 3].
        affinity: self-attention between cells [n, n], rows summing to 1, as in `attention_maps.affinity`.
        grid: (height, width) of those cells.

    Returns:
        Its tree; one segment where the picture has but one colour.
    """
    from skimage.color import rgb2lab
    from skimage.measure import block_reduce
    from skimage.segmentation import felzenszwalb

    times = max(1, max(pixels.shape[:2]) // _SIDE)
    small = block_reduce(pixels, (times, times, 1), np.mean).astype(np.uint8) if times > 1 else pixels
    height, width = small.shape[:2]
    segments = felzenszwalb(small, scale=_SCALE, sigma=0.5, min_size=max(1, round(_MIN_SHARE * height * width)))
    colours, count = rgb2lab(small) / _COLOUR_UNIT, int(segments.max()) + 1
    sizes = np.bincount(segments.ravel(), minlength=count).astype(float)
    cells = (np.arange(height) * grid[0] // height)[:, None] * grid[1] + np.arange(width) * grid[1] // width
    shares = np.zeros((count, grid[0] * grid[1]))
    np.add.at(shares, (segments.ravel(), cells.ravel()), 1.0)
    means = np.stack([np.bincount(segments.ravel(), colour.ravel(), count) for colour in colours.transpose(2, 0, 1)], 1)
    joined = _Joining(
        sizes * _UNITS / segments.size,
        shares / sizes[:, None] @ affinity,
        means / sizes[:, None],
        _boundaries(segments, colours),
    )
    whole = segments.repeat(times, 0).repeat(times, 1)[: pixels.shape[0], : pixels.shape[1]]
    return _tree(whole, joined)


Boundaries = dict[int, dict[int, tuple[float, int]]]
"""Segment -> neighbour -> differences of colour across the border, summed, and its length in pixels."""


def _boundaries(segments: NDArray[Any], colours: NDArray[np.float64]) -> Boundaries:
    count = int(segments.max()) + 1
    pairs, differences = [], []
    for ahead, behind in ((np.s_[:, 1:], np.s_[:, :-1]), (np.s_[1:], np.s_[:-1])):
        one, other = segments[behind], segments[ahead]
        across = one != other
        pairs.append(np.minimum(one, other)[across] * count + np.maximum(one, other)[across])
        differences.append(np.linalg.norm(colours[behind][across] - colours[ahead][across], axis=-1))
    keys, where, lengths = np.unique(np.concatenate(pairs), return_inverse=True, return_counts=True)
    sums = np.bincount(where, np.concatenate(differences), len(keys))
    found: Boundaries = {i: {} for i in range(count)}
    for key, total, length in zip(keys.tolist(), sums.tolist(), lengths.tolist(), strict=True):
        one, other = divmod(key, count)
        found[one][other] = found[other][one] = total, length
    return found


class _Joining:
    """Joins the two neighbours that are most alike until one node is left.

    Args:
        sizes: The sizes of the segments in units [S].
        profiles: their attention to cells [S, n].
        colours: their means [S, 3].
        boundaries: between them.

    Attributes:
        children: The children of every node that was made, in order.
        costs: The costs of the dearest join within every node.
    """

    def __init__(
        self,
        sizes: NDArray[np.float64],
        profiles: NDArray[np.float64],
        colours: NDArray[np.float64],
        boundaries: Boundaries,
    ) -> None:
        count = len(sizes)
        self.children: list[tuple[int, int]] = []
        self.costs = [0.0] * count
        self._sizes, self._profiles, self._colours = list(sizes), list(profiles), list(colours)
        self._neighbours = boundaries
        queue = [(self._cost(a, b), a, b) for a in boundaries for b in boundaries[a] if a < b]
        heapify(queue)
        while queue:
            cost, a, b = heappop(queue)
            if a in self._neighbours and b in self._neighbours:
                self._join(cost, a, b)
                node = len(self.costs) - 1
                for other in self._neighbours[node]:
                    heappush(queue, (self._cost(node, other), node, other))

    def _cost(self, a: int, b: int) -> float:
        total, length = self._neighbours[a][b]
        attention = _divergence(self._profiles[a], self._profiles[b])
        colour = float(np.linalg.norm(self._colours[a] - self._colours[b]))
        size_a, size_b = self._sizes[a], self._sizes[b]
        unlike = _ATTENTION_WEIGHT * attention + colour + total / length
        return float(unlike * np.sqrt(size_a * size_b / (size_a + size_b)))

    def _join(self, cost: float, a: int, b: int) -> None:
        node, size = len(self.costs), self._sizes[a] + self._sizes[b]
        share = self._sizes[a] / size
        for values in (self._profiles, self._colours):
            values.append(share * values[a] + (1 - share) * values[b])
        self._sizes.append(size)
        self.children.append((a, b))
        self.costs.append(max(cost, self.costs[a], self.costs[b]))
        beside: dict[int, tuple[float, int]] = {}
        for part in (a, b):
            for other, (total, length) in self._neighbours.pop(part).items():
                if other not in (a, b):
                    before = beside.get(other, (0.0, 0))
                    beside[other] = before[0] + total, before[1] + length
        self._neighbours[node] = beside
        for other, border in beside.items():
            near = self._neighbours[other]
            near.pop(a, None)
            near.pop(b, None)
            near[node] = border


def _divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Jensen and Shannon's divergence of two distributions."""
    middle = (p + q) / 2 + 1e-9
    return float(0.5 * (p * np.log((p + 1e-9) / middle) + q * np.log((q + 1e-9) / middle)).sum())


def _tree(segments: NDArray[Any], joined: _Joining) -> SegmentTree:
    """Number the leaves in the order of a walk from the root."""
    count, nodes = int(segments.max()) + 1, len(joined.costs)
    parents, ranges = np.full(nodes, -1), np.zeros((nodes, 2), int)
    order, pending, children = [], [nodes - 1], dict(enumerate(joined.children, count))
    while pending:
        node = pending.pop()
        if node in children:
            parents[list(children[node])] = node
            pending.extend(children[node])
        else:
            order.append(node)
    ranges[order, 0] = np.arange(count)
    ranges[:count, 1] = ranges[:count, 0] + 1
    for node, (a, b) in children.items():
        ranges[node] = min(ranges[a, 0], ranges[b, 0]), max(ranges[a, 1], ranges[b, 1])
    leaves = ranges[:count, 0][segments]
    edge = np.concatenate([leaves[0], leaves[-1], leaves[:, 0], leaves[:, -1]])
    shares, border = (_within(np.bincount(at, minlength=count) / at.size, ranges) for at in (leaves.ravel(), edge))
    # leaves are found by their new number, so their rows take that order too
    places = np.concatenate([np.argsort(ranges[:count, 0]), np.arange(count, nodes)])
    return SegmentTree(
        leaves, parents[places], np.array(joined.costs)[places], ranges[places], shares[places], border[places]
    )


def _within(shares: NDArray[np.float64], ranges: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sums of the leaves' shares over every node's range."""
    sums = np.concatenate([[0.0], shares.cumsum()])
    total: NDArray[np.float64] = sums[ranges[:, 1]] - sums[ranges[:, 0]]
    return total

"""Which combinations of a parametrised test run by default: a covering subset of the product.

A test marked `@pytest.mark.sweep` keeps so many combinations that every pair of values of two of its parameters occurs
(`sweep(1)`: every value of every parameter); `--all` runs the whole product. Knows pytest and nothing of fisedit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

Values = tuple[tuple[int, str], ...]
"""One combination: the number of each parameter, and the id of its value."""

PAIRS = 2


def split(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Divide collected tests into those that run by default and those that `--all` adds; both in their order."""
    products: defaultdict[object, list[pytest.Item]] = defaultdict(list)
    left_out = {item for item in items if item.get_closest_marker("slow")}
    for item in items:
        if item.get_closest_marker("sweep") and item not in left_out:
            products[item.nodeid.partition("[")[0]].append(item)
    for product in products.values():
        mark = product[0].get_closest_marker("sweep")
        chosen = covering([_values(item) for item in product], mark.args[0] if mark.args else PAIRS)
        left_out |= {item for number, item in enumerate(product) if number not in chosen}
    return [item for item in items if item not in left_out], [item for item in items if item in left_out]


def covering(product: Sequence[Values], strength: int) -> set[int]:
    """Choose few combinations that have every tuple of `strength` values which the product has.

    Greedy: always the combination with most tuples that are missing; among equals the one whose values are used least.

    Args:
        product: the combinations, all of the same parameters.
        strength: 1 for every value, 2 for every pair of values.

    Returns:
        The places of the chosen combinations in `product`; the same ones for the same product.
    """
    tuples = [set(combinations(one, min(strength, len(one)))) for one in product]
    missing = set[Values]().union(*tuples)
    used: Counter[tuple[int, str]] = Counter()
    chosen: set[int] = set()
    while missing:
        best = max(range(len(product)), key=lambda i: (len(tuples[i] & missing), -sum(used[v] for v in product[i]), -i))
        chosen.add(best)
        missing -= tuples[best]
        used.update(product[best])
    return chosen


def _values(item: pytest.Item) -> Values:
    """Parameters that one table gives together count as one; pytest has an id for each table's row."""
    return tuple(enumerate(item.callspec._idlist))

"""What is left of a product has every value and every pair, and is small."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.sweeps import covering

AXES = {"grid": 10, "backend": 3, "dtype": 2, "size": 2}
PRODUCT = [tuple(zip(AXES, values, strict=True)) for values in product(*map(range, AXES.values()))]


@pytest.mark.parametrize(("strength", "most"), [(1, 10), (2, 34)])
def test_every_tuple_of_values_occurs(strength, most):
    chosen = covering(PRODUCT, strength)
    occurring = {values for i in chosen for values in combinations(PRODUCT[i], strength)}
    assert occurring == {values for one in PRODUCT for values in combinations(one, strength)}
    assert len(chosen) <= most and chosen == covering(PRODUCT, strength)


def test_values_take_turns():
    chosen = [dict(PRODUCT[i]) for i in covering(PRODUCT, 1)]
    assert all(2 <= sum(one["backend"] == backend for one in chosen) <= 4 for backend in range(3))


def test_a_single_combination_is_kept():
    assert covering(PRODUCT[7:8], 2) == {0} and covering([()], 2) == {0}


def test_a_run_by_default_and_a_whole_one(pytester):
    pytester.makeconftest("from tests.conftest import pytest_addoption, pytest_collection_modifyitems")
    pytester.makepyfile("""
        import pytest

        @pytest.mark.sweep
        @pytest.mark.parametrize("a", range(3))
        @pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 1), (2, 2)])
        @pytest.mark.parametrize("d", range(3))
        def test_swept(a, b, c, d): ...

        @pytest.mark.slow
        def test_slow(): ...
    """)
    arguments = ["-p", "no:cacheprovider", "-o", "markers=sweep\nslow"]
    pytester.runpytest(*arguments).assert_outcomes(passed=9, deselected=19)
    pytester.runpytest(*arguments, "--all").assert_outcomes(passed=28)

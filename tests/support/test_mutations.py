"""Mutants differ from the module in one expression, compile, and are drawn the same for the same seed."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.mutants import AREAS, draw, files, table
from tests.support.mutations import mutations

TREE = Path(__file__).resolve().parents[2]

SOURCE = '''"""Docstrings stay."""
def f(a: int = 1, *rest: "str") -> bool:
    assert a > 2, "nor are asserts changed"
    b = g(a, [3.5])  # é
    return not (a <
        b) and x[:, 0] is None
'''


def test_every_change_of_a_module():
    told = {(one.line, one.before, one.after) for one in mutations(SOURCE)}
    assert told == {
        (2, "1", "2"),
        (4, "g(a, [3.5])", "g([3.5], a)"),
        (4, "3.5", "7.0"),
        (5, "not a < b and x[:, 0] is None", "not a < b or x[:, 0] is None"),
        (5, "not a < b", "a < b"),
        (5, "a < b", "a <= b"),
        (6, "x[:, 0] is None", "x[:, 0] is not None"),
        (6, "0", "1"),
    }


def test_a_change_leaves_the_rest_alone():
    for one in mutations(SOURCE):
        lines = one.applied(SOURCE).splitlines()
        assert ast.dump(ast.parse("\n".join(lines))) != ast.dump(ast.parse(SOURCE))
        assert lines[: one.line - 1] == SOURCE.splitlines()[: one.line - 1]
        assert lines[one.line :] == SOURCE.splitlines()[one.end_line :]


def test_every_area_has_modules_and_tests_and_its_share_of_a_draw():
    drawn = draw(TREE, 24, 5)
    assert drawn == draw(TREE, 24, 5) != draw(TREE, 24, 6)
    for name, area in AREAS.items():
        assert files(TREE, area.tests) and sum(one == name for one, _, _ in drawn) == 24 // len(AREAS)
        assert {file for one, file, _ in drawn if one == name} <= set(files(TREE, area.modules))


def test_the_table_counts_by_area():
    results = [("masks", "killed"), ("masks", "timeout"), ("batch", "survived")]
    rows = table([{"area": area, "result": result} for area, result in results]).splitlines()
    assert [row.split()[-4:] for row in rows if row.startswith(("masks", "all"))] == [
        ["2", "1", "1", "0"],
        ["3", "1", "1", "1"],
    ]

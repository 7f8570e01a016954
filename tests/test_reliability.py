"""The table of docs/reliability.md names tests that are there, and tells their results as they were."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.support import reliability_table as table

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.batch.test_manifest.TestTables" name="test_edits"/>
<testcase classname="tests.batch.test_manifest.TestTables" name="test_captions[a]"><failure/></testcase>
<testcase classname="tests.batch.test_manifest.TestTables" name="test_captions[b]"/>
<testcase classname="tests.batch.test_manifest.TestTables" name="test_outputs_of_rows"><skipped/></testcase>
<testcase classname="tests.fault.fault_batch" name="test_killed_thirty_times">
<properties><property name="measured" value="30 kills"/></properties></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("test", table.tests())
def test_it_is_there(test):
    path, *names = test.split("::")
    scope = parsed(path).body
    for name in names:
        named = [node for node in scope if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name]
        assert named, f"{path} has no {name}"
        scope = named[0].body


@cache
def parsed(path: str) -> ast.Module:
    return ast.parse((table.ROOT / path).read_text(encoding="utf-8"))


def test_the_page_tells_every_case_as_passed():
    """Whoever changes the table runs `make fault` and commits what it writes."""
    page = table.PAGE.read_text(encoding="utf-8")
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[-1] for line in page.splitlines()}
    said = [rows[case] for cases in table.CASES.values() for case, _ in cases]
    assert all(re.match(r"\d+ passed", one) and not re.search("failed|not run", one) for one in said)


def test_results_are_told_as_they_were(tmp_path):
    (tmp_path / "junit.xml").write_text(JUNIT)
    page = table.page(table.results(tmp_path / "junit.xml"), "abc")
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[-1] for line in page.splitlines()}
    assert rows["kill -9 at random, 30 times: the outputs are a clean run's, no worker stays"] == "1 passed; 30 kills |"
    tables = next(said for case, said in rows.items() if case.startswith("Tables"))
    assert tables == "2 passed, 1 skipped, 1 failed, 2 not run |"

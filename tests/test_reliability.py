"""The table of docs/reliability.md names tests that are there, and tells their results as they were."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.support import reliability_table as table

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.batch.test_manifest.TestTables" name="test_edits"/>
<testcase classname="tests.batch.test_manifest.TestTables" name="test_captions[a]"><failure/></testcase>
<testcase classname="tests.batch.test_manifest.TestTables" name="test_captions[b]"/>
<testcase classname="tests.batch.test_manifest.TestTables" name="test_outputs_of_rows"><skipped/></testcase>
<testcase classname="tests.fault.fault_batch" name="test_killed_thirty_times">
<properties><property name="measured" value="30 kills"/></properties></testcase>
</testsuite></testsuites>"""


def test_every_test_of_the_table_is_there():
    assert table.tests() and not [test for test in table.tests() if not is_there(test)]


def is_there(test: str) -> bool:
    path, *names = test.split("::")
    if not (table.ROOT / path).exists():
        return False
    scope = parsed(path).body
    for name in names:
        named = [node for node in scope if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name]
        if not named:
            return False
        scope = named[0].body
    return True


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

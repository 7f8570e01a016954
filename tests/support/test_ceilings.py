"""The ceilings of a full run, held by runs of their own."""

from __future__ import annotations

import pytest

CONFTEST = """
import pytest
from tests.conftest import pytest_addoption, pytest_sessionfinish, pytest_terminal_summary
"""
FLAKY = """
import pytest
tried = []
@pytest.mark.flaky(reruns=1)
@pytest.mark.parametrize("each", range(COUNT))
def test_it(each):
    tried.append(each)
    assert tried.count(each) == 2
"""
CASES = {
    "passed": ("def test_it(): pass", 0, ""),
    "expected": ("import pytest\ndef test_it(): pytest.skip('needs the package xformers, and CUDA')", 0, ""),
    "skipped": ("import pytest\ndef test_it(): pytest.skip('the font is not here')", 1, "*skipped: *font is not here*"),
    "module": ("import pytest\npytest.importorskip('no_such_module')", 1, "*skipped: *no_such_module*"),
    "flaky": (FLAKY.replace("COUNT", "2"), 0, "*run twice: *test_it[[]1[]]: *"),
    "flakier": (FLAKY.replace("COUNT", "3"), 1, "*run twice: *test_it[[]2[]]: *"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_full_run_fails_for_unexpected_skips_and_second_attempts(pytester, name):
    code, status, line = CASES[name]
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(code)
    run = pytester.runpytest_inprocess("--full", "-p", "no:cacheprovider")
    assert run.ret == status
    if line:
        run.stdout.fnmatch_lines([line])

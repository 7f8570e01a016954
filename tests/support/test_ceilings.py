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
def test_it():
    tried.append(1)
    assert len(tried) == 2
"""
CASES = {
    "passed": ("def test_it(): pass", 0, ""),
    "expected": ("import pytest\ndef test_it(): pytest.skip('needs the package xformers, and CUDA')", 0, ""),
    "skipped": ("import pytest\ndef test_it(): pytest.skip('the font is not here')", 1, "*skipped: *font is not here*"),
    "module": ("import pytest\npytest.importorskip('no_such_module')", 1, "*skipped: *no_such_module*"),
    "flaky": (FLAKY, 1, "*run twice: *test_it: *"),
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

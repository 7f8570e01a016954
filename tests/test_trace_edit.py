"""What tools/trace_edit.py counts, on calls whose count is known."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fisedit.values import SchedulerName, num_timesteps

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("trace_edit", ROOT / "tools/trace_edit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_functions_and_classes_are_those_that_ran(tool):
    with tool.CallTrace() as trace:
        assert num_timesteps(SchedulerName.HEUN, 4) == 7
        assert SchedulerName.HEUN.label == "Heun"
    lines = list(tool.report(trace))
    assert [line.split()[0] for line in lines[:3]] == ["1", "2", "1"]
    assert {code.co_name for code in tool.functions(trace)} == {"num_timesteps", "label"}
    assert tool.classes(trace) == {(str(Path("values", "schedulers.py")), "SchedulerName")} and not trace.edges


def test_an_edge_goes_upward_where_the_callee_lies_above_the_caller(tool):
    down, up = ("editor/base.py", "values/base.py"), ("values/base.py", "editor/base.py")
    assert tool.upward({down, up, ("history.py", "history.py")}) == [up]


def test_a_word_is_found_as_a_word(tool):
    assert 0 < tool.naming(r"\bDENSE_GROWTH\b") < tool.naming(r"\bimport\b")
    assert not tool.naming(r"\bno_such_mode\b")

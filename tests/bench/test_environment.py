"""What every benchmark's JSON says of where, when and by what it was measured."""

import sys
from importlib.machinery import ModuleSpec

from fisedit.bench import environment
from fisedit.machine import hardware as machine


def test_a_report_says_where_it_was_measured(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fisedit", "bench", "edit", "--areas", "5, 15"])
    report = environment.with_environment({"settings": {"dtype": "bfloat16"}, "rows": []})
    assert list(report) == ["environment", "settings", "rows"]
    found = report["environment"]
    assert found["command"] == "fisedit bench edit --areas '5, 15'" and found["dtype"] == "bfloat16"
    assert {"commit", "clean", "date", "cpu", "cpu_features", "cores", "threads", "versions"} <= found.keys()
    assert found["cores"] >= 1 and found["threads"] == 1 and found["cpu"]


def test_a_study_is_named_by_its_module(monkeypatch):
    for name, told in (("benchmarks.costs", "costs"), ("benchmarks.quality.__main__", "quality")):
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(name, None))
        monkeypatch.setattr(sys, "argv", ["module.py", "--edits", "3"])
        assert environment.describe("")["command"] == f"python -m benchmarks.{told} --edits 3"


def test_the_commit_is_of_this_repository_and_a_changed_tree_is_not_clean(monkeypatch):
    answers = {"rev-parse --show-toplevel": str(environment.ROOT), "rev-parse HEAD": "f" * 40, "status": ""}

    def git(*arguments):
        return answers.get(" ".join(arguments), answers["status"])

    monkeypatch.setattr(environment, "git", git)
    assert environment.code_state.__wrapped__() == {"commit": "f" * 40, "clean": True}
    answers["status"] = " M fisedit/edits/planner.py"
    assert environment.code_state.__wrapped__()["clean"] is False
    answers["rev-parse --show-toplevel"] = "/another/repository"
    assert environment.code_state.__wrapped__() == {"commit": "", "clean": None}


def test_git_that_fails_says_nothing():
    assert environment.git("no-such-verb") is None


def test_the_cpu_has_a_name_and_features(tmp_path):
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2 amx_bf16\n", encoding="utf-8")
    assert machine.cpu_model(listing) == ("A CPU", ("avx2", "amx_bf16"))
    name, features = machine.cpu_model(tmp_path / "none")
    assert name and features == ()

"""Calibration: a table of every run, a pipeline that is left as it was, and nothing kept of one that was stopped."""

from __future__ import annotations

import tempfile

import numpy as np
import pytest

from fisedit import Cancelled, Editor
from fisedit.costs.table import CostTable, Curve, Measurements
from fisedit.diagnosis import calibration
from fisedit.diagnosis import transfer_rates as transfers
from fisedit.diagnosis.calibration import shape_mask
from fisedit.diagnosis.transfer_rates import transfer_rates
from fisedit.errors import InputError, MeasurementError
from fisedit.machine.stopwatch import current_recorder


def test_calibrate_measures_every_run_and_leaves_the_editor_as_it_was(pipelines, tmp_path, monkeypatch):
    monkeypatch.setenv("FISEDIT_COSTS", str(tmp_path))
    editor = Editor(pipelines["demo"], model="tiny")
    assert editor.calibrated is False

    def stop(step: int, steps: int, preview: object) -> None:
        raise Cancelled("enough")

    with pytest.raises(Cancelled):
        editor.calibrate(0, on_step=stop)
    assert editor.calibrated is False and not len(editor.history) and current_recorder() is None
    table = editor.calibrate(0, size=64)
    runs = {row["run"] for row in table["curves"]}
    assert runs == {"dense", "sparse", "shifted", "decode dense", "edit"}
    kinds = {row["kind"] for row in table["curves"] if row["run"] == "sparse"}
    assert kinds >= {"conv", "linear", "attention", "cross-attention", "feed-forward", "group norm", "gather", "other"}
    assert all(seconds >= 0 for row in table["curves"] for seconds in row["seconds"])
    assert table["predicted"][0]["run"] == "source" and len(table["predicted"]) == 5
    assert editor.calibrated and not len(editor.history) and not editor.recorded_bytes
    assert not any(module._forward_hooks for module in editor.pipe.unet.modules()), "no hook is left"
    source = editor.generate("a cat", num_inference_steps=4, width=64, height=64)
    mask = np.zeros((64, 64), bool)
    mask[:16, :16] = True
    seen = editor.preview("a dog", mask=mask)
    assert source.stats.seconds["total"] > 0 and seen.seconds > 0 and seen.seconds_dense > 0
    with pytest.raises(InputError, match="seconds must be a number, 0 or more"):
        editor.calibrate(-1)


def test_a_slow_turn_is_slow_as_a_whole():
    """Sources and edits are made in turns: what slowed a turn's source to twice the median slowed its edit as well."""
    first, quick, slow = Measurements(), Measurements(), Measurements()
    first.add(("dense", "conv", 0), 10.0, 1.0)
    for turn, seconds in ((quick, 1.0), (slow, 2.0)):
        turn.add(("dense", "conv", 0), 40.0, 4.0 * seconds)
        turn.add(("sparse", "conv", 0), 20.0 * seconds, 0.5 * seconds)
    table = calibration.joined((quick, slow), (1.0, 0.5), first).table({}, {})
    assert table.curves["dense", "conv", 0].seconds == (1.0, 4.0)
    assert table.curves["sparse", "conv", 0].seconds == (0.5, 0.5)


def test_a_table_of_a_busy_machine_is_dropped(pipelines, tmp_path, monkeypatch):
    monkeypatch.setenv("FISEDIT_COSTS", str(tmp_path))
    monkeypatch.setattr(calibration, "FEWEST", 1)
    editor, waits = Editor(pipelines["demo"], model="tiny"), iter((0.0, 1e9))
    monkeypatch.setattr(calibration, "waited_seconds", lambda: next(waits))
    with pytest.raises(MeasurementError, match=r"this machine is busy: .* stop it and try again"):
        editor.calibrate(0, size=64)
    assert editor.calibrated is False and not list(tmp_path.iterdir())


def test_what_ran_beside_a_calibration_makes_no_work_longer_than_more_of_it():
    """Beside other work a small edit's steps were measured slower than a large one's, and small edits ran dense."""
    key = ("sparse", "conv", 0)
    table = CostTable({key: Curve((10.0, 20.0, 40.0), (0.5, 0.2, 0.3))}, {"pixels": 64}, {"memory": 1e9})
    found = calibration.never_falling(table)
    assert found.curves[key].seconds == pytest.approx((1 / 3, 1 / 3, 1 / 3)) and found.curves[key].works == (10, 20, 40)
    assert (found.about, found.rates) == (table.about, table.rates)


def test_shapes_cover_what_they_should():
    for area in (0.02, 0.25, 0.8):
        for discs in (False, True):
            assert shape_mask(area, 32, discs=discs).mean() == pytest.approx(area, abs=0.03)
    assert (shape_mask(0.2, 32, discs=True, seed=1) != shape_mask(0.2, 32, discs=True, seed=2)).any()


def test_a_disk_that_cannot_be_written_has_no_rate(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transfers, "_COPIED", 1 << 16)
    monkeypatch.setattr(transfers, "_WRITTEN", 1 << 12)
    assert transfer_rates(tmp_path).keys() == {"memory", "disk write", "disk read"}
    monkeypatch.setattr("os.fsync", full)
    assert transfer_rates(tmp_path).keys() == {"memory"} and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("pages", "costs", "measured"),
    [
        ("disk/fisedit/pages", "0", "disk"),
        ("disk/fisedit/pages", "costs/new", "disk"),
        ("0", "costs/new", "costs"),
        ("0", "0", None),
    ],
)
def test_the_disk_is_measured_that_records_go_to_even_before_their_folder_is_there(
    pages, costs, measured, tmp_path, monkeypatch
):
    folders, make = [], tempfile.NamedTemporaryFile

    def make_file(dir):  # noqa: A002 (tempfile's name)
        folders.append(dir)
        return make(dir=tmp_path)

    for name in ("disk", "costs"):
        (tmp_path / name).mkdir()
    for variable, value in (("FISEDIT_PAGES", pages), ("FISEDIT_COSTS", costs)):
        monkeypatch.setenv(variable, value if value == "0" else str(tmp_path / value))
    monkeypatch.setattr(transfers, "_COPIED", 1 << 16)
    monkeypatch.setattr(transfers, "_WRITTEN", 1 << 12)
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", make_file)
    assert transfer_rates().keys() == {"memory", "disk write", "disk read"}
    assert folders == [None if measured is None else tmp_path / measured]

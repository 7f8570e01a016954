"""The table of one dense conv over gather-then-linear: its rows and the masks they are of; times are not checked."""

from __future__ import annotations

import pytest
import torch

from benchmarks import kernel_speed


def test_the_table_has_a_row_for_every_level_edge_and_share(monkeypatch, capsys):
    monkeypatch.setattr(kernel_speed, "LEVELS", ((16, 8), (8, 16)))
    monkeypatch.setattr(kernel_speed, "EDGE_RATIOS", (0.5, 1.0))
    monkeypatch.setattr(kernel_speed, "DENSITIES", (1.0, 0.6))
    kernel_speed.main()
    about, head, *rows = capsys.readouterr().out.splitlines()
    assert f"{torch.get_num_threads()} threads" in about and head.split()[:2] == ["side", "channels"]
    cells = [row.split() for row in rows]
    assert [row[:2] for row in cells] == [["16", "8"]] * 4 + [["8", "16"]] * 4
    assert [row[2] for row in cells[::2]] == ["64", "256", "16", "64"], "compact squares have all their rows"
    assert all(int(ragged[2]) < int(compact[2]) for compact, ragged in zip(cells[::2], cells[1::2], strict=True))
    assert all(float(row[4]) > 0 for row in cells)


@pytest.mark.parametrize("edge", [1, 5, 16])
def test_a_mask_is_a_centred_square_of_what_is_kept(edge):
    compact, ragged = (kernel_speed._kernel_map(16, edge, kept) for kept in (1.0, 0.6))
    assert compact.rows_out == edge**2 >= ragged.rows_out
    assert ragged.waste >= compact.waste >= 1

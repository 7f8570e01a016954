from __future__ import annotations

import pytest
from PIL import Image

from fisedit.clips.drives import read_drives
from fisedit.integrations.mask_providers import AnnotationFile
from fisedit.storage.csv_tables import CsvTable, separated


@pytest.mark.parametrize(
    ("text", "separator"),
    [
        ("Image;Prompt, long\na", ";"),
        ('"image"\t"prompt"', "\t"),
        ("\n\nimage:more", ","),
        ("image|prompt", "|"),
        ("", ","),
        ("image,a;b", ","),
    ],
)
def test_the_header_tells_the_separator(text, separator):
    assert separated(text, ("image", "prompt")) == CsvTable(text, separator)


def test_a_line_that_tells_it_is_no_header():
    assert separated("sep=:\r\nimage:prompt", ("image",)) == CsvTable("image:prompt", ":", 1)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("start", ["", "sep={}\n"])
def test_poses_and_boxes_are_read_by_it(tmp_path, separator, start):
    boxes, poses = tmp_path / "boxes.csv", tmp_path / "poses.csv"
    boxes.write_text(start.format(separator) + "file,left,top,right,bottom\na.png,1,2,3,4\n".replace(",", separator))
    poses.write_text(start.format(separator) + "x,jawOpen\n0.25,0.5\n".replace(",", separator))
    assert AnnotationFile(boxes)(Image.new("L", (8, 8)), "a.png")[0].box == (1.0, 2.0, 3.0, 4.0)
    assert read_drives(poses)[0].pose[3] == 0.25

"""Line and branch coverage by package: `python -m tests.support.coverage_table .coverage.json`.

Reads the JSON report of coverage.py; paths are those of a checkout.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

COUNTED = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def table(report: Mapping[str, Any]) -> str:
    """Lay out the shares of lines and branches that ran: a row for each package, and one for `fisedit` and `app`."""
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, file in report["files"].items():
        top, *folders = PurePosixPath(name).parent.parts
        for row in {top, "/".join([top, *folders[:1]])}:
            sums[row].update({count: file["summary"][count] for count in COUNTED})
    rows = [f"{name:24} {_share(sums[name], *COUNTED[:2])} {_share(sums[name], *COUNTED[2:])}" for name in sorted(sums)]
    return "\n".join([f"{'':24} {'lines':>22} {'branches':>22}", *rows])


def _share(counts: Counter[str], covered: str, total: str) -> str:
    share = 100 * counts[covered] / max(1, counts[total])
    return f"{f'{counts[covered]}/{counts[total]}':>14} {share:6.2f}%"


if __name__ == "__main__":
    sys.stdout.write(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))) + "\n")

"""Sets OpenMP's threads up for a machine that others use too, before torch is imported. Knows nothing of tensors."""

from __future__ import annotations

import os
from math import ceil

from fisedit.machine.groups import cpu_limit

SPINS = 1000
"""Times that a waiting thread of libgomp looks for work before it sleeps; 3e5 and more are its own.

Threads that spin take the cores that the others of their team wait for. Seconds of a source and two edits of the demo
model, two threads on two cores: beside four other programs 1.5, 1.5 and 1.4, by libgomp's own more than 60. Alone .85,
.87 and .76, by libgomp's own .76, .82 and .67. With 4,000 spins 2.9, 2.9 and 2.6 beside the others, .78, .89 and .67
alone. One thread takes 1.1, .92 and .80 alone.
"""


def set_up_threads() -> None:
    """Have OpenMP start no more threads than the container has CPUs, and let those that wait sleep soon.

    Without it there is a thread for every core of the machine, most of which wait while their container is paused.
    OMP_NUM_THREADS, OMP_WAIT_POLICY and GOMP_SPINCOUNT stay as they are set.
    """
    limit = cpu_limit()
    if limit is not None and limit < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, ceil(limit))))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))

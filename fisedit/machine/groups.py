"""The limits that Linux's control groups set to this process: in a container, less than the machine has.

Containers, systemd's units and batch schedulers make use of them. A group is limited by every group that encloses it.
Elsewhere than on Linux there is no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True)
class _Files:
    """The names of a hierarchy's files; cgroup v1 has its own."""

    folder: str
    limit: str
    used: str
    droppable: str
    quota: str


_V2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file", "cpu.max")
_V1_MEMORY = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "")
_V1_CPU = _Files("sys/fs/cgroup/cpu", "", "", "", "cpu.cfs_quota_us")


def memory_limit(root: Path = _ROOT) -> int | None:
    """The bytes that the process may take beside what shares its groups; None without a limit.

    Args:
        root: The root of the file system.
    """
    return min((limit for limit, _ in _memory(root)), default=None)


def memory_left(root: Path = _ROOT) -> int | None:
    """The bytes that the process may still take; pages of files that are no longer in use count as free.

    Args:
        root: The root of the file system.
    """
    return min((max(0, limit - used) for limit, used in _memory(root)), default=None)


def cpu_limit(root: Path = _ROOT) -> float | None:
    """The CPU seconds a second that the process may take; None without a limit.

    Args:
        root: The root of the file system.
    """
    shares = []
    for group, files in _groups("cpu", root):
        quota, period = _words(group / files.quota), _words(group / "cpu.cfs_period_us")
        quota = quota[:1] + period[:1] if files is _V1_CPU else quota
        if len(quota) == 2 and quota[0].isdecimal() and int(quota[1]):  # "max" or -1 where there is none
            shares.append(int(quota[0]) / int(quota[1]))
    return min(shares, default=None)


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """Every limit of memory with the bytes that count against it."""
    for group, files in _groups("memory", root):
        limit, used = _words(group / files.limit), _words(group / files.used)
        if limit and used and limit[0].isdecimal() and int(limit[0]) < 1 << 60:  # v1 has a huge number for none
            stat = dict(zip(*[iter(_words(group / "memory.stat"))] * 2, strict=False))
            yield int(limit[0]), int(used[0]) - int(stat.get(files.droppable, 0))


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, _Files]]:
    """The process's group and all that enclose it; in a container the first that is visible may be the outermost."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = _V2
        elif controller in controllers.split(","):
            files = _V1_MEMORY if controller == "memory" else _V1_CPU
        else:
            continue
        group = Path(path.lstrip("/"))
        yield from ((root / files.folder / each, files) for each in (group, *group.parents))


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []

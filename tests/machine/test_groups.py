"""Limits of control groups, by files as Linux documents them; and what the machine's own figures become under them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fisedit import Editor
from fisedit.machine import device, groups, hardware

NO_V1_LIMIT = 9223372036854771712


def write(root: Path, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def v2(tmp_path):
    """A pod of 4 GB and 1.5 CPUs, in it a container without limits of its own."""
    write(tmp_path, proc__self__cgroup="0::/pod/container\n")
    pod, container = (tmp_path / "sys/fs/cgroup" / name for name in ("pod", "pod/container"))
    write(pod, memory_dot_max="4000\n", memory_dot_current="1500\n", memory_dot_stat="anon 900\ninactive_file 500\n")
    write(pod, cpu_dot_max="150000 100000\n")
    write(container, memory_dot_max="max\n", memory_dot_current="1000\n", memory_dot_stat="inactive_file 400\n")
    write(container, cpu_dot_max="max 100000\n")
    return tmp_path


@pytest.fixture
def v1(tmp_path):
    """A container that sees its own groups alone, though the process is told the machine's paths."""
    write(tmp_path, proc__self__cgroup="4:memory:/docker/ab:c\n2:cpu,cpuacct:/docker/ab:c\n1:name=systemd:/\n0::/\n")
    memory, cpu = (tmp_path / "sys/fs/cgroup" / name for name in ("memory", "cpu"))
    write(memory, memory_dot_limit_in_bytes="3000\n", memory_dot_usage_in_bytes="1000\n")
    write(memory, memory_dot_stat="inactive_file 1\ntotal_inactive_file 250\n")
    write(cpu, cpu_dot_cfs_quota_us="50000\n", cpu_dot_cfs_period_us="100000\n")
    return tmp_path


def test_a_group_is_limited_by_what_encloses_it(v2):
    assert (groups.memory_limit(v2), groups.memory_left(v2), groups.cpu_limit(v2)) == (4000, 3000, 1.5)
    write(v2 / "sys/fs/cgroup/pod/container", memory_dot_max="1200\n", cpu_dot_max="20000 100000\n")
    assert (groups.memory_limit(v2), groups.memory_left(v2), groups.cpu_limit(v2)) == (1200, 600, 0.2)


def test_version_1_has_files_of_its_own(v1):
    assert (groups.memory_limit(v1), groups.memory_left(v1), groups.cpu_limit(v1)) == (3000, 2250, 0.5)
    write(v1 / "sys/fs/cgroup/memory", memory_dot_limit_in_bytes=f"{NO_V1_LIMIT}\n")
    write(v1 / "sys/fs/cgroup/cpu", cpu_dot_cfs_quota_us="-1\n")
    assert (groups.memory_limit(v1), groups.memory_left(v1), groups.cpu_limit(v1)) == (None, None, None)


def test_elsewhere_than_on_linux_there_is_no_limit(tmp_path):
    assert groups.memory_limit(tmp_path) is groups.memory_left(tmp_path) is groups.cpu_limit(tmp_path) is None


def test_memory_and_cores_are_what_a_container_has(monkeypatch):
    machine, free, cores = device.memory_bytes(torch.device("cpu")), hardware.available_bytes(), hardware.num_cores()
    assert free <= machine
    monkeypatch.setattr("fisedit.machine.device.memory_limit", lambda: 3 << 30)
    monkeypatch.setattr("fisedit.machine.hardware.memory_left", lambda: 1 << 20)
    monkeypatch.setattr("fisedit.machine.hardware.cpu_limit", lambda: 0.5)
    assert device.memory_bytes(torch.device("cpu")) == min(machine, 3 << 30)
    assert hardware.available_bytes() == 1 << 20
    assert hardware.num_cores() == 1 <= cores


@pytest.mark.parametrize(("free", "expected"), [(1 << 29, 0), (1 << 30, 0), (5 << 30, 2 << 30)])
def test_records_leave_room_for_the_work(free, expected, pipelines, monkeypatch):
    monkeypatch.setattr(hardware, "available_bytes", lambda: free)
    assert hardware.recordable_bytes(torch.device("cpu")) == expected
    assert Editor(pipelines["sd15"])._pipeline.state.cache.max_bytes == expected

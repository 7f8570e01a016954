"""Faults that are real and take their time: kills, hangs, full and read-only disks, few files, little memory, crowds.

`make test` does not collect this folder; `make fault` does. Every run is the command line in a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.folders import JOURNAL, half, lines, picture, pictures, tree, whole
from tests.pipelines import build_pipeline

SAID = ("--prompt", "a dog and a cake on a beach", "--source-prompt", "a cat and a cake on a beach")
ITEMS = 8
KILLS = 30

namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs `unshare -rm`",
)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fault") / "model"
    build_pipeline("demo").save_pretrained(folder)
    return folder


@pytest.fixture
def command(model) -> Callable[..., list[str]]:
    return lambda *given: [
        *(sys.executable, "-m", "fisedit", "batch", "--num-inference-steps", "2", "--model", str(model)),
        *map(str, given),
    ]


@pytest.fixture
def batch(tmp_path, command):
    """Runs `fisedit batch` to its end."""

    def run(*given: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*given), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900, **options
        )

    return run


@pytest.fixture
def started(tmp_path, command) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `fisedit batch` in a process group of its own."""
    running = []

    def start(*given: object) -> subprocess.Popen[str]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        running.append(subprocess.Popen(command(*given), cwd=tmp_path, **options))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def clean(tmp_path, batch) -> dict[str, str]:
    """What an uninterrupted run makes of the folder "in"."""
    pictures(tmp_path / "in", ITEMS)
    assert batch("in", "clean", *SAID).returncode == 0
    return tree(tmp_path / "clean")


def worker_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The worker of a run, once it is there: the child that loads torch."""
    while True:
        for child in psutil.Process(process.pid).children():
            if "spawn_main" in " ".join(child.cmdline()):
                return child
        time.sleep(0.02)


def until(true: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def told(run: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(run.stdout)


def counts(run: subprocess.CompletedProcess[str]) -> dict[str, int]:
    return {status: count for status, count in told(run)["counts"].items() if count}


def test_killed_thirty_times(tmp_path, batch, started, clean, record_property):
    """At random, the run alone: its worker goes with it. Outputs are always whole, and the clean ones at the end."""
    chance, out = random.Random(0), tmp_path / "out"
    start = time.monotonic()
    assert batch("in", "timed", *SAID).returncode == 0
    whole_run, finished, left_behind = time.monotonic() - start, 0, 0
    for _ in range(KILLS):
        process = started("in", "out", *SAID)
        time.sleep(chance.uniform(0.2, 1.1) * whole_run)
        workers = psutil.Process(process.pid).children() if process.poll() is None else []
        process.kill()
        process.communicate()
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert not alive, "workers end with their run"
        assert whole(out).items() <= clean.items() if out.exists() else True
        left_behind += len(tree(out)) - len(whole(out)) if out.exists() else 0
        if process.returncode == 0:
            assert tree(out) == clean
            shutil.rmtree(out)
            finished += 1
    assert batch("in", "out", *SAID).returncode == 0
    assert tree(out) == clean
    assert finished < KILLS
    record_property("measured", f"{KILLS} kills, {finished} too late, {left_behind} unfinished files swept")


def test_nothing_is_done_twice(tmp_path, batch, started, clean):
    """Killed as soon as an item is on the disk, again and again."""
    out = tmp_path / "out"
    for n in range(1, 4):
        process = started("in", "out", *SAID)
        until(lambda n=n: out.exists() and len(whole(out)) >= n)
        process.kill()
        process.communicate()
    assert batch("in", "out", *SAID).returncode == 0
    made = [line["output"] for line in lines(out)]
    again = len(made) - len(set(made))
    assert tree(out) == clean and again <= 3, "at most the item in work at each kill"


@pytest.mark.parametrize(("number", "name"), [(signal.SIGSEGV, "Segmentation fault"), (signal.SIGKILL, "Killed")])
def test_a_worker_that_dies(tmp_path, started, clean, number, name):
    process = started("in", "out", *SAID, "--json")
    until(lambda: (tmp_path / "out").exists() and len(whole(tmp_path / "out")) >= 1)
    worker_of(process).send_signal(number)
    out, err = process.communicate(timeout=300)
    failed = [item for item in json.loads(out)["items"] if item["status"] == "failed"]
    assert (process.returncode, err, len(failed)) == (1, "", 1)
    assert failed[0]["reason"] == f"its worker ended with signal {int(number)} ({name})"
    assert len(tree(tmp_path / "out")) == ITEMS - 1 and tree(tmp_path / "out").items() < clean.items()


def test_a_worker_that_hangs(tmp_path, started, batch, clean):
    process = started("in", "out", *SAID, "--json", "--timeout", "3")
    until(lambda: (tmp_path / "out").exists() and len(whole(tmp_path / "out")) >= 1)
    worker_of(process).send_signal(signal.SIGSTOP)
    out, err = process.communicate(timeout=300)
    failed = [item["reason"] for item in json.loads(out)["items"] if item["status"] == "failed"]
    assert (process.returncode, err, failed) == (1, "", ["took longer than 3 seconds and did not stop"])
    assert batch("in", "out", *SAID).returncode == 0 and tree(tmp_path / "out") == clean


def test_an_interrupt_from_the_terminal(tmp_path, started, batch, clean):
    """It reaches the workers as well, which leave the decision to the run."""
    process = started("in", "out", *SAID)
    until(lambda: (tmp_path / "out").exists() and len(whole(tmp_path / "out")) >= 1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.splitlines() == [
        "finishing what is in hand; interrupt again to stop at once",
        "error[cancelled]: stopped",
    ]
    made = tree(tmp_path / "out")
    assert 1 <= len(made) < ITEMS and made.items() < clean.items()
    assert batch("in", "out", *SAID).returncode == 0 and tree(tmp_path / "out") == clean


def test_two_runs_on_one_folder(tmp_path, started, batch, clean):
    process = started("in", "out", *SAID)
    until((tmp_path / "out" / JOURNAL).exists)
    second = batch("in", "out", *SAID)
    assert (second.returncode, second.stdout) == (2, "")
    assert "another run is working on" in second.stderr and second.stderr.count("\n") == 1
    process.communicate(timeout=300)
    assert process.returncode == 0 and tree(tmp_path / "out") == clean


def test_one_and_four_workers(tmp_path, batch, clean):
    many = batch("in", "many", *SAID, "--workers", "4", "--json")
    assert counts(many) == {"done": ITEMS} and tree(tmp_path / "many") == clean
    assert batch("in", "here", *SAID, "--workers", "0").returncode == 0 and tree(tmp_path / "here") == clean


def test_few_file_descriptors(tmp_path, batch, clean):
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    run = batch("in", "out", *SAID, "--workers", "2", "--json", preexec_fn=few)
    assert (run.returncode, run.stderr, counts(run)) == (0, "", {"done": ITEMS})
    assert tree(tmp_path / "out") == clean


def test_little_memory(tmp_path, batch, started, clean):
    """A picture within the limits of size, but not of this machine, fails; those after it do not."""
    process = started("in", "measured", *SAID)
    until(lambda: (tmp_path / "measured").exists() and len(whole(tmp_path / "measured")) >= 1)
    enough = worker_of(process).memory_info().vms + (400 << 20)
    process.communicate()
    Image.new("RGBA", (8000, 7900)).save(tmp_path / "in/large.png")

    def little() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (enough, enough))

    run = batch("in", "out", *SAID, "--json", preexec_fn=little)
    failed = {item["image"]: item["reason"] for item in told(run)["items"] if item["status"] == "failed"}
    assert run.returncode == 1 and list(failed) == ["large.png"], run.stderr
    assert "memory" in failed["large.png"] or "signal" in failed["large.png"]
    assert tree(tmp_path / "out") == clean


@namespaces
def test_a_disk_that_is_full_and_then_is_not(tmp_path, command, clean):
    (tmp_path / "disk").mkdir()
    run = " ".join(f"'{word}'" for word in command("in", "disk/out", *SAID))
    script = f"""
        mount -t tmpfs -o size=72k none disk
        {run} --json > first.json 2> first.err; echo $? > first
        ls disk/out > first.ls; cp -r disk/out kept
        mount -o remount,size=9m disk
        {run} --json > second.json 2> second.err; echo $? > second
        cp -r disk/out made
    """
    subprocess.run(["unshare", "-rm", "bash", "-c", script], cwd=tmp_path, check=True, timeout=600)
    said = (tmp_path / "first.json").read_text() + (tmp_path / "first.err").read_text()
    assert (tmp_path / "first").read_text() == "1\n" and "No space left on device" in said
    kept = tree(tmp_path / "kept")
    assert kept.items() < clean.items(), "whole files only, and nothing unfinished"
    assert (tmp_path / "second").read_text() == "0\n" and tree(tmp_path / "made") == clean
    assert json.loads((tmp_path / "second.json").read_text())["counts"]["done before"] == len(kept)


@namespaces
def test_a_disk_that_cannot_be_written(tmp_path, command, clean):
    """It is said before the model loads."""
    (tmp_path / "disk").mkdir()
    run = " ".join(f"'{word}'" for word in command("in", "disk/out", *SAID, "--model", "./nowhere"))
    script = f"mount -t tmpfs none disk; mount -o remount,ro disk; {run} 2> err; echo $? > status"
    subprocess.run(["unshare", "-rm", "bash", "-c", script], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "status").read_text() == "2\n"
    assert "Read-only file system" in (tmp_path / "err").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become someone who may not read everything")
def test_a_file_that_may_not_be_read(tmp_path, model, monkeypatch):
    """As another user, in a copy of this process, since that user may not read this Python either."""
    from fisedit import cli

    pictures(tmp_path / "in", 2)
    (tmp_path / "in/1.png").chmod(0)
    (tmp_path / "out").mkdir()
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)
    (tmp_path / "out").chmod(0o777)
    for path in (model.parent, *model.rglob("*")):
        path.chmod(0o755)
    import fisedit.batch.hand  # noqa: F401 (before the rights to read it are gone)

    child = os.fork()
    if not child:
        with (tmp_path / "told.json").open("w") as file:
            os.dup2(file.fileno(), 1)
        os.setuid(65534)
        words = ("in", "out", *SAID, "--workers", "0", "--num-inference-steps", "2", "--model", model, "--json")
        os.chdir(tmp_path)
        sys.argv = ["fisedit", "batch", *map(str, words)]
        try:
            cli.main()
        except SystemExit as ended:
            sys.stdout.flush()
            os._exit(int(ended.code))
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    items = json.loads((tmp_path / "told.json").read_text())["items"]
    assert [(item["status"], item["reason"]) for item in items] == [
        ("done", ""),
        ("failed", "cannot be read: Permission denied"),
    ]


def test_a_hundred_thousand_files(tmp_path, batch, record_property):
    """Planned in seconds and little memory; nothing is opened for it."""
    first = picture(tmp_path / "in/0/first.png")
    for n in range(1, 100_000):
        place = tmp_path / f"in/{n // 1000}"
        place.mkdir(exist_ok=True)
        (place / f"{n}.png").hardlink_to(first)
    start = time.monotonic()
    run = batch("in", "out", *SAID, "--recursive", "--dry-run", "--json")
    assert counts(run) == {"left": 100_000} and run.returncode == 0
    assert time.monotonic() - start < 120
    record_property("measured", f"planned in {time.monotonic() - start:.0f} s")


BROKEN = {
    "zero.png": lambda good: b"",
    "text.jpg": lambda good: b"This is a text.\n",
    "cut.png": lambda good: good[: len(good) // 2],
    "head.png": lambda good: good[:20],
    "bomb.png": lambda good: good[:16] + (100_000).to_bytes(4, "big") * 2 + good[24:],
    "flipped.png": lambda good: good[:60] + bytes(byte ^ 255 for byte in good[60:200]) + good[200:],
    "psd.png": lambda good: b"8BPS\0\1" + bytes(500),
    "eps.png": lambda good: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "svg.webp": lambda good: b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "pickle.gif": lambda good: b"\x80\x04\x95cos\nsystem\n",
}


def good_picture(folder: Path, n: int) -> None:
    """One of many kinds: sizes, modes, formats, turns, names."""
    chance = np.random.default_rng(n)
    size = [(64, 64), (128, 128), (7, 9), (1, 1), (97, 70), (200, 40), (300, 225)][n % 7]
    mode, suffix = [("RGB", "png"), ("RGB", "jpg"), ("RGBA", "png"), ("L", "png"), ("RGBA", "webp"), ("CMYK", "jpg")][
        n % 6
    ]
    bands = len(Image.new(mode, (1, 1)).getbands())
    levels = chance.integers(0, 256, (size[1], size[0], bands), np.uint8)
    image = Image.fromarray(levels[..., 0] if bands == 1 else levels, mode)
    if n % 11 == 0:
        image, suffix = image.convert("RGB").convert("P"), "gif"
    name = [f"{n}", f"-{n}", f"a b {n}", f"new\nline {n}", f"\N{CAT FACE} {n}", f"{n}.old"][n % 5]
    exif = Image.Exif()
    exif[274] = n % 8 + 1
    image.save(folder / f"{name}.{suffix}", exif=exif) if suffix == "jpg" else image.save(folder / f"{name}.{suffix}")


def test_five_hundred_mixed_files(tmp_path, batch):
    """One in five is broken. Every good one is done, every bad one named, and no input is touched."""
    folder = tmp_path / "in"
    folder.mkdir()
    for n in range(400):
        good_picture(folder, n)
    good = picture(tmp_path / "good.png", 1, (96, 96)).read_bytes()
    for n in range(100):
        name, spoil = list(BROKEN.items())[n % len(BROKEN)]
        (folder / f"{n}-{name}").write_bytes(spoil(good))
    half(tmp_path / "masks/0.png")
    before = tree(folder)
    assert len(before) == 500
    words = (
        "--prompt",
        "a dog on a beach",
        "--source-prompt",
        "a cat on a beach",
        "--model",
        "demo",
        "--guidance-scale",
        "4",
    )
    run = batch("in", "out", *words, "--masks", "masks", "--report", "report.html", "--json")
    assert (run.returncode, run.stderr) == (1, "")
    bad = {item["image"] for item in told(run)["items"] if item["status"] == "failed"}
    assert bad == {f"{n}-{list(BROKEN)[n % len(BROKEN)]}" for n in range(100)}
    assert counts(run) == {"done": 400, "failed": 100} and len(tree(tmp_path / "out")) == 400
    assert all(item["reason"] for item in told(run)["items"] if item["status"] == "failed")
    assert tree(folder) == before
    for item in told(run)["items"]:
        if item["status"] == "done":
            assert turned(folder / item["image"]) == Image.open(tmp_path / "out" / item["output"]).size
    again = batch("in", "out", *words, "--masks", "masks", "--json")
    assert counts(again) == {"done before": 400, "failed": 100}


def turned(path: Path) -> tuple[int, int]:
    """A picture's size as its EXIF says it is looked at."""
    with Image.open(path) as image:
        across = image.getexif().get(274, 1) > 4
        return (image.height, image.width) if across else image.size

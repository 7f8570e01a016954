"""Faults that are real and take their time: kills, hangs, full and read-only disks, few files, little memory, crowds.

`make test` does not collect this folder; `make fault` does. Every run is the command line in a process of its own.
"""

from __future__ import annotations

import json
import os
import pty
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file

from tests.support.folders import JOURNAL, claims, half, lines, picture, pictures, tree, whole
from tests.support.processes import until

SAID = ("--prompt", "a dog and a cake on a beach", "--source-prompt", "a cat and a cake on a beach")
ITEMS = 8
KILLS = 30

namespaces = pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs `unshare -rm`",
)


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
            command(*given), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=3600, **options
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


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory) -> Path:
    """A folder with "in" and what an uninterrupted run makes of it, "clean"; leave it as it is."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    pictures(folder / "in", ITEMS)
    words = ("in", "clean", *SAID, "--num-inference-steps", "2", "--model", model)
    subprocess.run([sys.executable, "-m", "fisedit", "batch", *map(str, words)], cwd=folder, check=True)
    return folder


@pytest.fixture
def clean(tmp_path, uninterrupted) -> dict[str, str]:
    """What an uninterrupted run makes of the folder "in"."""
    shutil.copytree(uninterrupted / "in", tmp_path / "in")
    return tree(uninterrupted / "clean")


def worker_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The worker of a run, once it is there: the child that loads torch."""
    while True:
        for child in psutil.Process(process.pid).children():
            if "spawn_main" in " ".join(child.cmdline()):
                return child
        time.sleep(0.02)


def at_most(process: int, what: str) -> int:
    """Bytes that a process has had at most: of addresses, "VmPeak", or of memory, "VmHWM"."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(rf"{what}:\s+(\d+) kB", status)[1]) << 10


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


def test_a_worker_that_is_killed_in_a_crowd(tmp_path, started, clean):
    """As the system does where memory runs out: its item is tried again once the others are gone."""
    process = started("in", "out", *SAID, "--workers", "2", "--json")
    until(lambda: (tmp_path / "out").exists() and len(whole(tmp_path / "out")) >= 1)
    worker_of(process).send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "") and json.loads(out)["counts"]["done"] == ITEMS
    assert tree(tmp_path / "out") == clean


def test_a_worker_that_hangs(tmp_path, started, batch, clean):
    process = started("in", "out", *SAID, "--json", "--timeout", "15")
    until(lambda: (tmp_path / "out").exists() and len(whole(tmp_path / "out")) >= 1)
    worker_of(process).send_signal(signal.SIGSTOP)
    out, err = process.communicate(timeout=300)
    failed = [item["reason"] for item in json.loads(out)["items"] if item["status"] == "failed"]
    assert (process.returncode, err, failed) == (1, "", ["took longer than 15 seconds and did not stop"])
    assert batch("in", "out", *SAID).returncode == 0 and tree(tmp_path / "out") == clean


def test_an_interrupt_from_the_terminal(tmp_path, started, batch, clean):
    """It reaches the workers as well, which leave the decision to the run."""
    process = started("in", "out", *SAID)
    until(lambda: (tmp_path / "out").exists() and len(whole(tmp_path / "out")) >= 1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.splitlines() == [
        "finishing the items in progress; interrupt again to stop at once",
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


def test_what_a_terminal_shows(tmp_path, command, clean):
    """Items out of all, and the time left; at the end a table of counts, each number where it belongs."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command("in", "out", *SAID), cwd=tmp_path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # what a terminal's end looks like
        while part := os.read(ours, 1 << 16):
            shown += part
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert process.wait() == 0
    assert re.search(rf"Editing \S+ [1-7]/{ITEMS} 0:00:\d\d", text), text
    head, counts_ = (
        re.findall(r"[^┃│\s][^┃│]*[^┃│\s]|\d", line) for line in text.splitlines() if re.search("[┃│]", line)
    )
    assert head == ["done", "done before", "failed", "left", "seconds"] and counts_[:4] == [str(ITEMS), "0", "0", "0"]


@pytest.mark.parametrize(("fault", "words"), [("cut", "truncated"), ("nan", "NaN")])
def test_a_model_that_its_worker_cannot_load(tmp_path, batch, model, fault, words):
    pictures(tmp_path / "in", 2)
    weights = Path(shutil.copytree(model, tmp_path / "model")) / "unet/diffusion_pytorch_model.safetensors"
    if fault == "cut":
        os.truncate(weights, 10_000)
    else:
        tensors = load_file(weights)
        save_file(tensors | {"conv_in.weight": tensors["conv_in.weight"] * torch.nan}, weights)
    run = batch("in", "out", *SAID, "--model", "model")
    assert (run.returncode, run.stdout) == (2, "") and run.stderr.count("\n") == 1 and words in run.stderr


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
    until(lambda: (tmp_path / "measured").exists() and len(whole(tmp_path / "measured")) >= ITEMS - 2)
    enough = at_most(worker_of(process).pid, "VmPeak") + (400 << 20)
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
def test_a_journal_whose_disk_is_full(tmp_path, command, clean):
    """The journal alone lies on a disk of one page. No output is left that it does not tell of."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / JOURNAL).touch()
    run = " ".join(f"'{word}'" for word in command("in", "out", *SAID, "--json"))
    script = f"""
        mount -t tmpfs -o size=4k none disk; touch disk/journal; mount --bind disk/journal out/{JOURNAL}
        {run} > told.json 2> err; echo $? > status; cp out/{JOURNAL} kept; umount out/{JOURNAL}; cp kept out/{JOURNAL}
        {run} > again.json 2>> err; echo $? >> status
    """
    subprocess.run(["unshare", "-rm", "bash", "-c", script], cwd=tmp_path, check=True, timeout=600)
    first, again = (json.loads((tmp_path / name).read_text())["counts"] for name in ("told.json", "again.json"))
    assert (tmp_path / "status").read_text() == "1\n0\n" and (tmp_path / "err").read_text() == ""
    assert "the journal in OUT cannot be written: No space left on device" in (tmp_path / "told.json").read_text()
    assert first["failed"] == 1 and 1 <= first["done"] == again["done before"] and tree(tmp_path / "out") == clean


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
def test_a_file_that_may_not_be_read(tmp_path, model, fisedit):
    """As another user, in a copy of this process, since that user may not read this Python either."""
    from fisedit import cli

    pictures(tmp_path / "in", 2)
    words = (*SAID, "--workers", "0", "--num-inference-steps", "2", "--model", str(model), "--json")
    assert fisedit("batch", "in", "first", *words).status == 0, "all is imported while there is the right to read it"
    (tmp_path / "in/1.png").chmod(0)
    (tmp_path / "out").mkdir()
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)
    (tmp_path / "out").chmod(0o777)
    for path in (model.parent, *model.rglob("*")):
        path.chmod(0o755)
    child = os.fork()
    if not child:
        sys.stdout = (tmp_path / "told.json").open("w")
        os.setuid(65534)
        sys.argv = ["fisedit", "batch", "in", "out", *words]
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


def test_a_hundred_thousand_files(tmp_path, batch, started, record_property):
    """Planned in seconds and little memory; nothing is opened for it. Then begun, and stopped."""
    for folder in range(100):
        first = picture(tmp_path / f"in/{folder}/first.png", folder)
        for n in range(1, 1000):
            first.with_stem(str(n)).hardlink_to(first)  # a file may have 65,000 names at most
    start = time.monotonic()
    run = batch("in", "out", *SAID, "--recursive", "--dry-run", "--json")
    assert counts(run) == {"left": 100_000} and run.returncode == 0
    planned = time.monotonic() - start
    process = started("in", "out", *SAID, "--recursive")
    until(lambda: (tmp_path / "out").exists() and len(whole(tmp_path / "out")) >= 2, 300)
    most = at_most(process.pid, "VmHWM")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 130 and len(tree(tmp_path / "out")) == len(lines(tmp_path / "out")) >= 2
    record_property("measured", f"planned in {planned:.0f} s, {most >> 20} MiB at most while running")


def zipped(good: bytes) -> bytes:
    """The picture with a text of 100 million letters that packs well."""
    said = PngInfo()
    said.add_text("Comment", "x" * 100_000_000, zip=True)
    file = BytesIO()
    Image.open(BytesIO(good)).save(file, "PNG", pnginfo=said)
    return file.getvalue()


def large(_: bytes) -> bytes:
    """12,000 x 12,000 pixels in a few kilobytes."""
    file = BytesIO()
    Image.new("1", (12_000, 12_000)).save(file, "PNG")
    return file.getvalue()


def as_jpeg(good: bytes) -> bytes:
    file = BytesIO()
    Image.open(BytesIO(good)).save(file, "JPEG")
    return file.getvalue()


SPOILT: Mapping[str, tuple[Callable[[bytes], bytes], str]] = {
    "zero.png": (lambda good: b"", "empty"),
    "text.jpg": (lambda good: b"This is a text.\n", "something else"),
    "pointer.png": (lambda good: b"version https://git-lfs.github.com/spec/v1\n", "something else"),
    "psd.png": (lambda good: b"8BPS\0\1" + bytes(500), "something else"),
    "eps.png": (lambda good: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "something else"),
    "svg.webp": (lambda good: b'<svg xmlns="http://www.w3.org/2000/svg"/>', "something else"),
    "pickle.gif": (lambda good: b"\x80\x04\x95cos\nsystem\n", "something else"),
    "head.png": (lambda good: good[:20], ""),
    "tenth.png": (lambda good: good[: len(good) // 10], "damaged"),
    "half.png": (lambda good: good[: len(good) // 2], "damaged"),
    "half.jpg": (lambda good: as_jpeg(good)[:3000], "damaged"),
    "flipped.png": (lambda good: good[:60] + bytes(byte ^ 255 for byte in good[60:200]) + good[200:], "damaged"),
    "bomb.png": (lambda good: claims(good, 100_000), "64 million pixels"),
    "large.png": (large, "64 million pixels"),
    "zipped.png": (zipped, "damaged"),
}
"""A broken file's name -> what makes it of a good one, and a word of the reason that is given for it."""

STRANGE: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "loop.png": (lambda path: path.symlink_to(path.name), "symbolic links"),
    "nowhere.png": (lambda path: path.symlink_to("not-there.png"), "No such file"),
    "pipe.png": (os.mkfifo, "pipe"),
    "device.png": (lambda path: path.symlink_to("/dev/zero"), "device"),
    "masked.png": (lambda path: picture(path) and (path.parents[1] / "masks" / path.name).touch(), "mask"),
}
"""The same for what is no file of its own, or is good itself."""

BROKEN = (*SPOILT, *STRANGE)


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
    name = [f"{n}", f"-{n}", f"a b {n}", f"new\nline {n}", f"\N{CAT FACE} {n}", f"{n}.old"][n // 6 % 6]
    exif = Image.Exif()
    exif[274] = n % 8 + 1
    image.save(folder / f"{name}.{suffix}", exif=exif) if suffix == "jpg" else image.save(folder / f"{name}.{suffix}")


def test_five_hundred_mixed_files(tmp_path, batch, record_property):
    """One in five is broken. Every good one is done, every bad one named, and no input is touched."""
    folder = tmp_path / "in"
    folder.mkdir()
    half(tmp_path / "masks/0.png")
    for n in range(400):
        good_picture(folder, n)
    good = picture(tmp_path / "good.png", 1, (96, 96)).read_bytes()
    spoilt = {name: make(good) for name, (make, _) in SPOILT.items()}
    why = {f"{n} {name}": (SPOILT | STRANGE)[name][1] for n, name in enumerate(BROKEN * (100 // len(BROKEN)))}
    for name in why:
        kind = name.partition(" ")[2]
        (folder / name).write_bytes(spoilt[kind]) if kind in spoilt else STRANGE[kind][0](folder / name)
    before, names = tree(folder), sorted(folder.iterdir())
    assert len(why) == 100 and len(names) == 500
    said = ("--prompt", "a dog on a beach", "--source-prompt", "a cat on a beach", "--masks", "masks")
    words = ("in", "out", *said, "--model", "demo", "--guidance-scale", "4", "--workers", "2", "--json", "--report")
    run = batch(*words, "report.html")
    assert (run.returncode, run.stderr) == (1, "")
    failed = {item["image"]: item["reason"] for item in told(run)["items"] if item["status"] == "failed"}
    assert failed.keys() == why.keys() and counts(run) == {"done": 400, "failed": 100}
    for name, reason in failed.items():
        assert reason and "\n" not in reason and why[name] in reason, (name, reason)
    assert tree(folder) == before and sorted(folder.iterdir()) == names
    assert len(tree(tmp_path / "out")) == 400
    for item in told(run)["items"]:
        if item["status"] == "done":
            assert turned(folder / item["image"]) == Image.open(tmp_path / "out" / item["output"]).size
    assert (tmp_path / "report.html").read_text().count("<tr class=") == 500
    again = batch(*words, "again.html")
    assert counts(again) == {"done before": 400, "failed": 100}
    took = told(run)["seconds"]
    record_property("measured", f"400 done, 100 named, {len(BROKEN)} kinds of broken, in {took:.0f} s by two workers")


def turned(path: Path) -> tuple[int, int]:
    """A picture's size as its EXIF says it is looked at."""
    with Image.open(path) as image:
        across = image.getexif().get(274, 1) > 4
        return (image.height, image.width) if across else image.size

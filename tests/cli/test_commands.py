"""The command line as its users meet it: a process, its exit status, its two streams, and the files it leaves."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from benchmarks import masks as mask_quality
from fisedit import cli
from fisedit.cli import console, demo
from fisedit.errors import Cancelled, FisEditError, InputError, MaskError, ModelError, NumericsError
from fisedit.storage import images
from fisedit.values import SchedulerName

SMALL = ("--num-inference-steps", "2", "--width", "64", "--height", "64")
BEFORE, AFTER = "a cat and a cake on a beach", "a dog and a cake on a beach"


def half_mask(path: Path) -> Path:
    pixels = np.zeros((64, 64), np.uint8)
    pixels[:, :24] = 255
    Image.fromarray(pixels).save(path)
    return path


def test_version_and_help(process):
    assert process("--version").out.startswith("fisedit 0.")
    assert process() == process("--help")
    assert process("generate", "--help").status == 0


def test_the_help_names_every_scheduler(fisedit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # in 80, a column cuts the longest
    text = fisedit("generate", "--help").out
    assert all(name.value in text for name in SchedulerName)


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["generate"], "Missing argument 'prompt'; see fisedit generate --help"),
            (["bench"], "see fisedit bench --help"),
            (["paint"], "No such command 'paint'. Did you mean 'plan'? See fisedit --help"),
            (["generate", "a cat", "--colour", "red"], "see fisedit generate --help"),
            (
                ["generate", "a cat", "--seed", "seven"],
                "--seed must be a whole number, got 'seven'; see",
            ),
            (["generate", "a cat", "--seed=abc"], "--seed must be a whole number, got 'abc'; see"),
            (
                ["generate", "a cat", "--adapter-scale", "1", "--adapter-scale", "high"],
                "--adapter-scale must be a number, got 'high'; see",
            ),
            (
                ["edit", "--guidance-scale", "abc"],
                "--guidance-scale must be a number, got 'abc'; see",
            ),
            (["generate", "a", "cat"], "put a prompt in quotes"),
            (["batch"], "see fisedit batch --help"),
        ],
    )
    def test_a_wrong_call(self, fisedit, arguments, message):
        fisedit(*arguments).refused("usage", message)

    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            (["generate", " "], "prompt", "prompt must say something"),
            (["generate", "a [cat:dog:0.5]"], "prompt", "prompt has [cat:dog:0.5], which changes at a step"),
            (
                ["generate", "a cat", "--num-inference-steps", "0"],
                "input",
                "num_inference_steps must be",
            ),
            (["generate", "a cat", "--width", "100"], "input", "width must be divisible by 8"),
            (["demo", "--num-inference-steps", "0"], "input", "num_inference_steps must be"),
            (["plan", "--size", "100"], "input", "width must be divisible by 8"),
            (["edit", "--session", "none", "--prompt", "a dog"], "session", "there is no session in none"),
        ],
    )
    def test_values_that_are_refused_before_a_model_is_loaded(self, fisedit, monkeypatch, arguments, code, message):
        monkeypatch.setattr("fisedit.editor.Editor.from_pretrained", None)
        fisedit(*arguments).refused(code, message)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["--source-prompt", "a cat"],
                "give a --prompt, or --erase what a --mask, --box, --point, --detect, --word or --region marks",
            ),
            (
                ["--source-prompt", "a cat", "--erase"],
                "--erase needs a --mask, --box, --point, --detect, --word or --region, got none",
            ),
            (
                ["--source-prompt", "a cat", "--erase", "--box", "0,0,9,9", "--strength", "1"],
                "--erase has no use for --strength; leave it out",
            ),
            (["--source-prompt", "a cat", "--prompt", "a dog", "--soft"], "--soft is of a --mask, got none; give one"),
            (["--source-prompt", "a cat", "--prompt", "a dog", "--box", "0,0,9"], "--box must be L,T,R,B in pixels"),
            (["--source-prompt", "a cat", "--prompt", "a dog", "--box", "9,0,0,9"], "a box must have left < right"),
            (["--source-prompt", "a cat", "--prompt", "a dog", "--point", "9"], "--point must be X,Y in pixels"),
            (
                ["--source-prompt", "a cat", "--prompt", "a dog", "--point", "9,9", "--point-outside", "9"],
                "--point-outside must be X,Y in pixels, got '9'; give two numbers",
            ),
            (["--source-prompt", "a cat", "--prompt", "a dog", "--point-outside", "9,9"], "--point-outside is of a"),
        ],
    )
    def test_regions_that_are_none(self, fisedit, arguments, message):
        fisedit("edit", *arguments).refused("input", message)

    def test_a_session_or_a_source(self, fisedit):
        fisedit("edit", "--prompt", "a dog").refused("input", "--session", "--source-prompt", "got several or none")
        fisedit("edit", "--prompt", "a dog", "--session", "s", "--source-prompt", "a cat").refused("input", "several")

    def test_a_session_has_its_own_recipe(self, fisedit):
        words = ["--prompt", "a dog", "--session", "s", "--seed", "7", "--model", "demo"]
        fisedit("edit", *words).refused("input", "a session has its own seed, model")

    @pytest.mark.parametrize("areas", ["1,x", "0", "101", ""])
    def test_areas(self, fisedit, areas):
        fisedit("bench", "edit", "--areas", areas).refused("input", "areas")


class TestBeforeTheModelLoads:
    """Refusals that need no model: the one named here does not exist, and is not what is complained of."""

    @pytest.mark.parametrize("output", ["picture.gif", "picture", ".", "file/picture.png", "/proc/picture.png"])
    def test_an_output_that_cannot_be_written(self, fisedit, tmp_path, output):
        (tmp_path / "file").write_text("a file")
        fisedit("generate", "a cat", "--model", "./nowhere", "--output", output).refused("input", "output")

    @pytest.mark.parametrize(
        ("verb", "option"), [("demo", "--output"), ("generate", "--session"), ("edit", "--session")]
    )
    def test_a_folder_that_cannot_be_written(self, fisedit, verb, option):
        nowhere = ["--model", "./nowhere"]
        words = {"demo": nowhere, "generate": ["a cat", *nowhere], "edit": ["--prompt", "a dog"]}[verb]
        fisedit(verb, *words, option, "/proc/folder").refused("input", "writable")

    def test_what_could_not_be_written_at_the_end(self, fisedit, study, tmp_path, monkeypatch):
        (tmp_path / "s").mkdir()
        (tmp_path / "s/session.json").write_text("a session")
        monkeypatch.setenv("FISEDIT_COSTS", str(tmp_path / "s/session.json"))
        nowhere, long = ("--model", "./nowhere"), "x" * 300
        for words in (
            ("bench", "edit", "--output", "s", *nowhere),
            ("generate", "a cat", "--trace", "s/session.json", *nowhere),
            ("generate", "a cat", "--session", long, *nowhere),
            ("generate", "a cat", "--output", f"{long}.png", *nowhere),
            ("plan", "--memory", "9" * 400, *nowhere),
            ("calibrate",),
        ):
            fisedit(*words).refused("input", "must")
        study("costs", "--output", "s/session.json", *nowhere).refused("input", "must")
        for option in ("--journal", "--html"):
            study("quality", option, "s", *nowhere).refused("input", "must")
        assert (tmp_path / "s/session.json").read_text() == "a session" and len(list(tmp_path.iterdir())) == 1

    def test_an_output_that_is_an_input(self, fisedit, tmp_path):
        before = half_mask(tmp_path / "mask.png").read_bytes()
        fisedit(
            *("edit", "--source-prompt", BEFORE, "--prompt", AFTER, "--mask", "mask.png", "--output", "./mask.png")
        ).refused("input", "must not be an input")
        assert (tmp_path / "mask.png").read_bytes() == before

    def test_links_in_a_circle(self, fisedit, tmp_path):
        """As an output they are replaced, as inputs they lead to no file."""
        for name in ("loop.png", "loop.json"):
            (tmp_path / name).symlink_to(name)
        nowhere = ("--model", "./nowhere")
        fisedit("generate", "a cat", "--output", "loop.png", "--trace", "loop.json", *nowhere).refused("model")
        fisedit("generate", "a cat", "--output", "loop.png", "--session", "s", *nowhere).refused("model")
        edit = ("edit", "--source-prompt", BEFORE, "--prompt", AFTER, *nowhere)
        fisedit(*edit, "--mask", "loop.png").refused("mask", "got loop.png: no such file")

    @pytest.mark.parametrize("content", [None, b"", b"no picture", b"%!PS-Adobe-3.0 EPSF-3.0\n"])
    def test_a_mask_that_is_no_image(self, fisedit, tmp_path, content):
        if content is not None:
            (tmp_path / "mask.png").write_bytes(content)
        fisedit("edit", "--source-prompt", BEFORE, "--prompt", AFTER, "--mask", "mask.png").refused("mask", "mask.png")

    def test_a_missing_model(self, fisedit, tmp_path):
        fisedit("generate", "a cat", "--model", "./nowhere").refused("model", "./nowhere")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "words",
        [
            ["a cat \udcff"],
            ["a cat", "--output", "caf\udce9.png"],
            ["a cat", "--negative-prompt", "\udc80"],
            ["a cat", "--session", "s\udcff"],
        ],
    )
    def test_arguments_that_are_not_utf_8(self, fisedit, words):
        fisedit("generate", *words, "--model", "./nowhere").refused("input", "UTF-8", "\\udc")

    def test_undecodable_bytes_of_a_real_argument(self, process, tmp_path):
        process("generate", "a cat", "--output", os.fsdecode(b"caf\xe9.png")).refused("input", "'caf\\udce9.png'")
        assert not list(tmp_path.iterdir())


NO_HOME = """
import os, pwd, sys
os.environ.pop("HOME", None)
def unknown(*_): raise KeyError("no such entry")
pwd.getpwuid = pwd.getpwnam = unknown
from fisedit import cli
for words in (["generate", "a", "--model", "~/m"], ["generate", "a", "--model", "~nobody-at-all/m"],
              ["generate", "a", "--model", "owner/name", "--local-files-only"],
              ["generate", "a cat", "--num-inference-steps", "2", "--width", "64", "--height", "64"]):
    sys.argv = ["fisedit", *words]
    try:
        cli.main()
    except SystemExit as ended:
        print(ended.code, flush=True)
"""
"""Commands in a process that has neither a home folder nor an entry of its user."""


@pytest.mark.slow
def test_without_a_home_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", NO_HOME], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert [line for line in done.stdout.splitlines() if line.isdecimal()] == ["2", "2", "2", "0"], done
    lines = done.stderr.splitlines()
    assert len(lines) == 3 and all(line.startswith("error[") for line in lines) and "internal" not in done.stderr
    assert "~/m" in lines[0] and "HF_HOME" in lines[2] and list(tmp_path.glob("*.png"))


def test_fp16_on_a_cpu(fisedit):
    fisedit("generate", "a cat", "--device", "cpu", "--dtype", "fp16").refused("input", "fp16", "bf16")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--scheduler", "magic"], "input"),
        (["--num-inference-steps", "0"], "input"),
        (["--width", "65"], "input"),
        (["--guidance-scale", "nan"], "input"),
    ],
)
def test_values_out_of_range(fisedit, model, tmp_path, options, code):
    fisedit("generate", "a cat", "--model", model, *SMALL, *options).refused(code)
    assert not list(tmp_path.iterdir())


def test_an_empty_prompt(fisedit, model):
    fisedit("generate", "  ", "--model", model, *SMALL).refused("prompt")


def test_a_session_that_is_none(fisedit, tmp_path):
    (tmp_path / "empty").mkdir()
    fisedit("edit", "--prompt", "a dog", "--session", "empty").refused("session", "empty")
    assert not list((tmp_path / "empty").iterdir())


def test_a_traceback_on_request_only(fisedit):
    run = fisedit("generate", "a cat", "--model", "./nowhere", "--debug")
    assert run.status == 2 and run.out == ""
    assert "Traceback" in run.err and run.err.splitlines()[-1].startswith("error[model]: ")


def test_generate_then_edit_in_a_session(fisedit, model, tmp_path):
    made = fisedit("generate", BEFORE, "--seed", 3, "--model", model, *SMALL, "--session", "s", "--output", "cat.png")
    assert made.status == 0 and "Written: cat.png" in made.out and made.err == ""
    half_mask(tmp_path / "mask.png")
    run = fisedit("edit", "--session", "s", "--prompt", AFTER, "--mask", "mask.png", "--output", "dog.png", "--json")
    assert (run.status, run.err) == (0, "")
    told = json.loads(run.out)
    assert told["prompt"] == AFTER and told["output"] == "dog.png" and told["stats"]["mask_source"] == "given"
    before, after = (np.asarray(Image.open(tmp_path / name)) for name in ("cat.png", "dog.png"))
    assert before.shape == after.shape == (64, 64, 3)
    assert (before[:, 24:] == after[:, 24:]).all() and (before[:, :24] != after[:, :24]).any()
    again = fisedit("edit", "--session", "s", "--prompt", BEFORE, "--mask", "mask.png", "--json")
    assert json.loads(again.out)["parent"] == told["id"]


def test_an_edit_reads_the_features_that_a_session_kept(fisedit, model, tmp_path):
    for name, words in (("kept", ["--features"]), ("anew", [])):
        options = ("--seed", 3, "--model", model, *SMALL, "--session", name, *words, "--output", "cat.png")
        assert fisedit("generate", BEFORE, *options).status == 0
        assert bool(list((tmp_path / name).glob("*.safetensors"))) == bool(words)
    half_mask(tmp_path / "mask.png")
    told = {}
    for name in ("kept", "anew"):
        options = ("--mask", "mask.png", "--output", f"{name}.png", "--json")
        run = fisedit("edit", "--session", name, "--prompt", AFTER, *options)
        told[name] = json.loads(run.out)["stats"]["notes"]
    assert any("rebuilt" in note for note in told["anew"]) and not any("rebuilt" in note for note in told["kept"])
    first, second = (np.asarray(Image.open(tmp_path / f"{name}.png")) for name in ("kept", "anew"))
    assert (first == second).all()
    fisedit("generate", BEFORE, "--features").refused("input", "--features are saved with a --session")
    fisedit("edit", "--source-prompt", BEFORE, "--prompt", AFTER, "--features").refused("input", "with a --session")


def test_a_one_shot_edit(fisedit, model, tmp_path):
    half_mask(tmp_path / "mask.png")
    options = ("--seed", 3, "--model", model, *SMALL, "--mask", "mask.png", "--output", "out/dog.webp", "--json")
    run = fisedit("edit", "--source-prompt", BEFORE, "--prompt", AFTER, *options)
    assert (run.status, run.err) == (0, "")
    assert json.loads(run.out)["change"] == "cat -> dog"
    assert Image.open(tmp_path / "out/dog.webp").size == (64, 64)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["dog.webp"]


@pytest.mark.slow
def test_an_interrupt_leaves_nothing(model, tmp_path):
    command = [sys.executable, "-m", "fisedit", "generate", BEFORE, "--num-inference-steps", "999", "--model", model]
    terminal, its_end = pty.openpty()
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    pipes = {"stdout": subprocess.PIPE, "stderr": its_end}
    process = subprocess.Popen(command, cwd=tmp_path, preexec_fn=heard, **pipes)  # noqa: PLW1509 (no threads here)
    os.close(its_end)
    shown = b""
    while b"/999" not in shown:  # the bar: it is at work
        shown += os.read(terminal, 1024)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # so a terminal ends
        while more := os.read(terminal, 1024):
            shown += more
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert shown.endswith(b"error[cancelled]: stopped\r\n")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_while_a_dataclass_is_made(process, tmp_path, monkeypatch):
    lines = (
        "import typer",
        "def stopped(*_, **__):",
        "    try: exec('raise KeyboardInterrupt')",
        "    except KeyboardInterrupt: return 130",
        "typer.Typer.__call__ = stopped",
    )
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = process("--version")
    assert (run.status, run.out, run.err) == (130, "", "error[cancelled]: stopped\n")


def test_the_demo(fisedit, tmp_path):
    run = fisedit("demo", "--output", "demo", "--num-inference-steps", 4)
    assert (run.status, run.err) == (0, "")
    assert "byte-identical" in run.out and "What it cost" in run.out and "demo/sheet.png" in run.out
    names = {"sheet.png", "report.json", "0-source.png"} | {
        f"{n}-{kind}.png" for n in (1, 2) for kind in ("mask", "edit")
    }
    assert {path.name for path in (tmp_path / "demo").iterdir()} == names
    report = json.loads((tmp_path / "demo/report.json").read_text())
    assert report["identical_outside"] and report["pixels_moved_outside"] == [0, 0]


def test_the_demo_fails_if_a_pixel_moved():
    assert not demo.DemoResult((), (0, 64)).passed and demo.DemoResult((), (0, 0)).passed


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (InputError("a\nb"), "error[input]: a b", 2),
        (MaskError("bad \x1b[31mred"), "error[mask]: bad  [31mred", 2),
        (ModelError("m"), "error[model]: m", 2),
        (NumericsError("n"), "error[numerics]: n", 1),
        (FisEditError("f"), "error[fisedit]: f", 1),
        (Cancelled("stopped"), "error[cancelled]: stopped", 130),
        (KeyboardInterrupt(), "error[cancelled]: stopped", 130),
        (OSError(13, "no", "a"), "error[file]: a cannot be used (no); check its path, permissions and disk", 1),
        (MemoryError(), "error[memory]: MemoryError", 1),
    ],
)
def test_errors_are_one_line(capsys, error, line, status):
    assert console.print_error(error) == status
    assert capsys.readouterr() == ("", line + "\n")


def test_streams_that_cannot_be_written():
    def run(word: str, **streams: object) -> tuple[int, str | None]:
        command = [sys.executable, "-m", "fisedit", word]
        done = subprocess.run(command, **{"stderr": subprocess.PIPE, **streams}, text=True, check=False)
        return done.returncode, done.stderr

    reading, writing = os.pipe()
    os.close(reading)
    with Path("/dev/full").open("w") as full:
        told = "error[file]: the output cannot be used (No space left on device); check its path, permissions and disk"
        assert run("--help", stdout=full) == (1, f"{told}\n")
        assert run("paint", stderr=full) == (2, None)
    assert run("--help", stdout=writing) == (1, ""), "who read it has gone"
    os.close(writing)


def test_a_bug_is_called_one(capsys):
    assert console.print_error(KeyError("x")) == 1
    assert "this is a bug" in capsys.readouterr().err


class TestFiles:
    def test_a_failed_write_leaves_what_was_there(self, tmp_path):
        path = tmp_path / "a.png"
        path.write_text("old")

        class Broken(Image.Image):
            mode, info = "RGB", {}

            def save(self, file, **_: object) -> None:
                file.write(b"half")
                raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            images.write_image(Broken(), path)
        assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_verbs_are_thin():
    for command in (*cli.app.registered_commands, *cli.bench.registered_commands):
        code = command.callback.__code__
        lines = {line for _, _, line in code.co_lines() if line is not None}
        assert len(lines) <= 30, code.co_name


QUICK_DEMO = ("--num-inference-steps", "2")


class TestTheDemo:
    def test_as_json(self, fisedit, model):
        told = json.loads(fisedit("demo", "--output", "demo", "--model", model, *QUICK_DEMO, "--json").out)
        assert told["identical_outside"] is True and told["files"][0] == "demo/sheet.png"
        assert [row["prompt"] for row in told["results"]] == list(demo.PROMPTS)

    def test_a_pixel_that_moved_is_an_error(self, fisedit, model, monkeypatch):
        whole = demo.run_demo
        monkeypatch.setattr(
            demo, "run_demo", lambda *given, **named: replace(whole(*given, **named), changed_outside=(0, 64))
        )
        run = fisedit("demo", "--output", "demo", "--model", model, *QUICK_DEMO)
        assert run.status == 1 and "byte-identical" not in run.out
        assert run.err.splitlines()[-1] == "error[moved]: pixels outside the masks changed: (0, 64); report this"


class TestTheApp:
    """What the command hands to the app; the app itself is tested in tests/app."""

    @pytest.fixture
    def opened(self, monkeypatch, tmp_path):
        """What the app was opened and built with, and what was done in which order; it is interrupted at once."""
        from app import server, sessions

        monkeypatch.setattr(os, "environ", os.environ.copy())
        told = SimpleNamespace(places=None, options=None, done=[], offline=None)

        class State:
            @classmethod
            def open(cls, *places, **options):
                told.places, told.options, told.offline = places, options, os.environ.get("HF_HUB_OFFLINE")
                return cls()

            def close(self):
                told.done.append("closed")

        class Server:
            def run(self, listeners):
                told.done.append(listeners[0].getsockname()[1])
                listeners[0].close()
                raise KeyboardInterrupt

        monkeypatch.setattr(sessions, "AppState", State)
        monkeypatch.setitem(sys.modules, "app.main", SimpleNamespace(build=lambda state: state, theme=dict))
        monkeypatch.setattr(server, "make_server", lambda state, address, page: Server())
        return told

    def test_it_says_where_it_is_and_ends_when_it_is_interrupted(self, fisedit, opened, tmp_path):
        run = fisedit("app", "--port", 0, "--sessions", "kept", "--device", "cpu")
        port, closed = opened.done
        assert (run.status, run.err, closed) == (0, "", "closed")
        assert run.out == f"The app is at http://127.0.0.1:{port}/ (Ctrl+C ends it)\n"
        assert opened.places == () and opened.options["folder"] == Path("kept") and opened.options["device"] == "cpu"
        assert opened.options["max_loaded"] == 2 and opened.options["adapters"] == ()

    def test_the_network_is_left_alone_where_all_is_here(self, fisedit, opened, tmp_path, monkeypatch):
        (tmp_path / "m").mkdir()
        for words, offline in ((("--model", "m"), "1"), (("--model", "m", "--model", "owner/name"), None)):
            monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
            assert fisedit("app", "--port", 0, *words).status == 0
            assert opened.offline == offline and opened.places[0] == "m"

    def test_what_cannot_be_opened_is_refused(self, fisedit, opened):
        fisedit("app", "--port", 0, "--sessions", "/proc/kept").refused("input", "writable")
        fisedit("app", "--host", "0.0.0.0", "--port", 0).refused("input", "give --token")
        assert opened.places is None


class TestBenchMasks:
    def test_its_options_are_the_settings_and_its_tables_are_printed(self, study, tmp_path, monkeypatch):
        asked = []

        def measure(settings, on_step):
            asked.append(settings)
            on_step(0, 1, None)
            return {
                "summary": [{"method": "fisedit", "IoU": "0.5"}],
                "classes": [],
                "calibration": [],
                "notes": ["a note"],
            }

        monkeypatch.setattr(mask_quality, "measure_mask_quality", measure)
        words = (
            "masks",
            "--edits",
            3,
            "--num-inference-steps",
            2,
            "--guidance-scale",
            2,
            "--seed",
            "reported",
        )
        run = study(*words, "--output", "masks.json")
        assert run.status == 0 and "fisedit" in run.out and run.out.endswith("note: a note\n")
        (settings,) = asked
        assert (settings.edits, settings.num_inference_steps, settings.guidance_scale) == (3, 2, 2.0)
        written = json.loads((tmp_path / "masks.json").read_text())
        assert written["summary"] == [{"method": "fisedit", "IoU": "0.5"}] and "environment" in written
        assert json.loads(study(*words, "--json").out)["notes"] == ["a note"]

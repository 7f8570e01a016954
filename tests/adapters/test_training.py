"""Training an adapter: a base that stays as it is, runs that go on exactly, folders that are checked first."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers import DDPMScheduler
from PIL import Image
from safetensors.torch import save_file

from fisedit.adapters.insertion_points import inject_maps
from fisedit.adapters.row_column.checkpoints import fresh_adapter, load_adapter
from fisedit.adapters.training import run as training_run
from fisedit.adapters.training.denoising import ConditionedUNet, denoising_loss, level_weights, region_weights
from fisedit.adapters.training.draws import draw_rows, generator_for
from fisedit.adapters.training.examples import TrainingExamples
from fisedit.adapters.training.log import append_row, truncate_after
from fisedit.adapters.training.run import TrainingRun, train_adapter
from fisedit.adapters.training.triples import read_triples
from fisedit.errors import AdapterError, InputError, NumericsError
from tests.support.adapters import lively
from tests.support.folders import half, picture
from tests.support.pipelines import build_pipeline
from tests.support.training import SETTINGS, SIDE

KILLED = """
import os, signal, sys
from pathlib import Path
from fisedit.adapters.training.run import train_adapter
from fisedit.adapters.training.triples import read_triples
from tests.support.training import SETTINGS
from dataclasses import replace
folder, output, model = map(Path, sys.argv[1:])
replaced = Path.replace
def replace_or_die(self, target):
    if Path(target).name == "checkpoint.pt" and Path(target).exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return replaced(self, target)
Path.replace = replace_or_die
train_adapter(read_triples(folder), output, replace(SETTINGS, model=str(model)), device="cpu")
"""
"""Trains, and is killed where the second checkpoint is written but not yet in its place."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Six triples; all but the first have a region, none a control."""
    folder = tmp_path_factory.mktemp("triples")
    for n in range(6):
        picture(folder / "target" / f"{n}.png", n, (SIDE, SIDE))
        (folder / "target" / f"{n}.txt").write_text(("a cat on a beach", "the red house in snow")[n % 2])
        picture(folder / "reference" / f"{n}.jpg", 10 + n, (80, 40))
        if n:
            half(folder / "region" / f"{n}.png", (SIDE, SIDE))
    return folder


@pytest.fixture
def pipe():
    return build_pipeline("demo")


@pytest.fixture
def begun(folder, pipe, tmp_path):
    """A run of the folder: begun(output, changed settings)."""

    def begin(output: str = "run", **changes: object) -> TrainingRun:
        AcceleratorState._reset_state(reset_partial_state=True)
        settings = replace(SETTINGS, **changes)
        (tmp_path / output).mkdir(exist_ok=True)
        accelerator = Accelerator(
            cpu=True,
            mixed_precision=settings.mixed_precision,
            gradient_accumulation_steps=settings.accumulate,
        )
        return TrainingRun(pipe, read_triples(folder), tmp_path / output, settings, accelerator)

    return begin


def weights(module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(ours, theirs) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def inputs(pipe, batch: int = 2) -> tuple[torch.Tensor, ...]:
    """Noised latents, steps, text, references, the text of no words."""
    text = pipe.encode_prompt(["a cat", "a dog"][:batch], "cpu", 1, False)[0]
    empty_prompt = pipe.encode_prompt("", "cpu", 1, False)[0]
    return (
        torch.randn(batch, 4, 8, 8),
        torch.tensor([300, 700][:batch]),
        text,
        torch.randn(batch, 4, 8, 8),
        empty_prompt,
    )


@pytest.mark.parametrize("family", ["v1", "v2", "v3", "v5", "v5b"])
def test_step_zero_is_the_base(pipe, family):
    given = inputs(pipe)
    with torch.no_grad():
        assert torch.equal(
            ConditionedUNet(pipe.unet, fresh_adapter(pipe.unet, family, 4))(*given), pipe.unet(*given[:3]).sample
        )
        assert not torch.equal(
            ConditionedUNet(pipe.unet, lively(pipe.unet, family))(*given), pipe.unet(*given[:3]).sample
        )


@pytest.mark.slow
def test_samples_before_the_first_step_are_the_base_s(begun):
    sheet, _ = (run := begun()).samples.report(run.ema_adapter, run.scheduler, run.settings)
    cells = np.asarray(sheet).reshape(2, SIDE, 4, SIDE, 3)
    assert np.array_equal(cells[:, :, 2], cells[:, :, 3])
    assert np.array_equal(cells[0, :, 0], np.asarray(Image.open(run.samples._examples.triples[0].target)))


def test_only_the_adapter_learns(begun, pipe):
    run = begun()
    parts = {name: weights(getattr(pipe, name)) for name in ("unet", "vae", "text_encoder")}
    before = weights(run.adapter)
    while run.step < run.settings.steps:
        run.advance()
    assert all(same(weights(getattr(pipe, name)), kept) for name, kept in parts.items())
    assert not any("forward" in module.__dict__ for module in pipe.unet.modules())
    after = weights(run.adapter)
    assert all(not torch.equal(before[name], after[name]) for name, _ in run.adapter.named_parameters())


def test_the_loss_falls(begun):
    run = begun(steps=30, batch=4, dropout=0.0, held_out=0, save_every=30)
    found = []
    while run.step < 30:
        found.append(float(run._loss(0).detach()))  # of the same pictures and noise, as the weights change
        run.advance()
    assert found[-1] < 0.9 * found[0]


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_exactly(begun, tmp_path):
    whole, stopped = begun("whole"), begun("stopped")
    for run, steps in ((whole, 4), (stopped, 3)):
        for _ in range(steps):
            run.advance()
    resumed = begun("stopped")
    resumed.resume()
    assert resumed.step == 2
    while resumed.step < 4:
        resumed.advance()
    assert same(weights(resumed.adapter), weights(whole.adapter))
    assert same(weights(resumed.ema_adapter), weights(whole.ema_adapter))
    logs = [(tmp_path / name / "log.csv").read_text().splitlines() for name in ("whole", "stopped")]
    whole_log, resumed_log = ([line.split(",")[:1] + line.split(",")[2:] for line in log] for log in logs)
    assert whole_log == resumed_log


def test_maps_that_are_kept_are_those_that_are_read(begun):
    """Dropped references too, on a second pass over the same triples."""
    read, kept = (begun(name, keep_maps=name == "kept", dropout=0.5) for name in ("read", "kept"))
    for passed in range(4):
        torch.testing.assert_close(kept._loss(passed), read._loss(passed))
    assert len(kept.examples._reference_maps) == 1 + len(kept.examples)
    for run in (read, kept):
        run.advance()
    torch.testing.assert_close(weights(kept.adapter), weights(read.adapter), rtol=1e-3, atol=1e-5)


def test_accumulated_passes_count_as_one_batch(begun):
    """Without dropped pictures, two passes of two pictures descend along the mean of both."""
    run = begun(accumulate=2, dropout=0.0)
    run.model.zero_grad()
    wanted = (run._loss(0) + run._loss(1)) / 2
    grads = torch.autograd.grad(wanted, run.adapter.blocks["up_1"].proj.weight)[0]
    seen = []
    run.adapter.blocks["up_1"].proj.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    run.advance()
    torch.testing.assert_close(seen[-1], grads, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_the_average(begun, tmp_path):
    """Decay (1 + n) / (10 + n) until it is the wanted one, as diffusers' EMAModel warms up."""
    run = begun()
    name, average = "reference_modules_up.1.proj.weight", None
    for n in range(4):
        run.advance()
        now = run.adapter.state_dict()[name]
        decay = min(SETTINGS.ema, (1 + n) / (10 + n)) if n else 0.0
        average = now.clone() if average is None else decay * average + (1 - decay) * now
    torch.testing.assert_close(run.ema_adapter.state_dict()[name], average)
    assert not torch.equal(run.ema_adapter.state_dict()[name], run.adapter.state_dict()[name])
    saved = load_adapter(tmp_path / "run" / "adapter")
    assert same(weights(saved), weights(run.ema_adapter))
    assert saved.family.name == "v5"


def test_region_weights(begun):
    run = begun(dropout=0.0)
    batch = run.examples.batch([1, 2])  # the left halves count more
    assert torch.equal(batch.regions[..., :4], torch.ones(2, 1, 8, 4))
    assert torch.equal(batch.regions[..., 4:], torch.zeros(2, 1, 8, 4))

    def loss(weight: float, batch=batch) -> float:
        settings = replace(run.settings, region_weight=weight)
        noise = generator_for(0, 0, torch.device("cpu"))
        with torch.no_grad():
            return float(denoising_loss(run.model, run.scheduler, batch, run.examples.empty_prompt, settings, noise))

    outside_taps, plain, heavy = loss(0), loss(1), loss(5)
    inside = plain - outside_taps
    assert inside > 0.1 * plain
    assert heavy == pytest.approx(outside_taps + 5 * inside, rel=1e-5)
    nowhere = replace(batch, regions=torch.zeros(2, 1, 8, 8))
    assert loss(5, nowhere) == pytest.approx(plain, rel=1e-6)
    assert torch.equal(region_weights(torch.tensor([0.0, 0.5, 1.0]), 3), torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_noise_levels_count_as_min_snr_says(pipe, prediction):
    scheduler = DDPMScheduler.from_config(pipe.scheduler.config, prediction_type=prediction)
    steps = torch.tensor([10, 500, 990])
    kept = scheduler.alphas_cumprod[steps]
    ratio = kept / (1 - kept)
    wanted = ratio.clamp(max=5) / (ratio + (prediction == "v_prediction"))
    torch.testing.assert_close(level_weights(scheduler, steps, 5.0).flatten(), wanted)
    assert torch.equal(level_weights(scheduler, steps, 0).flatten(), torch.ones(3))


def test_dropped_pictures_are_shown_nothing(begun):
    run = begun()
    batch = run.examples.batch([0, 1])
    seen = []

    def model(noised, steps, text, references, *_):
        seen.append((text, references))
        return torch.zeros_like(noised)

    for share in (0.0, 1 - 1e-9):
        settings = replace(run.settings, dropout=share)
        noise = generator_for(0, 0, torch.device("cpu"))
        denoising_loss(model, run.scheduler, batch, run.examples.empty_prompt, settings, noise)
    assert torch.equal(seen[0][0], batch.text)
    assert torch.equal(seen[0][1], batch.references)
    assert torch.equal(seen[1][0], run.examples.empty_prompt.expand(2, -1, -1))
    assert not seen[1][1].any()


def test_controls_are_added(pipe, folder, tmp_path):
    control = {"down_0": torch.randn(pipe.unet.config.block_out_channels[0], 4, 4)}
    save_file(control, tmp_path / "control.safetensors")
    first, second = read_triples(folder)[:2]
    examples = TrainingExamples(pipe, [replace(first, control=tmp_path / "control.safetensors"), second], SIDE)
    batch = examples.batch([0, 1])
    assert torch.equal(batch.controls["down_0"], torch.stack([control["down_0"], torch.zeros_like(control["down_0"])]))
    given = inputs(pipe)
    with torch.no_grad():
        ours = ConditionedUNet(pipe.unet, fresh_adapter(pipe.unet, "v5", 4))(*given, batch.controls)
        with inject_maps(pipe.unet, controls=batch.controls):
            assert torch.equal(ours, pipe.unet(*given[:3]).sample)
    save_file({"down_0": torch.zeros(3, 4, 4)}, tmp_path / "control.safetensors")
    with pytest.raises(InputError, match=r"got down_0 \[3, 4, 4\]"):
        examples.batch([0])
    (tmp_path / "control.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match=r"whole \.safetensors file"):
        examples.batch([0])


@pytest.mark.slow
def test_gradient_checkpointing_descends_alike(begun, pipe):
    found = []
    for lean in (False, True):
        run = begun(str(lean), gradient_checkpointing=lean)
        assert pipe.unet.is_gradient_checkpointing == lean
        run.advance()
        run.advance()
        found.append(weights(run.adapter))
    torch.testing.assert_close(*found)


@pytest.mark.slow
def test_mixed_precision(begun):
    exact = float(begun("exact")._loss(0).detach())
    run = begun("mixed", mixed_precision="bf16")
    assert float(run._loss(0).detach()) == pytest.approx(exact, rel=0.05)
    run.advance()
    run.advance()
    assert all(tensor.dtype == torch.float32 for tensor in run.adapter.parameters())


def test_an_adapter_to_start_from_is_asked_for_offline(folder, pipe, tmp_path, monkeypatch):
    def load_adapter(source, **options):
        raise AdapterError(f"{source} {options}")

    monkeypatch.setattr(training_run, "load_adapter", load_adapter)
    settings, accelerator = replace(SETTINGS, start="some/body"), Accelerator(cpu=True)
    with pytest.raises(AdapterError, match=r"some/body \{'local_files_only': True\}"):
        TrainingRun(pipe, read_triples(folder), tmp_path, settings, accelerator, local_files_only=True)


@pytest.mark.slow
def test_a_run_from_an_adapter(begun, tmp_path, pipe):
    first = begun("first")
    for _ in range(2):
        first.advance()
    second = begun("second", start=str(tmp_path / "first" / "adapter"))
    assert same(weights(second.adapter), weights(first.ema_adapter))
    with pytest.raises(AdapterError, match="not there"):
        begun("third", start=str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_a_run_of_other_settings(begun):
    run = begun()
    run.advance()
    run.advance()
    with pytest.raises(InputError, match=r"a run with batch 2, got 3"):
        begun(batch=3).resume()
    begun(steps=9, log_every=7, mixed_precision="bf16").resume()


@pytest.mark.parametrize("device", ["nonsense", "cuda:7"])
def test_a_device_that_is_not_here(folder, model, tmp_path, device):
    settings = replace(SETTINGS, model=str(model))
    with pytest.raises(InputError, match=r"device (must be cpu|cuda:7 is not on this machine)"):
        train_adapter(read_triples(folder), tmp_path / "run", settings, device=device)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_no_number(begun):
    run = begun()
    with torch.no_grad():
        run.adapter.blocks["up_1"].proj.weight.fill_(float("inf"))
    with pytest.raises(NumericsError, match="the loss is no number at step 1"):
        run.advance()


def test_every_pass_shows_every_example_once():
    rows = draw_rows(3, 5, 0, 15)
    assert [sorted(rows[n : n + 5]) for n in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert len({tuple(rows[n : n + 5]) for n in (0, 5, 10)}) > 1
    assert [draw_rows(3, 5, start, 4) for start in (0, 4, 8)] == [rows[:4], rows[4:8], rows[8:12]]


def test_lines_past_the_checkpoint_are_taken_back(tmp_path):
    log = tmp_path / "log.csv"
    for step in (1, 2, 3):
        append_row(log, {"step": step, "loss": 0.5})
    with log.open("a") as file:
        file.write("4,0.")
    truncate_after(log, 2)
    assert log.read_text().splitlines() == ["step,loss", "1,0.5", "2,0.5"]


class TestFolders:
    @pytest.fixture
    def own(self, tmp_path) -> Path:
        """A folder of two triples, to be spoilt."""
        for n in range(2):
            picture(tmp_path / "target" / f"{n}.png", n)
            (tmp_path / "target" / f"{n}.txt").write_text("a cat")
            picture(tmp_path / "reference" / f"{n}.png", n)
        return tmp_path

    def test_a_whole_one(self, own):
        half(own / "region" / "1.png")
        first, second = read_triples(own)
        assert (first.name, first.prompt, first.region, first.control) == ("0", "a cat", None, None)
        assert second.region == own / "region" / "1.png"

    def test_no_pictures(self, tmp_path):
        with pytest.raises(InputError, match=r"no pictures in .*target"):
            read_triples(tmp_path)

    @pytest.mark.parametrize(
        ("file", "data", "said"),
        [
            ("reference/1.png", None, "has no .*reference/1"),
            ("target/1.txt", None, "got no .*target/1.txt"),
            ("target/1.txt", b"  \n", "must say what the target shows, got an empty file"),
            ("target/1.txt", b"\xff\xfe", "must be UTF-8"),
            ("reference/1.png", b"no picture", "reference/1.png must be a PNG"),
            ("target/1.png", b"\x89PNG\r\n\x1a\n", "target/1.png must be"),
            ("target/1.jpg", b"", "must hold one picture of a name, got 1.jpg and 1.png"),
        ],
    )
    def test_a_spoilt_one(self, own, file, data, said):
        (own / file).unlink(missing_ok=True)
        if data is not None:
            (own / file).write_bytes(data)
        with pytest.raises(InputError, match=said) as caught:
            read_triples(own)
        assert "\n" not in str(caught.value)

    def test_too_few_to_hold_out(self, own):
        assert len(read_triples(own, 1)) == 2
        with pytest.raises(InputError, match="got 2 of 2"):
            read_triples(own, 2)

    def test_nothing_loads_before_it_is_checked(self, own):
        (own / "reference" / "1.png").unlink()
        arguments = ["fisedit", "train-adapter", str(own), str(own / "run"), "--held-out", "0"]
        code = (
            f"import sys\nsys.argv = {arguments}\nfrom fisedit.cli import main\n"
            "try: main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["2", "False"]
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("error[input]")
        assert not (own / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"steps": 10**400}, "steps must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"region_weight": float("nan")}, "region_weight must be at least 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
        ({"size": 100}, "size must be a multiple of 8"),
        ({"mixed_precision": "fp8"}, "mixed_precision must be one of"),
    ],
)
def test_settings_that_cannot_be(changes, said):
    with pytest.raises(InputError, match=said):
        replace(SETTINGS, **changes)


@pytest.mark.slow
def test_a_killed_run_leaves_a_whole_checkpoint(folder, model, tmp_path, fisedit):
    killed = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(folder), str(killed), str(model)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    options = {
        name.replace("_", "-"): value for name, value in vars(SETTINGS).items() if name not in ("start", "model")
    }
    del options["gradient-checkpointing"], options["keep-maps"]
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    AcceleratorState._reset_state(reset_partial_state=True)
    for output in (killed, tmp_path / "whole"):
        done = fisedit("train-adapter", folder, output, "--model", model, "--device", "cpu", *given)
        assert done.status == 0, done.err
    assert same(*(weights(load_adapter(output / "adapter")) for output in (killed, tmp_path / "whole")))
    assert len((killed / "log.csv").read_text().splitlines()) == 1 + SETTINGS.steps

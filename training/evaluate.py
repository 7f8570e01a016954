"""`python -m training.evaluate MODEL`: how good a demo model is, as one table, one JSON file and one contact sheet."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, StableDiffusionPipeline

from benchmarks.classifier import SceneClassifier, classify, frechet_distance
from benchmarks.scenes.drawing import Bytes
from benchmarks.scenes.prompts import describe_scene
from benchmarks.scenes.scene import Scene
from fisedit.adapters.training.draws import generator_for
from training.attention import measure_localisation
from training.autoencoder import psnr, reconstruct
from training.classifier import trained_classifier
from training.config import Scenes, load_config
from training.latents import encode_scenes
from training.pictures import draw_pictures, sample_unseen, save_sheet
from training.train import HERE

_PROMPT_SEED, _BATCH = 2_000_000, 16
_COUNTS = {1: 100, 2: 100, 3: 100}
_EDITS = ("a cat and a cake on a beach", "a dog and a cake on a beach", "a cat wearing a crown and a cake on a beach",
          "a cat and a red car on a beach", "a cat and a cake in the snow")  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How pictures are made for the figures."""

    steps: int
    guidance: float


def evaluation_scenes(objects: Sequence[str] = ()) -> list[Scene]:
    """300 scenes of these objects (of any, if there are none), with one, two and three of them.

    Each shows a combination of words that is held out of training.
    """
    scenes = []
    for count, number in _COUNTS.items():
        for index in range(number):
            sky = count > 1 and index % 4 == 0
            rng = np.random.default_rng((_PROMPT_SEED, count, index))
            scenes.append(sample_unseen(rng, objects, count - sky, sky))
    return scenes


def draw_prompts(pipeline: StableDiffusionPipeline, prompts: list[str], sampling: Sampling, seed: int) -> Bytes:
    """One picture for each prompt, picture i from noise seeded by (seed, i): uint8 [N, S, S, 3]."""
    drawn = []
    for start in range(0, len(prompts), _BATCH):
        part = prompts[start : start + _BATCH]
        noise = [generator_for(seed, start + row, torch.device("cpu")) for row in range(len(part))]
        made = pipeline(part, num_inference_steps=sampling.steps, guidance_scale=sampling.guidance, generator=noise,
                        output_type="np")  # fmt: skip
        drawn.append(np.round(made.images * 255).astype(np.uint8))
    return np.concatenate(drawn)


def count_objects(classifier: SceneClassifier, scenes: list[Scene], pictures: Bytes) -> dict[str, float]:
    """Shares of named objects that are seen, by how many were named, and of backgrounds that are right."""
    seen = classify(classifier, pictures)
    found = {}
    for count in _COUNTS:
        rows = [row for row, scene in enumerate(scenes) if len(scene.objects) == count]
        found[f"objects_present_{count}"] = float(
            np.mean([there for row in rows for there in seen.objects_found(row, scenes[row])])
        )
    adjectives = [right for row, scene in enumerate(scenes) for right in seen.adjectives_correct(row, scene)]
    found["adjectives_right"], found["adjectives"] = float(np.mean(adjectives)), len(adjectives)
    found["all_present"] = float(np.mean([all(seen.objects_found(row, scene)) for row, scene in enumerate(scenes)]))
    found["unnamed_per_picture"] = float(np.mean([seen.extra_objects(row, scene) for row, scene in enumerate(scenes)]))
    found["background_right"] = float(
        np.mean([seen.background_correct(row, scene) for row, scene in enumerate(scenes)])
    )
    return found


def contact_sheet(
    pipeline: StableDiffusionPipeline, pictures: Bytes, sampling: Sampling, seed: int, path: Path
) -> None:
    """Eight pictures for each number of objects, then one seed under prompts that differ in a word."""
    starts = np.cumsum([0, *_COUNTS.values()])[:-1]
    rows = [pictures[start : start + 8] for start in starts]
    for offset in range(2):
        noise = [generator_for(seed, 100 + offset, torch.device("cpu")) for _ in _EDITS]
        made = pipeline(list(_EDITS), num_inference_steps=sampling.steps, guidance_scale=sampling.guidance,
                        generator=noise, output_type="np")  # fmt: skip
        edited = np.round(made.images * 255).astype(np.uint8)
        rows.append(np.concatenate([edited, np.full_like(pictures[:3], 255)]))
    save_sheet(path, rows)


def evaluate(folder: Path, kept: Path, sampling: Sampling, seed: int, shape: Scenes) -> dict[str, float]:
    """All figures of the model in `folder`; `kept` holds the classifier and receives the contact sheet.

    Prompts are of the objects that the model was trained on, in combinations that it was not.
    """
    side = shape.side
    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(disable=True)
    autoencoder = cast(AutoencoderKL, pipeline.vae)
    classifier, figures = trained_classifier(kept, seed, side)
    scenes = evaluation_scenes(shape.objects)
    pictures = draw_prompts(pipeline, [describe_scene(scene).text for scene in scenes], sampling, seed)
    held_out = draw_pictures(_PROMPT_SEED + 1, 64, side, shape.objects).pixels
    latents = encode_scenes(autoencoder, _PROMPT_SEED + 1, 64, objects=shape.objects)
    localisation = measure_localisation(pipeline, latents, seed)
    contact_sheet(pipeline, pictures, sampling, seed, kept / "contact.png")
    figures = {f"classifier_{name}": value for name, value in figures.items()}
    figures |= count_objects(classifier, scenes, pictures)
    drawn = [draw_pictures(_PROMPT_SEED + 2 + i, len(scenes), side, shape.objects).pixels for i in range(2)]
    figures |= {"frechet_distance": frechet_distance(classifier, pictures, drawn[0])}
    figures |= {"frechet_distance_of_drawn_scenes": frechet_distance(classifier, drawn[1], drawn[0])}
    figures |= {"autoencoder_psnr": psnr(reconstruct(autoencoder, held_out), held_out)}
    return figures | {"attention_auc": localisation.auc, "attention_iou": localisation.iou}


def main() -> int:
    """Parses the command line and evaluates."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=Path("weights/demo"))
    parser.add_argument("--config", type=Path, default=HERE / "demo.toml")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="where classifier and sheet are kept")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=None)
    chosen = parser.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    config, sampling = load_config(chosen.config), Sampling(chosen.steps, chosen.guidance)
    figures = evaluate(chosen.model, chosen.folder, sampling, config.seed, config.scenes)
    figures |= {"steps": sampling.steps, "guidance": sampling.guidance}
    for name, value in figures.items():
        print(f"{name:34} {value:.4g}")
    (chosen.folder / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

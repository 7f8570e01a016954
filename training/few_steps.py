"""`python -m training.few_steps MODEL LORA`: what a distilled LoRA draws in few steps, beside the model in many.

Both draw the 300 prompts of `training.evaluate` from the same noise, and the model's own classifier looks at them.
"""

import argparse
import json
from pathlib import Path

import torch
from diffusers import DPMSolverMultistepScheduler, LCMScheduler, StableDiffusionPipeline

from benchmarks.classifier import SceneClassifier, load_classifier
from benchmarks.quality.edit_quality import CLASSIFIER_FILE
from benchmarks.scenes.prompts import describe_scene
from training.config import load_config
from training.evaluate import Sampling, count_objects, draw_prompts, evaluation_scenes
from training.pictures import save_sheet
from training.train import HERE

MANY = Sampling(steps=25, guidance=4.0)
_SEED, _SHOWN = 1, 8


def compare(model: Path, lora: Path, steps: list[int], threads: int | None = None) -> dict[str, dict[str, float]]:
    """Figures of `training.evaluate.count_objects` by name of the run.

    Args:
        model: folder of the model.
        lora: folder of the LoRA, which gets figures.json and contact.jpg: eight pictures of each run a row.
        steps: numbers of LCM's steps.
        threads: of the CPU; None for torch's own number.
    """
    if threads:
        torch.set_num_threads(threads)
    pipeline = StableDiffusionPipeline.from_pretrained(model, torch_dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    scenes = evaluation_scenes(load_config(HERE / "demo-cpu.toml").scenes.objects)
    prompts = [describe_scene(scene).text for scene in scenes]
    classifier: SceneClassifier = load_classifier(model / CLASSIFIER_FILE)
    schedule = pipeline.scheduler.config
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(schedule)
    pictures = {f"{MANY.steps} steps": draw_prompts(pipeline, prompts, MANY, _SEED)}
    pipeline.load_lora_weights(lora)
    pipeline.scheduler = LCMScheduler.from_config(schedule)
    for number in steps:
        pictures[f"{number} steps, {lora.name}"] = draw_prompts(pipeline, prompts, Sampling(number, 1.0), _SEED)
    save_sheet(lora / "contact.jpg", [drawn[:: len(prompts) // _SHOWN][:_SHOWN] for drawn in pictures.values()])
    figures = {name: count_objects(classifier, scenes, drawn) for name, drawn in pictures.items()}
    (lora / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return figures


def main() -> None:
    """Parses the command line, compares and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m training.few_steps", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=Path("weights/demo"))
    parser.add_argument("lora", type=Path, nargs="?", default=Path("weights/demo-fast"))
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 8], help="numbers of LCM's steps")
    parser.add_argument("--threads", type=int, default=None)
    chosen = parser.parse_args()
    for name, figures in compare(chosen.model, chosen.lora, chosen.steps, chosen.threads).items():
        print(name, *(f"{key} {value:.3g}" for key, value in figures.items()), sep=", ")


if __name__ == "__main__":
    main()

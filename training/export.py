"""`python -m training.export OUT`: the averaged models of a run as one Stable Diffusion folder in 16 bit.

`--words-of MODEL` has the tokenizer spell all words but those that MODEL's knows: `fisedit bench` then measures both on
the same edits.
"""

import argparse
import json
import sys
from collections.abc import Collection
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from transformers import CLIPTokenizer

from benchmarks.scenes.prompts import prompt_words
from benchmarks.scenes.vocabulary import OBJECT
from fisedit.models.vocabulary import VOCABULARY_FILE
from training.autoencoder import AutoencoderStage, DecoderStage
from training.config import Config, ConfigError, load_config
from training.denoiser import DenoiserStage
from training.models import build_pipeline, build_text_encoder, build_unet, export
from training.tokens import build_tokenizer, is_one_token
from training.train import CLOSEUPS, HERE, MODEL, load_autoencoder

_PREFIX = "module."


def load_run(config: Config, folder: Path) -> StableDiffusionPipeline:
    """The pipeline that a run has come to, of whole scenes or else of close-ups; the polished decoder if there is one.

    Raises:
        ConfigError: the autoencoder or the denoiser has no checkpoint yet.
    """
    polished = (folder / DecoderStage.name / MODEL).is_dir()
    autoencoder = load_autoencoder(folder / (DecoderStage if polished else AutoencoderStage).name, torch.device("cpu"))
    paths = [folder / stage / "checkpoint.pt" for stage in (DenoiserStage.name, CLOSEUPS)]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise ConfigError(f"a denoiser checkpoint is needed, found none at {paths[0]}: train that stage first")
    text_encoder, unet = build_text_encoder(config.denoiser), build_unet(config.denoiser, config.scenes.side // 8)
    averaged = torch.load(path, map_location="cpu", weights_only=True)["averaged"]
    for name, model in (("text_encoder", text_encoder), ("unet", unet)):
        start = f"{_PREFIX}{name}."
        model.load_state_dict(
            {key.removeprefix(start): value for key, value in averaged.items() if key.startswith(start)}
        )
    return build_pipeline(autoencoder, text_encoder, unet, config.denoiser.prediction)


def write_vocabulary(objects: Collection[str], folder: Path) -> None:
    """Lists the words of scenes of these objects (of all, if there are none), for what fisedit says of others.

    The summary and examples of a list that is there already stay.
    """
    path = folder / VOCABULARY_FILE
    table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    unseen = OBJECT.keys() - objects if objects else set()
    words = [word for word in prompt_words() if word not in unseen]
    path.write_text(json.dumps(table | {"words": words}, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Parses the command line and exports."""
    parser = argparse.ArgumentParser(prog="python -m training.export", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, default=HERE / "demo.toml")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"))
    parser.add_argument("--words-of", type=Path, metavar="MODEL", help="a diffusers folder")
    chosen = parser.parse_args()
    try:
        config = load_config(chosen.config)
        pipeline = load_run(config, chosen.folder)
        if chosen.words_of:
            other = CLIPTokenizer.from_pretrained(chosen.words_of / "tokenizer")
            pipeline.tokenizer = build_tokenizer(tuple(word for word in prompt_words() if is_one_token(word, other)))
        export(pipeline, chosen.out)
        write_vocabulary(config.scenes.objects, chosen.out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

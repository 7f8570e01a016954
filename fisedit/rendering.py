"""How a picture is made: prompt encoded, latents sampled or inverted, decoded. One run in, trajectory and picture out.

Knows an engine and an autoencoder; neither history nor where masks come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fisedit.models.injection import exclusive
from fisedit.models.prompt_weighting import parse
from fisedit.models.vae import encode, preview
from fisedit.sampling.inversion import noised
from fisedit.sampling.trajectory import Beginning
from fisedit.sparse.vae_decode import DecoderRecord, composite, decode
from fisedit.values import Inversion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from PIL.Image import Image
    from torch import Tensor

    from fisedit.history import EditResult
    from fisedit.masking.drift_check import DriftCheck
    from fisedit.models.stopwatch import Stopwatch
    from fisedit.sampling.denoise import Engine
    from fisedit.sampling.trajectory import AttentionInjection, Trajectory
    from fisedit.values import BoolGrid, EditScript, GenerationConfig, OnStep


@dataclass(eq=False)
class Text:
    """A prompt, encoded: embeddings [B, T, D] and, as they are needed, every cross-attention's keys and values."""

    embeddings: Tensor
    cache: dict[str, Tensor]
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Run:
    """One call of the editor: what is to be made, from what, the clock, and who is told of its steps."""

    config: GenerationConfig
    parent: EditResult | None
    script: EditScript
    watch: Stopwatch
    on_step: OnStep | None = None


@dataclass(frozen=True, eq=False)
class RenderOutput:
    """A canvas, RGB, with its trajectory and what its decoder remembers."""

    trajectory: Trajectory
    image: Image
    decoder: DecoderRecord

    @property
    def own_bytes(self) -> int:
        """Bytes of recorded features held by it alone."""
        return self.trajectory.own_bytes + self.decoder.own_bytes


class Renderer:
    """The ways to make a picture on one engine.

    Args:
        budget: bytes of features that a source may have on the device, and what captured graphs gather for an edit;
            None is no limit.
    """

    def __init__(self, engine: Engine, budget: int | None = None) -> None:
        self.engine, self.budget = engine, budget

    def text(self, run: Run) -> Text:
        """Encode the prompt; says so where the encoder cannot read all of it."""
        pipe = self.engine.pipe
        tokenizer = pipe.tokenizer
        with run.watch.station("text"), torch.inference_mode(), exclusive(pipe.text_encoder, tokenizer):
            embeddings = self.engine.encode(run.config)
            limit, prompts = tokenizer.model_max_length, {"prompt": run.config.prompt}
            if run.config.guided:
                prompts["negative prompt"] = run.config.negative_prompt
            notes = []
            for name, prompt in prompts.items():
                length = len(tokenizer(parse(prompt).text, truncation=False, verbose=False).input_ids)
                if length > limit:
                    notes.append(f"the {name} has {length} tokens, and only the first {limit} are read; shorten it")
            return Text(embeddings, {}, tuple(notes))

    def dense(
        self, run: Run, text: Text, pin: tuple[BoolGrid, Trajectory] | None = None, start: int = 0
    ) -> RenderOutput:
        """Every row of every step from `start` on; `pin` is a grid [h, w] and the trajectory that stays outside it."""
        with run.watch.station("denoise"):
            trajectory = self.engine.record(
                run.config, text.embeddings, self._watch(run), pin, start=start, budget=self.budget
            )
        with run.watch.station("decode"), torch.inference_mode():
            image, decoder = decode(self.engine.pipe.vae, trajectory.latents[-1])
            if run.parent and pin:
                image = composite(run.parent.canvas, image, pin[0])
            return RenderOutput(trajectory, image, decoder)

    def plain(self, run: Run, text: Text, source: Trajectory) -> Image:
        """What a dense run makes from where a trajectory begins, nothing recorded."""
        steps = run.config.num_inference_steps
        with run.watch.station("denoise"):
            latents = self.engine.sample(run.config, text.embeddings, source, steps, self._watch(run))[-1]
        with run.watch.station("decode"), torch.inference_mode():
            return decode(self.engine.pipe.vae, latents)[0]

    def sparse(
        self,
        run: Run,
        text: Text,
        source: tuple[Trajectory, DecoderRecord],
        grid: BoolGrid,
        growth: tuple[int, ...],
        check: DriftCheck | None = None,
        structure: AttentionInjection | None = None,
        start: int = 0,
    ) -> RenderOutput:
        """The rows of a mask [h, w] and so many cells around it at each step from `start` on, over its parent.

        Raises:
            DriftDetected: `check` found the mask too small.
        """
        assert run.parent is not None
        over, record = source
        with run.watch.station("denoise"):
            trajectory = self.engine.replay(
                over,
                run.config,
                text.embeddings,
                text.cache,
                grid,
                growth,
                self._watch(run),
                check,
                structure,
                start,
                self.budget,
            )
        with run.watch.station("decode"), torch.inference_mode():
            vae, cache = self.engine.pipe.vae, self.engine.graphs.cache
            return RenderOutput(trajectory, *cache.decode(vae, trajectory.latents[-1], grid, record, run.parent.canvas))

    def many(
        self,
        runs: Sequence[Run],
        texts: Sequence[Text],
        source: tuple[Trajectory, DecoderRecord],
        grids: Sequence[BoolGrid],
        growth: tuple[int, ...],
    ) -> list[RenderOutput] | None:
        """`sparse` for several edits of one picture in one batch, by captured graphs; None where that cannot be."""
        over, record = source
        edits = [
            Beginning(run.config, text.embeddings, text.cache, grid)
            for run, text, grid in zip(runs, texts, grids, strict=True)
        ]
        with runs[0].watch.station("denoise"):
            trajectories = self.engine.replay_many(over, edits, growth, self._watch(runs[0]), self.budget)
        if trajectories is None:
            return None
        vae, decode_one, made = self.engine.pipe.vae, self.engine.graphs.cache.decode, []
        for run, trajectory, grid in zip(runs, trajectories, grids, strict=True):
            assert run.parent is not None
            with run.watch.station("decode"), torch.inference_mode():
                made.append(
                    RenderOutput(trajectory, *decode_one(vae, trajectory.latents[-1], grid, record, run.parent.canvas))
                )
        return made

    def opened(self, run: Run, text: Text, picture: Image) -> RenderOutput:
        """The trajectory that a picture might have had."""
        config, pipe, watch = run.config, self.engine.pipe, self._watch(run)
        with run.watch.station("encode"):
            latents = encode(pipe.vae, picture)
        with run.watch.station("denoise"):
            if config.inversion is Inversion.DDPM:
                trajectory = self.engine.record(
                    config, text.embeddings, watch, path=noised(pipe, config, latents), budget=self.budget
                )
            else:
                trajectory = self.engine.invert(config, text.embeddings, latents, watch, self.budget)
        with run.watch.station("decode"), torch.inference_mode():
            return RenderOutput(trajectory, picture, decode(pipe.vae, latents)[1])

    def _watch(self, run: Run) -> Callable[[int, int, Tensor], None]:
        def watch(i: int, n: int, estimate: Tensor) -> None:
            if run.on_step is not None:
                run.on_step(i, n, preview(self.engine.pipe.vae, estimate))

        return watch

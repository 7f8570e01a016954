"""Two ways to write a picture's story: densely, or sparsely over another story.

Knows the UNet, samplers and grids; knows nothing about masks from words, pictures or history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fisedit.adapters.conditioning import guided
from fisedit.adapters.references import References, level_grids
from fisedit.adapters.sparse_row_column import remembered
from fisedit.models.prompt_weighting import embeddings, parse
from fisedit.sampling.inversion import inverted
from fisedit.sampling.linear_scheduler import Coefficients, LinearSampler, coefficients
from fisedit.sampling.scheduler import Sampler, mask_steps, pinned
from fisedit.sampling.trajectory import Story, kept_steps
from fisedit.sparse.executor import Executor, mask_queries
from fisedit.sparse.feature_cache import Shift, StepFeatures, StepMaps, StepShifted, completed, shifted
from fisedit.sparse.modules import Role, text_keys
from fisedit.sparse.stepping import Batch, Captured, Graphs, Work
from fisedit.sparse_kernels.dilation import dilate
from fisedit.sparse_kernels.row_plan import SparsePlan, make_plan
from fisedit.values import WHOLE, Recipe

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

    from fisedit.adapters.conditioning import Guide
    from fisedit.masking.drift_check import Check
    from fisedit.sampling.trajectory import Beginning, Structure
    from fisedit.values import BoolGrid

Watch = Callable[[int, int, Tensor], None]
"""Called before every step with (index, number of steps, estimate of the clean latents [1, 4, h, w])."""


class Engine:
    """A pipeline and its executor; stateless between calls, so that several editors may share it.

    Args:
        graphs: of the pipeline's UNet, if others have some already; None for the default, on CUDA devices.
    """

    def __init__(self, pipe: StableDiffusionPipeline, graphs: Graphs | None = None) -> None:
        self.pipe = pipe
        self.executor = Executor(pipe.unet)
        self.references = References(pipe, self.executor)
        self.graphs = Graphs() if graphs is None else graphs
        self._coefficients: dict[object, tuple[Coefficients, ...] | None] = {}

    @property
    def _levels(self) -> dict[str, int]:
        """Of the sites whose maps sparse steps read."""
        return {site.name: site.level for site in self.executor.sites if site.role is not Role.QUERY}

    def guided(self, recipe: Recipe) -> bool:
        """Whether both branches run; distilled models take guidance as an input instead."""
        return recipe.guided and self.pipe.unet.config.time_cond_proj_dim is None

    def refresh(self) -> None:
        """Take note of LoRAs that came, went or got another scale."""
        if self.executor.refresh():
            self.references.forget()

    def guides(self, recipe: Recipe) -> tuple[Guide, ...]:
        """The adapters at work, with what they read of the recipe's references. Raises AdapterError without them."""
        return self.references.guides(recipe, self.batch(recipe)) if recipe.like else ()

    def remembers(self, story: Story, recipe: Recipe) -> bool:
        """Whether a story recorded what a recipe's adapters saw."""
        return all(remembered(like.adapter, story.features[0]) for like in recipe.like)

    def without(self, source: Story, recipe: Recipe, text: Tensor, step: int) -> Tensor | None:
        """What an edit's branch without words predicts [1, 4, h, w], at the one step where its source found it: the
        first."""
        known = source.known_to(recipe) if step == 0 else None
        return known[1] if known is not None and torch.equal(known[0], text[:1]) else None

    def batch(self, recipe: Recipe) -> int:
        """B, the branches of one evaluation."""
        return 2 if self.guided(recipe) else 1

    def grids(self, recipe: Recipe) -> list[tuple[int, int]]:
        """(height, width) of every level, finest first."""
        return level_grids(recipe, self.executor.depth)

    def sizes(self, recipe: Recipe) -> tuple[int, ...]:
        """Positions of every level, finest first."""
        return tuple(height * width for height, width in self.grids(recipe))

    def sampler(self, recipe: Recipe, source: Story | None = None, *, linear: bool = False) -> Sampler:
        """A fresh run of the recipe's scheduler, with the noise that inversion found for its source.

        Args:
            linear: where its steps are sums, as one that never makes the host wait.
        """
        unet, noises, config = self.pipe.unet, source.noises if source else [], self.pipe.scheduler.config
        rest = recipe, config, unet.config.in_channels, self.executor.device, unet.dtype, noises
        if not linear:
            return Sampler(*rest)
        key = recipe.scheduler, recipe.num_inference_steps, bool(noises), str(config)
        if key not in self._coefficients:
            self._coefficients[key] = coefficients(recipe, config, noisy=bool(noises))
        steps = self._coefficients[key]
        return Sampler(*rest) if steps is None else LinearSampler(steps, *rest)

    def encode(self, recipe: Recipe) -> Tensor:
        """Text embeddings [B, T, D], the negative prompt's first; diffusers' own where nothing is weighted."""
        guided, prompt, against = self.guided(recipe), parse(recipe.prompt), parse(recipe.negative_prompt)
        with self.graphs.ends.reading(self.pipe.text_encoder):
            positive, negative = self.pipe.encode_prompt(
                prompt.text,
                self.executor.device,
                1,
                guided,
                against.text,
                prompt_embeds=embeddings(prompt, self.pipe),
                negative_prompt_embeds=embeddings(against, self.pipe) if guided else None,
            )
        return torch.cat([negative, positive]) if guided else positive

    @torch.inference_mode()
    def record(
        self,
        recipe: Recipe,
        text: Tensor,
        watch: Watch,
        pin: tuple[BoolGrid, Story] | None = None,
        path: Sequence[Tensor] | None = None,
        start: int = 0,
        budget: int | None = None,
    ) -> Story:
        """Sample densely, as diffusers would, and remember everything.

        Over a pinned story the first step runs the branch with words alone, and takes the other from there.

        Args:
            text: embeddings [B, T, D]. watch: called before every step.
            pin: a grid [h, w] and the story that stays outside it, whose first latents are those of this one.
            path: of DDPM inversion, latents before every step and at the end [1, 4, h, w]: the noise that leads from
                each to the next is found.
            start: so many first steps are taken over from the pinned story. budget: bytes of features that may stay on
                the device; those of the steps that do not fit wait in host memory.
        """
        story = Story(recipe)
        sampler = self.sampler(recipe, pin[1] if pin else story)
        keep = _keeper(*pin) if pin else lambda i, latents: latents
        if pin:
            story.take_over(pin[1], start, sampler)
        else:
            story.latents.append(path[0] if path else sampler.latents)
        for i, t in enumerate(sampler.timesteps[start:], start):
            watch(i, len(sampler.timesteps), sampler.estimate)
            raw, maps = self._evaluate(story, sampler, text, i, story.latents[i], pin[1] if pin else None)
            story.predictions.append(self._guide(raw, recipe))
            story.features.append(_placed(maps, len(story.features) - start, budget))
            if path:  # the sampler steps with it, so that rounding never adds up
                story.noises.append(sampler.noise_between(story.predictions[i], t, story.latents[i], path[i + 1]))
            story.latents.append(keep(i + 1, sampler.step(story.predictions[i], t, story.latents[i])))
        return story

    @torch.inference_mode()
    def invert(self, recipe: Recipe, text: Tensor, clean: Tensor, watch: Watch, budget: int | None = None) -> Story:
        """DDIM inversion, and everything remembered on the way: a sampler that passed there would see the same.

        Args:
            text: embeddings [B, T, D]. clean: latents [1, 4, h, w]. watch: called before every step.
            budget: as of `record`.

        Raises:
            InputError, NumericsError: as `inversion.inverted`.
        """
        story, sampler, steps = Story(recipe), self.sampler(recipe), recipe.num_inference_steps

        def look(i: int, latents: Tensor) -> Tensor:
            watch(steps - 1 - i, steps, latents)
            raw, maps = self._evaluate(story, sampler, text, i, latents)
            story.predictions.insert(0, self._guide(raw, recipe))
            story.features.insert(0, _placed(maps, len(story.features), budget))
            return raw[-1:]

        story.latents = inverted(self.pipe, recipe, text[-1:], clean, look)
        return story

    @torch.inference_mode()
    def replay(
        self,
        source: Story,
        recipe: Recipe,
        text: Tensor,
        text_cache: dict[str, Tensor],
        grid: BoolGrid,
        growth: Sequence[int],
        watch: Watch,
        check: Check | None = None,
        structure: Structure | None = None,
        start: int = 0,
        budget: int | None = None,
    ) -> Story:
        """Sample sparsely over a story: compute the grown mask's rows, read the rest, pin what lies outside the mask.

        Args:
            recipe: the source's with the new prompt. text, text_cache: its embeddings, and keys known already.
            grid: booleans [h, w]. growth: latent cells to compute beyond the mask, one number per step. Those that grow
                by WHOLE run dense, and the steps after them read what is recorded shifted by what they found changed.
            check: computes some more cells at one step and looks at them. structure: what is kept of the source's.
            start: so many first steps are taken over. budget: bytes that captured graphs may gather on the device.

        Raises:
            Leak: what `check` found.
        """
        plans = self._plans(grid, growth, check, start)
        kept = self._kept_text(source, text, text_cache, structure) if structure else {}
        guidance = recipe.guidance_scale if self.guided(recipe) else None
        features = list(source.features)
        work = Work(
            plans,
            features,
            source.predictions,
            text,
            text_cache,
            kept,
            structure.steps if structure else 0,
            guidance,
            self.guides(recipe),
            budget,
            mixed=WHOLE in growth[start:],
        )
        ways, why = self.graphs.steps(self.executor, work)
        captured = sum(isinstance(way, Captured) for way in ways.values())
        sampler = self.sampler(recipe, source, linear=bool(captured))
        story = Story(recipe, text=text_cache, captured=captured, uncaptured=why)
        keep = _keeper(grid, source)
        story.take_over(source, start, sampler)
        for i, t in enumerate(sampler.timesteps[start:], start):
            watch(i, len(sampler.timesteps), sampler.estimate)
            made: StepFeatures
            if growth[i] == WHOLE:
                raw, made = self._evaluate(story, sampler, text, i, story.latents[i], source)
                prediction = self._guide(raw, recipe)
                story.shifts.append(Shift.between(source.features[i], made, self._levels))
            else:
                if story.shifts:
                    features[i] = StepShifted(source.features[i], story.shifts[-1])
                x, extra = self._inputs(sampler, recipe, story.latents[i], t)
                prediction, made = ways[i].step(i, x, t, extra)
            story.predictions.append(prediction)
            if check and i == check.step:
                moved = (prediction - source.predictions[i]).float().norm(dim=1)[0].cpu().numpy()
                check.look(moved)
            story.features.append(made)
            story.latents.append(keep(i + 1, sampler.step(prediction, t, story.latents[i])))
        if isinstance(sampler, LinearSampler):
            sampler.check()
        return story

    @torch.inference_mode()
    def replay_many(
        self, source: Story, edits: Sequence[Beginning], growth: Sequence[int], watch: Watch, budget: int | None = None
    ) -> list[Story] | None:
        """`replay` of several edits of one source in one batch, by captured graphs; None where that cannot be.

        Args:
            edits: they agree in everything but prompts and masks. The others as in `replay`.
        """
        recipe = edits[0].recipe
        sampler, graphs = self.sampler(recipe, source, linear=True), self.graphs.of(self.executor)
        if isinstance(graphs, str) or not isinstance(sampler, LinearSampler) or recipe.like or WHOLE in growth:
            return None
        if any(map(shifted, source.features)):
            return None
        guidance = recipe.guidance_scale if self.guided(recipe) else None
        plans = [self._plans(edit.grid, growth, None, 0) for edit in edits]
        shared = source.features, source.predictions
        works = [
            Work(plan, *shared, edit.text, edit.cache, {}, 0, guidance, budget=budget)
            for plan, edit in zip(plans, edits, strict=True)
        ]
        batch, count = Batch(graphs, works), len(sampler.timesteps)
        stories = [
            Story(e.recipe, text=e.cache, noises=source.noises, captured=count, without=source.known_to(e.recipe))
            for e in edits
        ]
        keep = _keeper(np.stack([edit.grid for edit in edits])[:, None], source)
        latents = source.latents[0].expand(len(edits), -1, -1, -1)
        for i, t in enumerate(sampler.timesteps):
            watch(i, count, sampler.estimate[:1])
            x, _ = self._inputs(sampler, recipe, latents, t)
            predictions, overlays = batch.step(i, x, t)
            _tell(stories, latents, predictions, overlays)
            latents = keep(i + 1, sampler.step(predictions, t, latents))
        sampler.check()
        _tell(stories, latents)
        return stories

    def _plans(self, grid: BoolGrid, growth: Sequence[int], check: Check | None, start: int) -> dict[int, SparsePlan]:
        """Of every sparse step from `start` on; one object for steps that compute the same cells."""
        made = {cells: self.plan(grid, cells) for cells in set(growth[start:]) - {WHOLE}}
        plans = {i: made[growth[i]] for i in range(start, len(growth)) if growth[i] != WHOLE}
        if check and check.step in plans:
            plans[check.step] = self.plan(grid, growth[check.step], check.cells)
        return plans

    def _kept_text(
        self, source: Story, text: Tensor, cache: dict[str, Tensor], structure: Structure
    ) -> dict[str, Tensor]:
        """The prompt's keys and values [B, T, C], with the source's keys for the words that both prompts have."""
        text_keys(self.executor.sites, text, cache)
        old, new = (list(tokens) for tokens in zip(*structure.tokens, strict=True))
        kept = dict(cache)
        for name in (name for name in cache if name.endswith(".to_k")):
            kept[name] = cache[name].clone()
            kept[name][-1:, new] = source.text[name][-1:, old]
        return kept

    @torch.inference_mode()
    def sample(
        self, recipe: Recipe, text: Tensor, source: Story, steps: int, watch: Watch | None = None
    ) -> list[Tensor]:
        """The first dense steps from where a story begins, nothing recorded: steps + 1 latents [1, 4, h, w]."""
        sampler, path = self.sampler(recipe, source), [source.latents[0]]
        for i, t in enumerate(sampler.timesteps[:steps]):
            if watch:
                watch(i, steps, sampler.estimate)
            x, extra = self._inputs(sampler, recipe, path[-1], t)
            with guided(self.pipe.unet, self.guides(recipe)):
                raw = self.pipe.unet(x, t, text, timestep_cond=extra, return_dict=False)[0]
            path.append(sampler.step(self._guide(raw, recipe), t, path[-1]))
        return path

    @torch.inference_mode()
    def look(self, recipe: Recipe, text: Tensor, source: Story, step: int) -> StepMaps:
        """What one step of a dense run from where a story begins would remember, of the prompt's own branch."""
        sampler, path = self.sampler(recipe, source), self.sample(recipe, text, source, step)
        t, queries = sampler.timesteps[step], mask_queries(self.executor.sites, self.sizes(recipe))
        x, extra = self._inputs(sampler, recipe, path[-1], t)
        return self.executor.record(x[-1:], t, text[-1:], {}, queries, extra, self.guides(recipe))[1]

    def plan(self, grid: BoolGrid, growth: int, besides: BoolGrid | None = None) -> SparsePlan:
        """The plan that computes the mask, `growth` cells around it, and other cells [h, w] besides."""
        cells = dilate(grid, growth) if besides is None else dilate(grid, growth) | besides
        return make_plan(cells, self.executor.depth, self.executor.device)

    def _evaluate(
        self, story: Story, sampler: Sampler, text: Tensor, i: int, latents: Tensor, source: Story | None = None
    ) -> tuple[Tensor, StepMaps]:
        """The i-th step's predictions [B, 4, h, w], and what of it later edits and masks may read."""
        recipe, t = story.recipe, sampler.timesteps[i]
        wanted = i < kept_steps(recipe) or i in mask_steps(sampler.timesteps)
        queries = mask_queries(self.executor.sites, self.sizes(recipe)) if wanted else frozenset()
        x, extra = self._inputs(sampler, recipe, latents, t)
        without = self.without(source, recipe, text, i) if source else None
        if source and without is not None:
            text_keys(self.executor.sites, text, story.text)
            own = {name: both[-1:] for name, both in story.text.items()}
            last, recorded = self.executor.record(x[-1:], t, text[-1:], own, queries)
            raw, maps = torch.cat([without, last]), completed(source.features[i], recorded, self._levels)
        else:
            raw, maps = self.executor.record(x, t, text, story.text, queries, extra, self.guides(recipe))
        if i == 0 and self.guided(recipe):
            story.without = text[:1], raw[:1]
        return raw, maps

    def _inputs(self, sampler: Sampler, recipe: Recipe, latents: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        x = sampler.scaled(torch.cat([latents] * self.batch(recipe)), t)
        width = self.pipe.unet.config.time_cond_proj_dim
        if width is None:
            return x, None
        scale = torch.tensor([recipe.guidance_scale - 1])
        return x, self.pipe.get_guidance_scale_embedding(scale, embedding_dim=width).to(x)

    def _guide(self, prediction: Tensor, recipe: Recipe) -> Tensor:
        """Classifier-free guidance, [B, ...] -> [1, ...]."""
        if not self.guided(recipe):
            return prediction
        without, with_text = prediction.chunk(2)
        return without + recipe.guidance_scale * (with_text - without)


def _placed(maps: StepMaps, before: int, budget: int | None) -> StepMaps:
    """A step recorded after so many others; it waits in host memory if they do not fit on the device with it."""
    if budget is not None and (before + 1) * maps.own_bytes > budget:
        maps.wait_in_host_memory()
    return maps


def _tell(
    stories: Sequence[Story], latents: Tensor, predictions: Tensor | None = None, overlays: Sequence[StepFeatures] = ()
) -> None:
    """Write a step [E, 4, h, w] of a batch into its stories."""
    for e, story in enumerate(stories):
        story.latents.append(latents[e : e + 1])
        if predictions is not None:
            story.predictions.append(predictions[e : e + 1])
            story.features.append(overlays[e])


def _keeper(grid: BoolGrid, source: Story) -> Callable[[int, Tensor], Tensor]:
    """Pins step i's latents to the source's outside the grid."""
    inside = torch.from_numpy(grid.copy()).to(source.latents[0].device)
    return lambda i, latents: pinned(latents, source.latents[i], inside)

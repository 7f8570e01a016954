"""The public face: a source is made once, then edited by changing its prompt.

`Editor.edit` reads in the order the data travels: text diff, mask, plan, sparse denoising, sparse decoding, result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from fisedit import masks, session
from fisedit.adapters.base import TURN
from fisedit.attention import affinity, cross_maps, text_keys
from fisedit.costs import Costs, default_growth
from fisedit.decode import DecoderRecord, composite, decode, decode_boxes
from fisedit.errors import InputError
from fisedit.history import EditResult, History
from fisedit.inversion import encode, inverted
from fisedit.memory import Memory
from fisedit.models import load
from fisedit.preview import preview
from fisedit.profiling import Stopwatch
from fisedit.recipes import check_prompt, make_recipe
from fisedit.schedule import mask_steps
from fisedit.source import Engine, Story
from fisedit.textdiff import diff
from fisedit.values import LATENT_FACTOR, EditKind, EditMask, EditScript, EditStats, MaskSource, OnStep, Recipe

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline
    from numpy.typing import NDArray
    from PIL.Image import Image

    from fisedit.cache import StepFeatures
    from fisedit.values import BoolGrid


@dataclass(eq=False)
class _Text:
    """A prompt, encoded: embeddings [B, T, D] and, as they are needed, every cross-attention's keys and values."""

    embeddings: Tensor
    cache: dict[str, Tensor]
    notes: tuple[str, ...]


class Editor:
    """Generates a picture and edits it, computing only what the words change.

    Args:
        pipe: a Stable Diffusion 1.x or 2.x pipeline. Editors may share one.
        model: its name, for saved sessions.
        max_recorded_bytes: recorded features kept before the least recently used are dropped (they are rebuilt when
            needed); None for a third of the machine's memory.

    Raises:
        UnsupportedModuleError: the UNet has a layer without an exact sparse counterpart.
    """

    def __init__(
        self, pipe: StableDiffusionPipeline, *, model: str = "", max_recorded_bytes: int | None = None
    ) -> None:
        self.pipe = pipe
        self.model = model
        self.history = History()
        self._engine = Engine(pipe)
        self._memory = Memory(max_recorded_bytes)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "demo",
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """Load a model: "demo", a diffusers folder, a hub id or a .safetensors file. See `fisedit.models.load`."""
        pipe = load(model, device=device, dtype=dtype, local_files_only=local_files_only)
        path = Path(model).expanduser()
        return cls(pipe, model=str(path.resolve()) if path.exists() and model != "demo" else str(model))

    @property
    def current(self) -> EditResult:
        """Where the user stands. Raises SessionError before the first source."""
        return self.history.current

    def undo(self) -> EditResult:
        """Go back to the parent. Raises SessionError at a source."""
        return self.history.undo()

    def redo(self) -> EditResult:
        """Go forward to the edit visited last. Raises SessionError where there is none."""
        return self.history.redo()

    def checkout(self, result_id: str) -> EditResult:
        """Stand on any result; the next edit branches there. Raises SessionError for an unknown id."""
        return self.history.checkout(result_id)

    def generate(
        self,
        prompt: str,
        *,
        seed: int = 0,
        negative_prompt: str = "",
        num_inference_steps: int = 25,
        guidance_scale: float = 7.5,
        width: int | None = None,
        height: int | None = None,
        scheduler: str = "ddim",
        on_step: OnStep | None = None,
    ) -> EditResult:
        """Make a source: what diffusers' pipeline makes of the same arguments, with everything recorded.

        Args:
            seed: of a CPU generator. guidance_scale: 1 or less runs one branch.
            width, height: pixels, divisible by 8; None for the model's own size.
            scheduler: "ddim", "dpmsolver++", "euler", "euler_a" or "lcm".
            on_step: called before every step with (i, n, preview); may raise `Cancelled`.

        Raises:
            PromptError, InputError: an argument out of range.
            NumericsError: the model produced NaN.
        """
        own = self.pipe.unet.config.sample_size * LATENT_FACTOR
        recipe = make_recipe(
            prompt,
            seed=seed,
            negative_prompt=negative_prompt,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            width=own if width is None else width,
            height=own if height is None else height,
            scheduler=scheduler,
        )
        run = _Run(recipe, None, self._diff(prompt, prompt), Stopwatch())
        return self._made(run, self._everywhere(recipe), self._text(run), on_step)

    def edit(
        self,
        prompt: str,
        *,
        mask: object = None,
        protect: object = None,
        growth: int | Sequence[int] | None = None,
        on_step: OnStep | None = None,
    ) -> EditResult:
        """Change the current picture to fit a new prompt, where the words changed and nowhere else.

        Args:
            mask: where to edit, instead of what the words say: a PIL image or numpy array of the picture's size, or a
                boolean latent grid [h, w]. protect: where never to edit, likewise.
            growth: latent cells computed beyond the mask, for all steps or each; None for the measured default.
            on_step: called before every step with (i, n, preview); may raise `Cancelled`.

        Raises:
            SessionError: there is no source yet. PromptError, MaskError, InputError: an argument out of range.
            NumericsError: the model produced NaN. The editor is as it was, whatever is raised.
        """
        parent = self.history.current
        recipe = replace(parent.recipe, prompt=check_prompt(prompt))
        run = _Run(recipe, parent, self._diff(parent.prompt, prompt), Stopwatch())
        wanted, barred = (self._given(m, recipe) if m is not None else None for m in (mask, protect))
        widths = _growth(growth, recipe)
        if run.script.kind is EditKind.IDENTICAL:
            return self._unchanged(run, run.script.reason or "the prompt says the same as before")
        if wanted is not None and not wanted.any():
            return self._unchanged(run, "the mask is empty")
        text = self._text(run)
        source, rebuilt = self._story(parent, on_step)
        if rebuilt:
            text.notes += (f"results rebuilt first, as their features were gone: {rebuilt}",)
        with run.watch.station("mask"):
            area = self._mask(run, source, text, wanted, barred)
        if not area.grid.any():
            return self._unchanged(run, "nothing is left of the mask")
        with run.watch.station("plan"):
            reason = self._dense_reason(run, area, wanted, widths)
        return self._made(run, area, text, on_step, source, () if reason else widths, reason)

    def open(
        self,
        picture: Image,
        prompt: str,
        *,
        negative_prompt: str = "",
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        on_step: OnStep | None = None,
    ) -> EditResult:
        """Make a source of a picture that was not generated here: DDIM inversion, with everything recorded.

        Args:
            picture: sides divisible by 8. prompt: what it shows. guidance_scale: of later edits; inversion has none.
            on_step: called before every step of inversion and recording with (i, n, preview); may raise `Cancelled`.

        Raises:
            PromptError, InputError: an argument out of range. NumericsError: the model produced NaN.
        """
        recipe = make_recipe(
            prompt,
            seed=0,
            negative_prompt=negative_prompt,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            width=picture.width,
            height=picture.height,
            scheduler="ddim",
            opened=True,
        )
        run = _Run(recipe, None, self._diff(prompt, prompt), Stopwatch())
        return self._made(run, self._everywhere(recipe), self._text(run), on_step, opened=picture.convert("RGB"))

    @torch.inference_mode()
    def attention(self, prompt: str) -> NDArray[np.float32]:
        """Where the words that would change are looked at in the current picture: floats [h, w], 0 to 1; no UNet call.

        Raises:
            SessionError: there is no source yet. PromptError: an empty prompt.
        """
        parent = self.history.current
        script = self._diff(parent.prompt, check_prompt(prompt))
        run = _Run(replace(parent.recipe, prompt=prompt), parent, script, Stopwatch())
        old, new = self._maps(run, self._story(parent, None)[0], self._text(run))
        return masks.seed_map(script, old, new)

    def save(self, folder: str | Path) -> None:
        """Write the session: pictures, masks, prompts, seeds, lineage, parameters. Raises SessionError if empty."""
        session.save(self.history, Path(folder), self.model, str(self.pipe.unet.dtype).removeprefix("torch."))

    @classmethod
    def resume(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """Take up a saved session where it was left; what was recorded is rebuilt when an edit first needs it.

        Raises:
            SessionError: no session there, or a damaged one. ModelError: its model cannot be loaded.
        """
        index = session.read_index(Path(folder))
        editor = cls.from_pretrained(
            index["model"], device=device, dtype=dtype or index["dtype"], local_files_only=local_files_only
        )
        editor.history = session.load(Path(folder), index, editor._diff)  # noqa: SLF001 (its own)
        return editor

    def _diff(self, old: str, new: str) -> EditScript:
        with TURN:
            return diff(old, new, self.pipe.tokenizer)

    def _text(self, run: _Run) -> _Text:
        """Encode the prompt; says so where the encoder cannot read all of it."""
        with run.watch.station("text"), torch.inference_mode(), TURN:
            embeddings = self._engine.encode(run.recipe)
            tokenizer = self.pipe.tokenizer
            length = len(tokenizer(run.recipe.prompt, truncation=False, verbose=False).input_ids)
            limit = tokenizer.model_max_length
            note = f"the prompt has {length} tokens, and only the first {limit} are read; shorten it"
            return _Text(embeddings, {}, (note,) if length > limit else ())

    def _given(self, mask: object, recipe: Recipe) -> BoolGrid:
        return masks.given(mask, recipe.height, recipe.width)

    def _everywhere(self, recipe: Recipe) -> EditMask:
        return EditMask(np.ones(self._engine.grids(recipe)[0], bool), MaskSource.EVERYWHERE)

    def _mask(
        self, run: _Run, source: Story, text: _Text, wanted: BoolGrid | None, barred: BoolGrid | None
    ) -> EditMask:
        """Where to edit: the user's mask, or what the words say; never where the user forbids it."""
        if wanted is not None:
            mask = EditMask(wanted, MaskSource.GIVEN)
        elif run.script.kind is EditKind.GLOBAL:
            mask = self._everywhere(run.recipe)
        else:
            mask = self._predicted(run, source, text)
            if mask.confidence < masks.LOW_CONFIDENCE:
                everywhere = self._everywhere(run.recipe)
                mask = replace(everywhere, confidence=mask.confidence, heat=mask.heat)
        return mask if barred is None else replace(mask, grid=mask.grid & ~barred)

    @torch.inference_mode()
    def _predicted(self, run: _Run, source: Story, text: _Text) -> EditMask:
        old, new = self._maps(run, source, text)
        sites, grids = self._engine.executor.sites, self._engine.grids(run.recipe)
        return masks.predict(run.script, old, new, *affinity(self.pipe.unet, sites, self._looks(run, source), grids))

    def _maps(self, run: _Run, source: Story, text: _Text) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Attention maps [T, h, w] of the source's words, and of the new words on the source's queries."""
        sites, unet, grids = self._engine.executor.sites, self.pipe.unet, self._engine.grids(run.recipe)
        text_keys(sites, text.embeddings, text.cache)
        steps = self._looks(run, source)
        return cross_maps(unet, sites, steps, source.text, grids), cross_maps(unet, sites, steps, text.cache, grids)

    def _looks(self, run: _Run, source: Story) -> list[StepFeatures]:
        """The recorded steps whose queries were remembered."""
        return [source.features[i] for i in mask_steps(self._engine.sampler(run.recipe).timesteps)]

    def _dense_reason(self, run: _Run, mask: EditMask, wanted: BoolGrid | None, growth: Sequence[int]) -> str:
        """Why this edit should run dense, or ""."""
        if wanted is None and run.script.kind is EditKind.GLOBAL:
            return f"global edit: {run.script.reason}"
        if wanted is None and mask.confidence < masks.LOW_CONFIDENCE:
            return f"the words point nowhere in particular (confidence {mask.confidence:.2f}); give a mask to be exact"
        return self._costs(run.recipe).dense_is_cheaper(mask.grid, growth)

    def _costs(self, recipe: Recipe) -> Costs:
        return Costs(self._engine, recipe)

    def _made(
        self,
        run: _Run,
        mask: EditMask,
        text: _Text,
        on_step: OnStep | None,
        source: Story | None = None,
        growth: tuple[int, ...] = (),
        fallback: str = "",
        opened: Image | None = None,
    ) -> EditResult:
        """Render, account for it, and stand on the result."""
        if opened is None:
            story, image, decoder = self._render(run, mask, text, on_step, source, growth)
        else:
            image, (story, decoder) = opened, self._invert(run, opened, text, on_step)
        costs = self._costs(run.recipe)
        macs = costs.sparse(mask.grid, growth) if growth else costs.dense()
        held = story.own_bytes + decoder.own_bytes
        stats = self._stats(run, mask, story, macs, held, notes=text.notes, growth=growth, fallback=fallback)
        parent = run.parent.id if run.parent else None
        result = EditResult(self.history.next_id(), parent, run.recipe, image, mask, run.script, stats, growth)
        self._memory.put(result.id, story, decoder, base=parent if growth else None)
        return self.history.add(result)

    def _render(
        self,
        run: _Run,
        mask: EditMask,
        text: _Text,
        on_step: OnStep | None,
        source: Story | None,
        growth: tuple[int, ...],
    ) -> tuple[Story, Image, DecoderRecord]:
        """Sample and decode: sparsely where `growth` says how far, else densely, pinned to the source where the mask
        leaves something out."""
        vae, watch, pin = self.pipe.vae, self._watch(on_step), source if source and not mask.grid.all() else None
        with run.watch.station("denoise"):
            if source and growth:
                prompt = (run.recipe, text.embeddings, text.cache)
                story = self._engine.replay(source, *prompt, mask.grid, growth, watch)
            else:
                story = self._engine.record(run.recipe, text.embeddings, watch, (mask.grid, pin) if pin else None)
        with run.watch.station("decode"), torch.inference_mode():
            if run.parent and growth:
                record = self._memory.get(run.parent.id)[1]
                return story, *decode_boxes(vae, story.latents[-1], mask.grid, record, run.parent.image)
            image, record = decode(vae, story.latents[-1])
            if run.parent and pin:
                image = composite(run.parent.image, image, mask.grid)
            return story, image, record

    def _invert(self, run: _Run, picture: Image, text: _Text, on_step: OnStep | None) -> tuple[Story, DecoderRecord]:
        """The story that a picture might have had, and what its decoder remembers."""
        watch, steps = self._watch(on_step), run.recipe.num_inference_steps
        with run.watch.station("invert"), TURN:
            latents = encode(self.pipe.vae, picture)
            path = inverted(
                self.pipe, run.recipe, text.embeddings[-1:], latents, lambda i, now: watch(i, 2 * steps, now)
            )
        with run.watch.station("denoise"):
            story = self._engine.record(
                run.recipe, text.embeddings, lambda i, n, now: watch(n + i, 2 * n, now), path=path
            )
        with run.watch.station("decode"), torch.inference_mode():
            return story, decode(self.pipe.vae, latents)[1]

    def _unchanged(self, run: _Run, why: str) -> EditResult:
        """The parent's picture, byte for byte, without a UNet call; and its prompt, for that is what it shows."""
        assert run.parent is not None
        mask = EditMask(np.zeros_like(run.parent.mask.grid), MaskSource.NOWHERE)
        stats = self._stats(run, mask, None, 0, 0, notes=(f"nothing was edited: {why}",))
        result = EditResult(
            self.history.next_id(), run.parent.id, run.parent.recipe, run.parent.image, mask, run.script, stats
        )
        self._memory.share(run.parent.id, result.id)
        return self.history.add(result)

    def _stats(
        self,
        run: _Run,
        mask: EditMask,
        story: Story | None,
        macs: int,
        held: int,
        *,
        notes: tuple[str, ...],
        growth: tuple[int, ...] = (),
        fallback: str = "",
    ) -> EditStats:
        costs, steps = self._costs(run.recipe), run.recipe.num_inference_steps if story else 0
        taken = len(story.predictions) if story else steps
        return EditStats(
            mask_area=mask.area,
            mask_source=mask.source,
            mask_confidence=mask.confidence,
            active_rows=costs.rows(mask.grid, growth) if growth else costs.sizes if story else (),
            growth=growth,
            unet_evaluations_dense=0 if growth else taken,
            unet_evaluations_sparse=taken if growth else 0,
            macs=macs,
            macs_dense=costs.dense(),
            seconds=run.watch.done(),
            recorded_bytes=held,
            fallback=fallback,
            notes=notes,
        )

    def _story(self, result: EditResult, on_step: OnStep | None) -> tuple[Story, int]:
        """What was recorded with a result, and how many were rebuilt for it from the nearest ancestor still known."""
        lineage = self.history.lineage(result.id)
        known = next((i for i in reversed(range(len(lineage))) if lineage[i].id in self._memory), -1)
        for past in lineage[known + 1 :]:
            self._rebuild(past, on_step)
        return self._memory.get(result.id)[0], len(lineage) - known - 1

    def _rebuild(self, result: EditResult, on_step: OnStep | None) -> None:
        """Run a result's recipe again, over its parent's story where it was sparse."""
        if result.parent is not None and result.stats.unet_evaluations_dense + len(result.growth) == 0:
            self._memory.share(result.parent, result.id)
            return
        parent = next((past for past in self.history if past.id == result.parent), None)
        run = _Run(result.recipe, parent, result.diff, Stopwatch())
        source = self._memory.get(parent.id)[0] if parent else None
        if result.recipe.opened and parent is None:
            story, decoder = self._invert(run, result.image, self._text(run), on_step)
        else:
            story, _, decoder = self._render(run, result.mask, self._text(run), on_step, source, result.growth)
        self._memory.put(result.id, story, decoder, base=result.parent if result.growth else None)

    def _watch(self, on_step: OnStep | None) -> Callable[[int, int, Tensor], None]:
        def watch(i: int, n: int, estimate: Tensor) -> None:
            if on_step is not None:
                on_step(i, n, preview(self.pipe.vae, estimate))

        return watch


@dataclass(frozen=True, eq=False)
class _Run:
    """One call of generate or edit: what is to be made, from what, and the clock."""

    recipe: Recipe
    parent: EditResult | None
    script: EditScript
    watch: Stopwatch


def _growth(growth: int | Sequence[int] | None, recipe: Recipe) -> tuple[int, ...]:
    steps = recipe.num_inference_steps
    if growth is None:
        return default_growth(steps)
    widths = tuple(growth) if isinstance(growth, Sequence) else (growth,) * steps
    if len(widths) != steps or not all(type(w) is int and 0 <= w <= 64 for w in widths):
        raise InputError(f"growth must be one number of latent cells in [0, 64], or {steps} of them, got {growth!r}")
    return widths

"""Runs a batch from the plan to the outcome: what is left to do, the longest first, on a pool, into the result store.

Knows the result store and the pool, no image and no model.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from fisedit.batch import ray_pool
from fisedit.batch.journal import BatchJournal
from fisedit.batch.manifest import BatchPlan, plan_batch
from fisedit.batch.pool import WorkerPool, open_pool
from fisedit.batch.result_store import ResultStore, remove_partial_files
from fisedit.batch.values import (
    BatchItem,
    BatchJob,
    BatchOutcome,
    BatchSettings,
    ExecutorKind,
    ItemFailure,
    ItemOutput,
    ItemStatus,
    OnError,
)
from fisedit.errors import InputError, as_text
from fisedit.integrations import mask_providers
from fisedit.models.paths import DEMO_ADAPTERS, demo_adapter_folder, expand_home, model_digest
from fisedit.prompts.syntax import check_syntax
from fisedit.storage import files
from fisedit.values import check_quality, make_generation_config

if TYPE_CHECKING:
    from fisedit.values import OnStep

_OPEN_POOL = {ExecutorKind.LOCAL: open_pool, ExecutorKind.RAY: ray_pool.open_pool}


def preview_batch(job: BatchJob, settings: BatchSettings) -> BatchOutcome:
    """Determine what `run_batch` would do; nothing is written, loaded or locked.

    Args:
        job: Inputs and outputs.
        settings: The model, and the options of every edit.

    Returns:
        The records of all items; those that would be edited are `ItemStatus.LEFT`.

    Raises:
        InputError: As in `run_batch`.
        ModelError: As in `run_batch`.
    """
    _check_settings(settings)
    plan, model = _plan(job, settings), _model_identity(settings)
    return ResultStore(job, settings, model, plan, BatchJournal.read(job.output)).outcome()


def run_batch(
    job: BatchJob,
    settings: BatchSettings,
    *,
    workers: int,
    on_error: OnError,
    on_step: OnStep,
    executor: ExecutorKind = ExecutorKind.LOCAL,
) -> BatchOutcome:
    """Edit the remaining items of a job. The first SIGINT finishes the items in progress; the second stops at once.

    Args:
        job: Inputs and outputs.
        settings: The model, and the options of every edit.
        workers: Number of worker processes, each with its own model; 0 for this process.
        on_error: Whether the run goes on after an item failed.
        on_step: Called after each item with (finished items, items of this run, None).
        executor: Processes of this machine, or actors of a Ray cluster.

    Returns:
        The records of all items.

    Raises:
        InputError: A job that contradicts itself, or an output folder that cannot be used or is in use.
        ModelError: The model cannot be loaded.
        KeyboardInterrupt: The second SIGINT.
    """
    least = int(executor is ExecutorKind.RAY)
    if workers < least:
        raise InputError(f"workers must be {least} or more, got {workers}")
    if executor is ExecutorKind.RAY:
        ray_pool.require_ray()
    _check_settings(settings)
    start, plan = monotonic(), _plan(job, settings)
    files.check_output_folder(job.output)
    model = _model_identity(settings)
    with _sigint_requests() as interrupted, BatchJournal.lock(job.output) as journal:
        store = ResultStore(job, settings, model, plan, journal)
        remaining = store.remaining()
        remove_partial_files(remaining)

        def commit(item: BatchItem, result: ItemOutput | ItemFailure) -> bool:
            record = store.commit(item, result)
            on_step(store.committed, len(remaining), None)
            return not store.full and (on_error is OnError.SKIP or record.status is not ItemStatus.FAILED)

        queue = _Queue(remaining)
        while queue.sources:
            workers = min(workers, queue.sources)
            with _OPEN_POOL[executor](workers, settings) as pool:
                queue = _Queue(_process(pool, queue, commit, interrupted, shared_memory=workers > 1))
            workers = min(workers, 1)
        return replace(store.outcome(), interrupted=interrupted(), seconds=monotonic() - start)


def _model_identity(settings: BatchSettings) -> str:
    """Return the identity of the files of the model, the detector, LoRAs and adapters, as far as they are here."""
    own, adapters = model_digest(settings.model, local_files_only=settings.local_files_only), settings.adapters
    named = [settings.detect]
    if settings.loras:
        from fisedit.adapters.lora import weight_file

        named += [str(weight_file(source)) for source, _ in settings.loras]
    if adapters is not None:
        from fisedit.adapters.loading import files_beside

        beside = [str(path) for path in map(files_beside, adapters.sources) if path]
        named += [*adapters.sources, adapters.image_encoder, adapters.reference, adapters.control, *beside]
    return " ".join([own, *(digest for name in named if (digest := _file_identity(name)))])


def _file_identity(name: str) -> str:
    """Return the identity of a folder's or a file's contents; "" where there is none."""
    path = demo_adapter_folder(name) if name in DEMO_ADAPTERS else expand_home(name)
    if name and path.is_dir():
        return model_digest(path, local_files_only=True)
    return sha256(path.read_bytes()).hexdigest() if name and path.is_file() else ""


def _plan(job: BatchJob, settings: BatchSettings) -> BatchPlan:
    """The items of a job. Raises InputError for masks beside a detector."""
    plan = plan_batch(job)
    masked = next((item.output for item in plan.items if item.mask), "") if settings.detect else ""
    if masked:
        raise InputError(f"give either a detector or masks, got both; {masked} has a mask")
    return plan


def _check_settings(settings: BatchSettings) -> None:
    """Raise now the InputError that every item would fail with."""
    is_number = isinstance(settings.timeout, int | float) and not isinstance(settings.timeout, bool)
    if not is_number or not settings.timeout > 0:
        raise InputError(f"timeout must be above 0 seconds, got {as_text(settings.timeout)}")
    check_quality(settings.quality)
    if settings.adapters is not None:
        settings.adapters.read_pictures()
    if settings.detect:
        mask_providers.check_choice(settings.threshold, settings.instance)
        if Path(settings.detect).suffix.lower() in (".json", ".csv"):
            mask_providers.AnnotationFile(Path(settings.detect))
    check_syntax(settings.negative_prompt, "negative_prompt")
    make_generation_config(
        "a picture",
        seed=0,
        negative_prompt=settings.negative_prompt,
        num_inference_steps=settings.num_inference_steps,
        guidance_scale=settings.guidance_scale,
        width=512,
        height=512,
        scheduler="ddim",
    )


def _process(
    pool: WorkerPool,
    queue: _Queue,
    commit: Callable[[BatchItem, ItemOutput | ItemFailure], bool],
    interrupted: Callable[[], bool],
    *,
    shared_memory: bool,
) -> list[BatchItem]:
    """Submit items until there are none or the run stops, and wait for those in progress.

    Args:
        pool: The workers.
        queue: The items.
        commit: Stores a result; returns whether the run goes on.
        interrupted: Whether the user asked to stop.
        shared_memory: Whether workers share the machine's memory.

    Returns:
        Items that ran out of shared memory, to be edited again by a single worker.
    """
    retry: list[BatchItem] = []
    while True:
        for slot in pool.idle_slots():
            item = None if interrupted() else queue.pop(slot)
            if item:
                pool.submit(slot, item)
        if not queue.in_progress:
            return [] if queue.closed or interrupted() else retry
        for _, item, result in pool.results():
            queue.in_progress -= 1
            if shared_memory and isinstance(result, ItemFailure) and result.memory:
                retry.append(item)
            elif not commit(item, result):
                queue.close()


class _Queue:
    """Items to submit: those of one source to one slot in a row, the longest source first.

    Args:
        items: The items.

    Attributes:
        in_progress: Number of items that were popped and have no result yet.
        closed: Whether no more items are given out.
    """

    def __init__(self, items: Iterable[BatchItem]) -> None:
        sources = defaultdict[object, deque[BatchItem]](deque)
        for item in items:
            sources[item.source].append(item)
        self._waiting = deque(sorted(sources.values(), key=_estimated_work, reverse=True))
        self._of_slot: dict[int, deque[BatchItem]] = {}
        self.in_progress = 0
        self.closed = False

    @property
    def sources(self) -> int:
        """Number of sources that no slot has."""
        return len(self._waiting)

    def pop(self, slot: int) -> BatchItem | None:
        """The next item for a slot: of the source that it has open, else of the next source."""
        if not self._of_slot.get(slot) and self._waiting:
            self._of_slot[slot] = self._waiting.popleft()
        if not self._of_slot.get(slot):
            return None
        self.in_progress += 1
        return self._of_slot[slot].popleft()

    def close(self) -> None:
        """Give out no more items."""
        self.closed = True
        self._waiting.clear()
        self._of_slot.clear()


def _estimated_work(items: deque[BatchItem]) -> tuple[int, int]:
    """A sort key for the time that a source with its edits takes: number of edits, then size of the file."""
    try:
        size = items[0].picture.stat().st_size
    except OSError:
        size = 0
    return len(items), size


@contextmanager
def _sigint_requests() -> Iterator[Callable[[], bool]]:
    """Make the first SIGINT a request to finish and the second a KeyboardInterrupt; yields whether there was one."""
    requested = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        print("finishing the items in progress; interrupt again to stop at once", file=sys.stderr)  # noqa: T201

    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return
    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield requested.is_set
    finally:
        signal.signal(signal.SIGINT, before)

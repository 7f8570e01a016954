"""Steps that do not fit in memory lie on disk: all that is read stays the same, whatever becomes of the pages."""

from __future__ import annotations

import gc
import logging
from types import SimpleNamespace
from weakref import ref

import pytest
import torch

from fisedit.errors import PageError
from fisedit.features.cache import PagedMaps, StepFeatures
from fisedit.features.codec import encode
from fisedit.features.pages import Page, PageFolder
from fisedit.features.tiers import FeatureTiers

N, EACH = 10, 4 * 40


def step(i):
    return StepFeatures({"k": torch.full((1, 10, 4), float(i))}, {"norm": torch.zeros(1, 2, 2)})


def paged(steps):
    return [i for i, each in enumerate(steps) if isinstance(each.maps, PagedMaps)]


class Reading:
    """Tiers with recorded steps, and how often pages were read."""

    def __init__(self, folder, budget, monkeypatch, **arguments):
        self.pages = PageFolder(folder)
        self.tiers, self.reads = FeatureTiers(budget, self.pages), []
        read = Page.read
        monkeypatch.setattr(Page, "read", lambda page: self.reads.append(page) or read(page))
        self.steps = [step(i) for i in range(N)]
        for i, each in enumerate(self.steps):
            self.tiers.add(each, i, **{name: make(i) for name, make in arguments.items()})
        self.wait()

    def wait(self):
        while self.tiers._writes:
            self.tiers._writes.popleft().result()

    def edit(self):
        """Read all steps in order; how many pages that took."""
        before = len(self.reads)
        with self.tiers.reads(self.steps) as reads:
            for i, each in enumerate(self.steps):
                reads.at(i)
                assert isinstance(each.maps, dict)
                assert torch.equal(each.whole("k", 0), torch.full((1, 10, 4), float(i)))
                self.wait()
                assert self.tiers.bytes <= max(self.tiers.max_bytes, 2 * EACH)
        return len(self.reads) - before


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.9, 1.0])
def test_a_share_of_the_budget_keeps_that_share(tmp_path, monkeypatch, share):
    """Every edit reads only what does not fit: some steps stay and the others stream, where the one that was used least
    recently would be needed next."""
    case = Reading(tmp_path, int(share * N * EACH), monkeypatch)
    kept = int(share * N)
    assert paged(case.steps) == list(range(kept, N)) and case.tiers.bytes == kept * EACH
    assert case.tiers.paged_bytes(case.steps) == (N - kept) * EACH
    first, *others = [case.edit() for _ in range(4)]
    assert first == N - kept
    assert all(N - kept <= each <= min(N, N - kept + 2) for each in others) or share == 1.0, others


def test_the_next_page_is_fetched_while_a_step_runs(tmp_path, monkeypatch):
    case = Reading(tmp_path, 3 * EACH, monkeypatch)
    with case.tiers.reads(case.steps) as reads:
        reads.at(2)
        case.tiers._thread.submit(lambda: None).result()
        assert len(case.reads) == 1 and isinstance(case.steps[3].maps, PagedMaps)
        reads.at(3)
        assert isinstance(case.steps[3].maps, dict)


def test_names_and_bytes_are_known_without_reading(tmp_path, monkeypatch):
    case = Reading(tmp_path, 0, monkeypatch)
    (far, *_) = case.steps
    assert "k" in far and "v" not in far and list(far.maps) == ["k"] and len(far.maps) == 1
    assert far.own_bytes == EACH + 16 and not case.reads
    far.maps["k"] = torch.zeros(1, 10, 4)
    assert len(case.reads) == 1 and not far.whole("k", 0).any()
    del far.maps["k"]
    assert "k" not in far


def test_encoded_maps_come_back(tmp_path):
    tiers = FeatureTiers(0, PageFolder(tmp_path))
    rows = {name: torch.randn(2, 9, 4) for name in ("int8", "int4")}
    steps = [StepFeatures({name: encode(each, int(name[-1])) for name, each in rows.items()}) for _ in range(2)]
    expected = {name: steps[0].whole(name, 0) for name in rows}
    for i, each in enumerate(steps):
        tiers.add(each, i)
    while tiers._writes:
        tiers._writes.popleft().result()
    assert paged(steps) == [0, 1]
    assert all(torch.equal(steps[0].whole(name, 0), each) for name, each in expected.items())


def test_trajectories_used_least_recently_go_first(tmp_path):
    tiers = FeatureTiers(2 * N * EACH, PageFolder(tmp_path))
    old, new = ([step(i) for i in range(N)] for _ in range(2))
    for i, each in enumerate(old):
        tiers.add(each, i)
    with tiers.reads(old):
        pass
    for i, each in enumerate(new):
        tiers.add(each, i)
    assert not paged(old + new)
    tiers.make_room(3 * EACH)
    while tiers._writes:
        tiers._writes.popleft().result()
    assert (paged(old), paged(new)) == ([7, 8, 9], [])
    with tiers.reads(old):
        pass
    tiers.make_room(10 * EACH)
    while tiers._writes:
        tiers._writes.popleft().result()
    assert (paged(old), paged(new)) == ([7, 8, 9], [3, 4, 5, 6, 7, 8, 9])


@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_a_damaged_page_is_made_again(tmp_path, monkeypatch, damage):
    made = []
    case = Reading(tmp_path, 4 * EACH, monkeypatch, remake=lambda i: lambda: made.append(i) or step(i))
    for path in tmp_path.glob("*/*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data) if damage == "flip" else path.unlink()
    case.edit()
    assert made == [4, 5, 6, 7, 8, 9]


def test_a_damaged_page_that_cannot_be_made_again_is_told(tmp_path, monkeypatch):
    case = Reading(tmp_path, 4 * EACH, monkeypatch)
    next(tmp_path.glob("*/*.safetensors")).unlink()
    with pytest.raises(PageError):
        case.edit()


@pytest.mark.parametrize("possible", [True, False])
def test_what_is_made_sooner_than_read_is_made_where_it_can_be(tmp_path, monkeypatch, possible):
    made = []

    def remake(i):
        def again():
            made.append(i)
            if not possible:
                raise PageError("other LoRAs now")
            return step(i)

        return again

    case = Reading(tmp_path, 4 * EACH, monkeypatch, remake=remake, disposable=lambda _: True)
    assert case.edit() == (0 if possible else 6) and made == [4, 5, 6, 7, 8, 9]


class Failing(PageFolder):
    """A folder whose disk fails as asked."""

    error = "no memory for a page"

    def write(self, tensors):
        if self.error:
            raise MemoryError(self.error)
        return super().write(tensors)


def test_a_step_is_never_poisoned_by_a_failure(tmp_path, monkeypatch, caplog):
    """Neither by a write nor by a read that fails for lack of memory; nothing keeps the step."""
    folder = Failing(tmp_path)
    tiers, far = FeatureTiers(0, folder), step(7)
    with caplog.at_level(logging.WARNING):
        tiers.add(far, 0, lambda: step(7))
        tiers._writes.pop().result()
    assert not paged([far]) and tiers.bytes == EACH and len(caplog.messages) == 1
    folder.error, tiers._refused = None, None
    tiers.make_room(0)
    tiers._writes.pop().result()
    assert paged([far])

    def read(_):
        raise MemoryError

    monkeypatch.setattr(Page, "read", read)
    assert torch.equal(far.whole("k", 0), step(7).whole("k", 0)), "made again"
    weak = ref(far)
    gc.disable()
    try:
        del far
        assert weak() is None and tiers.bytes == 0
    finally:
        gc.enable()


def test_a_disk_that_was_full_is_tried_again_when_pages_went(tmp_path):
    folder = PageFolder(tmp_path, None)
    tiers, steps = FeatureTiers(0, folder), [step(i) for i in range(4)]
    tiers.add(steps[0], 0)
    tiers._writes.pop().result()
    folder.max_bytes = folder.bytes
    tiers.add(steps[1], 1)
    tiers._writes.pop().result()
    assert paged(steps) == [0] and not tiers.can_page
    tiers.add(steps[2], 2)
    assert not tiers._writes, "it is not asked again for every step"
    del steps[0]
    gc.collect()
    assert tiers.can_page
    tiers.add(steps[-1], 3)
    tiers._writes.pop().result()
    assert len(paged(steps)) == 1


def test_steps_that_are_held_stay(tmp_path, monkeypatch):
    case = Reading(tmp_path, 3 * EACH, monkeypatch)
    held = [case.steps[i] for i in (9, 4, 6, 1, 8)]
    with case.tiers.hold(held):
        assert not paged(held)
        case.tiers.make_room(10 * EACH)
        case.wait()
        assert not paged(held)
    before = len(case.reads)
    assert before == 4
    case.tiers.make_room(0)
    assert case.tiers.bytes <= 3 * EACH


def test_what_was_fetched_ahead_of_a_cancelled_edit_is_let_go(tmp_path, monkeypatch):
    case = Reading(tmp_path, 3 * EACH, monkeypatch)

    def cancelled():
        with case.tiers.reads(case.steps) as reads:
            reads.at(3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cancelled()
    assert all(entry.incoming is None for entry in case.tiers._entries.values())


@pytest.mark.parametrize("why", ["full", "read-only", "none"])
def test_without_a_disk_all_stays_in_memory(tmp_path, monkeypatch, caplog, why):
    folder = PageFolder(tmp_path / "file/pages" if why == "read-only" else tmp_path, 0 if why == "full" else None)
    (tmp_path / "file").write_text("no folder can be made here")
    tiers = FeatureTiers(0, None if why == "none" else folder)
    steps = [step(i) for i in range(N)]
    with caplog.at_level(logging.WARNING):
        for i, each in enumerate(steps):
            tiers.add(each, i)
        while tiers._writes:
            tiers._writes.popleft().result()
    assert not paged(steps) and tiers.bytes == N * EACH
    assert len(caplog.messages) == (why != "none")


def test_steps_that_go_are_not_counted(tmp_path, monkeypatch):
    case = Reading(tmp_path, 4 * EACH, monkeypatch)
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 6
    case.steps.clear()
    gc.collect()
    assert case.tiers.bytes == 0 and not list(tmp_path.glob("*/*.safetensors"))
    assert SimpleNamespace(bytes=case.pages.bytes).bytes == 0

"""Sessions on disk, without a model: whatever interrupts, damages or shares a folder, results are whole or refused."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
from multiprocessing import get_context

import pytest

from fisedit.errors import InputError, PageError, SessionError
from fisedit.features.pages import Page
from fisedit.sessions import folder as session_folder
from fisedit.sessions import store as session_store
from fisedit.sessions.store import SessionStore
from fisedit.storage import files as output_files
from tests.support.sessions import (
    NAMES,
    change_index,
    contents,
    diff,
    file_of,
    files,
    load,
    one_line,
    refused,
    save,
    written_again,
)


def _loaded_or_told(folder):
    """What a folder holds, or "told" where one line says that it is damaged."""
    try:
        return contents(load(folder))
    except SessionError as error:
        return "told" if one_line(error) else error


def flipped(folder, place, seed, times):
    """Sessions with one flipped bit each, in files drawn by their size, and what was loaded of them, or the error."""
    rng, parts, expected = random.Random(seed), files(folder), contents(load(folder))
    written_again(parts, place)
    names = sorted(parts)
    for _ in range(times):
        name = rng.choices(names, [len(parts[name]) if rng.random() < 0.5 else 4000 for name in names])[0]
        bit = rng.randrange(8 * len(parts[name]))
        data = bytearray(parts[name])
        data[bit // 8] ^= 1 << bit % 8
        (place / name).write_bytes(bytes(data))
        yield name, bit, _loaded_or_told(place) in (expected, "told")
        (place / name).write_bytes(parts[name])


@pytest.mark.parametrize(("name", "times"), [(name, 70) for name in NAMES])
def test_no_flipped_bit_is_silent(whole, tmp_path, name, times):
    assert [(file, bit) for file, bit, noticed in flipped(whole[name], tmp_path / "s", 1, times) if not noticed] == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "times"), [("generated", 1400), ("opened", 1300), ("look", 1300)])
def test_none_of_4000_flipped_bits_is_silent(whole, tmp_path, name, times):
    assert [(file, bit) for file, bit, noticed in flipped(whole[name], tmp_path / "s", 2, times) if not noticed] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_session_is_saved_in_place(whole, tmp_path, name):
    folder = written_again(files(whole[name]), tmp_path / "s")
    (folder / "notes.txt").write_text("mine")
    before, store = files(folder), SessionStore(folder)
    loaded = store.load(diff)
    save(loaded, store)
    assert contents(load(folder)) == contents(loaded) and files(folder) == before


@pytest.mark.parametrize("version", [1, 6])
def test_a_session_of_another_version_is_refused(whole, tmp_path, version):
    folder = written_again(files(whole["look"]), tmp_path / "s")
    change_index(folder / "session.json", lambda index: index.update(version=version))
    assert f"must be of version 5, got {version}; use the fisedit that wrote it" in refused(folder)


# Two writers


def test_another_writers_session_is_not_replaced(whole, tmp_path):
    mine, theirs = load(whole["generated"]), load(whole["opened"])
    place = tmp_path / "s"
    save(mine, SessionStore(place))
    before = files(place)
    with pytest.raises(SessionError, match="holds another session"):
        save(theirs, SessionStore(place))
    assert files(place) == before
    save(theirs, SessionStore(place), overwrite=True)
    assert contents(load(place)) == contents(theirs)
    assert len(files(place)) == 10


def test_who_loaded_before_another_saved_is_refused(whole, tmp_path):
    written_again(files(whole["generated"]), tmp_path / "s")
    first, second = SessionStore(tmp_path / "s"), SessionStore(tmp_path / "s")
    ours, theirs = first.load(diff), second.load(diff)
    theirs.history.delete("3")
    save(theirs, second)
    ours.history.delete("1")
    with pytest.raises(SessionError, match="another run changed it"):
        save(ours, first)
    assert [result.id for result in load(tmp_path / "s").history] == ["0", "1", "2"]
    save(theirs, second)


def test_saving_to_two_folders_in_turns(whole, tmp_path):
    loaded = load(whole["generated"])
    stores = [SessionStore(tmp_path / name) for name in ("a", "b")]
    for store in stores * 2:
        save(loaded, store)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def _race(source, place, started, outcome):
    loaded = load(source)
    started.wait()
    try:
        save(loaded, SessionStore(place))
    except SessionError as error:
        outcome.put((source.name, str(error)))
    else:
        outcome.put((source.name, ""))


@pytest.mark.slow
def test_of_many_processes_one_saves(whole, tmp_path):
    fork = get_context("fork")
    for turn in range(3):
        started, outcome = fork.Barrier(6), fork.Queue()
        place = tmp_path / str(turn)
        runs = [fork.Process(target=_race, args=(whole[name], place, started, outcome)) for name in NAMES * 2]
        for run in runs:
            run.start()
        told = [outcome.get(timeout=60) for _ in runs]
        for run in runs:
            run.join()
        (winner,) = [name for name, error in told if not error]
        assert all("another" in error for _, error in told if error)
        assert contents(load(place)) == contents(load(whole[winner]))


def test_a_run_that_works_on_a_session_keeps_others_out(whole, tmp_path):
    place = written_again(files(whole["generated"]), tmp_path / "s")
    store = SessionStore(place)
    loaded = store.load(diff)
    with session_folder.lock(place):
        save(loaded, store)
        assert _forked(lambda: save(loaded, store)) == "SessionError"
        assert _forked(lambda: load(place)) == ""
    assert _forked(lambda: save(loaded, store)) == ""


def _forked(work):
    """The name of what `work` raised in another process, "" for nothing; "killed" where that was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        raised = ""
        try:
            session_folder._held.set(frozenset())
            work()
        except BaseException as error:  # noqa: BLE001
            raised = type(error).__name__
        os.write(writing, raised.encode())
        os._exit(0)
    os.close(writing)
    status = os.waitpid(child, 0)[1]
    with os.fdopen(reading) as file:
        return "killed" if os.WIFSIGNALED(status) else file.read()


# Kills, full disks, odd folders


def _die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def _full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def at_call(count, fail, *, after):
    """`write_bytes` that ends the process, or fails, before or after its n-th call."""
    calls = iter(range(1000))

    def write(data, path):
        last = next(calls) == count
        if last and not after:
            fail()
        output_files.write_bytes(data, path)
        if last and after:
            fail()

    return write


PAGES = [b"what a source recorded", b"its first step"]


def pages_in(place):
    """The bytes of the pages that a session's index names, each compared with its digest."""
    index = SessionStore(place).read_index()
    found = [page for pages in SessionStore(place).pages(index).values() for page in pages]
    data = [page.path.read_bytes() for page in found]
    assert [hashlib.sha256(each).hexdigest() for each in data] == [page.sha256 for page in found]
    return data


@pytest.mark.sweep(1)
@pytest.mark.parametrize("pages", [[], PAGES], ids=["", "pages"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_before_and_after_every_write(whole, tmp_path, overwrite, pages):
    old, new = (contents(load(whole[name])) for name in ("opened", "look"))
    loaded, finished = load(whole["look"]), 0
    writes = len(loaded.history) * 2 + 2 + len(pages)
    for count in range(writes + 1):
        for after in (False, True):
            place = tmp_path / f"{count}{after}"
            if overwrite:
                written_again(files(whole["opened"]), place)

            def work(count=count, after=after, place=place):
                session_store.write_bytes = at_call(count, _die, after=after)
                save(loaded, SessionStore(place), pages={loaded.history[0].id: pages}, overwrite=overwrite)

            assert _forked(work) == ("killed" if count < writes else "")
            if overwrite or (count, after) >= (writes - 1, True):
                found = contents(load(place))
                assert found in (old, new) and pages_in(place) == (pages if found == new else [])
                finished += found == new
            else:
                with pytest.raises(SessionError, match="there is no session"):
                    load(place)
            save(load(whole["generated"]), SessionStore(place), overwrite=True)
            assert contents(load(place)) == contents(load(whole["generated"]))
            assert not list(place.glob("*.safetensors")), "a killed save's pages go too"
    assert finished == 3


def test_pages_stay_until_their_result_goes_and_are_written_once(whole, tmp_path):
    place, loaded = tmp_path / "s", load(whole["generated"])
    store, first = SessionStore(place), loaded.history[0].id
    save(loaded, store, pages={first: PAGES})
    assert pages_in(place) == PAGES and len(list(place.glob("*.safetensors"))) == 2
    for each in (store, SessionStore(place)):
        save(each.load(diff), each)
        assert pages_in(place) == PAGES
    again = store.load(diff)
    save(again, store, pages={first: PAGES[:1]})
    assert pages_in(place) == PAGES[:1] and len(list(place.glob("*.safetensors"))) == 1
    save(load(whole["opened"]), SessionStore(place), overwrite=True)
    assert not list(place.glob("*.safetensors"))


def test_a_page_that_is_no_plain_file_is_never_opened(whole, tmp_path):
    place, loaded = tmp_path / "s", load(whole["generated"])
    save(loaded, SessionStore(place), pages={loaded.history[0].id: PAGES})
    for path in place.glob("*.safetensors"):
        path.unlink()
        os.mkfifo(path)
    store = SessionStore(place)
    pages = [Page(place / name, "") for name in store.load(diff).index.page_names()]
    assert len(pages) == 2 and not store.pages(store.read_index())
    for page in pages:
        with pytest.raises(PageError):
            page.read()


def test_a_kill_within_a_write_leaves_nothing_to_clean(whole, tmp_path, monkeypatch):
    place = written_again(files(whole["opened"]), tmp_path / "s")
    loaded, before = load(whole["generated"]), contents(load(place))

    def work():
        os.fsync = _die
        save(loaded, SessionStore(place), overwrite=True)

    assert _forked(work) == "killed"
    assert contents(load(place)) == before and list(place.glob(".*.part"))
    save(loaded, SessionStore(place), overwrite=True)
    assert not list(place.glob(".*.part")) and contents(load(place)) == contents(loaded)


def test_a_full_disk_leaves_the_session_and_nothing_else(whole, tmp_path, monkeypatch):
    place = written_again(files(whole["opened"]), tmp_path / "s")
    before = files(place)
    for count in range(11):
        monkeypatch.setattr(session_store, "write_bytes", at_call(count, _full, after=False))
        loaded = load(whole["generated"])
        with pytest.raises(OSError, match="No space left"):
            save(loaded, SessionStore(place), pages={loaded.history[0].id: PAGES}, overwrite=True)
        assert files(place) == before


def test_a_folder_that_cannot_be_synced_after_the_index_keeps_it(whole, tmp_path, monkeypatch):
    """The index is in place when the folder's sync fails: what it names must stay."""
    place, loaded = tmp_path / "s", load(whole["generated"])
    monkeypatch.setattr(session_store, "write_bytes", at_call(8, _full, after=True))
    with pytest.raises(OSError, match="No space left"):
        save(loaded, SessionStore(place))
    assert contents(load(place)) == contents(loaded)


def test_an_interrupted_save_can_be_repeated(whole, tmp_path, monkeypatch):
    place, loaded = tmp_path / "s", load(whole["generated"])
    store = SessionStore(place)

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(session_store, "write_bytes", at_call(8, interrupt, after=True))
    with pytest.raises(KeyboardInterrupt):
        save(loaded, store)
    monkeypatch.undo()
    save(loaded, store)
    assert contents(load(place)) == contents(loaded)


def test_a_reader_finds_a_session_while_others_replace_it(whole, tmp_path):
    place = written_again(files(whole["opened"]), tmp_path / "s")
    known = [contents(load(whole[name])) for name in ("opened", "generated")]
    fork = get_context("fork")
    stop = fork.Event()

    def replace():
        loaded = [load(whole[name]) for name in ("generated", "opened")]
        while not stop.is_set():
            for one in loaded:
                save(one, SessionStore(place), overwrite=True)

    writer = fork.Process(target=replace)
    writer.start()
    try:
        found = [known.index(contents(load(place))) for _ in range(40)]
    finally:
        stop.set()
        writer.join()
    assert len(found) == 40


def test_links_and_odd_files_are_neither_followed_nor_removed(whole, tmp_path):
    (tmp_path / "kept.json").write_bytes((whole["look"] / "session.json").read_bytes())
    place = written_again(files(whole["opened"]), tmp_path / "s")
    loaded = load(place)
    linked = tmp_path / "linked"
    linked.symlink_to(place)
    store = SessionStore(linked)
    store.load(diff)
    save(loaded, store)
    assert contents(load(place)) == contents(loaded)
    (place / "session.json").unlink()
    (place / "session.json").symlink_to(tmp_path / "kept.json")
    save(loaded, SessionStore(place), overwrite=True)
    assert not (place / "session.json").is_symlink()
    assert (tmp_path / "kept.json").read_bytes() == (whole["look"] / "session.json").read_bytes()


ODD = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
}


def test_what_is_no_plain_file_is_never_opened(whole, tmp_path):
    for kind, make in ODD.items():
        for name in ("session.json", file_of(whole["generated"], 0).name):
            place = written_again(files(whole["generated"]), tmp_path / f"{kind} {name}")
            (place / name).unlink()
            make(place / name)
            assert refused(place), (kind, name)
            with pytest.raises(SessionError, match="holds another"):
                save(load(whole["look"]), SessionStore(place))


def test_a_folder_that_cannot_be_read_is_not_called_damaged(whole, tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("fisedit.sessions.reader.read_bytes", refuse)
    with pytest.raises(SessionError, match=r"cannot be read \(session.json: Permission denied\)"):
        load(whole["look"])


def test_names_do_not_differ_by_case_alone(whole):
    for folder in whole.values():
        names = list(files(folder))
        assert len({name.casefold() for name in names}) == len(names)


def test_no_output_lies_in_a_session(whole, tmp_path):
    (tmp_path / "link").symlink_to(whole["look"])
    for folder in (whole["look"], tmp_path / "link", whole["look"] / ".." / "look"):
        for name in ("0.png", "new.jpg"):
            with pytest.raises(InputError, match="must not be in a session's folder"):
                output_files.check_image_path(folder / name)


# What a session may say


def test_a_disk_that_knows_no_locks_is_used_without_and_another_error_is_told(tmp_path, monkeypatch):
    descriptor = os.open(tmp_path, os.O_RDONLY)

    def fail(number):
        def flock(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(session_folder.fcntl, "flock", flock)

    try:
        fail(errno.ENOLCK)
        session_folder._lock(descriptor, tmp_path)
        fail(errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            session_folder._lock(descriptor, tmp_path)
        fail(errno.EWOULDBLOCK)
        with pytest.raises(SessionError, match="another run is working on the session"):
            session_folder._lock(descriptor, tmp_path)
    finally:
        os.close(descriptor)


def test_only_unfinished_copies_are_removed(tmp_path):
    (tmp_path / ".notes.part").touch()
    session_folder.remove_unfinished(tmp_path)
    assert (tmp_path / ".notes.part").exists()

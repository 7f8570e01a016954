"""docs/reliability.md: every case of the reliability plan, the tests that prove it, and how they ended last.

    python -m tests.support.reliability_table

runs those tests, fast and slow ones, and writes the page. It knows the tests by their names alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"

BATCH, KINDS, FAULT, OPENING, MODELS, CLI, BAD = (
    "tests/batch/test_runner.py",
    "tests/batch/test_images.py",
    "tests/fault/fault_batch.py",
    "tests/editor/test_opening.py",
    "tests/models/test_loader.py",
    "tests/cli/test_commands.py",
    "tests/editor/test_editing_errors.py",
)
MASKS = "tests/storage/test_mask_images.py"
GIVEN, RESUMING, HAND, POOL, REPORT, RAY, FAULT_RAY = (
    "tests/batch/test_manifest.py",
    "tests/batch/test_journal.py",
    "tests/batch/test_worker.py",
    "tests/batch/test_pool.py",
    "tests/batch/test_report.py",
    "tests/batch/test_ray_pool.py",
    "tests/fault/fault_ray.py",
)
DOORS, SAFETY, SERVER, BROWSER, FAULT_APP = (
    "tests/app/test_security.py",
    "tests/app/test_safety.py",
    "tests/app/test_server.py",
    "tests/app/test_browser.py",
    "tests/fault/fault_app.py",
)
STEPPING, FOLDER, INDEX, SESSION, CACHE, CALLS, ARCHIVE, PREFETCH, FAULT_ENGINE = (
    "tests/runners/test_stepping.py",
    "tests/sessions/test_folder.py",
    "tests/sessions/test_index.py",
    "tests/sessions/test_store.py",
    "tests/sampling/test_trajectory_cache.py",
    "tests/app/test_allowed_calls.py",
    "tests/app/test_archive.py",
    "tests/runners/test_prefetch.py",
    "tests/fault/fault_engine.py",
)

Case = tuple[str, tuple[str, ...]]

CASES: Mapping[str, Sequence[Case]] = {
    "Images": (
        (
            "Empty, a text, PSD, EPS or SVG under another name, cut at every tenth: named, never decoded as such",
            (f"{BATCH}::TestBadFiles::test_each_is_named_and_the_good_are_done",),
        ),
        (
            "A header of 100,000 x 100,000 pixels, or 12,000 x 12,000 in a small file: refused in 0.1 s, undecoded",
            (
                f"{GIVEN}::TestPictures::test_a_bomb_is_refused_by_its_header",
                f"{MASKS}::test_a_huge_mask_is_refused_by_its_header",
            ),
        ),
        ("A text chunk that unpacks to too much", (f"{GIVEN}::TestPictures::test_metadata_that_unpacks_to_too_much",)),
        (
            "1x1, 7x9, 1x20000, 20000x1, sides not divisible by 8: the output has the input's size",
            (f"{KINDS}::test_sizes", f"{OPENING}::test_any_size_comes_back"),
        ),
        (
            "CMYK, palettes, 1-bit, LA, alpha, 16-bit (scaled, not clipped), Lab",
            (
                f"{KINDS}::test_modes",
                f"{KINDS}::test_sixteen_bits_stay",
                f"{KINDS}::test_lab_is_shown_in_rgb",
                f"{OPENING}::test_outside_every_pixel_is_the_originals",
                f"{OPENING}::test_paint_has_the_pictures_depth",
                f"{OPENING}::test_lab_becomes_rgb",
            ),
        ),
        (
            "Animated: the first frame, and it is said",
            (
                f"{KINDS}::test_of_an_animation_the_first_frame",
                f"{GIVEN}::TestPictures::test_the_first_of_many_frames",
            ),
        ),
        (
            "EXIF orientations 1 to 8",
            (f"{KINDS}::test_orientations", f"{OPENING}::test_pictures_are_turned_upright"),
        ),
        (
            "EXIF, comments, texts and profiles, damaged and huge",
            (f"{KINDS}::test_metadata_damaged_and_huge", f"{OPENING}::test_damaged_exif_says_nothing"),
        ),
        (
            "Colour profiles, also damaged ones",
            (
                f"{OPENING}::TestProfiles::test_the_model_sees_the_colours_that_a_screen_shows",
                f"{OPENING}::TestProfiles::test_it_survives_a_file",
                f"{OPENING}::TestProfiles::test_a_damaged_profile_is_as_none",
            ),
        ),
        (
            "Outputs in formats that hold less than the input",
            (
                f"{OPENING}::test_files_hold_what_they_can",
                f"{OPENING}::test_a_jpeg_shows_what_it_cannot_hold",
                f"{GIVEN}::TestPictures::test_what_a_format_cannot_hold_is_told",
            ),
        ),
        (
            "Masks: another size, all black (the input's bytes come back), empty file, JPEG",
            (f"{BATCH}::TestAFolder::test_a_mask_says_where",),
        ),
        ("Masks: all white (dense, and it is said)", (f"{KINDS}::test_a_mask_of_everything_is_dense",)),
        (
            "Masks: soft, in grey, RGB, alpha or 16 bits: cut at their half",
            (f"{KINDS}::test_a_soft_mask_is_cut_at_its_half",),
        ),
        (
            "Masks: 16-bit, 1-bit, transparent, of the picture's own size",
            (
                f"{MASKS}::test_every_form_of_a_mask_marks_the_same",
                f"{OPENING}::test_a_mask_of_the_pictures_own_size",
            ),
        ),
        ("Masks of a wrong size or type in Python", (f"{BAD}::test_edit_refuses_in_one_line",)),
    ),
    "Files": (
        (
            "Names: not UTF-8, with newlines, of 255 bytes, emoji, leading dash",
            (f"{BATCH}::TestBadFiles::test_each_is_named_and_the_good_are_done",),
        ),
        (
            "Loops of links, links to nowhere; links that lead an output to an input",
            (
                f"{GIVEN}::TestBeforeTheModelLoads::test_links_that_lead_nowhere",
                f"{GIVEN}::TestBeforeTheModelLoads::test_an_output_that_is_an_input_behind_a_link",
            ),
        ),
        (
            "Pipes and devices: never opened",
            (
                f"{BATCH}::TestBadFiles::test_each_is_named_and_the_good_are_done",
                f"{MASKS}::test_a_pipe_is_never_opened",
                f"{MODELS}::TestRefusedBeforeWeights::test_a_pipe_is_never_opened",
            ),
        ),
        ("Unreadable", (f"{FAULT}::test_a_file_that_may_not_be_read",)),
        ("Vanishing while running", (f"{BATCH}::TestBadFiles::test_a_picture_that_vanishes",)),
        ("a.png beside a.jpg: two outputs", (f"{BATCH}::TestBadFiles::test_two_pictures_of_one_name",)),
        (
            "OUT is IN, a file, missing or an input; IN is missing, empty or a file: exit 2 before the model loads",
            (
                f"{GIVEN}::TestBeforeTheModelLoads::test_what_cannot_start",
                f"{GIVEN}::TestBeforeTheModelLoads::test_an_output_that_is_an_input",
            ),
        ),
        (
            "OUT inside IN: outputs are never taken for inputs",
            (f"{GIVEN}::TestBeforeTheModelLoads::test_outputs_within_the_inputs_are_never_inputs",),
        ),
        (
            "Files in OUT that no batch wrote stay",
            (f"{RESUMING}::TestResuming::test_a_file_that_no_batch_wrote_stays",),
        ),
        ("Read-only OUT: said before the model loads", (f"{FAULT}::test_a_disk_that_cannot_be_written",)),
        (
            "Disk full at an output or the journal",
            (
                f"{FAULT}::test_a_disk_that_is_full_and_then_is_not",
                f"{FAULT}::test_a_journal_whose_disk_is_full",
                f"{BATCH}::TestBadFiles::test_a_full_disk_stops_the_run_and_loses_nothing",
                f"{CLI}::TestFiles::test_a_failed_write_leaves_what_was_there",
            ),
        ),
        ("100,000 files", (f"{FAULT}::test_a_hundred_thousand_files",)),
        ("64 file descriptors", (f"{FAULT}::test_few_file_descriptors",)),
        (
            "Tables: BOM, CRLF, duplicate rows, bad lines (told by number), captions missing or too many",
            (
                f"{GIVEN}::TestTables::test_captions",
                f"{GIVEN}::TestTables::test_a_bad_table_is_told_with_its_line",
                f"{GIVEN}::TestTables::test_edits",
                f"{GIVEN}::TestTables::test_captions_missing_and_too_many",
                f"{GIVEN}::TestTables::test_outputs_of_rows",
            ),
        ),
    ),
    "Batch": (
        (
            "kill -9 at random, 30 times: the outputs are a clean run's, no worker stays",
            (f"{FAULT}::test_killed_thirty_times",),
        ),
        (
            "kill -9 before and after the first three calls of each function that writes: nothing lost or done twice",
            (f"{RESUMING}::TestResuming::test_killed_anywhere", f"{FAULT}::test_nothing_is_done_twice"),
        ),
        (
            "A torn last line of the journal, a damaged one",
            (f"{RESUMING}::TestResuming::test_a_torn_last_line_and_a_damaged_one",),
        ),
        (
            "SIGINT once finishes the item, twice stops at once",
            (
                f"{RESUMING}::TestResuming::test_one_interrupt_finishes_the_item_in_hand",
                f"{RESUMING}::TestResuming::test_two_interrupts_stop_at_once",
                f"{FAULT}::test_an_interrupt_from_the_terminal",
            ),
        ),
        (
            "A worker that is killed or crashes: its item alone fails",
            (f"{FAULT}::test_a_worker_that_dies", f"{POOL}::test_a_killed_worker_fails_its_item_only"),
        ),
        (
            "A Ray cluster's worker or machine that is lost: its items are done elsewhere; an item that kills is named",
            (
                f"{RAY}::test_a_lost_workers_item_is_done_elsewhere",
                f"{FAULT_RAY}::test_a_lost_machine_leaves_its_items_to_the_rest",
                f"{FAULT_RAY}::test_an_item_that_kills_is_named",
                f"{FAULT_RAY}::test_a_worker_that_hangs",
            ),
        ),
        (
            "Ray: a token that does not fit, no cluster there; Ray is not installed",
            (
                f"{FAULT_RAY}::test_a_token_that_does_not_fit",
                f"{FAULT_RAY}::test_no_cluster_there",
                f"{RAY}::test_no_ray",
            ),
        ),
        (
            "A Ray cluster of the run's own: nothing of it stays, though the run is killed",
            (
                f"{FAULT_RAY}::test_a_cluster_of_ones_own",
                f"{FAULT_RAY}::test_a_run_that_is_stopped_takes_its_cluster_along",
            ),
        ),
        (
            "A worker that hangs, an item that takes too long",
            (f"{FAULT}::test_a_worker_that_hangs", f"{BATCH}::TestBadFiles::test_an_item_that_takes_too_long"),
        ),
        (
            "Out of memory: freed, evicted, sliced, on the CPU at last, else named; the next item unharmed",
            (
                f"{HAND}::TestFallbacks::test_memory_that_ran_out_once",
                f"{HAND}::TestFallbacks::test_each_fallback_needs_less_memory",
                f"{HAND}::TestFallbacks::test_memory_that_stays_out",
                f"{HAND}::TestFallbacks::test_a_device_that_stays_full",
                f"{FAULT}::test_little_memory",
            ),
        ),
        (
            "Out of memory beside other workers, or killed for it: tried again alone",
            (
                f"{HAND}::TestFallbacks::test_items_without_shared_memory_are_tried_by_one_worker",
                f"{FAULT}::test_a_worker_that_is_killed_in_a_crowd",
            ),
        ),
        (
            "A product beyond half precision: tried in fp32 with fp32's bytes, else named",
            (f"{HAND}::TestFallbacks::test_an_overflow_of_half_precision_is_tried_in_fp32",),
        ),
        ("A bug in one item is that item's", (f"{BATCH}::TestBadFiles::test_a_bug_in_one_item_is_that_item_s",)),
        (
            "Two runs on one folder: the second says so",
            (
                f"{FAULT}::test_two_runs_on_one_folder",
                f"{RESUMING}::TestResuming::test_a_second_run_on_the_folder_is_told",
            ),
        ),
        (
            "Changed prompt, parameters, model or input: not taken as done",
            (
                f"{RESUMING}::TestResuming::test_what_changed_is_done_again",
                f"{RESUMING}::TestResuming::test_a_changed_input_model_or_lost_output_is_done_again",
            ),
        ),
        ("1 and 4 workers, with one thread each: the same bytes", (f"{FAULT}::test_one_and_four_workers",)),
        ("A dry run writes nothing", (f"{GIVEN}::TestBeforeTheModelLoads::test_a_dry_run_writes_nothing",)),
        (
            "Most work first; a source opened once for all its edits",
            (f"{BATCH}::TestAFolder::test_most_work_first_and_a_source_is_opened_once",),
        ),
        (
            "Progress with the time left, a table at the end",
            (f"{FAULT}::test_what_a_terminal_shows", f"{BATCH}::TestAFolder::test_a_summary_for_people"),
        ),
        (
            "500 mixed files, 20 % of them broken: every good one done, every bad one named, no input touched",
            (f"{FAULT}::test_five_hundred_mixed_files",),
        ),
        ("HTML in names and prompts", (f"{REPORT}::test_the_page_escapes_and_links",)),
    ),
    "Sessions": (
        (
            "4,000 single flipped bits of a saved session: none without an error or an effect on its contents",
            (f"{FOLDER}::test_no_flipped_bit_is_silent", f"{FOLDER}::test_none_of_4000_flipped_bits_is_silent"),
        ),
        (
            "kill -9 before and after every write of a save: the session before or the one after, whole",
            (
                f"{FOLDER}::test_a_kill_before_and_after_every_write",
                f"{FOLDER}::test_a_kill_within_a_write_leaves_nothing_to_clean",
            ),
        ),
        (
            "Several editors and processes save into one folder: one does, the others are refused in one line",
            (
                f"{FOLDER}::test_another_writers_session_is_not_replaced",
                f"{FOLDER}::test_who_loaded_before_another_saved_is_refused",
                f"{FOLDER}::test_of_many_processes_one_saves",
                f"{FOLDER}::test_a_reader_finds_a_session_while_others_replace_it",
            ),
        ),
        (
            "A full disk, a folder that cannot be synced, an interrupt: the session before is whole",
            (
                f"{FOLDER}::test_a_full_disk_leaves_the_session_and_nothing_else",
                f"{FOLDER}::test_a_folder_that_cannot_be_synced_after_the_index_keeps_it",
                f"{FOLDER}::test_an_interrupted_save_can_be_repeated",
            ),
        ),
        (
            "An output within a session's folder; links, pipes and unreadable folders in its place: refused",
            (
                f"{FOLDER}::test_no_output_lies_in_a_session",
                f"{FOLDER}::test_links_and_odd_files_are_neither_followed_nor_removed",
                f"{FOLDER}::test_what_is_no_plain_file_is_never_opened",
                f"{FOLDER}::test_a_folder_that_cannot_be_read_is_not_called_damaged",
            ),
        ),
        (
            "Fields of other types, out of range or nested 100,000 deep: refused at load in one line",
            (
                f"{INDEX}::test_every_field_is_checked_before_anything_is_built",
                f"{INDEX}::test_odd_texts_are_refused",
                f"{SESSION}::test_a_damaged_session_is_told_in_one_line",
            ),
        ),
    ),
    "Engine": (
        (
            "Memory that runs out within a source (limited addresses), three times: an edit's bytes are as before",
            (f"{FAULT_ENGINE}::test_memory_that_runs_out_within_a_source_leaves_the_editor_as_it_was",),
        ),
        (
            "`on_step` raises anything, a failure in a model, NaN in weights: nothing kept, the same bytes afterwards",
            (
                f"{BAD}::test_on_step_may_raise_anything",
                f"{BAD}::test_a_failure_inside_a_model",
                f"{BAD}::test_nan_in_weights_is_told",
            ),
        ),
        (
            "A parent that is deleted while an edit of it runs; results that a caller writes to",
            (
                f"{BAD}::TestWithinARun::test_a_parent_stays_while_an_edit_of_it_runs",
                f"{BAD}::TestWithinARun::test_a_parent_stays_while_it_is_rebuilt",
                f"{BAD}::TestWriting::test_masks_are_read_only",
                f"{BAD}::TestWriting::test_a_mask_that_a_caller_empties_is_rebuilt_as_it_was",
            ),
        ),
        (
            "The pipeline or a part of it moved to another dtype: records made anew, or one line",
            (
                f"{BAD}::test_a_pipeline_of_another_dtype_is_noticed",
                f"{BAD}::test_a_part_of_another_dtype_is_refused",
            ),
        ),
        (
            "Editors of one pipeline in threads: what each gives alone; editors of two models never wait",
            (
                f"{BAD}::test_two_threads_on_one_pipeline",
                "tests/contract/test_e5.py::test_editors_of_one_pipeline_in_threads_give_what_each_gives_alone",
                "tests/contract/test_e5.py::test_editors_of_two_models_never_wait_for_one_another",
            ),
        ),
        (
            "A graph that fails or differs in its first step: given up, the edit runs eagerly",
            (f"{STEPPING}::test_a_graph_that_fails_or_differs_is_given_up_and_the_edit_runs_eagerly",),
        ),
        (
            "An edit that leaves a mask which is too small, without stand-ins: noticed, and the mask grown",
            ("tests/masking/test_drift_check.py::test_a_mask_that_is_too_small_is_noticed_and_grown",),
        ),
    ),
    "Cache": (
        (
            "Evicted features: rebuilt with the same bytes, the least recently used source first",
            (
                f"{CACHE}::test_what_was_dropped_is_rebuilt",
                f"{CACHE}::test_only_what_is_gone_is_rebuilt",
                f"{CACHE}::test_the_least_recently_used_source_goes_first",
                f"{CACHE}::test_a_result_outlives_what_was_recorded",
            ),
        ),
        (
            "A cancelled edit while features are fetched ahead: no buffer is reused before its copy is done",
            (
                f"{PREFETCH}::test_a_cancelled_edit_waits_for_what_was_fetched_ahead",
                f"{PREFETCH}::test_buffers_stay_until_the_copy_that_nobody_waits_for_is_done",
            ),
        ),
        (
            "Several edits at once of which one is cancelled: nothing is kept",
            (f"{STEPPING}::test_a_batch_that_is_cancelled_leaves_nothing",),
        ),
    ),
    "Models": (
        (
            "Given to `fisedit batch`: exit 2, one line, no output",
            (
                f"{GIVEN}::TestBeforeTheModelLoads::test_a_model_that_cannot_be_loaded",
                f"{GIVEN}::TestBeforeTheModelLoads::test_the_model_itself",
                f"{FAULT}::test_a_model_that_its_worker_cannot_load",
            ),
        ),
        (
            "Missing",
            (
                f"{MODELS}::TestRefusedBeforeWeights::test_nothing_there",
                f"{CLI}::TestBeforeTheModelLoads::test_a_missing_model",
            ),
        ),
        (
            "Truncated weights, texts or tokenizer; lying headers",
            (
                f"{MODELS}::TestRefusedBeforeWeights::test_truncated_weights",
                f"{MODELS}::TestRefusedBeforeWeights::test_truncated_texts",
                f"{MODELS}::TestRefusedBeforeWeights::test_a_header_that_lies",
                f"{MODELS}::test_a_tokenizer_cut_short",
            ),
        ),
        ("Git LFS pointers", (f"{MODELS}::TestRefusedBeforeWeights::test_a_git_lfs_pointer",)),
        ("NaN weights", (f"{MODELS}::test_weights_that_are_no_numbers", f"{BAD}::test_nan_in_weights_is_told")),
        (
            "Kolors, LoRA and others given as a model: named, before allocation",
            (
                f"{MODELS}::TestRefusedBeforeWeights::test_another_pipeline",
                f"{MODELS}::TestRefusedBeforeWeights::test_other_files",
            ),
        ),
        (
            "Missing keys, other shapes",
            (
                f"{MODELS}::TestRefusedBeforeWeights::test_missing_keys",
                f"{MODELS}::TestRefusedBeforeWeights::test_other_shapes",
            ),
        ),
        ("Pickles under any name: refused, never run", (f"{MODELS}::test_pickles_are_never_run",)),
        (
            "Configurations that name foreign classes, code beside a model: refused, never run",
            (
                f"{MODELS}::TestRefusedBeforeWeights::test_foreign_classes",
                f"{MODELS}::test_code_beside_a_model_is_never_run",
            ),
        ),
    ),
    "App": (
        (
            "100 callers at once, 10 times: own picture or error[busy]; at most 64 MiB more from round 3 to round 10",
            (
                f"{FAULT_APP}::test_a_hundred_people_ten_times_over",
                f"{SERVER}::test_everybody_gets_their_own_or_is_told",
            ),
        ),
        (
            "Stop, or the client leaves, while it waits, generates, opens or edits: at most one more step of the model",
            (
                f"{SAFETY}::TestLeaving::test_while_it_runs",
                f"{SAFETY}::TestLeaving::test_while_it_waits",
                f"{BROWSER}::test_stop",
            ),
        ),
        (
            "A prompt of 100,000 letters, or of none: refused, nothing computed",
            (
                f"{SAFETY}::TestArguments::test_a_prompt_of_100000_letters",
                f"{SAFETY}::TestArguments::test_prompts_that_say_nothing",
            ),
        ),
        (
            "Numbers, words and masks out of range: refused, nothing computed",
            (
                f"{SAFETY}::TestArguments::test_numbers_out_of_range",
                f"{SAFETY}::TestArguments::test_wishes_out_of_range",
            ),
        ),
        (
            "Paths and addresses (/etc/passwd, ../, file://, 127.0.0.1, link-local), links among uploads: never read",
            (
                f"{SAFETY}::TestPlaces::test_no_path_and_no_address_is_read",
                f"{SAFETY}::TestPlaces::test_the_servers_own_files",
                f"{DOORS}::test_files_of_others",
                f"{DOORS}::test_addresses",
            ),
        ),
        (
            "Uploads that are no picture, cut, or bombs; requests that are too large or no JSON",
            (
                f"{SAFETY}::TestPlaces::test_uploads_are_looked_at_like_any_file",
                f"{DOORS}::test_too_much",
                f"{DOORS}::test_what_is_no_json",
            ),
        ),
        (
            "A forged Host, a page of another site, routes that are not the page's",
            (
                f"{SAFETY}::TestPlaces::test_a_forged_host",
                f"{SAFETY}::TestPlaces::test_a_page_of_another_site",
                f"{DOORS}::test_forged_hosts",
                f"{DOORS}::test_pages_of_other_sites",
                f"{DOORS}::test_other_routes_are_not_there",
            ),
        ),
        (
            "An address that others reach without a token, or a wrong one",
            (
                f"{SERVER}::test_others_need_a_token",
                f"{DOORS}::TestToken::test_nothing_without_it",
                f"{SERVER}::test_a_whole_life",
            ),
        ),
        (
            "Session A reads session B, or guesses keys; two browsers do not see each other",
            (
                f"{SAFETY}::TestOthers::test_a_session_is_its_owners",
                f"{SAFETY}::TestOthers::test_a_key_is_not_guessed",
                f"{BROWSER}::test_a_reload_keeps_the_session_and_others_do_not_see_it",
            ),
        ),
        (
            "Port taken, no such model: one line",
            (
                f"{SERVER}::test_refusals_are_one_line_before_anything_is_loaded",
                f"{SERVER}::test_a_port_that_is_taken",
            ),
        ),
        (
            "HTML and ANSI in prompts",
            (
                f"{BROWSER}::test_words_of_users_are_words",
                f"{SAFETY}::TestArguments::test_control_signs_never_arrive",
            ),
        ),
        (
            "No request leaves the page's server, no error in the browser's console",
            (f"{BROWSER}::test_from_words_to_a_file", f"{BROWSER}::test_painting"),
        ),
        (
            "The server in a network without a way out: it starts, generates and edits, and tries to reach nothing",
            (f"{FAULT_APP}::test_no_packet_leaves_the_server",),
        ),
        (
            "2,000 fuzzed calls of every route and event: none answers 500 or names a handler or a path",
            (f"{CALLS}::test_fuzzed_calls", f"{CALLS}::test_2000_fuzzed_calls"),
        ),
        (
            "Crafted, damaged and oversized session archives; every flipped bit: refused before anything is written",
            (
                f"{ARCHIVE}::test_crafted_archives_are_refused_before_anything_is_written",
                f"{ARCHIVE}::test_no_flipped_bit_of_an_archive_is_silent",
            ),
        ),
    ),
}


def tests() -> list[str]:
    """Every test of the table, once."""
    return list(dict.fromkeys(test for cases in CASES.values() for _, named in cases for test in named))


def results(junit: Path) -> dict[str, tuple[Counter[str], list[str]]]:
    """Test -> how its runs ended, and what they measured."""
    found: dict[str, tuple[Counter[str], list[str]]] = defaultdict(lambda: (Counter(), []))
    for case in ET.parse(junit).iter("testcase"):
        ends, measured = found[f"{case.get('classname')}.{str(case.get('name')).partition('[')[0]}"]
        bad = {child.tag for child in case} & {"failure", "error", "skipped"}
        ends["failed" if bad - {"skipped"} else "skipped" if bad else "passed"] += 1
        measured += [str(p.get("value")) for p in case.iter("property") if p.get("name") == "measured"]
    return found


def page(found: Mapping[str, tuple[Counter[str], list[str]]], commit: str) -> str:
    """The page as Markdown."""
    head = (
        "# Reliability\n\n"
        "What may go wrong, the tests that make it go wrong, and how they ended. Written by `make fault`.\n\n"
        f"Last run: commit `{commit}`.\n"
    )
    return head + "".join(_section(name, cases, found) for name, cases in CASES.items())


def _section(name: str, cases: Sequence[Case], found: Mapping[str, tuple[Counter[str], list[str]]]) -> str:
    return f"\n## {name}\n\n| case | tests | last result |\n|---|---|---|\n" + "".join(
        _row(*case, found) for case in cases
    )


def _row(case: str, named: Sequence[str], found: Mapping[str, tuple[Counter[str], list[str]]]) -> str:
    links = "<br>".join(f"[{test.rpartition('::')[2]}](../{test.partition('::')[0]})" for test in named)
    ends, measured = Counter[str](), []
    for test in named:
        counted, told = found.get(_key(test), (Counter({"not run": 1}), []))
        ends += counted
        measured += told
    said = ", ".join(f"{ends[end]} {end}" for end in ("passed", "skipped", "failed", "not run") if ends[end])
    return f"| {case} | {links} | {'; '.join([said, *measured])} |\n"


def _key(test: str) -> str:
    """How junit names a test: its module's path with dots, its class, its name."""
    path, *names = test.split("::")
    return ".".join([path.removesuffix(".py").replace("/", "."), *names])


def main() -> int:
    """Run the tests and write the page, of a clean tree alone; returns pytest's exit status."""
    if subprocess.check_output(["git", "status", "--porcelain", "--untracked-files=no"], cwd=ROOT):
        sys.stderr.write("error: the page names a commit, got changes that are not committed; commit them first\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--all",
            f"--junitxml={junit}",
            "-o",
            "junit_family=xunit1",
            *tests(),
        ]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if not junit.is_file():
            return status or 1
        found = results(junit)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(found, commit), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())

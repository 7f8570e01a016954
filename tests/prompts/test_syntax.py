r"""Syntax of web UIs in prompts: what is taken out, what is refused, and what stays words."""

from __future__ import annotations

import pytest

from fisedit.errors import PromptError
from fisedit.prompts.syntax import (
    blank_tags,
    check_syntax,
    named_embeddings,
    syntax_notes,
    take_loras,
    without_loras,
)


@pytest.mark.parametrize(
    ("prompt", "text", "scales"),
    [
        ("a cat on a beach", "a cat on a beach", {}),
        ("a cat <lora:ink:0.8>", "a cat", {"ink": 0.8}),
        ("<lora:ink>a cat, <lyco:my file-v2.1:-.5> big", "a cat,  big", {"ink": 1.0, "my file-v2.1": -0.5}),
        ("<LORA: ink : 1 >", "", {"ink": 1.0}),
        ("a <cat-toy> and <hypernet:x:1>", "a <cat-toy> and <hypernet:x:1>", {}),
    ],
)
def test_tags_of_loras_are_taken_out(prompt, text, scales):
    assert take_loras(prompt) == (text, scales) and without_loras(prompt) == text


@pytest.mark.parametrize(
    "tag", ["<lora::1>", "<lora:>", "<lora:a:b>", "<lora:a:1:0.5>", "<lora:a:te=1>", "<lora:a:1> <lora:a:1>"]
)
def test_other_tags_of_loras_are_refused(tag):
    with pytest.raises(PromptError, match="LoRA"):
        take_loras(f"a cat {tag}")
    assert without_loras(f"a cat {tag}") == "a cat"


def test_tags_that_are_not_applied_are_told_and_are_no_words():
    prompt = "a <lora:ink:(0.8)>cat <lyco:[a|b]> <cat-toy>"
    assert blank_tags(prompt) == f"a {' ' * 16}cat {' ' * 12} <cat-toy>" and len(blank_tags(prompt)) == len(prompt)
    told = [note.partition(", ")[0] for note in syntax_notes(prompt, "prompt")]
    assert told == ["the prompt has <lora:ink:(0.8)>", "the prompt has <lyco:[a|b]>"]
    check_syntax(prompt)


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ("a {{cat}} b", "{{cat}}"),
        ("a 1.3::cat, dog:: b", "1.3::cat, dog::"),
        ("a -2::cat b", "-2::cat b"),
        ("a cat::2 b", "cat::2"),
        ("a cat++ b", "cat++"),
        ("a (red cat)--, b", ")--"),
        ("a (cat)1.4", ")1.4"),
        ('("a cat", "b").blend(1, 1)', ".blend("),
        ("a cat # a comment\nb", "# a comment"),
        ("a cat // b", "// b"),
    ],
)
def test_marks_of_other_programs_are_told(prompt, part):
    check_syntax(prompt)
    notes = syntax_notes(prompt, "negative prompt")
    assert [note.startswith(f"the negative prompt has {part}, which is read as words") for note in notes] == [True]


@pytest.mark.parametrize(
    "prompt",
    [
        r"a \{cat\} (cat:1.2)",
        "C ++, 16:9 at 12:30, a:b :: c",
        "a #1 dad, well-known -- (a) - b",
        "https://a.b/c, 1.5 (a)",
    ],
)
def test_marks_that_mean_nothing_are_not_told(prompt):
    assert syntax_notes(prompt) == ()


def test_a_word_of_an_embedding_is_named():
    prompt = "a (embedding:ink-2.pt:1.2), Embedding:<toy>, my_embedding:x embedding: x <embedding:x:1>"
    blank = f"a ({' ' * 10}ink-2   :1.2), {' ' * 10}<toy>, my_embedding:x embedding: x <embedding:x:1>"
    assert blank_tags(prompt) == blank and named_embeddings(prompt) == ("ink-2", "<toy>")
    with pytest.raises(
        PromptError, match=r"<embedding:x:1>, which is a tag that is not supported; write the loaded word"
    ):
        check_syntax(prompt)


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("a cat <hypernet:anime:1>", "<hypernet:anime:1>"),
        ("a [cat:dog:0.5] on a beach", "[cat:dog:0.5]"),
        ("a [cat:10]", "[cat:10]"),
        ("a [cat::.5] b", "[cat::.5]"),
        ("a [(cat:1.2):big (dog:1.1): 0.5 ]", "[(cat:1.2):big (dog:1.1): 0.5 ]"),
        ("a [cat|dog]", "[cat|dog]"),
        ("(a [cat||dog] on a beach:1.2)", "[cat||dog]"),
        ("[[a|b]:c:0.3]", "[a|b]"),
        ("a cat AND a dog", "AND"),
        ("a cat :1.2 AND a dog :0.8", "AND"),
        ("a __animal__ on a beach", "__animal__"),
        ("a __art/style-1*__", "__art/style-1*__"),
        ("a {cat|dog}", "{cat|dog}"),
        ("a {2$$, $$cat|dog|fox}", "{2$$, $$cat|dog|fox}"),
    ],
)
def test_what_no_text_encoder_reads_is_refused_by_name(prompt, named):
    with pytest.raises(PromptError) as refused:
        check_syntax(prompt)
    assert str(refused.value).startswith(f"prompt has {named}, which ") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "prompt",
    [
        "a (cat:1.2) [dog] BREAK ((big)) [(a:0.5)] [a (b:0.3)]",
        r"\[cat|dog\] and \[a:b:0.5\] and \{a|b\}",
        "a cat | a dog, a cat :) [dog :1.3) a] 12:30 a:b:0.5",
        "a <cat-toy> <|startoftext|> a < b > c : d",
        "sand and SAND, COMMAND; ANDROID {cat} __ ____ snake_case __init",
        "[a:b] (a|b) [a (b|c) d]",
        "A CAT AND A CAKE",
        "",
    ],
)
def test_all_else_is_left(prompt):
    check_syntax(prompt)


def test_long_parts_are_shortened():
    with pytest.raises(PromptError) as refused:
        check_syntax(f"[{'a' * 5000}|b]", "negative_prompt")
    assert len(str(refused.value)) < 300 and str(refused.value).startswith("negative_prompt has [aaa")

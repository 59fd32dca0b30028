"""The final answer of a response."""

import time
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo_cli.recipe import VerifySettings
from exgrpo_cli.verifiers import boxes
from exgrpo_cli.verifiers.extract import (
    RULES,
    after_thinking,
    extract_answer,
    gold_answer,
    last_boxed,
)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So \boxed{42}.", "42"),
        (r"First \boxed{1}, but no: \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\left\{ x : x > 0 \right\}}", r"\left\{ x : x > 0 \right\}"),
        # escaped braces are printed ones: these are no pair, and the box still closes
        (r"\boxed{\left\{ \frac{a}{b} \right.}", r"\left\{ \frac{a}{b} \right."),
        (r"\boxed { 7 }", "7"),
        (r"\fbox{7}", "7"),
        (r"\\boxed{7}", "7"),
        (r"\[ a \\ \boxed{7} \]", "7"),
        (r"is $\boxed 5$", "5"),
        (r"\boxed{a \boxed{b} c}", "b"),
        # an empty box is passed over, an unclosed one was cut off: what it said is not known
        (r"\boxed{3} and then \boxed{1", None),
        (r"\boxed{3} as asked for in \boxed{}", "3"),
        (r"\boxed{12", None),
        (r"a stray { and \boxed{5}", "5"),
        (r"a stray } and \boxed{5}", "5"),
        ("\\boxed{two\nlines}", "two\nlines"),
        # other forms, in their order
        ("<answer> 8 </answer>", "8"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        (r"<answer>\boxed{9}</answer>", "9"),
        ("<answer>9", None),
        ("3 * 4 = 12\n#### 12", "12"),
        ("#### 1,200\n", "1,200"),
        ("##### no heading of five", None),
        ("The answer is 12.", "12"),
        ("The answer is 3.5.", "3.5"),
        ("the final answer is: $\\frac{1}{2}$. I hope it is correct.", r"\frac{1}{2}"),
        ("The final answer is 7. I hope it is correct.", "7"),
        ("The answer is 5 apples. They are red.", "5 apples"),
        ("**Answer:** 17", "17"),
        ("Final answer: **17**", "17"),
        ("Answer: $x$ and $y$", "x, y"),
        ("The answer is:\n\n$$x^2$$", "x^2"),
        ("The answer is (B).", "(B)"),
        (r"The answer is 3, so \boxed{4}", "4"),
        # only what follows the thinking counts
        (r"<think>\boxed{1}</think> So \boxed{2}.", "2"),
        (r"<think>\boxed{1}</think> I do not know.", None),
        (r"\boxed{1}</think>a</think>\boxed{2}", "2"),
        (r"<think> cut off in thought \boxed{1}", None),
        ("", None),
        ("   \n", None),
        ("no answer at all", None),
        ("The answer is", None),
        ("The answer is ...", None),
    ],
)
def test_the_answer_of_a_response(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


ALL = (
    "<think>#### 0</think>\n#### 1\nThe answer is 2.\n<answer>\\boxed{3}</answer>\n"
    "\\boxed{4}\nlast: 5"
)


@pytest.mark.parametrize(
    ("rule", "answer"),
    [
        ("auto", "4"), ("boxed", "4"), ("answer_tag", "3"), ("hashes", "1"), ("phrase", "2"),
        ("last_line", "last: 5"), ("whole", ALL.partition("</think>\n")[2]),
    ],
)  # fmt: skip
def test_the_rule_says_where_the_answer_is(rule: str, answer: str) -> None:
    assert extract_answer(ALL, rule) == answer
    assert extract_answer(ALL.replace("<think>", "").replace("</think>", ""), rule) is not None
    assert extract_answer("<think>" + ALL.replace("</think>", ""), rule) is None
    # no rule falls back on another form
    kept = {"auto": "x", "boxed": "x", "answer_tag": "x", "hashes": "x", "phrase": "x"}
    assert extract_answer("x", rule) == ("x" if rule not in kept else None)
    assert extract_answer(" \n ", rule) is None


def test_recipe_and_rules_are_the_same() -> None:
    annotation = VerifySettings.model_fields["extract"].annotation
    assert set(get_args(annotation)) == set(RULES)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("I see no answer: yet.\n" + "word " * 500 + "\nthe answer is 4. Done.", "4"),
        ("The answer is 3.\n" + "word " * 500 + "my answer is what I said.", "3"),
        ("İ" * 300 + " The answer is 3.", "3"),
        ("The\nfinal\nanswer\nis\n\n7", "7"),
        ("x" * 300 + " Answer: 3", None),
        ("x" * 300 + "\nAnswer: 3", "3"),
    ],
)
def test_the_last_phrase_in_long_texts(text: str, answer: str | None) -> None:
    assert extract_answer(text, "phrase") == answer


@given(
    st.lists(
        st.sampled_from(
            [
                "\\boxed{",
                "\\fbox{",
                "\\\\boxed{",
                "boxed",
                "\\",
                "{",
                "}",
                "\\{",
                "\\boxed{1}",
                ", ",
            ]
        ),
        max_size=20,
    ).map("".join)
)
def test_looking_at_the_last_boxes_alone_changes_nothing(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "_box_near_the_end", lambda text: boxes._first_box(text))
        expected = boxes.boxed(text)
    assert boxes.boxed(text) == expected


@pytest.mark.parametrize(
    ("solution", "gold"),
    [
        (r"So \boxed{1} and \boxed{-2}.", "1, -2"),
        (r"First \boxed{7}. After a long while, it is seen that the sum is \boxed{8}.", "8"),
        (r"It is \boxed{5", None),
        ("The answer is 5.", None),
    ],
)
def test_gold_answers_are_read_alike(solution: str, gold: str | None) -> None:
    assert gold_answer(solution) == gold == extract_answer(solution, "boxed")


balanced = st.recursive(
    st.text(alphabet=r"abc 1+$", min_size=1, max_size=5),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(
        lambda parts: "{" + "".join(parts) + "}x"
    ),
    max_leaves=20,
)


@given(balanced, st.text(alphabet="ab }\n$", max_size=20))
def test_balanced_content_comes_out_whole(content: str, before: str) -> None:
    expected = content.strip() if content.strip(" $") else None  # a blank is no answer
    assert last_boxed(f"{before}\\boxed{{{content}}} end") == expected


@given(st.text(max_size=300))
def test_any_text_is_taken(text: str) -> None:
    answer = extract_answer(text)
    assert answer is None or answer.strip()
    assert after_thinking(text) in text


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 150_000,
        "\\boxed{" + "{" * 100_000 + "}" * 100_000 + "}",
        "\\boxed{" + "1" * 1_000_000 + "}",
        "\\" * 1_000_000,
        "\n" * 1_000_000,
        " " * 1_000_000 + "#",
        "*" * 1_000_000,
        "the answer is" + " " * 1_000_000,
        "the " * 250_000,
        "answer: \n" * 100_000,
        "the answer is 1" + "." + "*" * 1_000_000 + "x",
        "the answer is 1" + " " * 1_000_000 + "x",
        "<answer>" * 120_000,
        "</think>" * 120_000,
        "####" * 250_000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_long_texts_take_linear_time(text: str) -> None:
    begin = time.process_time()
    extract_answer(text)
    assert time.process_time() - begin < 2.0

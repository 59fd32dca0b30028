"""Format rewards and length penalties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo_cli.verifiers.reward import has_required, overlong, well_formed


@pytest.mark.parametrize(
    ("response", "think", "think_answer"),
    [
        ("<think>a</think> b", True, False),
        ("a</think> b", True, False),  # the template has opened the thought
        ("\n<think>\na\n</think>\n\n<answer>\nb\n</answer>\n", True, True),
        ("a</think><answer>b</answer>", True, True),
        ("<think>a</think>So <answer>b</answer>", True, False),
        ("<think>a</think><answer>b</answer> I hope.", True, False),
        ("<think>a</think><answer> </answer>", True, False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", True, False),
        ("<think>a</think><answer>b", True, False),
        ("b", False, False),
        ("<think>a", False, False),
        ("<think>a</think>", False, False),
        ("<think> </think> b", False, False),
        ("</think> b", False, False),
        ("<think>a</think> b </think> c", False, False),
        ("<think>a <think>b</think> c", False, False),
        ("Hm. <think>a</think> b", False, False),
        ("", False, False),
    ],
)
def test_formats(response: str, think: bool, think_answer: bool) -> None:
    assert (well_formed(response, "think"), well_formed(response, "think_answer")) == (
        think,
        think_answer,
    )


def test_what_is_required() -> None:
    # as published: a closed thought is enough, even where the format is not kept
    for response in ("a</think> b", "</think>", "<think>a</think>b</think>c", "Hm. a</think>"):
        assert has_required(response, "think")
    assert not has_required(r"So the answer is \boxed{12}.", "think")
    assert not has_required("<think>a", "think")
    assert has_required("a</think><answer>b</answer>", "think_answer")
    assert not has_required("a</think>b", "think_answer")
    assert has_required("", "none")


def test_the_length_penalty_is_dapos() -> None:
    # equation 13 with L_max = 20480 and L_cache = 4096
    for tokens, share in ((1, 0.0), (16384, 0.0), (18432, 0.5), (20480, 1.0)):
        assert overlong(tokens, False, 20480, 4096) == share
    assert overlong(20480, False, 20480, 0) == 0.0  # ended just in time
    assert overlong(20480, True, 20480, 0) == 1.0
    assert overlong(300, True, 20480, 4096) == 1.0  # cut off by the context's end


@given(st.integers(1, 200), st.booleans(), st.integers(1, 150), st.integers(0, 150))
def test_the_penalty_is_a_share(tokens: int, truncated: bool, limit: int, margin: int) -> None:
    share = overlong(tokens, truncated, limit, margin)
    assert 0.0 <= share <= overlong(tokens + 1, truncated, limit, margin) <= 1.0

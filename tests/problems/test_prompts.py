"""What a chat template is told besides the messages."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from exgrpo_cli.errors import InputError
from exgrpo_cli.problems.prompts import render_prompt
from exgrpo_cli.recipe import Recipe, differences, load_recipe, parse_recipe, to_toml
from exgrpo_cli.runs.prepare import SAMPLED_BY

# As Qwen3's: thinking is on unless it is told otherwise.
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}n{% else %}y{% endif %}"
)
CHAT = [{"role": "user", "content": "q"}]


def tokenizer(template: str | None = TEMPLATE) -> Any:
    raw = Tokenizer(models.WordLevel({c: i for i, c in enumerate("?qny")}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="?", chat_template=template)


def recipe(**model: Any) -> Recipe:
    return parse_recipe({"model": model}, "test")


@pytest.mark.parametrize(
    ("told", "last"),
    [({}, 3), ({"enable_thinking": False}, 2), ({"enable_thinking": True}, 3)],
)
def test_the_template_is_told(told: dict[str, Any], last: int) -> None:
    assert render_prompt(CHAT, tokenizer(), recipe(chat_template_kwargs=told).model) == [1, last]


@pytest.mark.parametrize("key", ["enable_thinkin", "thinking", "messages", "padding"])
def test_what_the_template_does_not_know_is_refused(key: str) -> None:
    with pytest.raises(InputError, match=f"chat_template_kwargs: {key} is nothing that"):
        render_prompt(CHAT, tokenizer(), recipe(chat_template_kwargs={key: False}).model)


def test_it_needs_a_chat_template() -> None:
    told = {"enable_thinking": False}
    for template, how in ((None, "auto"), (TEMPLATE, "plain")):
        settings = recipe(chat_template_kwargs=told, template=how).model
        with pytest.raises(InputError, match="is for a chat template, and none is used"):
            render_prompt(CHAT, tokenizer(template), settings)


def test_it_is_recorded_and_compared() -> None:
    one = load_recipe(None, ["model.chat_template_kwargs={enable_thinking = false, n = [1, 'x']}"])
    two = load_recipe(None, ["model.chat_template_kwargs.enable_thinking=true"])
    assert one.model.chat_template_kwargs == {"enable_thinking": False, "n": [1, "x"]}
    assert two.model.chat_template_kwargs == {"enable_thinking": True}
    assert set(differences(one, two)) == {"model.chat_template_kwargs"}
    assert "model.chat_template_kwargs" in SAMPLED_BY
    for made in (one, two):
        import tomllib

        assert parse_recipe(tomllib.loads(to_toml(made)), "test") == made

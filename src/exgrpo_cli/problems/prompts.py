"""From a problem's chat to prompt token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OURS = ("messages", "add_generation_prompt", "continue_final_message", "tokenize")


def render_prompt(
    prompt: Sequence[Mapping[str, str]], tokenizer: PreTrainedTokenizerBase, settings: ModelSettings
) -> list[int]:
    """Token ids of a chat, ready for the response to follow.

    With a chat template: the template with its generation prompt, which places all special
    tokens. Without one, or with ``model.template = "plain"``: the system text, if any, and the
    last user message put into ``model.plain_template``, without special tokens.
    """
    messages = [
        {"role": m["role"], "content": m["content"]}
        for m in prompt
        if not (settings.replace_system and m["role"] == "system")
    ]
    if settings.system and not any(m["role"] == "system" for m in messages):
        messages.insert(0, {"role": "system", "content": settings.system})
    templated = settings.template == "auto" and tokenizer.chat_template
    more: dict[str, Any] = settings.chat_template_kwargs
    for key in more:  # what a template does not know it passes over in silence
        if not templated or not _knows(tokenizer, key):
            raise InputError(
                f"model.chat_template_kwargs: {key} is nothing that this prompt's template knows"
                if templated
                else f"model.chat_template_kwargs: {key} is for a chat template, and none is used"
            )
    if templated:
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False, **more
            )
        except Exception as error:
            raise InputError(f"the chat template refuses a prompt: {error}") from error
        return [int(i) for i in ids]
    users = [m["content"] for m in messages if m["role"] == "user"]
    if not users:
        raise InputError("a prompt without a user message cannot be put into plain_template")
    system = "".join(m["content"] + "\n\n" for m in messages if m["role"] == "system")
    text = system + settings.plain_template.replace("{prompt}", users[-1])
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def _knows(tokenizer: Any, key: str) -> bool:
    """Whether a chat template reads a variable of this name."""
    template = tokenizer.get_chat_template()
    return bool(re.search(rf"\b{re.escape(key)}\b", template)) and key not in _OURS

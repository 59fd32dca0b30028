"""What a reward has besides the verdict: a required format, format and length. Pure functions."""

from __future__ import annotations


def well_formed(response: str, form: str) -> bool:
    """Whether a response keeps to a format.

    ``think``: one thought, closed by one ``</think>``, and then an answer. The opening ``<think>``
    may be missing (chat templates put it into the prompt); where it is there, the response begins
    with it. ``think_answer``: as ``think``, and what follows the thought is one
    ``<answer>...</answer>`` and nothing else (the format reward of DeepSeek-R1, arXiv 2501.12948).
    """
    thought, close, rest = response.strip().partition("</think>")
    thought, rest = thought.removeprefix("<think>").strip(), rest.strip()
    if not close or not thought or not rest or "<think>" in thought:
        return False
    if "<think>" in rest or "</think>" in rest:
        return False
    if form == "think":
        return True
    inner = rest.removeprefix("<answer>").removesuffix("</answer>")
    whole = len(inner) == len(rest) - len("<answer></answer>")
    return whole and bool(inner.strip()) and "<answer>" not in inner and "</answer>" not in inner


def has_required(response: str, require: str) -> bool:
    """Whether a response has the format without which it earns nothing.

    ``think``: it has a ``</think>``, and no more is asked (the gate of the public implementation of
    ExGRPO; :func:`well_formed` asks for more). ``think_answer``: it is :func:`well_formed` so.
    ``none``: any response has it.
    """
    if require == "think":
        return "</think>" in response
    return require == "none" or well_formed(response, require)


def overlong(tokens: int, truncated: bool, limit: int, margin: int) -> float:
    """How much of the length penalty a response gets, from 0 to 1.

    Truncated responses get all of it. With a ``margin``, it rises linearly over the last so many
    tokens before the limit: DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    Args:
        margin: tokens; 0 for truncated responses only.
    """
    if truncated:
        return 1.0
    if margin <= 0:
        return 0.0
    return min(1.0, max(0.0, (tokens - (limit - margin)) / margin))

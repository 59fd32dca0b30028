"""A user's own verifier: ``path.py:function``. Runs in a worker that serves it alone.

``function(response: str, answer: str, metadata: dict) -> bool | float``: the whole response, the
gold answer and the problem's metadata. True and False are rewards 1 and 0. A number is the reward
itself, and counts as a correct answer from 0.5 on. Processes that it starts end with its answer;
those that the file starts as it is imported end with the worker.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from collections.abc import Callable
from typing import Any

from exgrpo_cli.verifiers import split_function

Function = Callable[[str, str, dict[str, Any]], bool | float]

CORRECT_FROM = 0.5
"""The least number that counts as correct."""
_LARGEST = (2 - 2**-23) * 2.0**127  # of the table's 32-bit floats


def load(verifier: str) -> Function:
    """Import the file and take the function from it. Files beside it can be imported there.

    Raises:
        Exception: whatever the file raises; AttributeError or TypeError when the function is
            missing or no function.
    """
    path, name = split_function(verifier)
    path = path.resolve()
    sys.path.append(str(path.parent))
    module_name = f"_exgrpo_verifier_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if function is None:
        raise AttributeError(f"there is no function {name} in {path}")
    if not callable(function):
        raise TypeError(f"{name} in {path} is no function")
    return function  # type: ignore[no-any-return]


def caller(function: Function) -> Callable[[str, str, dict[str, Any]], tuple[float | None, str]]:
    """What calls the function and reads its result: the reward, a finite number that 32 bits hold,
    and a line for people; without a reward, why there is none."""
    # The function may put others in the places of these.
    number, has, isa, kind_of, size = float, hasattr, isinstance, type, abs
    isnan, text, largest = math.isnan, (str, bytes), _LARGEST
    suppress, failures = contextlib.suppress, (TypeError, ValueError, OverflowError)

    def call(response: str, answer: str, metadata: dict[str, Any]) -> tuple[float | None, str]:
        value: Any = function(response, answer, metadata)
        kind = kind_of(value)
        if value is None or isa(value, text):
            return None, f"the function returned {value!r:.80}, not a bool or a number"
        reward = None
        # float() would also read buffers
        if has(kind, "__float__") or has(kind, "__index__"):
            with suppress(*failures):
                reward = number(value)
        if reward is None:
            return None, f"the function returned a {kind.__name__}, not a bool or a number"
        if isnan(reward):
            return None, f"the function returned {reward}"
        if size(reward) > largest:
            return None, f"the function returned {reward}, which a 32-bit number cannot hold"
        return reward, f"the function returned {value!r:.80}"

    return call


def storable(text: str) -> str:
    """Text that a table can hold: lone surrogates become question marks."""
    return text.encode("utf-8", "replace").decode()


def verdict(message: dict[str, Any]) -> dict[str, Any]:
    """The verdict's fields in a worker's reply, which is the user's own word: all is checked.

    Raises:
        KeyError, TypeError, ValueError: it is no reply of a function's worker.
    """
    reward = message["reward"]
    if not isinstance(reward, (int, float)) or not abs(reward) <= _LARGEST:
        raise ValueError(f"reward {reward!r}")
    return {
        "status": "ok",
        "reward": float(reward),
        "correct": reward >= CORRECT_FROM,
        "why": storable(str(message["why"])[:500]),
    }

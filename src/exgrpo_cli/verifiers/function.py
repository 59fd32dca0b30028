"""A user's own verifier: ``path.py:function``. Runs in a worker.

``function(response: str, answer: str, metadata: dict) -> bool | float``: the whole response, the
gold answer and the problem's metadata. True and False are rewards 1 and 0. A number is the reward
itself, and counts as a correct answer from 0.5 on.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from typing import Any

from exgrpo_cli.verifiers import Verdict, split_function

Function = Callable[[str, str, dict[str, Any]], bool | float]

CORRECT_FROM = 0.5
"""The least number that counts as correct."""


def load(verifier: str) -> Function:
    """Import the file and take the function from it. Files beside it can be imported there.

    Raises:
        Exception: whatever the file raises; AttributeError or TypeError when the function is
            missing or no function.
    """
    path, name = split_function(verifier)
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module_name = f"_exgrpo_verifier_{path.stem}_{abs(hash(str(path)))}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    function = getattr(module, name, None)
    if function is None:
        raise AttributeError(f"there is no function {name} in {path}")
    if not callable(function):
        raise TypeError(f"{name} in {path} is no function")
    return function  # type: ignore[no-any-return]


def judge(function: Function, response: str, answer: str, metadata: dict[str, Any]) -> Verdict:
    """Call the function and read its result; ``error`` when that is no finite number."""
    value: Any = function(response, answer, metadata)
    if isinstance(value, (str, bytes)) or value is None:
        return Verdict("error", why=f"the function returned {value!r:.80}, not a bool or a number")
    try:
        reward = float(value)
    except (TypeError, ValueError):
        return Verdict(
            "error", why=f"the function returned a {type(value).__name__}, not a bool or a number"
        )
    if not math.isfinite(reward):
        return Verdict("error", why=f"the function returned {reward}")
    return Verdict(
        "ok", reward=reward, correct=reward >= CORRECT_FROM, why=f"the function returned {value!r}"
    )

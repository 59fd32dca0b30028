"""reasoning-gym's own scorers (arXiv 2505.24760), by the kind that a problem's metadata names.

The reward is 1 for the full score and else 0. Many scorers give a part of it to wrong answers (one
that holds the gold somewhere gets its share of the length), which a policy soon learns to collect.

Some scorers evaluate answers and metadata as Python (``eval``, sympy's ``parse_expr``). Here
nothing is evaluated but literals, arithmetic, and the functions of sympy.
"""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from exgrpo_cli.verifiers import Verdict, judged

OPEN_GOLD = "(any that the scorer accepts)"
"""The gold answer of kinds that give none."""

_FULL = 1 - 1e-9
_TUPLES = ("arc_agi", "rearc")  # kinds whose scorers compare boards with tuples, not lists
_FUNCTIONS = ("sqrt", "cbrt", "root")  # of sympy's; its others are classes
_HARMLESS = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.unaryop,
    ast.BinOp, ast.operator, ast.Name, ast.Load, ast.Call, ast.keyword,
)  # fmt: skip

Score = Callable[[str, str], float]
"""What a scorer gives an answer, beside the gold answer."""


def judge(
    answer: str, extracted: str, explain: bool = False, metadata: Mapping[str, Any] | None = None
) -> Verdict:
    """What the scorer says of an answer; one that it cannot read is wrong.

    Args:
        metadata: the entry's own, with ``source_dataset``, the kind, and perhaps ``config``, its
            options.

    Returns:
        ``unparsable`` where the metadata is none that a scorer takes.
    """
    try:
        score = _scorer(metadata or {})
    except (ImportError, ValueError) as error:
        return Verdict("unparsable", why=str(error))
    try:
        value = score(extracted, answer)
        why = f"the scorer gives {value:g} of 1"
    except MemoryError:
        raise
    except Exception as error:
        fault = check_gold(answer, metadata)
        if fault is not None:
            return Verdict("unparsable", why=fault)
        value, why = 0.0, f"the scorer cannot read it: {type(error).__name__}: {error}"[:500]
    correct = value >= _FULL
    return judged(correct, why, answer[:500], extracted[:500]) if explain else judged(correct, why)


def check_gold(answer: str, metadata: Mapping[str, Any] | None = None) -> str | None:
    """Why a gold answer cannot be judged against; None when its scorer gives it the full score."""
    try:
        score = _scorer(metadata or {})
        if answer == OPEN_GOLD:
            return None
        value = score(answer, answer)
    except MemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]
    return None if value >= _FULL else f"its own scorer gives it {value:g} of 1"


def _scorer(metadata: Mapping[str, Any]) -> Score:
    import reasoning_gym  # noqa: F401  (here, so that a worker has it before it is asked)
    import sympy.parsing.sympy_parser  # noqa: F401

    kind, config = metadata.get("source_dataset"), metadata.get("config", {})
    if not isinstance(kind, str) or not isinstance(config, dict):
        raise ValueError("the problem's metadata names no kind of reasoning-gym's (source_dataset)")
    dataset = _dataset(kind, json.dumps(config))
    entry = {"metadata": _tuples(dict(metadata)) if kind in _TUPLES else metadata}
    return lambda answer, gold: float(dataset.score_answer(answer, entry | {"answer": gold}))


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(one) for key, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@functools.lru_cache(maxsize=256)
def _dataset(kind: str, config: str) -> Any:
    from reasoning_gym.factory import DATASETS

    if kind not in DATASETS:
        raise ValueError(f"reasoning-gym has no kind {kind!r}")
    _guard()
    dataset, settings = DATASETS[kind]
    try:
        return dataset(config=settings(**json.loads(config)))
    except Exception as error:
        raise ValueError(f"{kind} cannot be opened with {config}: {error}"[:500]) from error


def _guard() -> None:
    """Have the scorers evaluate by :func:`evaluate`, in this process from now on."""
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") or name == "sympy.parsing.sympy_parser":
            vars(module)["eval"] = evaluate


def evaluate(
    source: str, names: dict[str, Any] | None = None, local: Mapping[str, Any] | None = None
) -> Any:
    """Python's ``eval`` for literals, arithmetic, and calls of sympy's classes and roots.

    Raises:
        ValueError: anything else.
        SyntaxError: no expression.
    """
    import sympy

    if not isinstance(source, str):
        raise ValueError("compiled code is not evaluated")
    tree = ast.parse(source.strip(), mode="eval")
    known = {**(names or {}), **(local or {})}
    used = {}
    for node in ast.walk(tree):
        if not isinstance(node, _HARMLESS):
            raise ValueError(f"{type(node).__name__} is not evaluated")
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            raise ValueError("a call of what is no name is not evaluated")
        if isinstance(node, ast.Name):
            value = known.get(node.id)
            kinds = value if isinstance(value, type) else type(value)
            if node.id not in _FUNCTIONS and not issubclass(kinds, sympy.Basic):
                raise ValueError(f"the name {node.id} is not evaluated")
            used[node.id] = value
    return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}}, used)

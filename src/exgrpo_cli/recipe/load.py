"""Reading recipes: TOML, overrides, and messages that name the nearest key."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe.settings import Recipe, Section

_SHOWN = 80
"""Characters of a value in a message."""


def known_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the recipe, such as ``train.learning_rate``."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from known_keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _unknown_key(key: str) -> str:
    """``unknown key train.lerning_rate; did you mean train.learning_rate?``"""
    keys = list(known_keys())
    sections = [name for name, f in Recipe.model_fields.items() if f.annotation is not int]
    leaf = key.rsplit(".", 1)[-1]
    same_name = [name for name in keys + sections if name.rsplit(".", 1)[-1] == leaf]
    near = difflib.get_close_matches(key, same_name or keys + sections, n=1, cutoff=0.6)
    if not near and same_name:
        near = same_name[:1]
    if not near:  # right name in the wrong section, or a slip in a short name
        leaves = {name.rsplit(".", 1)[-1]: name for name in keys}
        near = [leaves[n] for n in difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.6)]
    return f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else "")


_CHOICE = {
    "highest_entropy": "-mean_entropy",
    "lowest_perplexity": "-mean_logprob",
    "random": "luck",
    "newest": "age",
}
_WEIGHT = {
    "linear": "bucket",
    "sqrt": "sqrt(bucket)",
    "linear_clip": "least(bucket, samples / 2.0)",
}


def _rule(key: str, expression: str) -> str:
    return f'write the rule curate.{key} = "{expression}"'


def _weights(value: Any) -> str:
    if value == "uniform":  # all questions in one bucket
        return _rule("bucket", "0")
    return _rule("bucket_weight", _WEIGHT.get(str(value), "1"))


# Keys that are gone: what they were when nobody set them, and what to do instead (a function of
# the value where that depends on it).
_GONE: dict[str, tuple[Any, str | Callable[[Any], str]]] = {
    "curate.lower": (0, lambda v: _rule("store", f"correct AND k < n AND k > {v}")),
    "curate.upper": (None, lambda v: _rule("store", f"correct AND k < n AND k <= {v}")),
    "curate.weights": ("normal", _weights),
    "curate.sigma": (
        1.0,
        lambda v: _rule("bucket_weight", f"exp(-0.5 * ((bucket - samples / 2.0) / {v}) ** 2)"),
    ),
    "curate.selection": (
        "lowest_entropy",
        lambda v: _rule("choose", _CHOICE.get(str(v), "mean_entropy")),
    ),
    "curate.max_age": (None, lambda v: _rule("drop", f"age > {v}")),
    "curate.max_per_question": (None, lambda v: _rule("drop", f"newness > {v}")),
    "curate.max_trajectories": (None, lambda v: _rule("drop", f"pool_newness > {v}")),
    "rollout.top_p": (1.0, "training rollouts are sampled from the whole distribution"),
    "curate.sigma_unit": ("count", "sigma is in counts of successes"),
    "rollout.enforce_eager": (False, "vLLM compiles where it can"),
    "objective.replay_ratio_cap": (None, "objective.shaping = ratio bounds the ratio by 1"),
}


def _without_gone(values: dict[str, Any], origin: str, flags: Mapping[str, str]) -> dict[str, Any]:
    """The values without keys of earlier versions, where these stood at their defaults."""
    kept = {
        name: dict(value) if isinstance(value, dict) else value for name, value in values.items()
    }
    for key, (default, advice) in _GONE.items():
        section, _, leaf = key.partition(".")
        here = kept.get(section)
        if isinstance(here, dict) and leaf in here:
            value = here.pop(leaf)
            if value != default:
                told = advice if isinstance(advice, str) else advice(value)
                raise InputError(f"{flags.get(key, origin)}: {key} is gone: {told}")
    return kept


def parse_recipe(
    values: dict[str, Any], origin: str, flags: Mapping[str, str] | None = None
) -> Recipe:
    """A nested dictionary as a recipe.

    Args:
        flags: what gave a key its value, by dotted key, where that was not ``origin``.
    """
    try:
        return Recipe.model_validate(_without_gone(values, origin, flags or {}))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        told = (
            flag
            for name, flag in (flags or {}).items()
            if f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.")
        )
        origin = next(told, origin)
        if first["type"] == "extra_forbidden":
            raise InputError(f"{origin}: {_unknown_key(key)}") from None
        message = first["msg"].removeprefix("Value error, ")
        value = repr(first["input"])
        value = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}…"
        where = f"{key} = {value}: " if key else ""
        raise InputError(f"{origin}: {where}{message}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dictionary."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such recipe") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None


def parse_value(text: str) -> Any:
    """A flag's value: TOML (``3``, ``true``, ``[1, 2]``, ``"x"``), and otherwise a bare string."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def parse_sets(sets: Sequence[str]) -> dict[str, Any]:
    """The keys and values of ``--set KEY=VALUE``, of equal keys the last."""
    found = {}
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(
                f"--set {text}: expected KEY=VALUE, such as --set train.learning_rate=2e-6"
            )
        found[key.strip()] = parse_value(value.strip())
    return found


def set_key(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a nested dictionary, in place; ``None`` is left out."""
    if value is None:
        return
    *sections, leaf = key.split(".")
    here = values
    for name in sections:
        here = here.setdefault(name, {})
        if not isinstance(here, dict):
            raise InputError(f"{_unknown_key(key)}")
    here[leaf] = value


def load_recipe(
    path: Path | None, sets: Sequence[str] = (), flags: dict[str, Any] | None = None
) -> Recipe:
    """The settings of one command.

    Args:
        path: a TOML file; None for the defaults.
        sets: ``key=value`` overrides, as given to ``--set``.
        flags: dotted keys from dedicated options; None values are left out. They win over ``sets``.

    Raises:
        InputError: see :func:`parse_recipe`.
    """
    values = read_toml(path) if path is not None else {}
    if path is not None:
        parse_recipe(values, str(path))  # so that a fault names the file, not the flags
    given: dict[str, str] = {}
    for key, value in parse_sets(sets).items():
        set_key(values, key, value)
        given[key] = "--set"
    for key, value in (flags or {}).items():
        set_key(values, key, value)
        if value is not None:
            given[key] = f"--{key.rpartition('.')[2].replace('_', '-')}"
    origin = next(reversed(given.values()), str(path) if path else "options")
    return parse_recipe(values, origin, given)


def to_toml(recipe: Recipe) -> str:
    """The recipe as TOML that reads back to the same settings; unset optional keys are left out."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def setting(recipe: Recipe, key: str) -> Any:
    """The value of a dotted key."""
    here: Any = recipe
    for name in key.split("."):
        here = getattr(here, name)
    return here


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """The dotted keys whose values differ, with both values."""

    pairs = {key: (setting(old, key), setting(new, key)) for key in known_keys()}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe with its files and folders by absolute paths, where they are there: a run must not
    depend on the folder that a command is typed in."""

    def absolute(path: str) -> str:
        return str(Path(path).absolute()) if path and Path(path).exists() else path

    problems, evaluate = recipe.problems, recipe.evaluate
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"path": absolute(recipe.model.path)}),
            "problems": problems.model_copy(update={"path": absolute(problems.path)}),
            "objective": recipe.objective.model_copy(
                update={"reference": absolute(recipe.objective.reference)}
            ),
            "evaluate": evaluate.model_copy(
                update={"problems": {n: absolute(p) for n, p in evaluate.problems.items()}}
            ),
        }
    )

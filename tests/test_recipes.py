"""The recipes that come with the package: they resolve, and say no more than they must."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from exgrpo_cli import cli
from exgrpo_cli.recipe import Recipe, load_recipe, parse_recipe, read_toml

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
BENCHMARKS = ROOT.parent / "shared" / "data" / "math-benchmarks.verl.parquet"


def keys(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a recipe file; a table that is a value (evaluate.problems) is one key."""
    for name, value in values.items():
        if isinstance(value, dict) and not isinstance(value_of(Recipe(), prefix + name), dict):
            yield from keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def value_of(recipe: Recipe, key: str) -> Any:
    here: Any = recipe
    for name in key.split("."):
        here = getattr(here, name)
    return here


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_resolves_and_is_minimal(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", str(run), "--recipe", str(path), "--dry-run"])
    assert not ended.value.code
    done = capsys.readouterr()
    assert done.err == ""
    assert not run.exists()
    recipe = load_recipe(path)
    assert parse_recipe(tomllib.loads(done.out), "dry run") == recipe
    idle = [k for k in keys(read_toml(path)) if value_of(recipe, k) == value_of(Recipe(), k)]
    assert not idle, "these are the defaults"
    assert recipe.model.path
    comment = path.read_text(encoding="utf-8").splitlines()
    assert comment[0].startswith("# ")
    assert any(f"--recipe recipes/{path.name}" in line for line in comment)


@pytest.mark.parametrize(
    "name", ["qwen2.5-math-7b", "qwen2.5-math-1.5b", "qwen2.5-7b-instruct", "continual", "grpo"]
)
def test_qwen_recipes_have_the_published_system_message(name: str) -> None:
    system = load_recipe(ROOT / "recipes" / f"{name}.toml").model.system
    assert system.startswith("Your task is to follow a systematic, thorough reasoning process")
    assert system.count("\n") == 3  # those between the tags, and no line of the file's own
    if not BENCHMARKS.exists():
        pytest.skip(f"{BENCHMARKS} is not there")
    first = pl.read_parquet(BENCHMARKS, n_rows=1)["prompt"][0].to_list()
    assert system == next(m["content"] for m in first if m["role"] == "system")


@pytest.mark.parametrize(
    "path",
    [path for path in RECIPES if path.stem not in ("demo", "demo-lm", "weak")],
    ids=lambda path: path.stem,
)
def test_the_papers_recipes_are_on_the_scale_of_the_published_loss(path: Path) -> None:
    recipe = load_recipe(path)
    gpus, micro_batch_tokens, length = 8, 32768, 8192  # of the published run
    rows = recipe.train.minibatch_questions * recipe.rollout.samples
    scale = rows / gpus  # of a sum over rows, averaged over GPUs, to the mean over rows
    assert (rows, scale, recipe.length_divisor) == (512, 64, length)
    assert recipe.train.max_grad_norm == 1 / scale == 0.015625
    assert recipe.train.skip_grad_norm == 500 / scale == 7.8125
    assert recipe.train.adam_eps == 1e-8 / scale == 1.5625e-10
    assert recipe.train.weight_decay == 0.01
    fewest, most = (math.ceil(rows / gpus * mean / micro_batch_tokens) for mean in (1025, 3072))
    assert (fewest, most) == (3, 6)
    bonus = [0.001 * count / scale for count in (fewest, (fewest + most) / 2, most)]
    assert bonus == pytest.approx([4.7e-5, recipe.objective.entropy_bonus, 9.4e-5], rel=0.01)


def test_the_demo_has_the_scale_of_the_defaults() -> None:
    demo, default = load_recipe(ROOT / "recipes/demo.toml"), Recipe()
    assert demo.objective.entropy_bonus == default.objective.entropy_bonus
    for name in ("max_grad_norm", "skip_grad_norm", "adam_eps", "weight_decay"):
        assert getattr(demo.train, name) == getattr(default.train, name)


def test_the_llama_recipes_replace_it() -> None:
    from exgrpo_cli.problems.prompts import render_prompt

    class Letters:  # a tokenizer's two faces that a prompt needs
        chat_template = None

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [ord(c) for c in text]

    settings = load_recipe(ROOT / "recipes/llama-3.1-8b.toml").model
    chat = [{"role": "system", "content": "long"}, {"role": "user", "content": "1+1=?"}]
    text = "".join(map(chr, render_prompt(chat, Letters(), settings)))  # type: ignore[arg-type]
    assert text.startswith("<|begin_of_text|>User: 1+1=?\nPlease")
    assert "long" not in text
    assert "\\boxed{}" in text

"""Recipes: strict, resolved, and the same after a round trip."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo_cli import recipe as r
from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe.load import parse_value
from exgrpo_cli.recipe.settings import Section

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))


def test_defaults_are_the_papers() -> None:
    recipe = r.Recipe()
    assert (recipe.curate.questions, recipe.rollout.samples) == (128, 8)
    assert recipe.train.minibatch_questions == 64
    assert recipe.train.learning_rate == 1e-6
    assert (recipe.rollout.max_prompt_tokens, recipe.rollout.max_new_tokens) == (1024, 8192)
    assert (recipe.curate.replay_ratio, recipe.curate.start_success) == (0.5, 0.35)
    assert (recipe.objective.shaping, recipe.objective.beta) == ("ratio", 0.1)
    assert recipe.length_divisor == 8192


def test_defaults_that_are_not_the_papers() -> None:
    recipe = r.Recipe()
    train = recipe.train
    assert (train.max_grad_norm, train.skip_grad_norm) == (1.0, None)
    assert (train.betas, train.adam_eps, train.weight_decay) == ((0.9, 0.999), 1e-8, 0.0)
    assert recipe.objective.entropy_bonus == 0.001


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_shipped_recipes_are_valid_and_round_trip(path: Path) -> None:
    recipe = r.load_recipe(path)
    assert r.parse_recipe(tomllib.loads(r.to_toml(recipe)), "x") == recipe


@given(st.integers(0, 10), st.floats(0.01, 2, allow_nan=False), st.booleans(), st.text(max_size=20))
def test_round_trip(seed: int, temperature: float, flag: bool, text: str) -> None:
    values = {
        "seed": seed,
        "model": {"system": text},
        "rollout": {"temperature": temperature, "entropies": flag},
    }
    recipe = r.parse_recipe(values, "x")
    assert r.parse_recipe(tomllib.loads(r.to_toml(recipe)), "x") == recipe


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("train.lerning_rate", "unknown key train.lerning_rate; did you mean train.learning_rate?"),
        ("trian.learning_rate", "unknown key trian; did you mean train?"),
        ("rollout.learning_rate", "rollout.learning_rate; did you mean train.learning_rate?"),
        ("curate.buckets", "unknown key curate.buckets; did you mean curate.bucket?"),
        ("sed", "unknown key sed; did you mean seed?"),
        ("train.lora.rank", "unknown key train.lora; did you mean lora?"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(key: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        r.load_recipe(None, [f"{key}=1"])
    assert words in str(caught.value)


def test_an_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[curate]\nquestons = 3\n")
    with pytest.raises(InputError, match=r"mine\.toml: unknown key curate\.questons; did you mean"):
        r.load_recipe(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rollout.samples=0", "rollout.samples = 0"),
        ("rollout.samples=many", "rollout.samples = 'many'"),
        ("curate.weights=gauss", "curate.weights is gone: write the rule"),
        ("train.adam_eps=0", "train.adam_eps = 0"),
        ("train.adam_eps=-1e-8", "train.adam_eps = -1e-08"),
        ("train.adam_eps=nan", "train.adam_eps = nan"),
        ("train.adam_epsilon=1e-12", "did you mean train.adam_eps?"),
        ("curate.upper=3", 'write the rule curate.store = "correct AND k < n AND k <= 3"'),
        ("curate.max_age=3", 'write the rule curate.drop = "age > 3"'),
        ("curate.weights=uniform", 'write the rule curate.bucket = "0"'),
        ("curate.choose=mean_entrpy", "did you mean mean_entropy?"),
        ("train={schedule='linear', min_learning_rate=1}", "is above train.learning_rate"),
        ("model.plain_template=Q: {question}", "model.plain_template = 'Q: {question}'"),
        ("novalue", "expected KEY=VALUE"),
    ],
)
def test_a_bad_value_is_one_line(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        r.load_recipe(None, [text])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_precedence_defaults_file_set_flags(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("seed = 1\n[rollout]\nsamples = 4\ntemperature = 0.9\n")
    recipe = r.load_recipe(
        path, ["rollout.samples=5", "seed=2"], {"seed": 3, "rollout.temperature": None}
    )
    assert (recipe.seed, recipe.rollout.samples, recipe.rollout.temperature) == (3, 5, 0.9)


def test_not_toml_and_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("seed = = 1")
    with pytest.raises(InputError, match="not valid TOML"):
        r.load_recipe(path)
    with pytest.raises(InputError, match="no such recipe"):
        r.load_recipe(tmp_path / "b.toml")


def test_values_of_flags() -> None:
    assert parse_value("3") == 3
    assert parse_value("1e-6") == 1e-6
    assert parse_value("[0.9, 0.95]") == [0.9, 0.95]
    assert parse_value("true") is True
    assert parse_value("runs/a") == "runs/a"


def test_differences() -> None:
    changed = r.load_recipe(None, ["train.learning_rate=2e-6"])
    assert r.differences(r.Recipe(), changed) == {"train.learning_rate": (1e-6, 2e-6)}


def test_every_key_is_described() -> None:
    def walk(model: type[r.BaseModel]) -> None:
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                walk(field.annotation)
            else:
                assert field.description, name

    walk(r.Recipe)

"""Settings: one typed tree, from TOML, overridden by flags. Strict: an unknown key is an error."""

from exgrpo_cli.recipe.load import (
    differences,
    known_keys,
    load_recipe,
    parse_recipe,
    parse_value,
    read_toml,
    set_key,
    setting,
    to_toml,
    with_absolute_paths,
)
from exgrpo_cli.recipe.settings import (
    SAMPLED_BY,
    CurateSettings,
    ModelSettings,
    ObjectiveSettings,
    ProblemSettings,
    Recipe,
    Section,
    TrainSettings,
    VerifySettings,
)

__all__ = [
    "SAMPLED_BY",
    "CurateSettings",
    "ModelSettings",
    "ObjectiveSettings",
    "ProblemSettings",
    "Recipe",
    "Section",
    "TrainSettings",
    "VerifySettings",
    "differences",
    "known_keys",
    "load_recipe",
    "parse_recipe",
    "parse_value",
    "read_toml",
    "set_key",
    "setting",
    "to_toml",
    "with_absolute_paths",
]

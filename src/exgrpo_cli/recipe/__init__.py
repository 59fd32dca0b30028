"""Settings: one typed tree, from TOML, overridden by flags. Strict: an unknown key is an error."""

from exgrpo_cli.recipe.load import differences as differences
from exgrpo_cli.recipe.load import known_keys as known_keys
from exgrpo_cli.recipe.load import load_recipe as load_recipe
from exgrpo_cli.recipe.load import parse_recipe as parse_recipe
from exgrpo_cli.recipe.load import parse_sets as parse_sets
from exgrpo_cli.recipe.load import read_toml as read_toml
from exgrpo_cli.recipe.load import setting as setting
from exgrpo_cli.recipe.load import to_toml as to_toml
from exgrpo_cli.recipe.load import with_absolute_paths as with_absolute_paths
from exgrpo_cli.recipe.settings import SAMPLED_BY as SAMPLED_BY
from exgrpo_cli.recipe.settings import Autocast as Autocast
from exgrpo_cli.recipe.settings import CurateSettings as CurateSettings
from exgrpo_cli.recipe.settings import ModelSettings as ModelSettings
from exgrpo_cli.recipe.settings import ObjectiveSettings as ObjectiveSettings
from exgrpo_cli.recipe.settings import ProblemSettings as ProblemSettings
from exgrpo_cli.recipe.settings import Recipe as Recipe
from exgrpo_cli.recipe.settings import TrainSettings as TrainSettings
from exgrpo_cli.recipe.settings import VerifySettings as VerifySettings

"""docs/ideas.md: its recipes run, and its columns are those that rules see."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from exgrpo_cli import tables
from exgrpo_cli.experience.whatif import choices
from exgrpo_cli.inspect.diff import diff
from exgrpo_cli.recipe import CurateSettings, Recipe, parse_recipe
from exgrpo_cli.recipe.rules import RULES
from exgrpo_cli.rundir import RunDir
from making import (
    curate,
    group,
    import_row,
    make_recipe,
    plan,
    write_imports,
    write_problems,
    write_step,
)

PAGE = Path(__file__).parents[2] / "docs" / "ideas.md"
TEXT = PAGE.read_text(encoding="utf-8")
IDEAS = dict(re.findall(r"^### (.+?)\n.*?```toml\n(.*?)```", TEXT, re.MULTILINE | re.DOTALL))


def recipe_of(text: str) -> Recipe:
    rules = tomllib.loads(text)["curate"]
    base = make_recipe(questions=6, start_success=0.1).model_dump(mode="json", exclude_none=True)
    return parse_recipe({**base, "curate": {**base["curate"], **rules}}, "docs/ideas.md")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Five steps of the default rules over ten questions, with failures and another model's
    trajectories, and one mastered."""
    made = RunDir(tmp_path_factory.mktemp("ideas") / "run")
    names = [f"q{i}" for i in range(10)]
    write_problems(made, [*names, "zz"])
    recipe = make_recipe(questions=6, start_success=0.1)
    write_step(made, 0, group(0, "zz", "1100"))
    curate(made, 0, recipe)
    write_imports(
        made, 1, [import_row(1, q, i, i > 0, f"{q}.{i}") for q in names[:4] for i in range(3)]
    )
    for step in range(1, 5):
        asked = plan(made, step)
        rows = [
            r
            for i, q in enumerate(asked["fresh"])
            for r in group(step, q, ("1000", "1100", "1110", "1111")[(i + step) % 4], logprob=-0.4)
        ]
        rows += [
            r
            for i, q in enumerate(asked["replay"])
            for r in group(step, q, ("100", "011")[(i + step) % 2], "replay", logprob=-0.3)
        ]
        write_step(made, step, rows)
        curate(made, step, recipe)
    return made


def test_there_are_ten_and_the_first_is_the_default() -> None:
    assert len(IDEAS) >= 10
    assert recipe_of(IDEAS["ExGRPO"]) == make_recipe(questions=6, start_success=0.1)


@pytest.mark.parametrize("name", IDEAS)
def test_an_idea_runs_over_a_log(run: RunDir, name: str) -> None:
    found = list(choices(run, recipe_of(IDEAS[name])))
    assert sum(len(choice.chosen) for choice in found) > 0
    again = list(choices(run, recipe_of(IDEAS[name])))
    assert again == found


def test_an_idea_differs_from_the_default(run: RunDir) -> None:
    default = make_recipe(questions=6, start_success=0.1)
    found = diff(run, default, recipe_of(IDEAS["ExGRPO without its choices"]))
    assert set(found["settings"]) == {"curate.retire", "curate.bucket", "curate.choose"}
    assert found["total"]["other"]["pool_retired"] == 0
    assert found["total"]["recorded"]["pool_retired"] > 0
    found = diff(run, default, recipe_of(IDEAS["Advantage priority"]))
    assert found["total"]["other"]["replayed_hard"] >= found["total"]["recorded"]["replayed_hard"]


def test_an_idea_curates_a_run(run: RunDir, tmp_path: Path) -> None:
    copy = RunDir(shutil.copytree(run.root, tmp_path / "run"))
    recipe = recipe_of(IDEAS["Priority by version and uses"])
    assert curate(copy, 4, recipe, force=True)["rebuilt"]
    held = tables.read_table("experience", copy.experience)
    assert curate(copy, 4, recipe, rebuild=True, force=True)["pool/trajectories"] == held.height


def test_columns_and_defaults_are_documented() -> None:
    columns = TEXT.split("## Columns")[1].split("## Published")[0]
    for rule in RULES.values():
        for column in rule.columns:
            assert f"`{column}`" in columns, column
    rows = {row[0]: row[1] for row in re.findall(r"^\| `(\w+)` \|.*\| `(.*)` \|$", TEXT, re.M)}
    assert rows == {name: CurateSettings.model_fields[name].default for name in RULES}

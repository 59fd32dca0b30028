"""Another recipe over the same log: what it would have planned and replayed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.plan import first_plan
from exgrpo_cli.experience.whatif import choices
from exgrpo_cli.inspect.diff import diff, format_diff
from exgrpo_cli.recipe import Recipe, to_toml
from exgrpo_cli.rundir import RunDir
from making import (
    curate,
    group,
    make_recipe,
    plan,
    row,
    write_problems,
    write_rollouts,
    write_scores,
    write_verdicts,
)

Exgrpo = Callable[..., Any]

QUESTIONS = [f"q{i}" for i in range(8)]
RECIPE = make_recipe(questions=4, start_success=0.3)
STEPS = 5


def follow(run: RunDir, step: int) -> None:
    """Roll out a step's plan: half of each group's samples succeed, with falling entropy."""
    made = plan(run, step)
    rows = [r for q in made["fresh"] for r in group(step, q, "1100", logprob=step - 9.0)]
    rows += [r for q in made["replay"] for r in group(step, q, "100", "replay", logprob=step - 9.0)]
    write_rollouts(run, step, rows)
    write_verdicts(run, step, rows)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of five steps as the stages leave it, and the plan of the sixth."""
    made = RunDir(tmp_path_factory.mktemp("diff") / "run")
    write_problems(made, QUESTIONS)
    tables.write_table("plan", first_plan(made.problems, RECIPE), made.plan(0))
    tables.write_text(made.recipe, to_toml(RECIPE))
    for step in range(STEPS):
        follow(made, step)
        curate(made, step, RECIPE)
    return made


@pytest.fixture
def run(whole: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(shutil.copytree(whole.root, tmp_path / "run"))


def files(run: RunDir) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}


def test_the_run_s_own_recipe_gives_what_the_run_did(run: RunDir) -> None:
    before = files(run)
    found = list(choices(run, RECIPE))
    assert files(run) == before  # nothing is written
    assert [choice.step for choice in found] == list(range(STEPS + 1))
    for choice in found:
        assert {"fresh": choice.fresh, "replay": choice.replay} == plan(run, choice.step)
        assert choice.replaying is (choice.step >= 1)
    for choice in found[:STEPS]:
        recorded = tables.read_table("curated", run.curated(choice.step))
        chosen = [row["rollout_id"] for row in choice.chosen]
        assert chosen == recorded["rollout_id"].to_list()
    held = tables.read_table("experience", run.experience)
    assert found[-1].pool["trajectories"] == held.height
    assert found[-1].pool["questions"] == held["problem_id"].n_unique()
    assert found[-1].pool["age_mean"] == pytest.approx(STEPS - (held["step"].mean() or 0))

    same = diff(run, RECIPE, RECIPE)
    assert same["settings"] == {}
    assert same["plans_as_recorded"] == [STEPS + 1, STEPS + 1]
    total = same["total"]
    assert total["recorded"] == total["other"]
    assert total["recorded"]["replay_from"] == 1
    assert total["common"]["replayed"] == total["recorded"]["replayed"] > 0
    assert total["common"]["other_trajectory"] == 0
    assert "no setting that curation depends on differs" in format_diff(same)


def test_another_choice_from_the_same_questions(run: RunDir) -> None:
    other = make_recipe(questions=4, start_success=0.3, selection="highest_entropy")
    found = diff(run, RECIPE, other)
    assert found["settings"] == {"curate.choose": ["mean_entropy", "-mean_entropy"]}
    total = found["total"]
    assert total["common"]["planned"] == total["recorded"]["fresh"] + total["recorded"]["replay"]
    assert total["common"]["replay"] == total["recorded"]["replay"] == total["other"]["replay"]
    assert total["common"]["other_trajectory"] > 0
    both = total["common"]["replayed"] + total["common"]["other_trajectory"]
    assert both == total["recorded"]["replayed"]
    assert total["other"]["entropy_mean"] > total["recorded"]["entropy_mean"]
    assert total["other"]["age_mean"] > total["recorded"]["age_mean"]  # entropy falls with time
    for step in found["steps"]:
        for side in ("recorded", "other"):
            buckets = sum(step[side][f"replayed_{b}"] for b in ("easy", "medium", "hard"))
            assert buckets == step[side]["replayed"] == step[side]["replay"]


def test_limits_and_a_later_start_show_in_pool_and_ages(run: RunDir) -> None:
    oldest = {"questions": 4, "start_success": 0.3, "selection": "highest_entropy"}
    found = diff(run, make_recipe(**oldest), make_recipe(**oldest, max_age=1))
    assert found["total"]["other"]["age_max"] == 1
    assert found["total"]["recorded"]["age_max"] > 1
    assert (
        found["total"]["other"]["pool_trajectories"]
        < found["total"]["recorded"]["pool_trajectories"]
    )
    never = diff(run, RECIPE, make_recipe(questions=4, start_success=1.0))["total"]
    assert never["other"]["replay_from"] is None
    assert (never["other"]["replayed"], never["other"]["age_mean"]) == (0, None)
    assert never["other"]["pool_trajectories"] == 0
    assert never["common"]["replayed"] == 0


def test_scores_of_a_step_serve_both_recipes(run: RunDir) -> None:
    step, rows = STEPS - 1, []
    for problem in plan(run, step)["replay"]:
        rows += [
            row(int(h["step"]), problem, h["sample"], True, "") | {"rollout_id": h["rollout_id"]}
            for h in tables.read_table("experience", run.experience).to_dicts()
            if h["problem_id"] == problem and h["step"] < step
        ]
    write_scores(run, step, rows, {r["rollout_id"]: 0.125 for r in rows}, prefix="replay")
    found = diff(run, RECIPE, make_recipe(questions=4, start_success=0.3, selection="newest"))
    for side in ("recorded", "other"):
        assert found["steps"][step][side]["stale_entropies"] == 0
        assert found["steps"][step][side]["entropy_mean"] == pytest.approx(0.125)
    assert found["steps"][step - 1]["recorded"]["stale_entropies"] > 0


def test_a_last_step_that_is_not_whole_is_planned_only(run: RunDir) -> None:
    shutil.rmtree(run.verdicts(STEPS - 1))
    lines: list[str] = []
    found = diff(run, RECIPE, make_recipe(questions=4, weights="uniform"), lines.append)
    assert [step["step"] for step in found["steps"]] == list(range(STEPS))
    assert len(lines) == 1
    assert f"step {STEPS - 1} is planned, but not taken in" in lines[0]
    shutil.rmtree(run.verdicts(1))
    with pytest.raises(InputError, match="no verdicts of step 1 yet"):
        diff(run, RECIPE, RECIPE)
    with pytest.raises(InputError, match="no rollouts yet"):
        diff(RunDir(run.root / "plan"), RECIPE, RECIPE)


def test_the_command(run: RunDir, exgrpo: Exgrpo, tmp_path: Path) -> None:
    before = files(run)
    other = tmp_path / "other.toml"
    changed = RECIPE.model_dump(mode="json", exclude_none=True)
    changed["curate"]["choose"] = "age"
    changed["train"]["learning_rate"] = 1.0  # of no matter here
    other.write_text(to_toml(Recipe.model_validate(changed)), encoding="utf-8")
    done = exgrpo("diff", run.root, other, "--set", "curate.drop=age > 2", "--json")
    found = json.loads(done.stdout)
    assert set(found["settings"]) == {"curate.choose", "curate.drop"}
    words = format_diff(found)
    assert exgrpo("diff", run.root, other, "--set", "curate.drop=age > 2").stdout == words + "\n"
    assert "curate.choose: mean_entropy -> age" in words
    assert f"the recorded plan in {STEPS + 1} of {STEPS + 1} steps" in words
    assert len(words.splitlines()[-1].split("|")) == 6
    assert files(run) == before
    assert "give another RECIPE" in exgrpo("diff", run.root, code=2).stderr
    assert "no such recipe" in exgrpo("diff", run.root, tmp_path / "no.toml", code=2).stderr

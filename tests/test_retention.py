"""Which policies of a run stay, and what comes of those that do not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo_cli import Step, train
from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe import parse_recipe
from exgrpo_cli.retention import KEEP, keep_policy, prune_policies, removable
from exgrpo_cli.rundir import REMOVED, RunDir
from making import write_problems

STEPS = st.integers(1, 40)
HISTORY = st.fixed_dictionaries(
    {
        "recent": st.integers(1, 5),
        "every": st.integers(0, 7),
        "evaluated": st.dictionaries(
            st.sampled_from("ab"), st.dictionaries(STEPS, st.sampled_from([0.1, 0.2, 0.3]))
        ),
        "needed": st.sets(STEPS),
    }
)


@given(st.sets(STEPS), HISTORY)
def test_what_may_go(policies: set[int], history: dict) -> None:
    gone = set(removable(policies, **history))
    stay = policies - gone
    last = {n for n in policies if n > max(policies) - history["recent"]}
    marked = {n for n in policies if history["every"] and n % history["every"] == 0}
    best = set()
    for accuracies in history["evaluated"].values():
        there = [n for n in policies if n in accuracies]
        ranked = sorted(there, key=lambda n: (-accuracies[n], n))
        best |= set(ranked[:1])
    assert stay == last | marked | best | (history["needed"] & policies)
    assert removable(stay, **history) == []
    later = max(policies, default=0) + 1
    unevaluated = all(later not in accuracies for accuracies in history["evaluated"].values())
    if unevaluated:  # training goes on, and none is missed that was removed
        assert gone <= set(removable(policies | {later}, **history))


def policy(run: RunDir, step: int) -> Path:
    folder = run.policy(step)
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(name)
    run.trainer(step).mkdir(parents=True)
    return folder


def evaluated(run: RunDir, step: int, accuracy: float) -> None:
    folder = run.evaluation(step, "held")
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"overall": {"pass@1": accuracy}}))
    run.record(step, "evaluate-held", {"eval/held/pass@1": accuracy})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Policies of steps 1 to 9; 3 and 6 were evaluated, and 9 is to be."""
    run = RunDir(tmp_path / "run")
    for step in range(1, 10):
        policy(run, step)
    evaluated(run, 3, 0.5)
    evaluated(run, 6, 0.4)
    return run


def recipe(**changes: object):
    values = {
        "evaluate": {"every": 3, "problems": {"held": "held.jsonl"}},
        "train": {"keep_policies": 1, "keep_every": 4, **changes},
    }
    return parse_recipe(values, "the test")


def there(run: RunDir) -> list[int]:
    return [step for step in run.steps("policy") if not run.is_removed(step)]


def test_what_is_still_needed_stays(run: RunDir) -> None:
    (run.policy(2) / KEEP).touch()
    assert prune_policies(run, recipe(), 8) == []  # an earlier step was trained again
    assert prune_policies(run, recipe(), 9) == [1, 5, 6, 7]
    assert there(run) == run.steps("trainer") == [2, 3, 4, 8, 9]
    policy(run, 10)
    prune_policies(run, recipe(), 10)
    assert there(run) == [2, 3, 4, 8, 9, 10]  # 9 is not evaluated yet
    evaluated(run, 9, 0.6)
    prune_policies(run, recipe(keep_every=0), 10)
    assert there(run) == [2, 9, 10]
    assert run.steps("policy") == list(range(1, 11))
    lagged = parse_recipe({"loop": {"lag": 2}, "train": {"keep_policies": 1}}, "the test")
    for step in (11, 12, 13):
        policy(run, step)
        prune_policies(run, lagged, step)
        assert there(run)[-3:] == [step - 2, step - 1, step]


def test_a_policy_that_is_half_removed_is_none_and_goes_the_next_time(run: RunDir) -> None:
    os.utime(run.policy(1), (1, 1))
    prune_policies(run, recipe(), 9)
    assert [path.name for path in run.policy(1).iterdir()] == [REMOVED]
    assert run.policy(1).stat().st_mtime == 1  # make would take it for newer than what is from it
    (run.policy(1) / "model.safetensors").write_text("a part")
    with pytest.raises(InputError, match="removed to save disk"):
        run.policy_path(1, "")
    prune_policies(run, recipe(), 9)
    assert [path.name for path in run.policy(1).iterdir()] == [REMOVED]


def test_a_base_of_others_stays(run: RunDir, tmp_path: Path) -> None:
    keep_policy(str(run.policy(5)))
    write_problems(run, ["a"])
    reference = parse_recipe(
        {"objective": {"reference": str(run.policy(7))}, "train": {"keep_policies": 1}}, "the test"
    )
    prune_policies(run, reference, 9)
    assert there(run) == [3, 5, 7, 9]
    keep_policy(str(tmp_path / "nowhere"))


def test_a_step_whose_policy_is_removed_is_not_trained_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.policy(1).mkdir(parents=True)
    (run.policy(1) / REMOVED).write_text("gone\n")
    said: list[str] = []
    assert train(Step.of(run, 0), recipe(), log=said.append).skipped == 1
    assert said == [f"{run.policy(1)} was trained and then removed and is left as it is"]

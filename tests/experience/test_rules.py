"""The rules of curation: refused where they are wrong, and each does what it says."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.explain import explain
from exgrpo_cli.experience.whatif import choices
from exgrpo_cli.inspect.diff import diff
from exgrpo_cli.inspect.groups import example_groups
from exgrpo_cli.recipe import CurateSettings, Recipe, load_recipe, parse_recipe, to_toml
from exgrpo_cli.recipe.rules import RULES, exponent, fault
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.step import Step
from exgrpo_cli.training.batch import Batch
from making import curate, group, make_recipe, plan, rebuild, row, write_problems, write_step

WIDER = "exp(-0.5 * ((bucket - samples / 2.0) / 2.0) ** 2)"


@pytest.mark.parametrize("name", RULES)
def test_the_defaults_can_be_used(name: str) -> None:
    assert fault(name, CurateSettings.model_fields[name].default) is None


@pytest.mark.parametrize(
    ("name", "expression", "words"),
    [
        ("choose", "mean_entrpy", "did you mean mean_entropy?"),
        ("choose", "xyzzy", "its columns are age, newness"),
        ("choose", "random()", "random() may give another value each time; luck is"),
        ("choose", "CAST(now() AS VARCHAR)", "now() may give another value"),
        ("choose", "epoch(current_timestamp)", "current_timestamp may give another value"),
        ("choose", "abs(hash(uuid()) % 7)", "uuid() may give another value"),
        ("store", "correct AND", "not an expression: syntax error"),
        ("store", "k", "must be true or false, and is INTEGER"),
        ("choose", "'a'", "must be a number, and is VARCHAR"),
        ("choose", "NULL", "must be a number"),
        ("choose", " ", "is empty"),
        ("choose", "(SELECT 1)", "no subquery"),
        ("choose", "(SELECT length(content) FROM read_text('/etc/passwd'))", "no subquery"),
        ("choose", "count(*)", "cannot contain aggregates"),
        ("choose", "row_number() OVER ()", "has no window"),
        ("choose", "$step", "has no parameters"),
        ("choose", "1), (2", "not one expression"),
        ("choose", "1) FROM range(3) --", "not an expression"),
        ("choose", "1; DROP TABLE choose", "not an expression"),
        ("choose", "nosuch(age)", "nosuch does not exist"),
        ("question", "k / K", "the number of samples K is called samples"),
        ("bucket_weight", "k", "its columns are bucket, questions"),
        ("choose", "epoch(ago(INTERVAL 1 DAY))", "ago() may give another value"),
        ("choose", "COLUMNS('mean_.*')", "names its columns one by one"),
        ("choose", "#1", "names its columns one by one"),
        ("choose", "choose.age", 'table "choose" not found'),
        ("choose", "rowid", "did you mean reward?"),
        ("choose", "[age]", "must be a number, and is INTEGER[]"),
        ("choose", "INTERVAL 1 DAY", "must be a number, and is INTERVAL"),
        ("choose", "+".join(["age"] * 95), "is nested more than 100 levels deep"),
        ("choose", "+".join(["age"] * 400), "is nested more than 100 levels deep"),
    ],
)
def test_a_wrong_rule_is_one_line(name: str, expression: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_recipe({"curate": {name: expression}}, "mine.toml")
    said = str(caught.value)
    assert said.startswith("mine.toml: curate." + name)
    assert "\n" not in said
    assert len(said) < 400
    assert words in said, said


def test_rules_go_through_files_and_flags() -> None:
    text = "age > 10 -- a comment\n OR newness > 3"
    recipe = parse_recipe({"curate": {"drop": text}}, "x")
    assert parse_recipe(tomllib.loads(to_toml(recipe)), "x") == recipe
    assert load_recipe(None, ["curate.question=1"]).curate.question == "1"
    assert load_recipe(None, ["curate.retire=false"]).curate.retire == "false"
    assert exponent("exp(bucket)") == "bucket"
    assert exponent("exp(1) * exp(bucket)") is None
    assert exponent("bucket") is None
    assert exponent("exp(bucket) -- )") is None


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("lower", 2, 'curate.store = "correct AND k < n AND k > 2"'),
        (
            "sigma",
            2.0,
            f'curate.bucket_weight = "{WIDER}"',
        ),
        ("selection", "random", 'curate.choose = "luck"'),
        ("selection", ["random"], 'curate.choose = "mean_entropy"'),
        ("max_trajectories", 9, 'curate.drop = "pool_newness > 9"'),
    ],
)
def test_what_a_rule_has_replaced_names_it(key: str, value: object, rule: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_recipe({"curate": {key: value}}, "old.toml")
    assert str(caught.value) == f"old.toml: curate.{key} is gone: write the rule {rule}"
    written = rule.partition(" = ")[2].strip('"')
    parse_recipe({"curate": {rule.partition(" = ")[0].removeprefix("curate."): written}}, "new")
    old = {"lower": 0, "sigma": 1.0, "selection": "lowest_entropy", "weights": "normal"}
    assert parse_recipe({"curate": old}, "old.toml") == parse_recipe({}, "new")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Replay from step 1; then successes of ``a`` (2 of 4), ``b`` (1) and ``c`` (3)."""
    made = RunDir(tmp_path / "run")
    write_problems(made, [*"abcdefgh", "zz"])
    write_step(made, 0, group(0, "zz", "1110"))
    rows = group(1, "a", "1100") + group(1, "b", "1000") + group(1, "c", "1110")
    write_step(made, 1, [*rows, *group(1, "d", "1111")])
    return made


def stored(run: RunDir) -> list[str]:
    return tables.read_table("experience", run.experience)["rollout_id"].to_list()


def after(run: RunDir, upto: int = 1, **rules: object) -> RunDir:
    for step in range(upto + 1):
        curate(run, step, make_recipe(**rules), rebuild=True, force=True)
    return run


def test_store_sees_the_rollout_its_group_and_its_question(run: RunDir) -> None:
    after(run, store="correct AND advantage > 0.5 AND std_reward > 0 AND tokens < 99")
    assert stored(run) == ["s00001/b/00"]  # 1 - 1/4
    after(run, store="correct AND k < n AND source = 'test' AND metadata IS NULL AND stored = 0")
    assert len(stored(run)) == 6


def test_retire_by_another_share_and_never(run: RunDir) -> None:
    after(run, retire="fresh_k >= 0.75 * fresh_n")
    asked = tables.read_table("questions", run.questions)
    gone = asked.filter(asked["retired_step"].is_not_null())["problem_id"].to_list()
    assert gone == ["c", "d", "zz"]
    after(run, retire="false")
    asked = tables.read_table("questions", run.questions)
    assert asked["retired_step"].null_count() == asked.height
    assert asked.filter(asked["problem_id"] == "d")["bucket"].to_list() == ["easy"]
    assert "s00001/d/00" not in stored(run)  # the rule store has its own say


def test_buckets_and_weights_decide_who_is_replayed(run: RunDir) -> None:
    after(run, bucket_weight="CASE WHEN bucket = 3 THEN 1 ELSE 0 END", questions=2)
    assert plan(run, 2)["replay"] == ["c"]
    after(run, bucket="CASE WHEN k = 1 THEN 7 ELSE 0 END", bucket_weight="bucket", questions=2)
    assert plan(run, 2)["replay"] == ["b"]
    after(run, question="CASE WHEN success_rate = 0.5 THEN 1 ELSE 0 END")
    assert plan(run, 2)["replay"] == ["a"]  # what weighs nothing is not drawn, and fresh ones fill
    assert len(plan(run, 2)["fresh"]) == 3
    after(run, bucket_weight="CASE WHEN bucket = 2 THEN 1 ELSE 0 END")
    assert plan(run, 2)["replay"] == ["a"]
    assert len(plan(run, 2)["fresh"]) == 3


def test_a_heavier_question_comes_more_often(run: RunDir) -> None:
    names = [f"q{i}" for i in range(10)]
    write_problems(run, [*names, "zz"])
    write_step(run, 1, [r for q in names for r in group(1, q, "1100")])
    write_step(run, 2, group(2, "q0", "0000"))
    drawn: Counter[str] = Counter()
    for seed in range(40):
        recipe = make_recipe(
            seed=seed, questions=2, question="CASE WHEN since_sampled = 1 THEN 9 ELSE 1 END"
        )
        drawn.update(list(choices(run, recipe))[-1].replay)
    assert drawn.total() == 40
    assert 12 <= drawn["q0"] <= 28  # half: nine weights of eighteen; unweighted a tenth


def test_drop_sees_the_pool_after_the_step(run: RunDir) -> None:
    write_step(run, 2, group(2, "e", "1000"))
    after(run, 2, drop="age > 1")
    assert stored(run) == ["s00002/e/00"]
    after(run, 2, drop="newness > 1 OR k = 1")
    assert stored(run) == ["s00001/a/00", "s00001/c/00"]
    after(run, 2, drop="pool_newness > 2")
    assert stored(run) == ["s00001/c/00", "s00002/e/00"]


def test_a_trajectory_may_be_used_so_often(run: RunDir) -> None:
    """What was replayed is in the run: incremental and rebuilt agree."""
    rules = {"drop": "times_used >= 1", "choose": "times_used"}
    after(run, 1, **rules)
    write_step(run, 2, group(2, "a", "000", "replay"))
    curate(run, 2, make_recipe(**rules))
    chosen = tables.read_table("curated", run.curated(2))["rollout_id"].to_list()
    assert chosen == ["s00001/a/00"]
    assert stored(run) == ["s00001/a/01", "s00001/b/00", *(f"s00001/c/{i:02d}" for i in range(3))]
    before = stored(run)
    write_step(run, 3, group(3, "a", "000", "replay"))
    curate(run, 3, make_recipe(**rules))
    assert "s00001/a/01" not in stored(run)
    incremental = stored(run)
    rebuild(run, 3, make_recipe(**rules))
    assert stored(run) == incremental != before
    assert [c.chosen[0]["rollout_id"] for c in choices(run, make_recipe(**rules)) if c.chosen]


def test_a_step_has_used_what_it_was_trained_on(run: RunDir) -> None:
    rules = {"drop": "times_used >= 1"}
    after(run, **rules, choose="luck")
    write_step(run, 2, group(2, "a", "000", "replay"))
    curate(run, 2, make_recipe(**rules, choose="luck"))
    run.policy(3).mkdir(parents=True)
    used = tables.read_table("curated", run.curated(2))["rollout_id"][0]
    curate(run, 2, make_recipe(**rules, choose="-luck"))
    assert tables.read_table("curated", run.curated(2))["rollout_id"].to_list() == [used]
    assert used not in stored(run)


def test_fresh_weights_order_an_epoch(run: RunDir) -> None:
    after(run, 1, fresh="CASE WHEN k IS NULL THEN 1 ELSE 0 END", questions=9, replay_ratio=0.01)
    assert set(plan(run, 2)["fresh"]) == {*"efgh", "zz"}  # zz was solved before replay was on
    after(run, 1, fresh="coalesce(times_replayed, 0) + 1e-9", questions=9, replay_ratio=0.01)
    assert len(plan(run, 2)["fresh"]) == 8


@pytest.mark.parametrize(
    ("rule", "expression", "words"),
    [
        ("store", "correct AND since_sampled > 1", "rule curate.store is null of s00001/"),
        ("question", "1 - k", "rule curate.question is null, not finite or negative of "),
        ("choose", "sqrt(-age)", "curate.choose"),
        ("choose", "CAST('nan' AS DOUBLE) * age", "rule curate.choose is null or not finite of s0"),
        ("bucket_weight", "2 - bucket", "weight is null, not finite or negative of bucket 3"),
        ("fresh", "k", "rule curate.fresh is null, not finite or negative of "),
        ("drop", "since_sampled > NULL", "curate.drop"),
    ],
)
def test_a_value_that_cannot_be_used_names_the_row(
    run: RunDir, rule: str, expression: str, words: str
) -> None:
    write_step(run, 2, group(2, "a", "000", "replay"))
    with pytest.raises(InputError) as caught:
        after(run, 2, **{rule: expression})
    assert words in str(caught.value)


def test_chosen_rows_are_one_a_question_by_the_rule(run: RunDir) -> None:
    rows = [
        row(2, "e", i, i < 3, f"e{i}" * (i + 1), logprob=-1.0 - i, entropy=0.1 * i)
        for i in range(4)
    ]
    write_step(run, 2, rows)
    write_step(run, 3, group(3, "e", "000", "replay"))
    for rule, sample in (("-tokens", 2), ("mean_logprob", 2), ("collected_entropy", 0)):
        after(run, 3, choose=rule)
        made = tables.read_table("curated", run.curated(3))["rollout_id"].to_list()
        assert made == [f"s00002/e/{sample:02d}"], rule


def test_a_replay_question_may_have_fewer_rollouts(run: RunDir) -> None:
    after(run, replay_samples=1)
    table = tables.read_table("plan", run.plan(2))
    assert set(zip(table["role"], table["samples"], strict=True)) == {("fresh", 4), ("replay", 1)}
    write_step(run, 2, group(2, "a", "0", "replay") + group(2, "c", "1", "replay"))
    curate(run, 2, make_recipe(replay_samples=1))
    asked = {q["problem_id"]: q for q in tables.read_table("questions", run.questions).to_dicts()}
    assert (asked["a"]["successes"], asked["a"]["attempts"]) == (1, 2)
    assert asked["c"]["retired_step"] == 2
    (made,) = [c for c in choices(run, make_recipe(replay_samples=1)) if c.step == 2]
    assert {row["problem_id"] for row in made.chosen} <= {"a", "b", "c"}
    groups = Batch.read(Step.of(run, 2)).groups(make_recipe(replay_samples=1))
    assert [len(rows) for rows in groups] == [2, 2]
    assert [round(row.advantage, 3) for row in groups[0]] == [0.5, -0.5]


def test_several_trajectories_enter_a_group(run: RunDir) -> None:
    rules = {"replayed": 2, "choose": "luck", "drop": "times_used > 5"}
    after(run, **rules)
    table = tables.read_table("plan", run.plan(2))
    assert set(zip(table["role"], table["samples"], strict=True)) == {("fresh", 4), ("replay", 2)}
    held = stored(run)
    rows = group(2, "b", "00", "replay") + group(2, "c", "10", "replay")
    write_step(run, 2, rows)
    notes: list[str] = []
    found = curate(run, 2, make_recipe(**rules), notes.append)
    made = tables.read_table("curated", run.curated(2))
    assert made.select("problem_id", "rank").rows() == [("b", 1), ("c", 1), ("c", 2)]
    assert set(made["rollout_id"]) <= set(held)
    assert found["replay/questions"] == 2
    assert not [line for line in notes if "candidates" in line]
    asked = {q["problem_id"]: q for q in tables.read_table("questions", run.questions).to_dicts()}
    counts = ("successes", "attempts", "fresh_successes", "fresh_attempts", "times_replayed")
    assert [asked["b"][c] for c in counts] == [1, 3, 0, 2, 1]  # it has one alone
    assert [asked["c"][c] for c in counts] == [3, 4, 1, 2, 1]
    groups = Batch.read(Step.of(run, 2)).groups(make_recipe(**rules))
    assert [[row.rollout_id for row in rows if row.replayed] for rows in groups] == [
        made["rollout_id"].to_list()[:1], made["rollout_id"].to_list()[1:]
    ]  # fmt: skip
    assert [round(row.advantage, 3) for row in groups[1]] == [0.25, 0.25, 0.25, -0.75]
    facts = Batch.read(Step.of(run, 2)).facts()
    assert (facts["train/reward_replay_hard"], facts["train/reward_replay_easy"]) == (0.0, 0.5)
    (shown,) = [g for g in example_groups(run, Recipe()) if g["problem_id"] == "c"]
    assert [row["verdict"] for row in shown["rows"]] == [
        "replayed",
        "replayed",
        "right",
        "no answer",
    ]
    assert (shown["right"], shown["count"]) == (3, 4)
    assert explain(run, make_recipe(**rules), 2, "c")["chosen"] == made["rollout_id"].to_list()[1:]
    step = diff(run, make_recipe(**rules | {"replayed": 1}), make_recipe(**rules))["steps"][2]
    one, two = step["recorded"]["replayed"], step["other"]["replayed"]
    assert two > one > 0
    assert (step["common"]["replayed"], step["common"]["other_trajectory"]) == (one, two - one)
    before = (stored(run), asked)
    rebuild(run, 2, make_recipe(**rules))
    after_ = {q["problem_id"]: q for q in tables.read_table("questions", run.questions).to_dicts()}
    assert (stored(run), after_) == before
    rules |= {"store": "true", "choose": "reward"}  # failures first
    after(run, 1, **rules)
    write_step(run, 2, rows)
    curate(run, 2, make_recipe(**rules), force=True)
    asked = {q["problem_id"]: q for q in tables.read_table("questions", run.questions).to_dicts()}
    assert [asked["c"][c] for c in counts[:2]] == [2, 4]  # one of each was replayed


def test_failures_are_kept_and_replayed(run: RunDir) -> None:
    rules = {"store": "true", "choose": "reward"}
    after(run, **rules)
    held = tables.read_table("experience", run.experience)
    assert held.filter(~held["correct"])["problem_id"].to_list() == ["a", "a", "b", "b", "b", "c"]
    write_step(run, 2, group(2, "a", "011", "replay"))
    curate(run, 2, make_recipe(**rules))
    (made,) = tables.read_table("curated", run.curated(2)).to_dicts()
    assert (made["rollout_id"], made["reward"]) == ("s00001/a/02", 0.0)
    (rows,) = Batch.read(Step.of(run, 2)).groups(make_recipe(**rules))
    assert [row.advantage for row in rows] == [-0.5, -0.5, 0.5, 0.5]
    asked = {q["problem_id"]: q for q in tables.read_table("questions", run.questions).to_dicts()}
    assert (asked["a"]["successes"], asked["a"]["attempts"]) == (2, 4)  # the failure is none
    before = (stored(run), asked)
    rebuild(run, 2, make_recipe(**rules))
    after_ = {q["problem_id"]: q for q in tables.read_table("questions", run.questions).to_dicts()}
    assert (stored(run), after_) == before
    rules["choose"] = "-reward"
    curate(run, 2, make_recipe(**rules), force=True)
    asked = {q["problem_id"]: q for q in tables.read_table("questions", run.questions).to_dicts()}
    assert asked["a"]["successes"] == 3

"""Random histories: incremental, rebuilt, and a reference in plain Python agree."""

import json
import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir
from making import (
    curate,
    experience,
    import_row,
    make_recipe,
    questions,
    rebuild,
    row,
    write_imports,
    write_plan,
    write_problems,
    write_rollouts,
    write_scores,
    write_verdicts,
)

EXAMPLES = int(os.environ.get("EXGRPO_EXAMPLES", "25"))


class Reference:
    """The experience as plain Python: dictionaries and lists, a group at a time."""

    def __init__(self, recipe: Recipe, limits: dict) -> None:
        self.curate = recipe.curate
        self.limits = limits
        self.pool: dict[str, dict[str, dict]] = {}
        self.bucket: dict[str, tuple[int, int]] = {}
        self.k: dict[str, int] = {}
        self.retired: dict[str, int] = {}
        self.epoch: dict[str, int] = {}
        self.replayed: Counter[str] = Counter()
        self.last: dict[str, int] = {}
        self.replay_from: int | None = None

    def away(self, problem: str, step: int) -> bool:
        if problem not in self.retired:
            return False
        after = self.curate.revive_after
        return after is None or step < self.retired[problem] + after

    def step(
        self, step: int, rows: list[dict], scored: dict[str, float], imports: list[dict]
    ) -> None:
        on = self.replay_from is not None and self.replay_from <= step
        groups: dict[tuple[str, str], list[dict]] = {}
        for r in rows:
            groups.setdefault((r["problem_id"], r["role"]), []).append(r)
        current = max(self.epoch.values(), default=0)
        solved_rows = all_rows = 0
        away = {q for q, _ in groups if self.away(q, step)}
        stored = {q: len(held) for q, held in self.pool.items() if held}
        retired_before = set(self.retired)
        full = {q for (q, _), g in groups.items() if all(r["correct"] for r in g)}
        for problem, role in sorted(groups, key=lambda key: (key[1] == "fresh", key[0])):
            members = sorted(groups[problem, role], key=lambda r: r["sample"])
            extra = min(self.curate.replayed, stored.get(problem, 0)) if role == "replay" else 0
            right = [r for r in members if r["correct"]]
            solved_rows += len(right) + extra
            all_rows += len(members) + extra
            self.last[problem] = step
            if role == "replay":
                self.replayed[problem] += 1
            else:
                seen = self.epoch.get(problem)
                due = current if seen is None else seen + 1
                self.epoch[problem] = max(due, current) if problem in retired_before else due
            if problem in away:
                continue
            if problem in full:
                self.retired[problem] = step
                self.pool.pop(problem, None)
                self.bucket.pop(problem, None)
                self.k.pop(problem, None)
                continue
            self.retired.pop(problem, None)
            k = len(right) + (extra if self.curate.count_replayed else 0)
            if not (on or self.curate.store_before_start) or k == 0:
                continue
            self.bucket[problem] = (len(right) + extra, len(members) + extra)
            self.k[problem] = k
            if k > self.limits["lower"]:
                held = self.pool.setdefault(problem, {})
                for r in right:
                    held.setdefault(r["token_hash"], r | {"scored": scored.get(r["rollout_id"])})
        start = self.curate.start_success
        starts = solved_rows / all_rows > start or (start == 0 and imports != [])
        if self.replay_from is None and starts:
            self.replay_from = step + 1
        self.take_in(step, imports, scored)
        self.prune(step + 1)

    def take_in(self, step: int, imports: list[dict], scored: dict[str, float]) -> None:
        """What others said: successes of questions that are not away."""
        for r in imports:
            problem = r["problem_id"]
            if self.away(problem, step) or not r["correct"]:
                continue
            if self.limits["lower"] and self.k.get(problem, 0) <= self.limits["lower"]:
                continue
            held = self.pool.setdefault(problem, {})
            if r["token_hash"] not in held:
                held[r["token_hash"]] = r | {"scored": scored.get(r["rollout_id"])}
                self.bucket.setdefault(problem, (0, 0))
                self.last.setdefault(problem, step)

    def prune(self, following: int) -> None:
        """Leave what the pool may hold before the following step; the first to go come first."""
        limits = self.limits
        everything = [(leaving(r), q, h) for q, p in self.pool.items() for h, r in p.items()]
        surplus = 0
        if limits["max_trajectories"] is not None:
            surplus = max(0, len(everything) - limits["max_trajectories"])
        beyond = {(q, h) for _, q, h in sorted(everything)[:surplus]}
        for q, held in self.pool.items():
            order = sorted(held, key=lambda h: leaving(held[h]))
            surplus = 0
            if limits["max_per_question"] is not None:
                surplus = max(0, len(order) - limits["max_per_question"])
            if limits["max_age"] is not None:
                oldest = following - limits["max_age"]
                surplus = max(surplus, sum(r["step"] < oldest for r in held.values()))
            self.pool[q] = {h: held[h] for h in order[surplus:] if (q, h) not in beyond}


def leaving(r: dict) -> tuple[int, int, str]:
    """Old ones leave first; of a step's, those with the highest sample numbers."""
    return (r["step"], -r["sample"], r["rollout_id"])


@st.composite
def histories(draw: st.DrawFn) -> tuple[Recipe, dict, list[dict], list[tuple]]:
    """A recipe and its limits, the log's steps, and a sequence of things that happen to the run."""
    limits = {
        "lower": draw(st.sampled_from([0, 0, 1])),
        "max_age": draw(st.sampled_from([None, None, 1, 2])),
        "max_per_question": draw(st.sampled_from([None, None, 1, 2])),
        "max_trajectories": draw(st.sampled_from([None, None, 1, 4])),
    }
    recipe = make_recipe(
        seed=draw(st.integers(0, 3)),
        questions=draw(st.integers(1, 5)),
        start_success=draw(st.sampled_from([0.0, 0.3, 0.5])),
        store_before_start=draw(st.booleans()),
        count_replayed=draw(st.booleans()),
        replayed=draw(st.sampled_from([1, 1, 2])),
        revive_after=draw(st.sampled_from([None, None, 1, 2])),
        weights=draw(st.sampled_from(["normal", "linear", "uniform"])),
        selection=draw(st.sampled_from(["lowest_entropy", "random", "newest"])),
        **limits,
    )
    steps = []
    for step in range(draw(st.integers(2, 4))):
        kinds = draw(
            st.lists(
                st.tuples(st.sampled_from("abcd"), st.sampled_from(["fresh", "replay"])),
                min_size=1,
                max_size=4,
                unique=True,
            )
        )
        rows = []
        for problem, role in kinds:
            for i in range(4 if role == "fresh" else 3):
                sample = i + int(role == "replay")
                # Few different texts, so that equal trajectories are common.
                text = f"t{draw(st.integers(0, 5))}"
                right = draw(st.sampled_from([True, True, False]))
                logprob = -draw(st.integers(1, 8)) / 8
                rows.append(row(step, problem, sample, right, text, role, logprob))
        imports = [
            import_row(step, q, i, right, f"t{text}")
            for i, (q, text, right) in enumerate(draw(st.lists(
                st.tuples(st.sampled_from("abcdef"), st.integers(4, 7), st.booleans()),
                max_size=draw(st.sampled_from([0, 0, 3])),
            )))
        ]  # fmt: skip
        steps.append(
            {
                "rows": rows,
                "imports": imports,
                "parts": draw(st.integers(1, 3)),
                "scored": draw(st.booleans()),
            }
        )
    last = len(steps) - 1
    at = st.integers(0, last)
    events = draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("arrive"), at),
                st.tuples(st.just("curate"), at),
                st.tuples(st.just("verify"), at, st.randoms(use_true_random=False)),
                st.tuples(st.just("score"), at),
                st.tuples(st.just("late"), at),
                st.tuples(st.just("rebuild"), at),
            ),
            max_size=5,
        )
    )
    # In the end all is curated in order; then something of the log changes once more.
    events += [("curate", step) for step in range(last + 1)]
    events.append(
        draw(
            st.one_of(
                st.tuples(st.just("verify"), at, st.randoms(use_true_random=False)),
                st.tuples(st.just("score"), at),
            )
        )
    )
    return recipe, limits, steps, [*events, ("curate", last)]


def arrive(run: RunDir, step: int, history: dict) -> None:
    write_rollouts(run, step, history["rows"], history["parts"])
    write_verdicts(run, step, history["rows"], history["parts"])
    if history["imports"]:
        write_imports(run, step, history["imports"])
    if history["scored"]:
        score(run, step, history)


def score(run: RunDir, step: int, history: dict) -> None:
    entropy = scores_of(history)
    write_scores(run, step, history["rows"], entropy, parts=history["parts"])
    if history["imports"]:
        write_imports(run, step, history["imports"], entropy)


def scores_of(history: dict) -> dict[str, float]:
    rows = history["rows"] + history["imports"]
    return {r["rollout_id"]: (i % 5) / 4 for i, r in enumerate(rows)}


@settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(histories())
def test_incremental_equals_rebuilt_over_random_histories(
    history: tuple[Recipe, dict, list[dict], list[tuple]],
) -> None:
    recipe, limits, steps, events = history
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "fsync", lambda path: None)  # no power cut is tested here
        run = RunDir(Path(folder) / "run")
        write_problems(run, [*"abcdef"])
        there: set[int] = set()
        for event, step, *more in events:
            if event == "arrive" or (event == "curate" and step not in there):
                write_plan(run, step, steps[step]["rows"])
                arrive(run, step, steps[step])
                there.add(step)
            if step not in there:
                continue
            if event == "curate":
                curate(run, step, recipe)
            elif event == "verify":  # verified again, and judged otherwise
                for r in steps[step]["rows"]:
                    r["correct"] = r["correct"] ^ (more[0].random() < 0.4)
                write_verdicts(run, step, steps[step]["rows"], steps[step]["parts"])
            elif event == "score":
                steps[step]["scored"] = True
                score(run, step, steps[step])
            elif event == "late":  # a shard of it is away for a while, and curation says so
                part = next(iter(sorted(run.rollouts(step).glob("*.parquet"))))
                away = run.root / part.name
                part.rename(away)
                with pytest.raises(InputError, match=r"parts are missing|no \.parquet"):
                    curate(run, step, recipe, force=True)
                away.rename(part)
            elif event == "rebuild":
                rebuild(run, step, recipe)
        last = len(steps) - 1
        incremental = (experience(run), tables.read_table("questions", run.questions))
        assert json.loads(run.curation.read_text())["last_step"] == last
        rebuild(run, last, recipe)
        assert experience(run).equals(incremental[0])
        assert tables.read_table("questions", run.questions).equals(incremental[1])

        reference = Reference(recipe, limits)
        for step in range(last + 1):
            scored = scores_of(steps[step]) if steps[step]["scored"] else {}
            reference.step(step, steps[step]["rows"], scored, steps[step]["imports"])
        asked = questions(run)
        assert set(asked) == set(reference.last)
        for q, found in asked.items():
            assert found["last_step"] == reference.last[q]
            assert found["times_replayed"] == reference.replayed[q]
            assert found["epoch"] == reference.epoch.get(q)
            assert found["retired_step"] == reference.retired.get(q)
            counts = (found["successes"], found["attempts"])
            assert counts == reference.bucket.get(q, (None, None))
        held = {(r["problem_id"], r["token_hash"]): r for r in experience(run).to_dicts()}
        expected = {(q, h): r for q, pool_ in reference.pool.items() for h, r in pool_.items()}
        assert set(held) == set(expected)
        for key, r in expected.items():
            assert held[key]["rollout_id"] == r["rollout_id"]
            entropy = r["mean_entropy"] if r["scored"] is None else r["scored"]
            assert held[key]["mean_entropy"] == pytest.approx(entropy)
        after = json.loads(run.curation.read_text())
        assert after["replay_from"] == reference.replay_from

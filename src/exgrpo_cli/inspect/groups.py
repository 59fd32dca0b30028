"""Whole groups for the report: all K responses to a question, with rewards and advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.tables.duck import literal, query

STEPS = 3
"""The last step, and the last ones before it whose policy was evaluated: so many in all."""

EACH = 3
"""Groups of each kind in a step: fresh or replay; solved in part, never, always."""

# The rest of a long response stays in the run: a report of wide groups is still a page.
_LONGEST = 3000

_SQL = """
WITH judged AS (
    SELECT r.rollout_id, r.problem_id, r.role, r.sample, r.text, r.tokens, r.finish_reason,
           v.reward, v.correct, v.extracted, v.status
    FROM read_parquet($rollouts) r JOIN read_parquet($verdicts) v USING (rollout_id)
),
groups AS (
    SELECT problem_id, role,
           CASE bool_or(correct)::INT + bool_and(correct)::INT
               WHEN 1 THEN 0 WHEN 0 THEN 1 ELSE 2 END AS kind
    FROM judged
    GROUP BY problem_id, role
),
chosen AS (
    FROM groups
    QUALIFY row_number() OVER (PARTITION BY role, kind ORDER BY hash(problem_id), problem_id)
        <= $each
)
SELECT * FROM judged JOIN chosen USING (problem_id, role)
ORDER BY kind, role, problem_id, sample
"""


def example_groups(
    run: RunDir, recipe: Recipe, steps: Sequence[int] | None = None, each: int = EACH
) -> list[dict[str, Any]]:
    """Groups of some steps.

    Args:
        recipe: ``objective``, which says what an advantage is.
        steps: default the last step and the last ones whose policy was evaluated, newest first.
        each: of each kind in a step.

    Returns:
        Of each group ``step``, ``problem_id``, ``role``, ``question``, ``answer`` (None where the
        problem is not there), ``right`` of ``count``, and ``rows``: ``rollout_id``, ``text`` (a
        long one without its middle), ``tokens``, ``reward``, ``advantage``, ``verdict``, ``css``,
        ``extracted``, ``age`` in steps and ``detail`` (of a replayed row, which comes first).
    """
    groups = []
    for step in _steps(run) if steps is None else steps:
        parts = {"rollouts": _files(run.rollouts(step)), "verdicts": _files(run.verdicts(step))}
        rows = query(_SQL, {**parts, "each": each}, run.rollouts(step))
        found = [list(one) for _, one in groupby(rows, lambda r: (r["problem_id"], r["role"]))]
        again = [one[0]["problem_id"] for one in found if one[0]["role"] == "replay"]
        replayed = _replayed(run, step, again)
        problems = _problems(run, [one[0]["problem_id"] for one in found])
        for one in found:
            first = one[0]
            past = replayed.get(first["problem_id"], []) if first["role"] == "replay" else []
            members = [*past, *one]
            groups.append(
                {
                    "step": step,
                    "role": first["role"],
                    "problem_id": first["problem_id"],
                    "right": sum(bool(row["correct"]) for row in members),
                    "count": len(members),
                    "question": "",
                    "answer": None,
                    **problems.get(first["problem_id"], {}),
                    "rows": [
                        _shown(row, value, step)
                        for row, value in zip(members, _advantages(members, recipe), strict=True)
                    ],
                }
            )
    return groups


def _steps(run: RunDir) -> list[int]:
    both = set(run.steps("rollouts")) & set(run.steps("verdicts"))
    judged = [n for n in both if _files(run.rollouts(n)) and _files(run.verdicts(n))]
    judged.sort(reverse=True)
    evaluated = [n for n in judged[1:] if n in run.steps("evaluations")]
    return [*judged[:1], *evaluated[: STEPS - 1]]


def _files(folder: Path) -> list[str]:
    return literal(folder.glob("[!.]*.parquet"))


def _advantages(rows: list[dict[str, Any]], recipe: Recipe) -> list[float]:
    """As training takes them (:class:`exgrpo_cli.training.batch.Batch`)."""
    import torch

    from exgrpo_cli.training.batch import is_silent
    from exgrpo_cli.training.objective import group_advantages

    rewards = torch.tensor([row["reward"] for row in rows], dtype=torch.float64)
    index = torch.zeros(len(rows), dtype=torch.int64)
    values = group_advantages(rewards, index, recipe.objective.divide_by_std).tolist()
    silent = [
        is_silent(recipe, len(rows), cut=r["finish_reason"] == "length", replayed="past" in r)
        for r in rows
    ]
    return [0.0 if none else value for none, value in zip(silent, values, strict=True)]


def _replayed(run: RunDir, step: int, problem_ids: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The trajectories that a step replayed, by question; rollouts of then may be gone."""
    if not problem_ids or not run.curated(step).exists():
        return {}
    chosen = query(
        "SELECT problem_id, rollout_id, collected_step, reward, mean_entropy, rank, candidates"
        " FROM read_parquet($curated) WHERE list_contains($ids, problem_id)"
        " ORDER BY problem_id, rank",
        {"curated": literal([run.curated(step)]), "ids": problem_ids},
        run.curated(step),
    )
    known: dict[str, dict[str, Any]] = {}
    for collected in {row["collected_step"] for row in chosen}:
        files = {
            kind: _files(getattr(run, kind)(collected)) + _files(run.imported(kind, collected))
            for kind in ("rollouts", "verdicts")
        }
        ids = [row["rollout_id"] for row in chosen if row["collected_step"] == collected]
        texts = query(
            "SELECT rollout_id, text, tokens, finish_reason, status, correct"
            " FROM read_parquet($rollouts) r JOIN read_parquet($verdicts) v USING (rollout_id)"
            " WHERE list_contains($ids, rollout_id)",
            {**files, "ids": ids},
            run.rollouts(collected),
        ) if all(files.values()) else []  # fmt: skip
        known |= {row["rollout_id"]: row for row in texts}
    found: dict[str, list[dict[str, Any]]] = {}
    for row in chosen:
        if row["rollout_id"] in known:
            past = {**row, **known[row["rollout_id"]], "past": True}
            found.setdefault(row["problem_id"], []).append(past)
    return found


def _problems(run: RunDir, problem_ids: list[str]) -> dict[str, dict[str, Any]]:
    if not problem_ids or not run.problems.exists():
        return {}
    rows = query(
        "SELECT problem_id, prompt, answer FROM read_parquet($problems)"
        " WHERE list_contains($ids, problem_id)",
        {"problems": literal([run.problems]), "ids": problem_ids},
        run.problems,
    )
    return {
        row["problem_id"]: {
            "question": clip(
                next((m["content"] for m in reversed(row["prompt"]) if m["role"] == "user"), ""),
                _LONGEST,
            ),
            "answer": clip(row["answer"], 300),
        }
        for row in rows
    }


def _shown(row: Mapping[str, Any], advantage: float, step: int) -> dict[str, Any]:
    verdict, css, detail = _verdict(row), "good" if row["correct"] else "bad", ""
    if row.get("past"):
        verdict = "replayed" if row["correct"] else f"replayed, {verdict}"
        place = "best" if row["rank"] == 1 else f"number {row['rank']}"
        css = "again"
        detail = (
            f"collected in step {row['collected_step']}, {place} of {row['candidates']} by mean"
            f" entropy {row['mean_entropy']:.3f} nats"
        )
    extracted = row.get("extracted")
    return {
        "rollout_id": row["rollout_id"],
        "text": clip(row["text"], _LONGEST),
        "tokens": row["tokens"],
        "reward": row["reward"],
        "advantage": advantage,
        "age": step - row.get("collected_step", step),
        "verdict": verdict,
        "css": css,
        "detail": detail,
        "extracted": None if extracted is None else clip(extracted, 300),
    }


def _verdict(row: Mapping[str, Any]) -> str:
    if row["correct"]:
        return "right"
    if row["finish_reason"] == "length":
        return "cut off"
    words = {"no_answer": "no answer", "ok": "wrong"}
    return words.get(row["status"]) or str(row["status"])


def clip(text: str, length: int) -> str:
    """The text, its middle left out where it is longer: a response's end holds its answer."""
    if len(text) <= length:
        return text
    if length <= 300:
        return text[: length - 1] + "…"
    half = length // 2
    return f"{text[:half]}\n[… {len(text) - length:,} characters left out …]\n{text[-half:]}"

"""Why a question was stored, retired, drawn or not, and which of its trajectories was chosen."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.choose import choose
from exgrpo_cli.experience.database import sql_text
from exgrpo_cli.experience.history import StepFiles, read_plan, read_step
from exgrpo_cli.experience.plan import draw_plan, require_plan
from exgrpo_cli.experience.pool import Experience
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.recipe.rules import RULES, mentions
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.terminal import aligned, harmless

# Where each rule is asked: the query file whose CTE ``seen`` has its columns.
_QUERIES = {
    "retire": "step_groups",
    "store": "take_in",
    "drop": "prune",
    "choose": "choose",
    "bucket": "pool_questions",
    "question": "pool_questions",
    "fresh": "plan_fresh",
}
_SEEN = re.compile(r"^( *)seen AS \(.*?^\1\)", re.MULTILINE | re.DOTALL)


def explain(run: RunDir, recipe: Recipe, step: int, problem: str) -> dict[str, Any]:
    """What each rule saw and said of a question when a step was curated.

    The experience before the step is derived in memory; nothing is written. ``choose`` is asked
    before the step is taken in, ``store``, ``retire`` and ``drop`` of what it sampled, and
    ``bucket``, ``question`` and ``fresh`` for the plan of the next step.

    Returns:
        ``step``, ``problem_id``, ``planned`` (the question's role in the step, or None), ``chosen``
        (the trajectories that it replays), ``planned_next``, and ``rules``: by rule its
        ``expression`` and ``rows``, each with ``row`` (a rollout, a trajectory, a role or the
        question), the columns that the rule names, and its ``value``.
    """
    files = StepFiles.of(run, step)
    with (
        tempfile.TemporaryDirectory(prefix="exgrpo-") as spill,
        Experience.open(run, recipe, Path(spill)) as experience,
    ):
        con = experience.con
        if not con.execute("SELECT 1 FROM problems WHERE problem_id = $1", [problem]).fetchall():
            raise InputError(f"{run.problems}: no problem {problem}")
        experience.derive(step - 1)
        rules: dict[str, Any] = {}

        def ask(name: str, row: str, at: int, **parameters: Any) -> None:
            rules[name] = _rows(experience, name, row, problem, step=at, **parameters)

        read_plan(con, require_plan(run, step), step)
        roles = con.execute("SELECT role FROM planned WHERE problem_id = $1", [problem]).fetchall()
        choose(experience, step, files)
        ask("choose", "rollout_id", step, in_pool=mentions(recipe.curate.choose, "pool_newness"))
        chosen = con.execute(
            "SELECT rollout_id FROM chosen WHERE problem_id = $1 ORDER BY rank", [problem]
        ).fetchall()
        read_step(con, files)
        experience.read_uses(step)
        ask("retire", "role", step)
        kept = recipe.curate.model_copy(update={"drop": "false"})
        experience.recipe = recipe.model_copy(update={"curate": kept})
        imported: list[dict[str, Any]] = []

        def ask_of_imports() -> None:
            ask("store", "rollout_id", step, query="take_in_imports")
            imported.extend(rules["store"]["rows"])

        experience.take_in(files, ask_of_imports)
        experience.recipe = recipe
        ask("store", "rollout_id", step)
        rules["store"]["rows"] += imported
        experience.read_uses(step)
        ask("drop", "rollout_id", step)
        if recipe.curate.drop != "false":
            experience.sql("prune", step=step)
        following, _ = draw_plan(experience, step + 1)
        for name in ("bucket", "question", "fresh"):
            ask(name, "problem_id", step + 1)
        again = following.filter(following["problem_id"] == problem)["role"].to_list()
        return {
            "step": step,
            "problem_id": problem,
            "planned": roles[0][0] if roles else None,
            "chosen": [rollout for (rollout,) in chosen],
            "planned_next": again[0] if again else None,
            "rules": {name: rules[name] for name in RULES if name in rules},
        }


def _rows(
    experience: Experience,
    name: str,
    row: str,
    problem: str,
    query: str | None = None,
    **parameters: Any,
) -> dict[str, Any]:
    """A rule's rows of a question: see :func:`explain`."""
    expression: str = getattr(experience.recipe.curate, name)
    text = sql_text(query or _QUERIES[name])
    seen = _SEEN.search(text)
    assert seen is not None, name
    begin = text.rindex("WITH ", 0, seen.start())
    columns = [column for column in RULES[name].columns if mentions(expression, column)]
    names = "".join(f', "{column}"' for column in columns)
    asked_of = " AND fresh_n > 0" if name == "retire" else ""  # a prompt may have been too long
    asked = (
        f"{text[begin : seen.end()]}\nSELECT {row} AS row{names}, <{name}|problem_id> AS value"
        f" FROM (SELECT * FROM seen WHERE problem_id = $problem{asked_of}) ORDER BY ALL"
    )
    found = experience.sql(name, asked, problem=problem, **parameters)
    return {"expression": expression, "rows": found}


def format_explanation(found: dict[str, Any]) -> str:
    """The result of :func:`explain` as text."""
    step = found["step"]
    first = (
        f"{found['problem_id']} in step {step}: {found['planned'] or 'not planned'};"
        f" replays {', '.join(found['chosen']) or 'nothing'};"
        f" in step {step + 1}: {found['planned_next'] or 'not planned'}"
    )
    lines = [first]
    for name, rule in found["rules"].items():
        lines += ["", f"{name} = {rule['expression']}"]
        rows: Sequence[dict[str, Any]] = rule["rows"]
        if rows:
            cells = [list(rows[0]), *([_cell(v) for v in row.values()] for row in rows)]
            lines += [f"  {line}" for line in aligned(cells)]
        else:
            lines.append("  not asked")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else harmless(str(value), keep="")

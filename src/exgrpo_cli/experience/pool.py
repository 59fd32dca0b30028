"""The experience of a run, in DuckDB: the tables that follow from its history."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli.errors import InputError, first_line
from exgrpo_cli.experience.curation import (
    Curation,
    all_settings,
    on_policy,
    recorded_metrics,
    table_settings,
)
from exgrpo_cli.experience.database import connect, fill_problems, run_sql, spill_of, sql_text
from exgrpo_cli.experience.history import StepFiles, read_step
from exgrpo_cli.experience.rules import any_mentions, columns_of_problems, with_rules
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.tables.duck import literal, write_query

if TYPE_CHECKING:
    import duckdb


@dataclass
class Experience:
    """A run's stored successes and the state of its questions, as they stand after a step.

    The tables ``experience`` and ``questions`` of :attr:`con` hold them. They start empty, or where
    the files of the run are (:meth:`resume`), and go on step by step (:meth:`derive`). Nothing is
    written but by :meth:`write`.
    """

    con: duckdb.DuckDBPyConnection
    run: RunDir
    recipe: Recipe
    """``curate``, ``rollout.samples`` and ``seed`` are its rules."""
    last_step: int = -1
    """The last step taken in; -1 before the first."""
    replay_from: int | None = None
    """The first step with replay; None before a success rate exceeded ``start_success``."""
    recorded: bool = True
    """Whether what was replayed before is as recorded in the run, and not only as chosen here."""
    _used: set[int] = field(default_factory=set)

    @classmethod
    @contextmanager
    def open(cls, run: RunDir, recipe: Recipe, spill: Path | None = None) -> Iterator[Experience]:
        """An empty one, with the ids of the run's problems in the working table ``problems``. It
        spills into a hidden folder of the run, or as told."""
        with connect(spill or spill_of(run.root)) as con:
            fill_problems(con, run.problems, columns_of_problems(recipe.curate))
            yield cls(con, run, recipe)

    def sql(self, name: str, text: str | None = None, **parameters: Any) -> list[dict[str, Any]]:
        """Run a query file of ``sql/``: see :func:`exgrpo_cli.experience.database.run_sql`.

        The settings of ``curate``, ``samples`` (K), ``batch`` (B) and ``seed`` are parameters by
        their names; the recipe's rules stand where the query names them.
        """
        import duckdb

        curate = self.recipe.curate
        given = curate.model_dump() | {
            "samples": self.recipe.rollout.samples,
            "batch": curate.questions,
            "seed": self.recipe.seed,
        }
        text, rules = with_rules(text or sql_text(name), curate)
        try:
            return run_sql(self.con, name, text, **given, **parameters)
        except duckdb.Error as error:
            if not rules or isinstance(error, duckdb.IOException):
                raise
            said = first_line(error)
            told = said.removeprefix("Invalid Input Error: ")
            if not told.startswith("rule curate."):
                told = f"rule {' or '.join(f'curate.{rule}' for rule in rules)}: {said}"
            raise InputError(f"{self.run.root}: {told}") from error

    def read_uses(self, upto: int) -> None:
        """What the run replayed in the steps up to one, into ``uses``, where a rule asks for it."""
        curate = self.recipe.curate
        only_successes = curate.store == type(curate).model_fields["store"].default
        if not self.recorded or (only_successes and not any_mentions(curate, "times_used")):
            return
        steps = [s for s in self.run.steps("curated") if s <= upto and s not in self._used]
        if steps:
            self.con.execute(
                "INSERT INTO uses BY NAME"
                " SELECT problem_id, rollout_id, step FROM read_parquet($files)",
                {"files": literal([self.run.curated(step) for step in steps])},
            ).fetchall()
            self._used |= set(steps)

    def use(self, step: int) -> None:
        """What is in ``chosen`` is what a step replays."""
        self.read_uses(step - 1)
        self._used.add(step)
        self.con.execute(f"DELETE FROM uses WHERE step = {int(step)}").fetchall()
        self.con.execute(
            f"INSERT INTO uses SELECT problem_id, rollout_id, {int(step)} FROM chosen"
        ).fetchall()

    def use_recorded(self, step: int) -> None:
        """What a step was trained on is what it replays, whatever is in ``chosen``."""
        self._used.discard(step)
        self.con.execute(f"DELETE FROM uses WHERE step = {int(step)}").fetchall()
        self.read_uses(step)

    def replays(self, step: int) -> bool:
        """Whether replay is on in a step."""
        return self.replay_from is not None and self.replay_from <= step

    def take_in(
        self, files: StepFiles, before_imports: Callable[[], object] = lambda: None
    ) -> None:
        """Take in a step of the history: counts, buckets, retirement, new successes, limits.

        Leaves the step's ``step_rows``, ``step_groups`` and ``planned`` in the connection, and
        where it takes in trajectories of others ``import_rows``.
        """
        step, rules, never = files.step, self.recipe.curate, on_policy(self.recipe)
        if files.imports:
            read_step(self.con, files.imports)
            self.con.execute("CREATE OR REPLACE TEMP TABLE import_rows AS FROM step_rows")
        read_step(self.con, files)
        self.read_uses(step)
        storing = not never and (self.replays(step) or rules.store_before_start)
        self.sql("step_groups", step=step, storing=storing, retiring=not never)
        self.sql("take_in", step=step)
        if files.imports and not never:
            before_imports()
            self.sql("take_in_imports", step=step)
        if rules.drop != "false":
            self.sql("prune", step=step)
        solved, sampled = self.con.execute(
            "SELECT coalesce(sum(successes), 0), coalesce(sum(attempts), 0) FROM step_groups"
            " WHERE fresh_attempts > 0"
        ).fetchall()[0]
        starts = sampled and int(solved) / int(sampled) > rules.start_success
        starts = starts or (files.imports is not None and rules.start_success == 0)
        if self.replay_from is None and starts and not never:
            self.replay_from = step + 1
        self.last_step = step

    def derive(self, upto: int) -> None:
        """Take in the steps of the history that follow, up to one, in order. Where a step is not
        whole, those before it are taken in."""
        for step in self.run.steps("rollouts"):
            if self.last_step < step <= upto:
                self.take_in(StepFiles.of(self.run, step))

    def resume(self, found: Curation | None, upto: int, digests: Mapping[str, str]) -> bool:
        """Go on from the run's tables, derived from what was ``found``, where these can be brought
        up to a step; False, and nothing was loaded, where not."""
        return (
            found is not None
            and found.last_step <= upto
            and found.fits(table_settings(self.recipe), digests, found.last_step)
            and self.load(found)
        )

    def load(self, found: Curation) -> bool:
        """The tables of the run, as they are; False, and nothing, where they are damaged."""
        import duckdb

        run = self.run
        try:
            for name, path in (("experience", run.experience), ("questions", run.questions)):
                self.con.execute(
                    f"INSERT INTO {name} BY NAME SELECT * FROM read_parquet($files)",
                    {"files": literal([path])},
                ).fetchall()
        except duckdb.Error:
            self.con.execute("DELETE FROM experience; DELETE FROM questions").fetchall()
            return False
        self.last_step, self.replay_from = found.last_step, found.replay_from
        return True

    def write(self, digests: Mapping[str, str]) -> None:
        """Write the run's tables and then what they were derived from."""
        Curation.remove(self.run)
        # The trajectories lie in order of entry, however derived; sorting took half of the time.
        write_query(self.con, "SELECT * FROM experience", self.run.experience)
        write_query(self.con, "SELECT * FROM questions ORDER BY problem_id", self.run.questions)
        settings = all_settings(self.recipe)
        Curation(self.last_step, self.replay_from, settings, digests).write(self.run)


def replay_on(run: RunDir, step: int) -> bool:
    """Whether replay was on in a step that was curated (whether or not it replayed anything)."""
    metrics = recorded_metrics(run, step)
    if metrics is not None:
        return bool(metrics.get("replay/started"))
    found = Curation.read(run)
    if found is None or found.last_step < step:
        raise InputError(
            f"{run.stage_metrics(step, 'curate')}: step {step} was not curated yet; run:"
            f" exgrpo curate {run.root} --step {step}"
        )
    return found.replay_from is not None and found.replay_from <= step

"""Curation at the size of real runs: time, memory, and what is read.

    python benchmarks/curate.py                             # 100 000 stored trajectories
    python benchmarks/curate.py --trajectories 1000000      # 0.6 GB of disk for a while
    python benchmarks/curate.py --trajectories 10000000 --tokens 20 --no-peer      # 1.7 GB, 15 min

Makes a synthetic history (rollouts with token lists, verdicts) in which so many successes are
stored, then curates it with the real stage, each time in a process of its own: once from the whole
log, then one step after the other. Against it, in this process: the pool as one would write it in
a trainer, a dictionary of lists in memory that is searched by scanning. Its time is that of a step
alone: it is neither read from disk nor written, and its trajectories share one token list.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import polars as pl

from exgrpo_cli import tables
from exgrpo_cli.experience.database import connect, sql_text
from exgrpo_cli.experience.plan import first_plan
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir, step_name
from exgrpo_cli.stages.curate import curate as stage
from exgrpo_cli.step import Step

SAMPLES = 8
QUESTIONS_PER_PART = 16
TEMPLATES = 8  # few, so that a million responses fit on a disk; read, they are as long as any
RECIPE = Recipe()  # the paper's: 128 questions a step, half of them replayed


# --- a history ----------------------------------------------------------------------------------


def open_templates(tokens: int) -> duckdb.DuckDBPyConnection:
    """Responses to pick from: random ids, log-probabilities of a fairly certain model."""
    con = duckdb.connect(config={"memory_limit": "2GB"})
    con.execute("SET enable_progress_bar = false")
    con.execute(
        """
        CREATE TABLE templates AS
        SELECT
            template,
            list(CAST(hash(template, place) % 50000 AS INTEGER) ORDER BY place) AS token_ids,
            list(CAST(ln(1 - pow(hash(place, template) % 4096 / 4096.0, 4)) AS FLOAT)
                ORDER BY place) AS logprobs
        FROM range($templates) AS a(template), range($tokens) AS b(place)
        GROUP BY template
        """,
        {"templates": TEMPLATES, "tokens": tokens},
    )
    return con


def write_step(con: duckdb.DuckDBPyConnection, run: RunDir, step: int, groups: str) -> None:
    """A step's rollouts and verdicts.

    Args:
        con: of :func:`open_templates`.
        run: where to.
        step: t.
        groups: SQL for (problem_id, role, samples, solved): ``solved`` of its samples are right.
    """
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE rows AS
        SELECT
            format('s{{:05d}}/{{}}/{{:02d}}{{}}', {step}, problem_id, sample,
                CASE role WHEN 'replay' THEN 'r' ELSE '' END) AS rollout_id,
            problem_id,
            CAST(sample AS INTEGER) AS sample,
            role,
            sample - first < solved AS correct,
            hash(rollout_id) % {TEMPLATES} AS template,
            (dense_rank() OVER (ORDER BY problem_id, role) - 1) // {QUESTIONS_PER_PART} AS part,
            0.1 + hash(rollout_id, 1) % 10000 / 10000.0 AS mean_entropy
        FROM (SELECT *, CAST(role = 'replay' AS INTEGER) AS first FROM ({groups}))
        CROSS JOIN LATERAL (SELECT unnest(range(first, first + samples)) AS sample)
        """
    )
    for folder, query in (
        (
            run.verdicts(step),
            """
            SELECT rollout_id, CAST(correct AS FLOAT) AS reward, correct,
                CAST(sample AS VARCHAR) AS extracted, 'ok' AS status, 'math' AS verifier,
                0::FLOAT AS seconds, part
            FROM rows
            """,
        ),
        (
            run.rollouts(step),
            f"""
            SELECT rollout_id, {step} AS step, problem_id, sample, role,
                '{step_name(step)}' AS policy, [1, 2, 3, 4]::INTEGER[] AS prompt_ids, token_ids,
                'a response' AS text, logprobs, NULL::FLOAT[] AS entropies,
                CAST(mean_entropy AS FLOAT) AS mean_entropy, 'engine' AS entropy_source,
                CAST(-mean_entropy AS FLOAT) AS mean_logprob,
                CAST(len(token_ids) AS INTEGER) AS tokens, md5(rollout_id) AS token_hash,
                'stop' AS finish_reason, 0::BIGINT AS seed, part
            FROM rows JOIN templates USING (template)
            """,
        ),
    ):
        folder.parent.mkdir(exist_ok=True)
        con.execute(
            f"COPY ({query}) TO '{folder}' (FORMAT parquet, COMPRESSION zstd, PARTITION_BY part)"
        )
        parts = sorted(folder.iterdir(), key=lambda path: int(path.name.removeprefix("part=")))
        for i, path in enumerate(parts):
            (file,) = path.iterdir()
            file.rename(folder / tables.part_name(i, len(parts)))
            path.rmdir()


def make_history(
    con: duckdb.DuckDBPyConnection, run: RunDir, questions: int, trajectories: int, steps: int
) -> None:
    """Steps 0 to ``steps`` of fresh questions; on average half of a group's samples are right."""
    run.root.mkdir(parents=True)
    con.execute(
        f"""
        COPY (
            SELECT format('question-{{:06d}}', i) AS problem_id,
                [{{'role': 'user', 'content': 'a question'}}] AS prompt, '1' AS answer,
                'math' AS verifier, 'synthetic' AS source, NULL::VARCHAR AS metadata
            FROM range({questions}) AS t(i)
        ) TO '{run.problems}' (FORMAT parquet)
        """
    )
    groups = -(-trajectories // (steps * SAMPLES // 2))
    for step in range(steps + 1):  # replay starts after the first: it stores nothing
        write_step(
            con,
            run,
            step,
            f"""
            SELECT format('question-{{:06d}}', ({step} * {groups} + i) % {questions}) AS problem_id,
                'fresh' AS role, {SAMPLES} AS samples,
                CASE WHEN hash(i, {step}) % 64 = 0 THEN {SAMPLES}
                    ELSE 1 + hash(i, {step}, 1) % ({SAMPLES} - 1) END AS solved
            FROM range({groups}) AS t(i)
            """,
        )
        print(f"\rhistory: step {step} of {steps}", end="", file=sys.stderr)
    print(file=sys.stderr)
    plan = first_plan(run.problems, RECIPE).with_columns(step=pl.lit(steps, pl.Int32))
    tables.write_table("plan", plan, run.plan(steps))


def sample_plan(con: duckdb.DuckDBPyConnection, run: RunDir, step: int) -> None:
    """Rollouts and verdicts of a planned step."""
    write_step(
        con,
        run,
        step,
        f"SELECT problem_id, role, samples, hash(problem_id, {step}) % 8 AS solved"
        f" FROM read_parquet('{run.plan(step)}')",
    )


# --- the stage, in a process of its own ---------------------------------------------------------


def child(root: Path, step: int, rebuild: bool) -> None:
    """Curate a step and print how long it took and the most memory that the process had."""
    started = time.perf_counter()
    metrics = dict(stage(Step.of(root, step), RECIPE, rebuild=rebuild).metrics)
    seconds = time.perf_counter() - started
    usage = resource.getrusage(resource.RUSAGE_SELF)
    peak_mb = usage.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
    cpu = usage.ru_utime + usage.ru_stime
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_mb": peak_mb} | metrics))


def curate(root: Path, step: int, *, rebuild: bool = False) -> dict[str, Any]:
    """Run :func:`child`; its result, with the process's whole time, imports included."""
    started = time.perf_counter()
    arguments = [sys.executable, __file__, "--child", str(root), str(step), str(int(rebuild))]
    done = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True)
    return {**json.loads(done.stdout), "process_seconds": time.perf_counter() - started}


# --- the obvious pool in Python -----------------------------------------------------------------


Row = tuple[str, str, bool, float]
"""rollout_id, text, correct, mean_entropy."""


class PythonPool:
    """A dictionary of lists, as in a trainer's process: found by scanning, chosen by scanning."""

    def __init__(self, run: RunDir) -> None:
        self.pool: dict[str, list[dict[str, Any]]] = {}
        self.buckets: dict[int, list[str]] = {k: [] for k in range(1, SAMPLES)}
        self.retired: list[str] = []
        shared = [0] * 500
        rows = duckdb.execute(
            "SELECT problem_id, rollout_id, token_hash, mean_entropy FROM read_parquet($1)",
            [str(run.experience)],
        )
        while batch := rows.fetchmany(10_000):
            for problem, rollout, text, entropy in batch:
                entry = {"id": rollout, "text": text, "entropy": entropy, "token_ids": shared}
                self.pool.setdefault(problem, []).append(entry)
        held = duckdb.execute(
            "SELECT problem_id, successes, retired_step FROM read_parquet($1)", [str(run.questions)]
        ).fetchall()
        for problem, successes, retired in held:
            if retired is not None:
                self.retired.append(problem)
            elif successes is not None and problem in self.pool:
                self.buckets[successes].append(problem)

    def step(self, groups: list[tuple[str, str, list[Row]]]) -> dict[str, str]:
        """Choose for the replay questions, then collect and retire; what was chosen."""
        best = {q: min(held, key=lambda t: t["entropy"]) for q, held in self.pool.items()}
        chosen = {q: best[q]["id"] for q, role, _ in groups if role == "replay" and q in best}
        for question, role, rows in groups:
            right = [row for row in rows if row[2]]
            k = len(right) + (role == "replay")
            if len(right) == len(rows):
                if question not in self.retired:
                    self.retired.append(question)
            elif 0 < k < SAMPLES:
                for held in self.buckets.values():
                    if question in held:
                        held.remove(question)
                self.buckets[k].append(question)
                for rollout, text, _, entropy in right:
                    known = self.pool.setdefault(question, [])
                    if text not in [entry["text"] for entry in known]:
                        known.append({"id": rollout, "text": text, "entropy": entropy})
        self.pool = {q: held for q, held in self.pool.items() if q not in self.retired}
        self.buckets = {
            k: [q for q in held if q not in self.retired] for k, held in self.buckets.items()
        }
        return chosen


def list_bytes(con: duckdb.DuckDBPyConnection) -> float:
    """Memory of a trajectory's lists in Python, ids and log-probabilities, in the mean."""
    tracemalloc.start()
    held = [con.execute("SELECT token_ids, logprobs FROM templates").fetchall() for _ in range(20)]
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return taken / sum(map(len, held))


def step_groups(run: RunDir, step: int) -> list[tuple[str, str, list[Row]]]:
    """A step's rollouts as Python has them."""
    rows = duckdb.execute(
        "SELECT problem_id, role, list((rollout_id, token_hash, correct, mean_entropy)"
        " ORDER BY sample)"
        " FROM read_parquet($1) AS r JOIN read_parquet($2) AS v USING (rollout_id) GROUP BY ALL",
        [str(run.rollouts(step) / "*.parquet"), str(run.verdicts(step) / "*.parquet")],
    ).fetchall()
    return [(problem, role, [tuple(r) for r in held]) for problem, role, held in rows]


# --- what is read -------------------------------------------------------------------------------


def scans(run: RunDir, step: int) -> Iterator[str]:
    """What a step's queries read of Parquet files, by EXPLAIN ANALYZE."""
    files = {kind: list((run.root / kind / step_name(step)).iterdir()) for kind in KINDS}
    with connect() as con:
        values = {kind: [str(path) for path in files[kind]] for kind in KINDS}
        yield from _scans(con, "step_rows", values | {"root": f"{run.root}/"})
        chosen = duckdb.execute(
            "SELECT rollout_id, e.part FROM read_parquet($1) JOIN read_parquet($2) AS e"
            " USING (rollout_id)",
            [str(run.curated(step)), str(run.experience)],
        ).fetchall()
        con.executemany("INSERT INTO wanted VALUES (?)", [row[:1] for row in chosen])
        parts = sorted({str(run.root / row[1]) for row in chosen})
        yield from _scans(con, "trajectories", {"parts": parts})


KINDS = ("rollouts", "verdicts")
LISTS = ("prompt_ids", "token_ids", "logprobs", "entropies")


def _scans(con: duckdb.DuckDBPyConnection, name: str, values: dict[str, Any]) -> Iterator[str]:
    query = f"EXPLAIN (ANALYZE, FORMAT json) {sql_text(name)}"
    plan = json.loads(con.execute(query, values).fetchall()[0][1])
    yield f"{name}.sql reads, by EXPLAIN ANALYZE:"
    nodes = list(plan["operator"])
    while nodes:
        node = nodes.pop(0)
        nodes += node.get("children", [])
        extra = node["extra_info"]
        if extra.get("Function") == "READ_PARQUET":
            columns = extra["Projections"]
            lists = " and ".join(c for c in columns if c in LISTS) or "no token list"
            yield (
                f"  {extra['Total Files Read']} files, {node['rows_scanned']:,} rows, {lists}:"
                f" {', '.join(columns)}"
            )


# --- main ---------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--trajectories", type=int, default=100_000, help="stored successes")
    parser.add_argument("--questions", type=int, help="default a twentieth of the trajectories")
    parser.add_argument("--tokens", type=int, default=500, help="of a response")
    parser.add_argument("--steps", type=int, default=100, help="of the history")
    parser.add_argument("--measured", type=int, default=3, help="steps that are measured")
    parser.add_argument("--no-peer", action="store_true", help="leave the Python pool out")
    parser.add_argument("--folder", type=Path, help="where the history lies for a while")
    parser.add_argument("--keep", action="store_true", help="do not remove it afterwards")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="exgrpo-benchmark-", dir=options.folder))
    try:
        measure(RunDir(folder / "run"), options)
    finally:
        if options.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder)


def measure(run: RunDir, options: argparse.Namespace) -> None:
    questions = options.questions or max(1000, options.trajectories // 20)
    con = open_templates(options.tokens)
    started = time.perf_counter()
    make_history(con, run, questions, options.trajectories, options.steps)
    size = sum(p.stat().st_size for p in run.root.rglob("*.parquet"))
    print(
        f"history: {options.steps + 1} steps, {questions:,} questions, responses of"
        f" {options.tokens} tokens; {size / 2**20:,.0f} MiB,"
        f" made in {time.perf_counter() - started:.0f} s"
    )
    last = options.steps
    whole = curate(run.root, last, rebuild=True)
    print(
        f"rebuild: {whole['pool/trajectories']:,} trajectories of {whole['pool/questions']:,}"
        f" questions in {whole['seconds']:.2f} s, peak {whole['peak_mb']:,.0f} MB;"
        f" experience.parquet has {run.experience.stat().st_size / 2**20:,.0f} MiB"
    )
    python = None if options.no_peer else PythonPool(run)
    ours, theirs = [], []
    for step in range(last + 1, last + 1 + options.measured):
        sample_plan(con, run, step)
        made = curate(run.root, step)
        assert not made["rebuilt"]
        ours.append(made["seconds"])
        line = (
            f"step {step}: {made['seconds']:.2f} s ({made['process_seconds']:.2f} s with the"
            f" process's start, {made['cpu_seconds']:.2f} s of CPU), peak"
            f" {made['peak_mb']:,.0f} MB, {made['replay/questions']} replayed"
        )
        if python is not None:
            groups = step_groups(run, step)
            started = time.perf_counter()
            chosen = python.step(groups)
            theirs.append(time.perf_counter() - started)
            ids = set(tables.read_table("curated", run.curated(step), ["rollout_id"])["rollout_id"])
            line += (
                f"; Python pool {theirs[-1]:.2f} s, chooses"
                f" {len(ids & set(chosen.values()))} of the same"
            )
        print(line, flush=True)
    line = f"median of a step: {statistics.median(ours):.2f} s"
    if theirs:
        ratio = statistics.median(theirs) / statistics.median(ours)
        line += f"; Python pool {statistics.median(theirs):.2f} s, which is {ratio:.2f} times that"
    memory = whole["pool/trajectories"] * list_bytes(con) / 2**30
    print(f"{line}; in Python lists, the pool's tokens would take {memory:.0f} GiB")
    print("\n".join(scans(run, last + options.measured)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")
    else:
        main()

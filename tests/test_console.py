"""`exgrpo sql` as a user has it: a process, its output and its exit code."""

import csv
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.inspect.sql import answer, open_run
from exgrpo_cli.rundir import RunDir
from made_run import make_run

Exgrpo = Callable[..., Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("a [run], with 'marks'") / "run", 6)


def ask(run: RunDir, text: str, form: str = "table") -> str:
    out = StringIO()
    with open_run(run.root) as con:
        answer(con, text, form, out)
    return out.getvalue()


def test_a_query_by_option_and_by_stdin(run: RunDir, exgrpo: Exgrpo) -> None:
    query = "SELECT problem_id, successes FROM questions ORDER BY problem_id"
    table = tables.read_table("questions", run.questions).sort("problem_id")
    done = exgrpo("sql", run.root, "-c", query)
    head, rule, *lines = done.stdout.splitlines()
    assert head.split() == ["problem_id", "successes"]
    assert set(rule) == {"-", " "}
    assert [line.split()[0] for line in lines] == table["problem_id"].to_list()
    assert done.stderr == ""

    made = exgrpo("sql", run.root, "--json", "-c", query).stdout.splitlines()
    assert [json.loads(line) for line in made] == table.select("problem_id", "successes").to_dicts()

    piped = subprocess.run(
        [sys.executable, "-m", "exgrpo_cli", "sql", str(run.root), "--csv"],
        input=query,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = list(csv.DictReader(StringIO(piped.stdout)))
    assert [r["problem_id"] for r in rows] == table["problem_id"].to_list()
    assert [r["successes"] or None for r in rows] == [
        None if k is None else str(k) for k in table["successes"].to_list()
    ]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("SELEC 1", 'Parser Error: syntax error at or near "SELEC"'),
        ("SELECT nothing FROM questions", 'column "nothing" not found'),
        ("FROM nowhere", "Table with name nowhere does not exist"),
        ("SELECT CAST('x' AS INTEGER)", "Could not convert string 'x'"),
        ("COPY questions TO 'out.csv'", "COPY is refused: exgrpo sql only reads"),
    ],
)
def test_bad_sql_is_one_line(run: RunDir, exgrpo: Exgrpo, query: str, words: str) -> None:
    done = exgrpo("sql", run.root, "-c", query, code=2)
    (line,) = done.stderr.splitlines()
    assert words in line
    assert done.stdout == ""


def test_other_bad_usage(run: RunDir, exgrpo: Exgrpo, tmp_path: Path) -> None:
    done = exgrpo("sql", tmp_path / "no", "-c", "SELECT 1", code=2)
    assert "no such run directory" in done.stderr
    done = exgrpo("sql", tmp_path, "-c", "SELECT 1", code=2)
    assert "holds no table of a run" in done.stderr
    assert "choose one" in exgrpo("sql", run.root, "--csv", "--json", code=2).stderr


def test_nothing_is_written(run: RunDir) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.root.rglob("*")}
    for query in (
        "COPY questions TO 'experience.parquet' (FORMAT parquet)",
        "EXPLAIN ANALYZE COPY questions TO 'x.csv'",
        "EXPORT DATABASE 'x'",
        "ATTACH 'x.duckdb' AS x",
        "PREPARE p AS COPY questions TO 'x.csv'",
        "SELECT 1; COPY questions TO 'x.csv'",
        "COPY (PIVOT (SELECT 1 AS a) ON a) TO 'x.csv'",
        "EXPLAIN ANALYZE COPY (PIVOT (SELECT 1 AS a) ON a) TO 'x.csv'",
        "EXPLAIN(ANALYZE) COPY questions TO 'x.csv'",
        "EXPLAIN (ANALYZE, FORMAT json) COPY questions TO 'x.csv'",
        "/* a */ EXPLAIN -- b\n ANALYZE COPY questions TO 'x.csv'",
        "SET profiling_output = 'x.json'",
        "PRAGMA profiling_output = 'x.json'",
        "CALL enable_logging(storage = 'file', storage_path = 'x')",
        "CREATE PERSISTENT SECRET s (TYPE s3, KEY_ID 'x')",
        "CREATE SECRET s (TYPE s3, KEY_ID 'x')",
        "IMPORT DATABASE '.'",
        "PRAGMA import_database('.')",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "RESET lock_configuration",
        "DELETE FROM questions",
        "INSERT INTO questions BY NAME SELECT 'x' AS problem_id",
    ):
        with pytest.raises(InputError):
            ask(run, query)
    # In memory one may keep things.
    assert ask(run, "CREATE TABLE mine AS FROM questions; SELECT count(*) AS n FROM mine") == (
        "n\n-\n3\n"
    )
    assert {path: path.stat().st_mtime_ns for path in run.root.rglob("*")} == before


def test_explaining_and_naming_a_copy_is_no_write(run: RunDir) -> None:
    assert "copy" in ask(run, "EXPLAIN SELECT 'copy'")
    assert "Total Time" in ask(run, "EXPLAIN ANALYZE SELECT 'export' AS copy -- copy")
    assert ask(run, "SELECT 'copy' AS copy", "csv") == "copy\ncopy\n"
    assert ask(run, "PIVOT (SELECT 'copy' AS b) ON b", "csv") == "copy\n1\n"
    assert "[" in ask(run, "EXPLAIN(FORMAT json) SELECT 'copy'")
    assert ask(run, "EXPLAIN PIVOT (SELECT 'copy' AS b) ON b")


def test_only_the_runs_files_are_within_reach(run: RunDir, tmp_path: Path) -> None:
    """Also those that lie elsewhere by a link; but no other file, and nothing over the network."""
    outside = tmp_path / "outside.csv"
    outside.write_text("a\n1\n")
    for source in (f"'{outside}'", "'https://localhost:1/x.csv'", "read_text('/etc/hostname')"):
        with pytest.raises(InputError):
            ask(run, f"FROM {source}")
    assert ask(run, "SELECT count(*) AS n FROM 'metrics.jsonl'", "csv") == "n\n7\n"
    linked = make_run(tmp_path / "linked", 2)
    elsewhere = linked.root.rename(tmp_path / "disk")
    linked.root.mkdir()
    for path in elsewhere.iterdir():
        (linked.root / path.name).symlink_to(path)
    assert ask(linked, "SELECT count(*) AS n FROM rollouts", "csv") == "n\n6\n"


def test_values_of_every_kind(run: RunDir) -> None:
    query = (
        "SELECT 1.5 AS x, 'nan'::FLOAT AS y, [1, 2] AS ids, {'a': 'b'} AS s, NULL AS n, true AS b,"
        " 'one\ntwo' AS t"
    )
    (line,) = ask(run, query, "json").splitlines()
    expected = {"x": 1.5, "y": None, "ids": [1, 2], "s": {"a": "b"}, "n": None, "b": True}
    assert json.loads(line) == expected | {"t": "one\ntwo"}
    ((_, *cells),) = [list(r.items()) for r in csv.DictReader(StringIO(ask(run, query, "csv")))]
    assert [value for _, value in cells] == ["nan", "[1, 2]", '{"a": "b"}', "", "true", "one\ntwo"]
    shown = ask(run, "SELECT chr(27) || '[31mred' AS text, 1e9::DOUBLE AS big, 12345678 AS n")
    assert "\x1b" not in shown
    assert shown.splitlines()[-1].split() == ["\\x1b[31mred", "1e+09", "12345678"]


def test_several_statements_pivot_and_explain(run: RunDir) -> None:
    assert ask(run, "SELECT 1 AS a; SELECT 2 AS b").split() == ["a", "-", "1", "b", "-", "2"]
    made = ask(run, "PIVOT (SELECT coalesce(bucket, 'none') AS b FROM questions) ON b", "csv")
    assert set(made.splitlines()[0].split(",")) >= {"medium", "hard"}
    plan = ask(run, "EXPLAIN SELECT bucket FROM questions")
    assert "READ_PARQUET" in plan
    assert "successes" not in plan
    assert ask(run, "") == ""


def test_a_long_answer_into_head_ends_quietly(run: RunDir) -> None:
    done = subprocess.run(
        f"{sys.executable} -m exgrpo_cli sql '{run.root.name}' -c 'FROM range(300000)' | head -3",
        shell=True,
        cwd=run.root.parent,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["range", "------", "0"]
    assert done.stderr == ""


def test_the_prompt(run: RunDir) -> None:
    """On a terminal: statements over lines, a mistake that is said, and the end of input."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "exgrpo_cli", "sql", str(run.root)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "100"},
    )
    os.close(theirs)
    seen = ""

    def until(words: str) -> None:
        nonlocal seen
        end = time.monotonic() + 60
        while words not in seen:
            assert time.monotonic() < end, seen
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096).decode()
        seen = seen[seen.index(words) + len(words) :]

    try:
        until("exgrpo> ")
        os.write(ours, b"SELECT count(*) AS questions_seen\n")
        until("...> ")
        os.write(ours, b"FROM questions;\n")
        until("questions_seen")
        until("3")
        until("exgrpo> ")
        os.write(ours, b"SELEC 1;\n")
        until("Parser Error")
        until("exgrpo> ")
        os.write(ours, b"SELECT 6 * 7 AS n;\n")
        until("42")
        until("exgrpo> ")
        os.write(ours, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        os.close(ours)


def test_ctrl_c_ends_a_long_query(run: RunDir) -> None:
    endless = "SELECT count(*) FROM range(100000000) AS a, range(100000) AS b WHERE hash(a, b) = 3"
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(run.root), endless],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "it runs\n"
    for _ in range(2):  # impatient
        process.send_signal(signal.SIGINT)
    try:
        assert process.wait(timeout=60) == 130
        assert "interrupted" in process.stderr.read()
    finally:
        process.kill()


# The command, which says when its query has started.
INTERRUPTED = """
import sys
from exgrpo_cli.inspect import sql as console
from exgrpo_cli.cli import main
real = console.answer
def answer(*arguments):
    print("it runs", file=sys.stderr, flush=True)
    real(*arguments)
console.answer = answer
main(["sql", sys.argv[1], "-c", sys.argv[2]])
"""

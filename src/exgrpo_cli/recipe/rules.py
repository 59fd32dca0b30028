"""The rules of curation: one DuckDB expression each, what it sees, and whether it can be used.

A rule is an expression over the columns documented here and nothing else: no subquery, aggregate or
window, no random number but ``luck``, no clock, no file. docs/ideas.md says when each is asked.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from exgrpo_cli.errors import first_line

if TYPE_CHECKING:
    import duckdb

Columns = Mapping[str, tuple[str, str]]
"""Name to DuckDB type and meaning."""

_ALWAYS: Columns = {
    "samples": ("INTEGER", "K, rollout.samples"),
    "batch": ("INTEGER", "B, curate.questions"),
    "step": ("INTEGER", "the step t; of question, bucket and fresh the step that is planned"),
}
_LUCK: Columns = {
    "luck": ("DOUBLE", "in [0, 1), from seed, step and row: the same in every repetition")
}
_QUESTION: Columns = {
    "times_replayed": ("INTEGER", "steps in which it was a replay question"),
    "since_sampled": ("INTEGER", "steps since it was last sampled; null: never"),
    "stored": ("INTEGER", "its trajectories in the pool"),
    "source": ("VARCHAR", "the data set's name"),
    "metadata": ("VARCHAR", "what else its problem holds, as JSON; may be null"),
}
_BUCKET: Columns = {
    "k": ("INTEGER", "successes that make its bucket, on the scale of K; null before the first"),
    "success_rate": ("DOUBLE", "the same as a share; both are 0 where only imports succeeded"),
}
_ORIGIN: Columns = {"origin": ("VARCHAR", "own, or the name that it was imported under")}
_GROUP: Columns = {
    "role": ("VARCHAR", "fresh or replay; of store also import"),
    "k": ("INTEGER", "successes of the group, by curate.count_replayed with replayed rows"),
    "n": ("INTEGER", "rows of the group, counted likewise"),
    "fresh_k": ("INTEGER", "successes of its rollouts"),
    "fresh_n": ("INTEGER", "its rollouts"),
    "mean_reward": ("DOUBLE", "of the group, a replayed success counted as 1, a failure as 0"),
    "std_reward": ("DOUBLE", "sample deviation of the same; 0 in a group of one"),
}
_ROLLOUT: Columns = {
    "correct": ("BOOLEAN", "whether its answer is right"),
    "reward": ("FLOAT", "its reward"),
    "advantage": ("DOUBLE", "reward - mean_reward"),
    "status": ("VARCHAR", "of the verdict: ok, no_answer, ..."),
    "finish_reason": ("VARCHAR", "stop or length"),
    **_ORIGIN,
    "tokens": ("INTEGER", "length of the response"),
    "mean_entropy": ("FLOAT", "nats a token"),
    "mean_logprob": ("FLOAT", "nats a token"),
}
_TRAJECTORY: Columns = {
    "age": ("INTEGER", "steps since it was collected; of drop in the step that comes"),
    "newness": ("BIGINT", "1 for the newest of its question"),
    "pool_newness": ("BIGINT", "1 for the newest of the pool"),
    "times_used": ("INTEGER", "how often it was replayed before"),
    "reward": ("FLOAT", "as judged when it was collected"),
    "tokens": ("INTEGER", "length of the response"),
    **_ORIGIN,
    "mean_entropy": ("FLOAT", "nats a token, of choose under the step's policy where scored"),
    "mean_logprob": ("FLOAT", "likewise"),
    "collected_entropy": ("FLOAT", "nats a token, when it was collected"),
    "collected_logprob": ("FLOAT", "likewise"),
}


@dataclass(frozen=True)
class Rule:
    """A rule's kind of value, and what it sees."""

    kind: Literal["boolean", "weight", "number", "integer"]
    columns: Columns


RULES: dict[str, Rule] = {
    "store": Rule("boolean", {**_ROLLOUT, **_GROUP, **_QUESTION, **_ALWAYS, **_LUCK}),
    "retire": Rule("boolean", {**_GROUP, **_QUESTION, **_ALWAYS, **_LUCK}),
    "bucket": Rule("integer", {**_BUCKET, **_QUESTION, **_ALWAYS, **_LUCK}),
    "bucket_weight": Rule(
        "weight",
        {
            "bucket": ("INTEGER", "its number, as the rule bucket says"),
            "questions": ("INTEGER", "that it holds"),
            **_ALWAYS,
        },
    ),
    "question": Rule("weight", {**_BUCKET, **_QUESTION, **_ALWAYS, **_LUCK}),
    "choose": Rule("number", {**_TRAJECTORY, **_BUCKET, **_QUESTION, **_ALWAYS, **_LUCK}),
    "drop": Rule("boolean", {**_TRAJECTORY, **_BUCKET, **_QUESTION, **_ALWAYS, **_LUCK}),
    "fresh": Rule("weight", {**_BUCKET, **_QUESTION, **_ALWAYS, **_LUCK}),
}
"""Every rule of ``[curate]``, by its key."""

_CLOCK = frozenset({  # functions that are written without brackets
    "current_date", "current_time", "current_timestamp", "localtime", "localtimestamp",
    "current_user", "current_role", "session_user", "user",
    "ago",  # a macro
})  # fmt: skip
_DEEP = 100
"""Levels of an expression. Its tree is read by functions that call themselves."""
_TOO_DEEP = "Max expression depth limit"
_CHANGING = "may give another value each time; luck is a number that does not"


@cache
def _database() -> duckdb.DuckDBPyConnection:
    """An empty database that can reach nothing, with an empty table for each rule."""
    import duckdb

    con = duckdb.connect(":memory:", config={"enable_external_access": False, "threads": 1})
    for name, rule in RULES.items():
        columns = ", ".join(f'"{column}" {kind}' for column, (kind, _) in rule.columns.items())
        con.execute(f"CREATE TABLE {name} ({columns})")
    con.execute(f"SET GLOBAL max_expression_depth = {_DEEP}")
    con.execute("SET lock_configuration = true")
    return con


def fault(name: str, expression: str) -> str | None:
    """What is wrong with a rule, in one line; None where it can be used."""
    import duckdb

    rule = RULES[name]
    if not expression.strip():
        return "is empty"
    with _database().cursor() as con:
        # A line of its own: a comment ends where the expression does.
        text = f"SELECT (\n{expression}\n) AS value"
        told = con.execute("SELECT json_serialize_sql(?)", [text]).fetchall()[0][0]
        tree = json.loads(told)
        if tree["error"] and _TOO_DEEP in tree["error_message"]:
            return f"is nested more than {_DEEP} levels deep"
        if tree["error"]:
            return f"not an expression: {first_line(Exception(tree['error_message']))}"
        node = tree["statements"][0]["node"]
        if len(tree["statements"]) != 1 or len(node.get("select_list", "")) != 1:
            return "not one expression"
        for part in _nodes(node["select_list"][0]):
            refused = _refused(con, part)
            if refused:
                return refused
        try:
            # Without the table's name, which the rule's query does not have.
            seen = f"(SELECT * FROM {name})"
            # In WHERE, where no aggregate may stand.
            con.execute(f"SELECT * FROM {seen} WHERE (\n{expression}\n) IS NOT NULL").fetchall()
            kind = con.execute(
                f"SELECT typeof(({expression}\n)) FROM (SELECT 1) LEFT JOIN {seen} ON true"
            ).fetchall()[0][0]
        except duckdb.Error as error:
            if _TOO_DEEP in str(error):
                return f"is nested more than {_DEEP} levels deep"
            return _nearest(first_line(error), rule)
    boolean = kind == "BOOLEAN"
    number = re.fullmatch(r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|FLOAT|DOUBLE|DECIMAL\([^)]*\)", kind)
    if rule.kind == "boolean" and not boolean:
        return f"must be true or false, and is {kind}"
    if rule.kind != "boolean" and not number:
        return f"must be a number, and is {kind}"
    return None


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Every expression of a serialised tree."""
    if isinstance(tree, dict):
        if "class" in tree:
            yield tree
        for value in tree.values():
            yield from _nodes(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _nodes(value)


def _refused(con: duckdb.DuckDBPyConnection, part: Mapping[str, Any]) -> str | None:
    """Why a part of an expression cannot stand in a rule."""
    kind = part["class"]
    if kind == "SUBQUERY":
        return "a rule sees its columns alone, and no subquery"
    if kind == "WINDOW":
        return "a rule is asked row by row, and has no window"
    if kind == "PARAMETER":
        return "a rule has no parameters; samples, batch and step are columns"
    if kind in ("STAR", "POSITIONAL_REFERENCE"):
        return "a rule names its columns one by one"
    if kind == "COLUMN_REF":
        if part["column_names"][-1] == "K":
            return "K is the same name as k to DuckDB; the number of samples K is called samples"
        name = part["column_names"][-1].lower()
        return f"{name} {_CHANGING}" if name in _CLOCK else None
    if kind == "FUNCTION" and not part["is_operator"]:
        name = part["function_name"].lower()
        found = con.execute(
            "SELECT count(*) FILTER (WHERE stability <> 'CONSISTENT') FROM duckdb_functions()"
            " WHERE function_name = ?",
            [name],
        ).fetchall()[0][0]
        if found or name in _CLOCK or name.startswith(("current_", "pg_", "nextval")):
            return f"{name}() {_CHANGING}"
    return None


def _nearest(message: str, rule: Rule) -> str:
    """DuckDB's message, with the rule's nearest columns in place of DuckDB's own candidates."""
    message = re.split(r"\s*Candidate bindings", message)[0].rstrip(" .!")
    unknown = re.search(r'column "?([^"\s]+)"?', message)
    if unknown and unknown[1].lower() not in {name.lower() for name in rule.columns}:
        near = difflib.get_close_matches(unknown[1], list(rule.columns), n=1, cutoff=0.4)
        if near:
            return f"{message}; did you mean {near[0]}?"
        return f"{message}; its columns are {', '.join(rule.columns)}"
    return message


def mentions(expression: str, *columns: str) -> bool:
    """Whether a rule names one of these columns (or something that is spelt like it)."""
    return re.search(rf"\b({'|'.join(columns)})\b", expression, re.IGNORECASE) is not None


def exponent(expression: str) -> str | None:
    """The ``x`` of a rule that is ``exp(x)``; None of another one."""
    with _database().cursor() as con:
        told = con.execute(
            "SELECT json_serialize_sql(?)", [f"SELECT (\n{expression}\n)"]
        ).fetchall()[0][0]
    top = json.loads(told)["statements"][0]["node"]["select_list"][0]
    inner = re.fullmatch(r"\s*exp\s*\((.*)\)\s*", expression, re.IGNORECASE | re.DOTALL)
    if top.get("function_name") != "exp" or not inner or fault("bucket_weight", inner[1]):
        return None  # also where the last bracket is a comment's
    return inner[1]


def as_sql(name: str, expression: str, row: str, kind: str | None = None) -> str:
    """A rule as it stands in a query: what it must not give is an error that names the row.

    Args:
        expression: the rule, without :func:`fault`.
        row: SQL for the row's name.
        kind: of the value; default the rule's.
    """
    kind = kind or RULES[name].kind
    inner = f"(\n{expression}\n)"
    if kind == "boolean":
        test, value, told = f"{inner} IS NOT NULL", inner, "null"
    else:
        value = f"CAST({inner} AS DOUBLE)"
        test, told = f"isfinite({value})", "null or not finite"
        if kind == "weight":
            test, told = f"{test} AND {value} >= 0", "null, not finite or negative"
        if kind == "integer":
            value = f"CAST({inner} AS INTEGER)"
    told = f"rule curate.{name} is {told} of "
    return f"(CASE WHEN {test} THEN {value} ELSE error('{told}' || {row}) END)"

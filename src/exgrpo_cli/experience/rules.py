"""The recipe's rules inside the queries of ``sql/``.

A query names them as ``<rule|row>``: the rule's expression, checked to give a value that can be
used (else the error names the row). Shared terms are written likewise: ``<luck|salt, row>``,
``<of_step|salt, row>`` (columns ``samples``, ``batch``, ``step``, ``luck``), ``<share|md5>``,
``<origin|rollout_id>``, and of a ``questions`` row ``<k|q>`` and ``<success_rate|q>``.
"""

from __future__ import annotations

import re

from exgrpo_cli.recipe import CurateSettings
from exgrpo_cli.recipe.rules import RULES, as_sql, exponent, mentions

_PLACE = re.compile(r"<(\w+)\|([^<>|]*)>")


def any_mentions(settings: CurateSettings, *columns: str) -> bool:
    """Whether some rule names one of these columns."""
    return any(mentions(getattr(settings, name), *columns) for name in RULES)


def columns_of_problems(settings: CurateSettings) -> list[str]:
    """Columns of the problem set that some rule names."""
    return [name for name in ("source", "metadata") if any_mentions(settings, name)]


def with_rules(text: str, settings: CurateSettings) -> tuple[str, list[str]]:
    """A query's text with its rules, and their names."""
    found: list[str] = []

    def put(match: re.Match[str]) -> str:
        name, row = match[1], match[2]
        if name in ("luck", "of_step"):
            salt, row = row.split(", ")
            row = f"md5(concat_ws(':', {salt}, $seed, $step, {row}))"
        if name in _TERMS:
            return _TERMS[name].replace("@", row)
        rule = name.removeprefix("log_")
        found.append(rule)
        expression = getattr(settings, rule)
        return _log_weight(expression, row) if rule != name else as_sql(rule, expression, row)

    return _PLACE.sub(put, text), found


_SHARE = "CAST('0x' || left(@, 13) AS BIGINT) / 4503599627370496.0"  # of 2 ** 52
_SUCCESSES = "CASE WHEN $count_replayed THEN @.successes ELSE @.fresh_successes END"
_ATTEMPTS = "CASE WHEN $count_replayed THEN @.attempts ELSE @.fresh_attempts END"
_TERMS = {
    "share": f"({_SHARE})",
    "luck": f"({_SHARE})",
    "origin": "CASE WHEN @ LIKE 'i/%' THEN split_part(@, '/', 2) ELSE 'own' END",
    "of_step": f"""CAST($samples AS INTEGER) AS samples,
        CAST($batch AS INTEGER) AS batch,
        CAST($step AS INTEGER) AS step,
        ({_SHARE}) AS luck""",
    # A count of another number of attempts is brought to K's scale. 0 are of an import's question.
    "k": f"""CASE
        WHEN {_ATTEMPTS} IS NULL OR {_ATTEMPTS} = $samples OR {_SUCCESSES} = 0 THEN {_SUCCESSES}
        ELSE greatest(1, least(
            $samples - 1, CAST(round({_SUCCESSES} * $samples / {_ATTEMPTS}) AS INTEGER)
        )) END""",
    "success_rate": f"CAST({_SUCCESSES} AS DOUBLE) / greatest({_ATTEMPTS}, 1)",
}


def _log_weight(expression: str, row: str) -> str:
    inner = exponent(expression)
    if inner is not None:
        return as_sql("bucket_weight", inner, row, "number")
    weight = as_sql("bucket_weight", expression, row)
    return f"(CASE WHEN {weight} > 0 THEN ln({weight}) ELSE CAST('-infinity' AS DOUBLE) END)"

"""The schemas of all tables."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from exgrpo_cli.verifiers import STATUSES

if TYPE_CHECKING:
    import polars as pl


# A column is (type, nullable, meaning). Types are written in DuckDB's words.
Column = tuple[str, bool, str]

SCHEMAS: dict[str, dict[str, Column]] = {
    "problems": {
        "problem_id": ("VARCHAR", False, "key: the data set's own id, or a hash of the prompt"),
        "prompt": ("STRUCT(role VARCHAR, content VARCHAR)[]", False, "the chat, without answer"),
        "answer": ("VARCHAR", False, "the gold answer"),
        "verifier": ("VARCHAR", False, "a built-in one such as math, or path.py:function"),
        "source": ("VARCHAR", False, "the data set's name; evaluation is reported by it"),
        "metadata": ("VARCHAR", True, "whatever else the row held, as JSON"),
    },
    "plan": {
        "step": ("INTEGER", False, "key: the step these questions are for"),
        "problem_id": ("VARCHAR", False, "key"),
        "role": ("VARCHAR", False, "fresh or replay"),
        "samples": (
            "INTEGER",
            False,
            "rollouts to sample: K, or of a replay question curate.replay_samples",
        ),
        "successes": ("INTEGER", True, "the question's bucket when it was planned"),
        "attempts": ("INTEGER", True, "out of how many"),
    },
    "rollouts": {
        "rollout_id": (
            "VARCHAR",
            False,
            "key: s00007/PROBLEM_ID/03; of an import i/NAME/PROBLEM_ID/HASH",
        ),
        "step": ("INTEGER", False, "the step t of the policy that sampled it, or takes it in"),
        "problem_id": ("VARCHAR", False, "the question"),
        "sample": ("INTEGER", False, "0..K-1; from 1 in a replay group, which has replayed rows"),
        "role": (
            "VARCHAR",
            False,
            "fresh or replay: the role of its question in this step; import",
        ),
        "policy": ("VARCHAR", False, "the policy's name, such as step-00007, or the import's"),
        "prompt_ids": ("INTEGER[]", False, "prompt token ids"),
        "token_ids": ("INTEGER[]", False, "response token ids, the end token included"),
        "text": ("VARCHAR", False, "the response for reading; never tokenised again"),
        "logprobs": ("FLOAT[]", False, "nats, of the distribution that was sampled"),
        "entropies": ("FLOAT[]", True, "nats a token; null where the engine has none"),
        "mean_entropy": ("FLOAT", False, "mean over the response tokens, nats"),
        "entropy_source": ("VARCHAR", False, "engine (exact), topk or logprobs (estimates)"),
        "mean_logprob": ("FLOAT", False, "mean over the response tokens, nats"),
        "tokens": ("INTEGER", False, "length of the response"),
        "token_hash": ("VARCHAR", False, "hash of token_ids: equal ids, equal hash"),
        "finish_reason": ("VARCHAR", False, "stop, or length where it was cut off"),
        "seed": ("BIGINT", False, "the seed of this row's sampling"),
    },
    "verdicts": {
        "rollout_id": ("VARCHAR", False, "key"),
        "reward": ("FLOAT", False, "0 or 1; other values only where reward options are set"),
        "correct": ("BOOLEAN", False, "whether the answer is right: this makes buckets"),
        "extracted": ("VARCHAR", True, "the answer, or with extract = whole the text with it"),
        "status": ("VARCHAR", False, "ok, no_answer, no_format, unparsable, timeout, error"),
        "verifier": ("VARCHAR", False, "which verifier judged"),
        "seconds": ("FLOAT", False, "time in the worker; 0 for a repeated answer"),
    },
    "scores": {
        "rollout_id": ("VARCHAR", False, "key: the scored trajectory"),
        "policy": ("VARCHAR", False, "key: the policy that scored it"),
        "step": ("INTEGER", False, "the step it was scored for"),
        "logprobs": ("FLOAT[]", False, "exact log-probabilities of the response tokens, nats"),
        "entropies": ("FLOAT[]", False, "exact entropies over the whole vocabulary, nats"),
        "mean_entropy": ("FLOAT", False, "mean over the response tokens, nats"),
        "mean_logprob": ("FLOAT", False, "mean over the response tokens, nats"),
    },
    # An index: token lists stay in the rollouts, where `part` says, and are read for chosen rows
    # only. So a step's curation writes megabytes, not the whole history of tokens.
    "experience": {
        "rollout_id": ("VARCHAR", False, "key: a stored trajectory, by curate.store a success"),
        "problem_id": ("VARCHAR", False, "its question"),
        "step": ("INTEGER", False, "when it was collected"),
        "sample": ("INTEGER", False, "its number in the group"),
        "tokens": ("INTEGER", False, "length of the response"),
        "token_hash": ("VARCHAR", False, "equal ids of a question enter once"),
        "correct": ("BOOLEAN", False, "whether its answer is right"),
        "reward": ("FLOAT", False, "as judged when it was collected"),
        "mean_entropy": ("FLOAT", False, "mean entropy when it was collected"),
        "mean_logprob": ("FLOAT", False, "mean log-probability when it was collected"),
        "entropy_source": ("VARCHAR", False, "score or engine (exact), topk or logprobs"),
        "entropy_policy": ("VARCHAR", False, "under which policy"),
        "part": ("VARCHAR", False, "the rollouts file that holds its token lists"),
    },
    "questions": {
        "problem_id": ("VARCHAR", False, "key: every question seen so far"),
        "successes": ("INTEGER", True, "k of the bucket, replayed rows counted"),
        "attempts": ("INTEGER", True, "n of the bucket, replayed rows counted"),
        "fresh_successes": ("INTEGER", True, "k without replayed rows"),
        "fresh_attempts": ("INTEGER", True, "n without replayed rows"),
        "bucket": ("VARCHAR", True, "easy, medium or hard; null before the first success"),
        "last_step": ("INTEGER", False, "the last step it was sampled in, or first imported in"),
        "times_replayed": ("INTEGER", False, "steps in which it was a replay question"),
        "retired_step": ("INTEGER", True, "when all of its samples succeeded"),
        "epoch": ("INTEGER", True, "the last epoch in which it was drawn fresh"),
    },
    "curated": {
        "step": ("INTEGER", False, "key: the step that replays it"),
        "problem_id": ("VARCHAR", False, "key"),
        "rollout_id": ("VARCHAR", False, "a chosen trajectory"),
        "collected_step": ("INTEGER", False, "when it was collected; step minus this is its age"),
        "prompt_ids": ("INTEGER[]", False, "prompt token ids"),
        "token_ids": ("INTEGER[]", False, "response token ids, the end token included"),
        "logprobs": ("FLOAT[]", False, "as recorded at collection: log pi_past, nats"),
        "logprob_source": ("VARCHAR", False, "score, or engine where no scores were made"),
        "reward": ("FLOAT", False, "as judged when it was collected"),
        "mean_entropy": ("FLOAT", False, "what it was chosen by, nats"),
        "entropy_source": ("VARCHAR", False, "score or engine (exact), topk or logprobs"),
        "entropy_policy": ("VARCHAR", False, "under which policy; another than pi_t is stale"),
        "bucket": ("VARCHAR", True, "easy, medium or hard"),
        "successes": ("INTEGER", True, "k of the bucket"),
        "attempts": ("INTEGER", True, "n of the bucket"),
        "rank": ("INTEGER", False, "key: 1 for the best of its candidates"),
        "candidates": ("INTEGER", False, "stored successes of the question"),
    },
}
"""Every table: its columns in order, each with type, nullability and meaning."""


# Lists of one row that must be equally long, by table.
EQUAL_LENGTHS: dict[str, tuple[str, ...]] = {
    "rollouts": ("token_ids", "logprobs", "entropies"),
    "scores": ("logprobs", "entropies"),
    "curated": ("token_ids", "logprobs"),
}

KEYS: dict[str, tuple[str, ...]] = {
    "problems": ("problem_id",),
    "plan": ("problem_id", "role"),
    "rollouts": ("rollout_id",),
    "verdicts": ("rollout_id",),
    "scores": ("rollout_id", "policy"),
    "experience": ("rollout_id",),
    "questions": ("problem_id",),
    "curated": ("problem_id", "rank"),
}
"""By table the columns that tell its rows apart, within a step."""

WORDS: dict[str, tuple[str, ...]] = {
    "role": ("fresh", "replay", "import"),
    "status": STATUSES,
    "finish_reason": ("stop", "length"),
    "entropy_source": ("engine", "topk", "logprobs", "score"),
    "logprob_source": ("score", "engine"),
    "bucket": ("easy", "medium", "hard"),
}
"""By column the words that it may hold."""


def polars_schema(table: str) -> dict[str, pl.DataType]:
    """The table's schema as polars types, in column order."""
    import polars as pl

    scalar: dict[str, Any] = {
        "VARCHAR": pl.String(),
        "INTEGER": pl.Int32(),
        "BIGINT": pl.Int64(),
        "FLOAT": pl.Float32(),
        "BOOLEAN": pl.Boolean(),
        "INTEGER[]": pl.List(pl.Int32()),
        "FLOAT[]": pl.List(pl.Float32()),
        "STRUCT(role VARCHAR, content VARCHAR)[]": pl.List(
            pl.Struct({"role": pl.String(), "content": pl.String()})
        ),
    }
    return {name: scalar[kind] for name, (kind, _, _) in SCHEMAS[table].items()}


def frame(table: str, rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Rows as a frame with exactly the table's columns and types; a missing nullable is null."""
    import polars as pl

    schema = polars_schema(table)
    rows = list(rows)  # by columns: polars takes lists of tokens several times faster so
    return pl.DataFrame({c: [row.get(c) for row in rows] for c in schema}, schema=schema)


def token_hash(token_ids: Sequence[int]) -> str:
    """A hash of token ids: 32 hexadecimal digits of BLAKE2b over little-endian int32."""
    import numpy as np

    raw = np.array(token_ids, dtype="<i4").tobytes()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def row_seed(*parts: object) -> int:
    """A seed in 0..2^62-1 from anything printable: the same parts, the same seed, anywhere."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2

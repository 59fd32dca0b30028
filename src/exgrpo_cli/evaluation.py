"""Accuracy of sampled answers: pass@k, avg@k, and confidence intervals over problems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from exgrpo_cli.terminal import harmless

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table


Floats = NDArray[np.float64]


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> Floats:
    """The unbiased estimate of the chance that at least one of k samples is right.

    ``1 - C(n - c, k) / C(n, k)``, equation 1 of Chen et al. 2021 (arXiv 2107.03374): the share of
    the k-subsets of the n samples that hold a right one.

    Args:
        n: samples of each problem, integers of any shape.
        c: how many of them are right; broadcast against n.

    Returns:
        float64, one estimate a problem; for k = 1 it is c / n.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    total, right = np.broadcast_arrays(np.asarray(n, dtype=np.int64), np.asarray(c, dtype=np.int64))
    if k < 1 or np.any(total < k):
        raise ValueError(f"pass@{k} needs 1 <= k <= samples; the fewest samples are {total.min()}")
    if np.any(right < 0) or np.any(right > total):
        raise ValueError("the count of right samples lies outside 0..samples")
    none_right = np.ones(total.shape)
    for i in range(k):  # C(n - c, k) / C(n, k), factor by factor: no large binomials
        none_right *= np.maximum(total - right - i, 0) / (total - i)
    return np.asarray(1.0 - none_right)


def bootstrap_interval(
    values: ArrayLike, resamples: int, seed: int, level: float = 0.95
) -> tuple[float, float]:
    """A percentile bootstrap interval of the mean, problems being resampled (Efron 1979).

    It speaks of the problem set as a sample of problems; the samples of a problem stay together.
    Where every problem is solved in all of its samples, or none in any, resampling has no width:
    the interval is Wilson's (1927) for as many successes or failures as there are problems.

    Args:
        values: one value a problem, ``[problems]``.
        seed: the same seed and values, in any order, give the same interval.

    Raises:
        ValueError: no values, or values that are not finite.
    """
    data = np.asarray(values, dtype=np.float64).ravel()
    if data.size == 0 or not np.all(np.isfinite(data)):
        raise ValueError("a bootstrap interval needs at least one value, all finite")
    if _at_an_end(data):
        return _wilson(data[0], data.size, level)
    means = _resampled_means(data, resamples, np.random.default_rng(seed))
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    # The mean itself can leave the quantiles by rounding only when all values are equal.
    return float(min(low, data.mean())), float(max(high, data.mean()))


def _at_an_end(data: Floats) -> bool:
    """Whether every problem is solved in all of its samples, or none in any."""
    return bool(data.min() == data.max() and data[0] in (0.0, 1.0))


def _wilson(share: float, trials: int, level: float) -> tuple[float, float]:
    """Wilson's score interval (1927, equation 4) of a proportion that was 0 or 1."""
    square = NormalDist().inv_cdf((1.0 + level) / 2.0) ** 2
    reach = square / (trials + square)
    return (0.0, reach) if share == 0 else (1.0 - reach, 1.0)


def _resampled_means(data: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    # Resampling with replacement draws multinomial counts of the distinct values, and accuracies
    # have few of them: k of n. So thousands of problems cost no more than a handful.
    distinct, counts = np.unique(data, return_counts=True)
    drawn = rng.multinomial(data.size, counts / data.size, size=resamples)
    return np.asarray(drawn @ distinct / data.size)


def t_half_width(values: ArrayLike, level: float = 0.95) -> float | None:
    """Half the width of Student's t interval of a mean (Student 1908), of a few runs for instance:
    t · s / √n; None where there are fewer than two values."""
    data = np.asarray(values, dtype=np.float64).ravel()
    if data.size < 2:
        return None
    t = _t_quantile((1.0 + level) / 2.0, data.size - 1)
    return float(t * data.std(ddof=1) / math.sqrt(data.size))


def _t_quantile(share: float, freedom: int) -> float:
    """The quantile of Student's t for a share above 1/2, by bisection of its angle."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_share(middle, freedom) < share else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _t_share(angle: float, freedom: int) -> float:
    """P(t < tan(angle) · √freedom): Abramowitz and Stegun 1964, 26.7.3 and 26.7.4."""
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for i in range(2 + odd, freedom, 2):
        term *= square * (i - 1) / i
        total += term
    if not odd:
        return (1 + sine * total) / 2
    inner = angle + (sine * total if freedom > 1 else 0.0)
    return 0.5 + inner / math.pi


def powers_of_two(samples: int) -> list[int]:
    """1, 2, 4, ... up to and including ``samples`` where it is a power of two."""
    return [1 << i for i in range(samples.bit_length())]


def summarise(
    frame: pl.DataFrame, ks: Sequence[int], bootstrap: int, seed: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Accuracies by source, and over all problems together.

    Args:
        frame: a row a sample: ``problem_id``, ``source``, ``correct`` (bool), ``finish_reason``
            and ``tokens`` (response length).
        ks: the k of pass@k; one above the fewest samples of a row's problems is left out there.

    Returns:
        ``(rows, overall)``: a row a source, in alphabetical order, and the same over everything,
        each problem weighing the same. A row has ``source``, ``problems``, ``samples`` (all of
        them), ``pass@1`` (which is avg@k) with its interval ``low`` and ``high``, for each further
        k ``pass@k``, ``pass@k_low`` and ``pass@k_high``, then ``truncated`` (share of samples cut
        off) and ``tokens`` (mean length).

    Raises:
        ValueError: no rows.
    """
    import polars as pl

    problems = frame.group_by("problem_id", "source").agg(
        n=pl.len(),
        c=pl.col("correct").sum(),
        truncated=(pl.col("finish_reason") == "length").sum(),
        tokens=pl.col("tokens").cast(pl.Int64).sum(),
    )
    if not problems.height:
        raise ValueError("nothing to summarise: no samples")

    def row(source: str, part: pl.DataFrame) -> dict[str, Any]:
        n, c = part["n"].to_numpy(), part["c"].to_numpy()
        samples = int(n.sum())
        found: dict[str, Any] = {"source": source, "problems": part.height, "samples": samples}
        for k in (k for k in ks if k <= n.min()):
            values = pass_at_k(n, c, k)
            low, high = bootstrap_interval(values, bootstrap, seed)
            bounds = ("low", "high") if k == 1 else (f"pass@{k}_low", f"pass@{k}_high")
            found |= {f"pass@{k}": float(values.mean()), bounds[0]: low, bounds[1]: high}
        found["truncated"] = int(part["truncated"].sum()) / samples
        found["tokens"] = int(part["tokens"].sum()) / samples
        return found

    sources = sorted(problems["source"].unique().to_list())
    rows = [row(source, problems.filter(pl.col("source") == source)) for source in sources]
    return rows, row("overall", problems)


def average_of_sources(frame: pl.DataFrame, bootstrap: int, seed: int) -> dict[str, float] | None:
    """Mean pass@1 over the sources, each weighing the same: how benchmarks are averaged in papers.

    It is ``pass@1``, ``low`` and ``high`` of a 95% interval, for which problems are resampled
    within their source; None where there is one source.
    """
    import polars as pl

    problems = (
        frame.group_by("source", "problem_id")
        .agg(value=pl.col("correct").cast(pl.Float64).mean())
        .sort("source", "problem_id")
    )
    sources = [part["value"].to_numpy() for part in problems.partition_by("source")]
    if len(sources) < 2:
        return None
    rng = np.random.default_rng(seed)
    average = float(np.mean([values.mean() for values in sources]))
    # A source at 0 or 1 has no width when it is resampled: it adds its whole Wilson interval.
    ends = [_wilson(v[0], v.size, 0.95) for v in sources if _at_an_end(v)]
    inner = [_resampled_means(v, bootstrap, rng) for v in sources if not _at_an_end(v)]
    sums = np.sum(inner, axis=0) if inner else np.zeros(1)
    quantiles = np.quantile(sums, [0.025, 0.975])
    low, high = (
        float(q + sum(bounds)) / len(sources)
        for q, bounds in zip(quantiles, zip(*ends, strict=True) if ends else ((), ()), strict=True)
    )
    return {"pass@1": average, "low": min(low, average), "high": max(high, average)}


def pass_ks(row: Mapping[str, Any]) -> list[int]:
    """The k of a summary's row, from its ``pass@k`` keys, ascending."""
    suffixes = [key.removeprefix("pass@") for key in row if key.startswith("pass@")]
    return sorted(int(suffix) for suffix in suffixes if suffix.isdigit())


def interval_of(row: Mapping[str, Any], k: int) -> tuple[float, float]:
    """The 95% interval of ``pass@k`` in a summary's row."""
    names = ("low", "high") if k == 1 else (f"pass@{k}_low", f"pass@{k}_high")
    return float(row[names[0]]), float(row[names[1]])


def format_table(summary: Mapping[str, Any]) -> Table:
    """An evaluation's summary as a rich table: a line a source, and where there are several, one
    over all problems and one with the average of the sources.
    """
    from rich.markup import escape
    from rich.table import Table

    rows = list(summary["rows"])
    ks = sorted({k for row in [*rows, summary["overall"]] for k in pass_ks(row)})
    temperature = summary["temperature"]
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    more = summary.get("samples_by_source") or {}
    how = "".join(f"{count} of {source}, " for source, count in more.items()) + how
    left_out = summary.get("left_out", 0)
    table = Table(
        title=escape(
            harmless(f"{summary['policy']}: {summary['samples']} samples a problem, {how}")
        ),
        caption="pass@1 over all samples, with 95% intervals over problems"
        + (f"\n{left_out} problems with too long prompts left out" if left_out else ""),
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("source", overflow="fold", min_width=10)
    for name in ("problems", *(f"pass@{k}" for k in ks), "cut off", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows if len(rows) == 1 else [*rows, summary["overall"]]:
        table.add_row(
            escape(harmless(row["source"])),
            str(row["problems"]),
            _with_interval(row),
            *(f"{row[f'pass@{k}']:.1%}" if f"pass@{k}" in row else "" for k in ks[1:]),
            f"{row['truncated']:.1%}",
            f"{row['tokens']:.0f}",
        )
    if summary.get("average"):
        table.add_row("average of sources", "", _with_interval(summary["average"]))
    return table


def _with_interval(row: Mapping[str, Any]) -> str:
    low, high = interval_of(row, 1)
    return f"{row['pass@1']:.1%} [{low:.1%}, {high:.1%}]"

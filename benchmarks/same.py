"""Whether two versions of the code make the same files, from the same seed on the same machine.

    python benchmarks/same.py make build/old --source ../old-checkout/src
    python benchmarks/same.py make build/new --model build/old/model
    python benchmarks/same.py compare build/old build/new

``make`` drives a checkout's command through whole runs of the demo, five minutes of one core.

``compare`` prints a line for each difference, ``FILE: COLUMN: row N: one | other``, and ends with 1
where there is any. Tables are compared row for row, tensors to the bit, JSON and TOML by key, text
by line. Durations, rates, memory and the folders' own paths are left aside, and a difference that
is meant by ``--except 'recipe.toml: rollout.top_p'``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[1]

# --- reading ------------------------------------------------------------------------------------

Rows = Sequence[str] | memoryview
Columns = dict[str, tuple[str, Rows]]
"""What a file holds: the name of each column to its type and its rows, written out as Python
writes them (so that equal text is an equal value, to the last bit of a float), or raw bits."""

ASIDE = re.compile(
    r"(^|[./])time/|seconds(_mean|_max)?$|per_second$|peak_memory_mb$|^log\.\d+$"
    r"|^\d+\.(first|last|commit)$"
)
"""Columns that no two runs have alike; that they are there is compared. (A step's log in
curation.json is a digest of the times at which its files were written; provenance.json says when
the run was started, and by which commit.)"""

_DURATION = re.compile(r"\b\d[\d.,]*(?= ?(ms|s|seconds|min|h|d|tokens/s)\b)")
_BITS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


def read(path: Path, folder: Path) -> Columns:
    """The columns of a file, with ``folder`` taken out of its strings and times put aside."""
    columns = _READERS.get(path.suffix, _bytes)(path)
    here = str(folder.resolve())
    for name, (kind, rows) in columns.items():
        if ASIDE.search(name):
            columns[name] = kind, ["aside"] * len(rows)
        elif not isinstance(rows, memoryview):
            columns[name] = kind, [row.replace(here, "FOLDER") for row in rows]
    return columns


def _bytes(path: Path) -> Columns:
    return {"bytes": ("", memoryview(path.read_bytes()))}


def _parquet(path: Path) -> Columns:
    import polars as pl

    table = pl.read_parquet(path, hive_partitioning=False)
    return {c.name: (str(c.dtype), [repr(v) for v in c.to_list()]) for c in table}


def _safetensors(path: Path) -> Columns:
    data = memoryview(path.read_bytes())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(bytes(data[8:start]))
    columns = _records([{"metadata": header.pop("__metadata__", "absent")}])
    for name, about in header.items():
        begin, end = about["data_offsets"]
        width = (end - begin) // max(math.prod(about["shape"]), 1)
        bits = data[start + begin : start + end].cast(_BITS.get(width, "B"))
        columns[name] = f"{about['dtype']} {about['shape']}", bits
    return columns


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every dotted key of nested dictionaries with its value; those in lists have numbers."""
    inner = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if inner else ()
    for key, item in pairs:
        yield from _leaves(item, f"{name}.{key}" if name else str(key))
    if not pairs:
        yield name, repr(value)


def _records(values: Sequence[Any]) -> Columns:
    """JSON values as rows; a key that a row lacks is ``absent``."""
    rows = [dict(_leaves(value)) for value in values]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: ("", [row.get(name, "absent") for row in rows]) for name in names}


def _text(path: Path) -> Columns:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {"text": ("", [_DURATION.sub("N", line.rstrip()) for line in lines])}


def _html(path: Path) -> Columns:
    """A page's tags and words, however its source is broken into lines."""
    pieces = re.findall(r"<[^>]*>|[^<]+", path.read_text(encoding="utf-8"))
    words = [" ".join(piece.split()) for piece in pieces]
    return {"page": ("", [piece for piece in words if piece])}


_READERS: dict[str, Callable[[Path], Columns]] = {
    ".parquet": _parquet,
    ".safetensors": _safetensors,
    ".json": lambda path: _records([json.loads(path.read_text(encoding="utf-8"))]),
    ".jsonl": lambda path: _records([json.loads(line) for line in path.open(encoding="utf-8")]),
    ".toml": lambda path: _records([tomllib.loads(path.read_text(encoding="utf-8"))]),
    ".txt": _text,
    ".html": _html,
}

# --- comparing ----------------------------------------------------------------------------------


def differences(one: Path, other: Path, counts: Counter[str]) -> Iterator[str]:
    """Each difference of two folders, as a line; what was compared is added to ``counts``.

    Files and folders whose name begins with a dot are nobody's.
    """
    files = {**dict.fromkeys(_files(one), one), **dict.fromkeys(_files(other), other)}
    for name in sorted(files):
        if not ((one / name).is_file() and (other / name).is_file()):
            yield f"{name}: only in {files[name]}"
            continue
        a, b = (read(folder / name, folder) for folder in (one, other))
        counts[f"{Path(name).suffix.lstrip('.') or 'other'} files"] += 1
        counts["columns"] += len(a)
        counts["rows"] += max((len(rows) for _, rows in a.values()), default=0)
        for column in sorted(a.keys() | b.keys()):
            if not (column in a and column in b):
                yield f"{name}: {column}: only in {one if column in a else other}"
            elif found := _difference(a[column], b[column]):
                yield f"{name}: {column}: {found}"
        if list(a) != list(b) and a.keys() == b.keys() and name.endswith(".parquet"):
            yield f"{name}: the columns stand in another order"


def _files(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise SystemExit(f"{folder}: no such folder")
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return [str(name) for name in names if not any(part.startswith(".") for part in name.parts)]


def _difference(one: tuple[str, Rows], other: tuple[str, Rows]) -> str:
    """What is different in a column; nothing where nothing is."""
    (kind, rows), (kind_b, rows_b) = one, other
    if kind != kind_b:
        return f"{kind} | {kind_b}"
    if rows == rows_b:
        return ""
    pairs: list[tuple[Any, Any]] = list(zip_longest(rows, rows_b))
    differ = [number for number, (a, b) in enumerate(pairs) if a != b]
    a, b = ("none" if v is None else _shown(v, kind) for v in pairs[differ[0]])
    near = max(next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0) - 20, 0)
    a, b = (f"{'…' * (near > 0)}{text[near : near + 80]}" for text in (a, b))
    more = f" ({len(differ)} of {len(pairs)} rows differ)" if len(pairs) > 1 else ""
    return f"row {differ[0]}: {a} | {b}{more}"


def _shown(value: str | int, kind: str) -> str:
    """A row for reading; the bits of a float32 or bfloat16 as the number that they are."""
    if isinstance(value, str) or not kind.startswith(("F32", "BF16")):
        return str(value)
    bits = value << (16 if kind.startswith("BF16") else 0)
    return f"{struct.unpack('<f', struct.pack('<I', bits))[0]!r} (bits {value:#x})"


def report(found: Iterable[str], counts: Counter[str], excepted: Sequence[str] = ()) -> int:
    """Print the differences and what was compared; 1 where there are any, else 0."""
    number = left_out = 0
    for line in found:
        if any(fnmatch(line, f"{pattern}*") for pattern in excepted):
            left_out += 1
            continue
        number += 1
        print(line)
    compared = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
    aside = f", {left_out} excepted" if left_out else ""
    print(f"compared {compared}: {number or 'no'} difference{'s' * (number > 1)}{aside}")
    return int(number > 0)


# --- making -------------------------------------------------------------------------------------


def _sets(text: str) -> list[str]:
    return [f"--set={pair}" for pair in text.split()]


DEMO = _sets("""
    model.path=model rollout.engine=transformers rollout.questions_per_part=12 evaluate.samples=1
    verify.workers=1 verify.timeout=60""")
SMALL = DEMO + _sets("""
    curate.questions=8 curate.start_success=0.0 curate.store_before_start=true
    rollout.samples=4 rollout.questions_per_part=3 evaluate.every=0""")
VARIANTS = {
    "lora": "lora.enabled=true lora.rank=4 lora.dropout=0.1 train.learning_rate=1e-2",
    "other": """curate.bucket_weight=sqrt(bucket) curate.choose=-mean_entropy
        curate.drop=(newness>2)OR(age>3) curate.revive_after=2 curate.count_replayed=false
        objective.clip=on objective.shaping=power objective.divide_by_std=true
        objective.aggregate=token_mean objective.truncated=zero_advantage
        objective.kl=0.01 objective.sampler_cap=2.0
        train.schedule=cosine train.warmup_steps=2 train.weight_decay=0.1 train.save_dtype=bfloat16
        train.minibatch_questions=3 train.tokens_per_microbatch=400 score.tokens_per_batch=400
        rollout.batch_size=7""",
}
QUERY = """SELECT bucket, count(*) AS questions, sum(times_replayed) AS replayed,
    count(retired_step) AS retired FROM questions GROUP BY ALL ORDER BY ALL"""


class Command:
    """The command of a checkout, in the folder ``out``, on one thread."""

    def __init__(self, source: Path, out: Path) -> None:
        self.out = out
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "EXGRPO_"))}
        fixed = {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
        self.variables = {**kept, **fixed, "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"}
        where = self._python("-c", "import exgrpo_cli; print(exgrpo_cli.__file__)").stdout.strip()
        if not Path(where).is_relative_to(source):
            raise SystemExit(f"{source}: no exgrpo_cli here; {where} would run")

    def _python(self, *arguments: object, ends: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=self.out, env=self.variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0 and ends:
            raise SystemExit(f"{' '.join(map(str, arguments))}\n{done.stdout}\n{done.stderr}")
        return done

    def __call__(self, *arguments: object, save: str = "", processes: int = 1) -> None:
        """Run ``exgrpo``; ``save`` names a file that gets what it prints, or why it fails."""
        started = time.monotonic()
        several = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes)
        start = several if processes > 1 else ()
        done = self._python(*start, "-m", "exgrpo_cli", *arguments, ends=not save)
        if save:
            file = self.out / "printed" / (f"{save}.failed.txt" if done.returncode else save)
            file.parent.mkdir(exist_ok=True)
            file.write_text(done.stderr if done.returncode else done.stdout, encoding="utf-8")
        words = " ".join(map(str, arguments))
        print(f"{time.monotonic() - started:6.1f} s  exgrpo {words[:80]}", flush=True)


def make(out: Path, source: Path, model: Path | None, steps: int) -> int:
    """All scenarios into ``out``; 1 where the stages by hand made other files than the loop."""
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out}: is not empty")
    out.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source.parent / "data/arithmetic", out / "data/arithmetic")
    shutil.copy(source.parent / "recipes/demo.toml", out)
    exgrpo = Command(source, out)
    if model is None:
        exgrpo("demo-model", "model")
    else:
        shutil.copytree(model, out / "model")
    first = steps - 2
    exgrpo("run", "run", "--recipe", "demo.toml", *DEMO, "--steps", first)
    shutil.copytree(out / "run", out / "hand")
    exgrpo("run", "run", "--recipe", "demo.toml", *DEMO, "--steps", steps)
    by_hand(exgrpo, first, steps)
    for name, sets in VARIANTS.items():
        exgrpo("run", name, "--recipe", "demo.toml", *SMALL, *_sets(sets), "--steps", 4)
    exgrpo("merge", "lora", "merged")
    loose_files(exgrpo)
    look(exgrpo, steps - 1)
    counts: Counter[str] = Counter()
    found = differences(out / "run", out / "hand", counts)
    return report(found, counts, ["metrics/*/time-*", "metrics.jsonl: time/*", "report.html"])


def by_hand(exgrpo: Command, first: int, steps: int) -> None:
    """The run's last steps from a copy of it, the first of them in shards that are out of order.

    That one is trained in two processes too, in a copy of its own.
    """
    exgrpo("init", "hand", "--recipe", "demo.toml", *DEMO, "--set", f"loop.steps={steps}")
    for step in range(first, steps):
        for stage, order in (("rollout", "201"), ("verify", "10"), ("score", "10")):
            shards = [f"{number}/{len(order)}" for number in order] if step == first else ["0/1"]
            for shard in shards:
                exgrpo(stage, "hand", "--step", step, "--shard", shard)
        exgrpo("curate", "hand", "--step", step)
        if step == first:
            shutil.copytree(exgrpo.out / "hand", exgrpo.out / "gloo")
            exgrpo("train", "gloo", "--step", step, processes=2)
            trained = exgrpo.out / "gloo" / "metrics" / f"step-{step:05d}" / "train.json"
            if not json.loads(trained.read_text())["train/replayed_rows"]:
                raise SystemExit(f"step {step} has replayed nothing yet: make with more --steps")
        exgrpo("train", "hand", "--step", step)
    exgrpo("evaluate", "hand", "--step", steps)


def loose_files(exgrpo: Command) -> None:
    """Each stage on files of no run."""
    few = ("--recipe", "other/recipe.toml")
    exgrpo("problems", "data/arithmetic/train.jsonl", "--limit", 6, "--out", "loose/p.parquet")
    files = ("--problems", "loose/p.parquet")
    exgrpo("rollout", *files, "--policy", "model", "--out", "loose/rollouts", *few)
    rollouts = ("--rollouts", "loose/rollouts")
    exgrpo("verify", *files, *rollouts, "--out", "loose/verdicts", *few)
    exgrpo("score", *rollouts, "--policy", "model", "--out", "loose/scores", *few)
    made = (*rollouts, "--verdicts", "loose/verdicts", "--scores", "loose/scores")
    exgrpo("train", *made, "--policy", "model", "--out", "loose/policy", *few)
    exgrpo("curate", "loose/pool", *made, *files, *few)
    exgrpo("evaluate", *files, "--policy", "loose/policy", "--out", "loose/held", *few)


def look(exgrpo: Command, step: int) -> None:
    """What is printed about the run, and its report, from a copy in which no time passes."""
    run = exgrpo.out / "same"
    shutil.copytree(exgrpo.out / "run", run)
    exgrpo("evaluate", "same", save="evaluate.txt")
    for path in [run / "metrics.jsonl", *run.glob("metrics/*/time-*.json")]:
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r'("time/[^"]+": )[\d.e-]+', r"\g<1>1.0", text), encoding="utf-8")
    (run / "provenance.json").unlink(missing_ok=True)  # the report would say when, and which commit
    other = _sets("curate.choose=luck curate.bucket_weight=bucket")
    for command in (["status", "same"], ["show", "same"], ["diff", "same", *other]):
        exgrpo(*command, save=f"{command[0]}.txt")
        exgrpo(*command, "--json", save=f"{command[0]}.json")
    exgrpo("show", "same/experience.parquet", save="experience.txt")
    exgrpo("show", f"same/rollouts/step-{step:05d}", save="rollouts.txt")
    exgrpo("sql", "same", "--csv", "-c", QUERY, save="sql.txt")
    exgrpo("report", "same")
    shutil.move(run / "report.html", exgrpo.out / "printed")
    shutil.rmtree(run)
    for page in exgrpo.out.glob("[!p]*/report.html"):
        page.unlink()  # they draw what took how long


# --- main ---------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    making = commands.add_parser("make", help="run all scenarios")
    making.add_argument("out", type=Path)
    making.add_argument("--source", type=Path, default=ROOT / "src", help="a checkout's src")
    making.add_argument("--model", type=Path, help="demo model; default made anew (two minutes)")
    making.add_argument("--steps", type=int, default=15, help="of the demo's run")
    comparing = commands.add_parser("compare", help="compare two folders")
    comparing.add_argument("one", type=Path)
    comparing.add_argument("other", type=Path)
    comparing.add_argument(
        "--except", dest="excepted", action="append", default=[], metavar="PATTERN",
        help="leave out differences whose lines begin so; * stands for anything",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    if given.command == "make":
        return make(given.out.resolve(), given.source.resolve(), given.model, given.steps)
    counts: Counter[str] = Counter()
    return report(differences(given.one, given.other, counts), counts, given.excepted)


if __name__ == "__main__":
    sys.exit(main())

"""Damaged tables: each file of a small run, in each way, is named, or does no harm.

A run of three steps is made once. A case puts it back to before a stage of the last step, damages
one file and goes on. It must end as the undamaged run did (the same tables and weights), or be
refused with the file's name. ``EXGRPO_DAMAGES=2000 pytest tests/trust`` tries so many, at random.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import Qwen2ForCausalLM

from exgrpo_cli import tables
from exgrpo_cli.demo import make_tokenizer, model_config
from exgrpo_cli.engines import Completion, Request, Sampling
from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe import Recipe, parse_recipe
from exgrpo_cli.rundir import RunDir, step_name
from exgrpo_cli.stages.curate import curate
from exgrpo_cli.stages.rollout import rollout
from exgrpo_cli.stages.score import score
from exgrpo_cli.stages.train import train
from exgrpo_cli.stages.verify import verify
from exgrpo_cli.step import Step

LAST = 2
CASES = int(os.environ.get("EXGRPO_DAMAGES", "0"))
TABLES = (
    "problems", "plan", "rollouts", "verdicts", "scores", "replay scores", "experience",
    "questions", "curated",
)  # fmt: skip
STATES = ("planned", "scored", "curated")
"""What of the last step is done when the damage comes."""


class Scripted:
    """An engine that answers half of the questions right, by the seeds of the requests."""

    name = "transformers"

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        for request in requests:
            rng = random.Random(request.seed)
            question = self.tokenizer.decode(request.prompt_ids).removesuffix("=")
            right = sum(map(int, question.split("+")))
            # The first question is never solved, and the second always: one retires.
            off = {"0": 1, "1": 0}.get(question[0], rng.randint(0, 1))
            text = f"{'x' * rng.randint(0, 3)}\\boxed{{{right + off}}}"
            ids = [*self.tokenizer(text).input_ids, self.tokenizer.eos_token_id]
            logprobs = [-rng.random() for _ in ids]
            yield Completion(request.index, ids, logprobs, [rng.random() for _ in ids], "stop")

    def load(self, policy: str) -> None: ...

    def sleep(self) -> bool:
        return False

    def close(self) -> None: ...


@dataclass
class Finished:
    """A finished run, what of it there was before, and what it must come to."""

    root: Path
    recipe: Recipe
    before: dict[str, Path]
    """The whole run by state of its last step."""


def go_on(run: RunDir, recipe: Recipe, step: int) -> None:
    """All stages of a step; those that are done find nothing to do."""
    engine = Scripted()
    one = Step.of(run, step)
    rollout(one, recipe, engine=lambda policy: engine)
    verify(one, recipe)
    score(one, recipe)
    curate(one, recipe)
    train(one, recipe)


def copy(source: Path, target: Path) -> Path:
    """A run whose files are linked: every writer renames, so the source stays as it is."""
    return Path(shutil.copytree(source, target, copy_function=os.link))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("damage")
    tokenizer = make_tokenizer()
    config = model_config(tokenizer)
    config.update({"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32})
    config.layer_types = config.layer_types[:1]
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    recipe = parse_recipe(
        {
            "model": {"path": str(folder / "model"), "template": "plain"},
            "rollout": {
                "samples": 4, "questions_per_part": 3, "engine": "transformers",
                "max_new_tokens": 16, "max_prompt_tokens": 8,
            },
            "curate": {"questions": 5, "start_success": 0.0, "store_before_start": True},
            "verify": {"workers": 1},
            "loop": {"steps": LAST + 1},
        },
        "the test",
    )  # fmt: skip
    run = RunDir(folder / "run")
    problems = [
        {
            "problem_id": f"p{i}", "prompt": [{"role": "user", "content": f"{i}+{i + 3}="}],
            "answer": str(2 * i + 3), "verifier": "math", "source": "sums",
        }
        for i in range(9)
    ]  # fmt: skip
    tables.write_table("problems", tables.frame("problems", problems), run.problems)
    for step in range(LAST):
        go_on(run, recipe, step)
    before = {"planned": copy(run.root, folder / "planned")}
    engine = Scripted()
    last = Step.of(run, LAST)
    rollout(last, recipe, engine=lambda policy: engine)
    verify(last, recipe)
    score(last, recipe)
    before["scored"] = copy(run.root, folder / "scored")
    curate(last, recipe)
    before["curated"] = copy(run.root, folder / "curated")
    train(last, recipe)
    yield Finished(run.root, recipe, before)
    torch.set_num_threads(threads)


def results(root: Path) -> dict[str, object]:
    """What a run has come to: its tables by value, and the weights bit by bit."""
    run = RunDir(root)
    files = [run.experience, run.questions, run.curated(LAST), run.plan(LAST + 1)]
    files += [
        f for kind in (run.rollouts, run.scores) for f in sorted(kind(LAST).glob("*.parquet"))
    ]
    found: dict[str, object] = {
        str(file.relative_to(root)): pl.read_parquet(file).to_dicts()
        for file in files
        if file.stat().st_size
    }
    return found | {"weights": (run.policy(LAST + 1) / "model.safetensors").read_bytes()}


# --- what a damage does -------------------------------------------------------------------------


def table_of(name: str) -> str:
    return "scores" if name == "replay scores" else name


def files_of(run: RunDir, name: str, step: int) -> list[Path]:
    match name:
        case "problems" | "experience" | "questions":
            return [getattr(run, name)]
        case "plan" | "curated":
            return [getattr(run, name)(step)]
        case "replay scores":
            return sorted(run.scores(step).glob("replay-*.parquet"))
    return sorted(getattr(run, name)(step).glob("part-*.parquet"))


Change = Callable[[str, pl.DataFrame, random.Random], pl.DataFrame | None]


def drop_column(table: str, data: pl.DataFrame, rng: random.Random) -> pl.DataFrame:
    return data.drop(rng.choice(data.columns))


def other_type(table: str, data: pl.DataFrame, rng: random.Random) -> pl.DataFrame:
    name = rng.choice(data.columns)
    other = pl.lit(1.5) if data.schema[name] == pl.String else pl.lit("x")
    return data.with_columns(other.alias(name))


def null_key(table: str, data: pl.DataFrame, rng: random.Random) -> pl.DataFrame:
    return set_value(data, rng.choice(tables.KEYS[table]), None, rng)


def null(table: str, data: pl.DataFrame, rng: random.Random) -> pl.DataFrame | None:
    names = [n for n, (kind, ok, _) in tables.SCHEMAS[table].items() if not ok]
    return set_value(data, rng.choice(names), None, rng)


def doubled(table: str, data: pl.DataFrame, rng: random.Random) -> pl.DataFrame:
    return pl.concat([data, data.slice(rng.randrange(data.height), 1)])


def not_finite(table: str, data: pl.DataFrame, rng: random.Random) -> pl.DataFrame | None:
    value = rng.choice([float("nan"), float("inf"), float("-inf")])
    names = [n for n, (kind, _, _) in tables.SCHEMAS[table].items() if kind.startswith("FLOAT")]
    return set_value(data, rng.choice(names), value, rng) if names else None


def out_of_range(table: str, data: pl.DataFrame, rng: random.Random) -> pl.DataFrame | None:
    names = [n for n, (kind, _, _) in tables.SCHEMAS[table].items() if kind.startswith("INTEGER")]
    return set_value(data, rng.choice(names), -1, rng) if names else None


def other_word(table: str, data: pl.DataFrame, rng: random.Random) -> pl.DataFrame | None:
    names = [n for n in tables.WORDS if n in data.columns]
    return set_value(data, rng.choice(names), "other", rng) if names else None


def unequal_lists(table: str, data: pl.DataFrame, rng: random.Random) -> pl.DataFrame | None:
    names = tables.EQUAL_LENGTHS.get(table)
    if not names:
        return None
    row, name = rng.randrange(data.height), rng.choice(names)
    short = pl.when(pl.int_range(pl.len()) == row).then(pl.col(name).list.slice(1))
    return data.with_columns(short.otherwise(pl.col(name)).alias(name))


def set_value(data: pl.DataFrame, name: str, value: object, rng: random.Random) -> pl.DataFrame:
    """One row's value, or the first of its list."""
    row, kind = rng.randrange(data.height), data.schema[name]
    if isinstance(kind, pl.List) and value is not None:
        first = pl.lit(value, dtype=kind.inner).implode()
        new = pl.concat_list(first, pl.col(name).list.slice(1))
    else:
        new = pl.lit(value, dtype=kind)
    return data.with_columns(
        pl.when(pl.int_range(pl.len()) == row).then(new).otherwise(pl.col(name)).alias(name)
    )


CHANGES: tuple[Change, ...] = (
    drop_column, other_type, null_key, null, doubled, not_finite, out_of_range, other_word,
    unequal_lists,
)  # fmt: skip
BYTES = ("truncated", "flipped", "empty")
PLACED = ("rows of another step", "file of another step")
DAMAGES = (*(change.__name__ for change in CHANGES), *BYTES, *PLACED)


def damaged(name: str, file: Path, other: Path, damage: str, rng: random.Random) -> bytes | None:
    """The file's bytes after a damage; None where there is no such damage to it.

    Args:
        name: of :data:`TABLES`.
        file: what is damaged.
        other: the file of an earlier step that lies in its place there.
        damage: of :data:`DAMAGES`.
        rng: draws the place.
    """
    whole = file.read_bytes()
    match damage:
        case "truncated":
            return whole[: rng.randrange(1, len(whole))]
        case "empty":
            return b""
        case "flipped":
            spoilt = bytearray(whole)
            for _ in range(rng.randint(1, 40)):
                spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
            return bytes(spoilt)
        case "file of another step":
            return other.read_bytes() if other != file and other.exists() else None
    data = pl.read_parquet(file)
    if data.is_empty():
        return None
    if damage == "rows of another step":
        if other == file or not other.exists():
            return None
        found = pl.concat([data, pl.read_parquet(other).head(2)])
    else:
        (change,) = (one for one in CHANGES if one.__name__ == damage)
        changed = change(table_of(name), data, rng)
        if changed is None:
            return None
        found = changed
    out = file.with_name(".damaged")
    found.write_parquet(out)
    try:
        return out.read_bytes()
    finally:
        out.unlink()


def outcome(
    finished: Finished, place: Path, state: str, name: str, damage: str, step: int, seed: int
) -> str:
    """Damage one file and go on: ``none``, ``refused`` or ``same``; anything else is a failure."""
    rng = random.Random(seed)
    shutil.rmtree(place, ignore_errors=True)
    run = RunDir(copy(finished.before[state], place))
    files = [file for file in files_of(run, name, step) if file.exists()]
    if not files:
        return "none"
    file = rng.choice(files)
    earlier = {
        "experience": finished.before["planned"] / "experience.parquet",
        "questions": finished.before["planned"] / "questions.parquet",
    }
    other = earlier.get(name) or Path(str(file).replace(step_name(step), step_name(step - 1)))
    new = damaged(name, file, other, damage, rng)
    if new is None or new == file.read_bytes():
        return "none"
    times = file.stat()
    file.unlink()  # its links stay as they are
    file.write_bytes(new)
    if rng.random() < 0.5:  # a disk that forgets does not tell when
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    refusal = None
    try:
        go_on(run, finished.recipe, LAST)
    except InputError as error:
        refusal = str(error)
    if refusal is not None:
        where = str(file) if file.parent == run.root else str(file.parent)
        assert where in refusal, f"{file} is not named: {refusal}"
        assert "\n" not in refusal
        return "refused"
    if damage != "flipped":  # what a flipped bit makes of a value may be another good one
        wanted, found = results(finished.root), results(run.root)
        if name in ("rollouts", "scores", "replay scores"):  # nobody has read what is wrong there
            for one in (wanted, found):
                one.pop(str(file.relative_to(run.root)), None)
        assert found.keys() == wanted.keys()
        other_results = [key for key in wanted if found[key] != wanted[key]]
        assert not other_results, f"{damage} of {file}: others are {other_results}"
    return "same"


@settings(
    max_examples=CASES or 90,
    derandomize=not CASES,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    state=st.sampled_from(STATES),
    name=st.sampled_from(TABLES),
    damage=st.sampled_from(DAMAGES),
    step=st.sampled_from([LAST, LAST, LAST, 1, 0]),
    seed=st.integers(0, 2**32),
)
def test_a_damaged_table_is_named_or_does_no_harm(
    finished: Finished,
    tmp_path_factory: pytest.TempPathFactory,
    state: str,
    name: str,
    damage: str,
    step: int,
    seed: int,
) -> None:
    place = tmp_path_factory.getbasetemp() / "damaged run"
    outcome(finished, place, state, name, damage, step, seed)

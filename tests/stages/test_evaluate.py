"""Evaluation with a real engine, real verification and a tiny random model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from exgrpo_cli import cli, tables
from exgrpo_cli.demo import make_tokenizer
from exgrpo_cli.engines import open_engine
from exgrpo_cli.errors import InputError, StageError
from exgrpo_cli.recipe import Recipe, parse_recipe
from exgrpo_cli.stages.evaluate import (
    evaluate,
    evaluation_metrics,
    format_table,
    policy_fingerprint,
)
from exgrpo_cli.step import Step
from making import qwen, save, write
from rollout_files import Stream


def _make_model(folder: Path, seed: int) -> None:
    """A random Qwen2 of some thousand parameters whose tokens are characters."""
    size = len(make_tokenizer())
    save(
        qwen(seed, vocab_size=size, initializer_range=0.02), folder, eos_token_id=1, pad_token_id=0
    )


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    _make_model(folder, seed=0)
    return str(folder)


@pytest.fixture
def recipe() -> Recipe:
    return parse_recipe(
        {
            "model": {"template": "plain"},
            "rollout": {"engine": "transformers", "max_prompt_tokens": 16, "device": "cpu"},
            "verify": {"workers": 1},
            "evaluate": {"bootstrap": 200},
        },
        "test",
    )


def _problems(file: Path, answers: dict[str, str]) -> Path:
    write(
        "problems",
        file,
        [
            {
                "problem_id": pid,
                "prompt": [{"role": "user", "content": f"{pid}="}],
                "answer": answer,
                "verifier": "exact",
                "source": "sums" if "+" in pid else "others",
            }
            for pid, answer in answers.items()
        ],
    )
    return file


@pytest.fixture
def run(policy: str, recipe: Recipe, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """evaluate() with everything given; the keywords replace."""
    problems = _problems(tmp_path / "problems.parquet", {"7+5": "12", "2*4": "8", "9-6": "3"})

    def call(
        *, policy: str = policy, problems: Path = problems, out: Path = tmp_path / "out",
        recipe: Recipe = recipe, step: int = 12, samples: int = 4, temperature: float = 1.0,
        max_new_tokens: int = 8, samples_by_source: dict[str, int] | None = None, **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        settings = recipe.evaluate.model_copy(
            update={"samples": samples, "temperature": temperature}
            | {"max_new_tokens": max_new_tokens, "samples_by_source": samples_by_source or {}}
        )
        given = recipe.model_copy(update={"evaluate": settings})
        of = Step.of(None, step, policy=policy, problems=problems, evaluation=out)
        return dict(evaluate(of, given, **more).metrics)

    return call


def test_files_and_summary(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    summary = run()
    out = tmp_path / "out"
    rollouts = tables.read_table("rollouts", out / "rollouts.parquet")
    verdicts = tables.read_table("verdicts", out / "verdicts.parquet")
    assert rollouts["rollout_id"].to_list()[:5] == [
        *(f"e00012/7+5/{sample:02d}" for sample in range(4)),
        "e00012/2*4/00",
    ]
    assert rollouts["tokens"].max() <= 8
    assert rollouts["seed"].n_unique() == 12
    assert sorted(verdicts["rollout_id"]) == sorted(rollouts["rollout_id"])
    overall = summary["overall"]
    assert overall["pass@1"] == pytest.approx(verdicts["correct"].mean())
    assert overall["tokens"] == pytest.approx(rollouts["tokens"].mean())
    assert overall["truncated"] == pytest.approx((rollouts["finish_reason"] == "length").mean())
    assert (overall["problems"], overall["samples"]) == (3, 12)
    assert [(row["source"], row["problems"]) for row in summary["rows"]] == [
        ("others", 2),
        ("sums", 1),
    ]
    assert {"pass@1", "pass@2", "pass@4", "pass@4_low"} <= overall.keys()
    assert json.loads((out / "summary.json").read_text()) == summary
    assert format_table(summary).row_count == 4  # two sources, all problems, the sources' average
    assert summary["average"]["pass@1"] == pytest.approx(
        sum(row["pass@1"] for row in summary["rows"]) / 2
    )


def _answer(out: Path) -> str:
    """What the first rollout answers, once it is made to answer: the text is put in its place."""
    rows = tables.read_table("rollouts", out / "rollouts.parquet").to_dicts()
    rows[0]["text"] = "so \\boxed{77}"
    write("rollouts", out / "rollouts.parquet", rows)
    return "77"


def test_a_finished_sampling_is_kept_and_changed_answers_are_verified_anew(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run()["overall"]["pass@1"] == 0.0  # a random model boxes nothing in 8 tokens
    answer = _answer(out)
    (out / "verdicts.parquet").unlink()
    before = (out / "rollouts.parquet").stat().st_mtime_ns
    assert run()["overall"]["pass@1"] == 0.0
    changed = _problems(tmp_path / "changed.parquet", {"7+5": answer, "2*4": "8", "9-6": "3"})
    said: list[str] = []
    summary = run(problems=changed, log=said.append)
    assert (out / "rollouts.parquet").stat().st_mtime_ns == before
    assert any("not sampled again" in line for line in said)
    assert summary["overall"]["pass@1"] == pytest.approx(1 / 12)
    assert summary["overall"]["pass@4"] == pytest.approx(1 / 3)
    assert summary["rows"][1]["pass@1"] == pytest.approx(1 / 4)  # the source of 7+5


def test_the_same_seed_gives_the_same_samples_and_another_seed_others(
    run: Callable[..., dict[str, Any]], recipe: Recipe, tmp_path: Path
) -> None:
    def tokens(name: str, **changes: Any) -> list[list[int]]:
        run(out=tmp_path / name, **changes)
        return tables.read_table("rollouts", tmp_path / name / "rollouts.parquet")[
            "token_ids"
        ].to_list()

    first = tokens("a")
    assert tokens("b") == first
    assert tokens("c", recipe=recipe.model_copy(update={"seed": 1})) != first


def test_what_an_evaluation_that_ended_had_sampled_is_not_sampled_again(
    run: Callable[..., Any], policy: str, recipe: Recipe, tmp_path: Path
) -> None:
    inner = open_engine(recipe, policy)
    whole, ended, last = Stream(inner), Stream(inner, 5), Stream(inner)
    summary = run(out=tmp_path / "whole", engine=lambda _: whole)
    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path / "ended", engine=lambda _: ended)
    assert run(out=tmp_path / "ended", engine=lambda _: last) == summary
    assert len(last.asked) == len(whole.asked) - 5
    names = [sorted(p.name for p in (tmp_path / name).iterdir()) for name in ("whole", "ended")]
    assert names[0] == names[1]
    inner.close()


def test_a_warm_engine_is_used_and_left_open(
    run: Callable[..., dict[str, Any]], policy: str, recipe: Recipe, tmp_path: Path
) -> None:
    engine = open_engine(recipe, policy)
    try:
        cold = run(out=tmp_path / "cold")
        warm = run(out=tmp_path / "warm", engine=lambda _: engine)
        again = run(out=tmp_path / "again", engine=lambda _: engine)  # it was not closed
    finally:
        engine.close()
    assert cold == warm == again


@pytest.mark.parametrize("more", [{}, {"samples": 1, "samples_by_source": {"sums": 4}}])
def test_greedy_takes_one_sample(
    run: Callable[..., dict[str, Any]], tmp_path: Path, more: dict[str, Any]
) -> None:
    said: list[str] = []
    summary = run(temperature=0.0, log=said.append, **more)
    assert summary["samples"] == 1
    assert any("one sample a problem" in line for line in said)
    assert tables.read_table("rollouts", tmp_path / "out" / "rollouts.parquet").height == 3


def test_another_evaluation_in_the_same_folder_is_refused(
    run: Callable[..., dict[str, Any]], policy: str, tmp_path: Path
) -> None:
    run()
    kept = (tmp_path / "out" / "summary.json").read_bytes()
    other = tmp_path / "other"
    _make_model(other, seed=1)
    fewer = _problems(tmp_path / "fewer.parquet", {"7+5": "12"})
    for changes, words in (
        ({"temperature": 0.5}, "temperature was 1.0, is now 0.5"),
        ({"samples": 2}, "samples was 4, is now 2"),
        ({"policy": str(other)}, "other weights"),
        ({"problems": fewer}, "other problems or prompts"),
    ):
        with pytest.raises(InputError, match=words):
            run(**changes)
    assert (tmp_path / "out" / "summary.json").read_bytes() == kept
    assert run(temperature=0.5, force=True)["temperature"] == 0.5
    link = tmp_path / "link"  # another name for the same weights is no other evaluation
    link.symlink_to(policy)
    assert run(temperature=0.5, policy=str(link))["policy"] == str(link)


def test_too_long_prompts_are_left_out_and_counted(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    some = _problems(tmp_path / "some.parquet", {"1+1+1+1+1+1+1+1+1+1": "10", "7+5": "12"})
    summary = run(problems=some)
    assert (summary["left_out"], summary["overall"]["problems"]) == (1, 1)
    assert "1 problems with too long prompts" in str(format_table(summary).caption)


def test_an_interrupted_evaluation_may_start_anew_with_other_settings(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    run()
    (tmp_path / "out" / "rollouts.parquet").unlink()
    assert run(samples=2, temperature=0.7)["overall"]["samples"] == 6


def test_verl_benchmarks_at_the_papers_standard(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """avg@k where a source asks for it, pass@1 elsewhere; rows repeated for avg@k count once."""
    questions = [("aime", "7+5"), ("aime", "2*4"), *(("math", f"{i}-1") for i in (3, 4, 5))]
    rows = [
        {
            "data_source": source,
            "prompt": [
                {"role": "system", "content": "+*" * 40},
                {"role": "user", "content": f"{text}="},
            ],
            "ability": "math",
            "reward_model": {"ground_truth": "1", "style": "rule"},
            "extra_info": {"index": i, "split": "test"},
        }
        for i, (source, text) in enumerate(q for q in questions for _ in range(2))
    ]
    pl.DataFrame(rows).write_parquet(tmp_path / "valid.parquet")
    words = [
        "evaluate", "--policy", policy, "--problems", tmp_path / "valid.parquet",
        "--out", tmp_path / "out", "--engine", "transformers", "--samples", 1,
        "--set", "evaluate.samples_by_source={aime = 4, amc = 4}", "--max-new-tokens", 4,
        "--set", "model.template=plain", "--set", "model.replace_system=true",
        "--set", "rollout.max_prompt_tokens=16", "--set", "verify.workers=1",
        "--set", "evaluate.bootstrap=200",
    ]  # fmt: skip

    def call(*more: str) -> tuple[str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, words), *more])
        assert not ended.value.code
        done = capsys.readouterr()
        return done.out, done.err

    out, err = call("--json")
    assert "no problem is of source amc, only ['aime', 'math']" in err
    summary = json.loads(out)["valid"]
    assert summary["temperature"] == 0.6
    assert [(r["source"], r["problems"], r["samples"]) for r in summary["rows"]] == [
        ("aime", 2, 8),
        ("math", 3, 3),
    ]
    assert "pass@4" in summary["rows"][0]
    assert "pass@4" not in summary["rows"][1]
    table, err = call()
    assert "not sampled again" in err
    assert "1 samples a problem, 4 of aime, temperature 0.6" in " ".join(table.split())
    assert "average of" in table
    words[words.index("evaluate.samples_by_source={aime = 4, amc = 4}")] = "seed=0"
    with pytest.raises(SystemExit):
        cli.main([*map(str, words)])
    assert "samples_by_source was {'aime': 4}, is now None" in capsys.readouterr().err


def test_bad_input(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    empty = tmp_path / "empty.parquet"
    write("problems", empty, [])
    repeated = tmp_path / "repeated.parquet"
    rows = tables.read_table("problems", tmp_path / "problems.parquet")
    pl.concat([rows, rows.head(1)]).write_parquet(repeated)
    long = _problems(tmp_path / "long.parquet", {"1+1+1+1+1+1+1+1+1+1": "10"})
    for changes, words in (
        ({"problems": empty}, "no problems"),
        ({"problems": repeated}, "7\\+5 is there more than once"),
        ({"problems": long}, "max_prompt_tokens"),
        ({"problems": tmp_path / "absent.parquet"}, "no such file"),
        ({"policy": str(tmp_path / "absent")}, "no such policy"),
    ):
        with pytest.raises(InputError, match=words):
            run(**changes)
    assert not (tmp_path / "out").exists()


def test_fingerprint_tells_weights_and_not_places(policy: str, tmp_path: Path) -> None:
    _make_model(tmp_path / "same", seed=0)
    _make_model(tmp_path / "other", seed=1)
    assert policy_fingerprint(str(tmp_path / "same")) == policy_fingerprint(policy)
    assert policy_fingerprint(str(tmp_path / "other")) != policy_fingerprint(policy)
    assert policy_fingerprint("org/a") != policy_fingerprint("org/b")


def test_metrics_are_flat_and_by_source_where_there_are_several(
    run: Callable[..., dict[str, Any]],
) -> None:
    summary = run()
    metrics = evaluation_metrics("heldout", summary)
    assert metrics["eval/heldout/pass@1"] == summary["overall"]["pass@1"]
    assert metrics["eval/heldout/pass@1_low"] == summary["overall"]["low"]
    assert metrics["eval/heldout/pass@4_high"] == summary["overall"]["pass@4_high"]
    assert metrics["eval/heldout/sums/tokens"] == summary["rows"][1]["tokens"]
    alone = evaluation_metrics("heldout", summary | {"rows": summary["rows"][:1]})
    assert all(key.count("/") == 2 for key in alone)


def test_what_could_not_be_judged_is_no_evaluation(
    run: Callable[..., dict[str, Any]], recipe: Recipe, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import time\n\ndef judge(response, answer, metadata):\n"
        "    time.sleep(60 * (answer < '9'))\n    return True\n"
    )
    trusted = recipe.model_copy(
        update={
            "problems": recipe.problems.model_copy(update={"verifier": f"{own}:judge"}),
            "verify": recipe.verify.model_copy(update={"timeout": 0.3}),
        }
    )

    def problems(*answers: str) -> Path:
        rows = {f"{answer}+0": answer for answer in answers}
        _problems(tmp_path / "p.parquet", rows)
        data = pl.read_parquet(tmp_path / "p.parquet")
        changed = data.with_columns(verifier=pl.lit(f"{own}:judge"))
        tables.write_table("problems", changed, tmp_path / "p.parquet")
        return tmp_path / "p.parquet"

    lines: list[str] = []
    for _ in range(2):  # the first leaves nothing that would pass for verdicts
        with pytest.raises(StageError, match="every verdict is a timeout"):
            run(problems=problems("1"), recipe=trusted, samples=1, out=tmp_path / "late")
    summary = run(problems=problems("1", "9"), recipe=trusted, samples=1, log=lines.append)
    assert summary["overall"]["pass@1"] == 0.5
    assert "evaluate: of 2 verdicts 1 timeout" in lines

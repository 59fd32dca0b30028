"""The verify stage, from files to files."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe import parse_recipe
from exgrpo_cli.stages import verify as stage
from rollout_files import RECIPE, explain, rollout, trusting, verify, write_problems, write_rollouts

Exgrpo = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    own = tmp_path / "own.py"
    own.write_text(
        "def judge(response, answer, metadata):\n"
        "    return metadata['word'] in response and response.endswith(answer)\n"
    )
    return write_problems(
        tmp_path / "problems.parquet",
        [
            ("m", r"\frac{1}{2}", "math", None),
            ("c", "B", "choice", None),
            ("f", "end", f"{own}:judge", '{"word": "blue"}'),
            ("u", "$$", "math", None),
        ],
    )


def write_parts(folder: Path, count: int = 3) -> Path:
    for index in range(count):
        write_rollouts(
            folder / tables.part_name(index, count),
            [
                rollout("m", index, rf"<think>\boxed{{3}}</think> So \boxed{{0.5}} {index}"),
                rollout("c", index, "The answer is (C)."),
                rollout("f", index, f"{index} blue end"),
                rollout("m", index + 10, "I was cut off in the mid"),
                rollout("m", index + 20, r"\boxed{9^{9^{9^9}}}"),
                rollout("u", index, r"\boxed{1}"),
            ],
        )
    return folder


def test_a_verdict_for_every_rollout_in_order(tmp_path: Path, problems: Path) -> None:
    rollouts = write_parts(tmp_path / "rollouts")
    out = tmp_path / "verdicts"
    lines: list[str] = []
    result = verify(rollouts, problems, out, trusting(tmp_path), log=lines.append)
    assert result["rows"] == 18
    assert result["correct"] == 6
    expected = {
        "ok": 9, "no_answer": 3, "no_format": 0, "unparsable": 3, "timeout": 3, "error": 0,
    }  # fmt: skip
    assert result["by_status"] == expected
    assert result["notes"] == ("of 18 verdicts 3 unparsable, 3 timeout",)
    assert (result["parts_done"], result["parts_skipped"]) == (3, 0)
    # the tower was waited for once, the later parts remember it
    told = tables.read_table("verdicts", out)
    waited = told.filter(told["status"] == "timeout")["seconds"]
    assert sorted(waited > 0) == [False, False, True]
    assert len(lines) == 3
    assert [p.name for p in tables.parquet_files(out)] == [
        p.name for p in tables.parquet_files(rollouts)
    ]
    for part in tables.parquet_files(rollouts):
        asked = tables.read_table("rollouts", part, ["rollout_id"])
        verdicts = tables.read_table("verdicts", out / part.name)
        assert verdicts["rollout_id"].to_list() == asked["rollout_id"].to_list()
        assert verdicts["status"].to_list() == [
            "ok", "ok", "ok", "no_answer", "timeout", "unparsable",
        ]  # fmt: skip
        assert verdicts["correct"].to_list() == [True, False, True, False, False, False]
        assert verdicts["reward"].to_list() == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
        assert verdicts["extracted"].to_list() == [
            "0.5", "(C)", None, None, "9^{9^{9^9}}", "1",
        ]  # fmt: skip
        assert verdicts["verifier"][1] == "choice"


def test_parts_that_are_there_are_skipped(tmp_path: Path) -> None:
    problems = write_problems(tmp_path / "p.parquet", [("e", "1", "exact", None)])
    rollouts, out = tmp_path / "rollouts", tmp_path / "verdicts"
    for index in range(3):
        rows = [rollout("e", 6 * index + i, f"\\boxed{{{i}}}") for i in range(6)]
        write_rollouts(rollouts / tables.part_name(index, 3), rows)
    first = verify(rollouts, problems, out, RECIPE, shard=tables.Shard(1, 2))
    assert (first["parts_done"], first["parts_skipped"], first["rows"]) == (1, 0, 6)
    assert [p.name for p in tables.parquet_files(out)] == [tables.part_name(1, 3)]
    before = (out / tables.part_name(1, 3)).stat().st_mtime_ns
    second = verify(rollouts, problems, out, RECIPE)
    assert (second["parts_done"], second["parts_skipped"]) == (2, 1)
    assert (out / tables.part_name(1, 3)).stat().st_mtime_ns == before
    assert verify(rollouts, problems, out, RECIPE)["rows"] == 0
    forced = verify(rollouts, problems, out, RECIPE, shard=tables.Shard(1, 2), force=True)
    assert (forced["parts_done"], forced["parts_skipped"]) == (1, 0)


def test_one_file_to_one_file(tmp_path: Path) -> None:
    problems = write_problems(tmp_path / "p.parquet", [("m", "1/2", "numeric", None)])
    file = write_rollouts(tmp_path / "loose.parquet", [rollout("m", 0, r"\boxed{1/2}")])
    out = tmp_path / "deep" / "verdicts.parquet"
    assert verify(file, problems, out, RECIPE)["correct"] == 1
    assert tables.read_table("verdicts", out)["correct"].to_list() == [True]
    assert verify(file, problems, tmp_path / "folder", RECIPE)["parts_done"] == 1
    assert (tmp_path / "folder" / "loose.parquet").exists()
    write_rollouts(tmp_path / "two" / "a.parquet", [rollout("m", 0, r"\boxed{2}")])
    write_rollouts(tmp_path / "two" / "b.parquet", [rollout("m", 1, r"\boxed{2}")])
    with pytest.raises(InputError, match="2 rollout parts"):
        verify(tmp_path / "two", problems, tmp_path / "both.parquet", RECIPE)
    assert verify(tmp_path / "two", problems, tmp_path / "out", RECIPE)["parts_done"] == 2


def test_an_empty_part(tmp_path: Path, problems: Path) -> None:
    write_rollouts(tmp_path / "empty.parquet", [])
    out = tmp_path / "verdicts.parquet"
    assert verify(tmp_path / "empty.parquet", problems, out, trusting(tmp_path))["rows"] == 0
    assert tables.read_table("verdicts", out).height == 0


def test_rollouts_of_another_problem_set(tmp_path: Path, problems: Path) -> None:
    file = write_rollouts(tmp_path / "r.parquet", [rollout("gone", 0, r"\boxed{1}")])
    out = tmp_path / "verdicts.parquet"
    with pytest.raises(InputError) as caught:
        verify(file, problems, out, trusting(tmp_path))
    for words in (str(file), str(problems), "'gone'"):
        assert words in str(caught.value)
    assert not out.exists()


def test_bad_input_leaves_nothing(tmp_path: Path, problems: Path) -> None:
    folder = write_parts(tmp_path / "rollouts", 2)
    out = tmp_path / "verdicts"
    broken = folder / tables.part_name(1, 2)
    broken.write_bytes(broken.read_bytes()[:-20])
    with pytest.raises(InputError, match="truncated or damaged"):
        verify(folder, problems, out, trusting(tmp_path), shard=tables.Shard(1, 2))
    assert not out.exists()
    with pytest.raises(InputError, match="upon the rollouts"):
        verify(folder, problems, folder, trusting(tmp_path))
    no_text = tmp_path / "no_text.parquet"
    pl.DataFrame({"rollout_id": ["a"], "problem_id": ["m"]}).write_parquet(no_text)
    with pytest.raises(InputError, match="column text is missing"):
        verify(no_text, problems, out, trusting(tmp_path))
    twice = write_problems(tmp_path / "twice.parquet", [("m", "1", "math", None)] * 2)
    with pytest.raises(InputError, match="more than once"):
        verify(folder, twice, out, trusting(tmp_path))
    unknown = write_problems(tmp_path / "unknown.parquet", [("m", "1", "maths", None)])
    with pytest.raises(InputError, match="unknown verifier"):
        verify(folder, unknown, out, trusting(tmp_path))
    assert not out.exists()


def test_only_the_columns_it_needs(tmp_path: Path, problems: Path) -> None:
    loose = tmp_path / "loose.parquet"
    pl.DataFrame(
        {"rollout_id": ["a"], "problem_id": ["m"], "text": ["#### 1/2"], "else": [1]}
    ).write_parquet(loose)
    assert verify(loose, problems, tmp_path / "v.parquet", trusting(tmp_path))["correct"] == 1


def test_the_recipe_says_where_the_answer_is(tmp_path: Path) -> None:
    problems = write_problems(tmp_path / "p.parquet", [("m", "2", "numeric", None)])
    file = write_rollouts(
        tmp_path / "r.parquet", [rollout("m", 0, r"\boxed{1} <answer>2</answer>")]
    )
    for rule, extracted in (("auto", "1"), ("answer_tag", "2"), ("hashes", None)):
        recipe = parse_recipe({"verify": {"workers": 1, "extract": rule}}, "test")
        result = verify(file, problems, tmp_path / f"{rule}.parquet", recipe)
        verdicts = tables.read_table("verdicts", tmp_path / f"{rule}.parquet")
        assert verdicts["extracted"].to_list() == [extracted]
        assert result["correct"] == (extracted == "2")
        assert explain(file, problems, "s00000/m/00", recipe)["extracted"] == extracted


def test_another_verifier_than_the_problems_say(tmp_path: Path) -> None:
    problems = write_problems(tmp_path / "p.parquet", [("e", "1/2", "exact", None)])
    file = write_rollouts(tmp_path / "r.parquet", [rollout("e", 0, r"\boxed{0.5}")])
    out = tmp_path / "v.parquet"
    assert verify(file, problems, out, RECIPE)["correct"] == 0
    assert verify(file, problems, out, RECIPE, force=True, verifier="numeric")["correct"] == 1
    assert tables.read_table("verdicts", out)["verifier"].to_list() == ["numeric"]
    assert explain(file, problems, "s00000/e/00", RECIPE, "numeric")["correct"] is True
    with pytest.raises(InputError, match="unknown verifier"):
        verify(file, problems, out, RECIPE, verifier="numerics")


@pytest.mark.parametrize("verifier", ["exact", "numeric"])
def test_any_of_several_golds_is_right(tmp_path: Path, verifier: str) -> None:
    golds = json.dumps({"golds": ["2", "-1,000"], "level": 1})
    problems = write_problems(tmp_path / "p.parquet", [("a", "2", verifier, golds)])
    texts = [r"\boxed{-1,000}", r"\boxed{2}", r"\boxed{3}", "none"]
    rows = [rollout("a", sample, text) for sample, text in enumerate(texts)]
    rollouts = write_rollouts(tmp_path / "part-00000-of-00001.parquet", rows)
    verify(rollouts, problems, tmp_path / "v.parquet", RECIPE)
    judged = tables.read_table("verdicts", tmp_path / "v.parquet")
    assert judged["correct"].to_list() == [True, True, False, False]
    assert judged["status"].to_list() == ["ok", "ok", "ok", "no_answer"]
    told = explain(rollouts, problems, "s00000/a/00", RECIPE)
    assert (told["answer"], told["correct"]) == ("-1,000", True)


def test_a_large_file_is_read_and_written_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "_ROWS_READ", 7)
    monkeypatch.setattr(stage, "_ROWS_JUDGED", 50)
    problems = write_problems(tmp_path / "p.parquet", [("m", "1", "math", None)])
    rows = [rollout("m", i, f"\\boxed{{{i % 3}}}") for i in range(333)]
    folder = tmp_path / "with [brackets]"
    file = write_rollouts(folder / "all.parquet", rows)
    out = folder / "v.parquet"
    killed = folder / ".v.parquet.x.parts"
    killed.mkdir()
    result = verify(file, problems, out, RECIPE)
    assert (result["rows"], result["correct"], result["by_status"]["ok"]) == (333, 111, 333)
    verdicts = tables.read_table("verdicts", out)
    assert verdicts["rollout_id"].to_list() == [row["rollout_id"] for row in rows]
    assert verdicts["correct"].to_list() == [i % 3 == 1 for i in range(333)]
    assert sorted(path.name for path in folder.iterdir()) == ["all.parquet", "v.parquet"]
    # a fault far in leaves the old verdicts and nothing else
    rows[300]["problem_id"] = "gone"
    write_rollouts(file, rows)
    with pytest.raises(InputError, match="'gone'"):
        verify(file, problems, out, RECIPE, force=True)
    assert tables.read_table("verdicts", out).equals(verdicts)
    assert sorted(path.name for path in folder.iterdir()) == ["all.parquet", "v.parquet"]


def test_a_null_is_named_by_its_row(tmp_path: Path, problems: Path) -> None:
    file = tmp_path / "r.parquet"
    pl.DataFrame(
        {"rollout_id": ["a", "b"], "problem_id": ["m", "m"], "text": ["x", None]}
    ).write_parquet(file)
    with pytest.raises(InputError, match="column text is null in row 2"):
        verify(file, problems, tmp_path / "v.parquet", trusting(tmp_path))


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 1e9, 0.0, -1.0])
def test_the_limit_is_a_time(timeout: float) -> None:
    with pytest.raises(InputError, match=r"verify\.timeout") as caught:
        parse_recipe({"verify": {"timeout": timeout}}, "test")
    assert "\n" not in str(caught.value)


def test_explain_on_the_command_line(tmp_path: Path, problems: Path, exgrpo: Exgrpo) -> None:
    rollouts = write_parts(tmp_path / "rollouts", 1)
    done = exgrpo(
        "verify", "--rollouts", rollouts, "--problems", problems,
        "--explain", "s00000/m/00", "--json",
        "--set", f"problems.verifier={tmp_path / 'own.py'}:judge",
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert (found["answer"], found["extracted"]) == (r"\frac{1}{2}", "0.5")
    assert (found["status"], found["correct"], found["reward"]) == ("ok", True, 1.0)
    assert r"\frac{1}{2}" in found["parsed_answer"]
    assert "0.5" in found["parsed_extracted"]
    assert found["why"] == "equal to the gold answer"
    assert found["response_end"].endswith(r"So \boxed{0.5} 0")
    assert not list(tmp_path.glob("*verdicts*"))  # nothing is written


def test_explain(tmp_path: Path, problems: Path) -> None:
    rollouts = write_parts(tmp_path / "rollouts")
    wrong = explain(rollouts, problems, "s00000/c/02", trusting(tmp_path))
    assert (wrong["parsed_answer"], wrong["parsed_extracted"]) == ("B", "C")
    assert wrong["why"] == "C, not B"
    assert explain(rollouts, problems, "s00000/m/10", trusting(tmp_path))["status"] == "no_answer"
    late = explain(rollouts, problems, "s00000/m/22", trusting(tmp_path))
    assert (late["status"], late["parsed_answer"]) == ("timeout", None)
    assert "1 seconds" in late["why"]
    with pytest.raises(InputError, match="no rollout 's00000/x/00'"):
        explain(rollouts, problems, "s00000/x/00", trusting(tmp_path))


def test_a_verifier_that_fails_everywhere_ends_with_1(exgrpo: Exgrpo, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def judge(response, answer, metadata):\n    return (True, 'a tuple')\n")
    problems = write_problems(tmp_path / "problems.parquet", [("f", "1", f"{own}:judge", None)])
    rows = [rollout("f", sample, "1") for sample in range(2)]
    rollouts = write_rollouts(tmp_path / "rollouts.parquet", rows)
    out = tmp_path / "verdicts.parquet"
    files = ("--rollouts", rollouts, "--problems", problems, "--out", out)
    done = exgrpo("verify", *files, "--set", f"problems.verifier={own}:judge", code=1)
    assert "0 of 2 correct (2 error)" in done.stderr
    assert f"exgrpo: {out}: every verdict is an error" in done.stderr
    assert tables.read_table("verdicts", out)["status"].to_list() == ["error"] * 2

"""Files and folders of problems: what is read, and what a bad row costs."""

import gzip
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from exgrpo_cli.errors import InputError
from exgrpo_cli.problems import import_problems
from exgrpo_cli.recipe import load_recipe, parse_recipe, to_toml
from exgrpo_cli.runs.prepare import import_into
from problem_files import one, write_json, write_jsonl, write_parquet

Exgrpo = Callable[..., subprocess.CompletedProcess[str]]
ROWS: list[dict[str, Any]] = [{"question": f"{i}+1?", "answer": i + 1} for i in range(3)]
ANSWERS = ["1", "2", "3"]


def answers(path: Path, **options: Any) -> list[str]:
    return import_problems(path, workers=1, **options).frame["answer"].to_list()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# --- kinds of files ------------------------------------------------------------------------------


def test_packed_files(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(row) for row in ROWS).encode()
    for name, content in (
        ("a.jsonl.gz", lines),
        ("b.json.gz", json.dumps(ROWS).encode()),
        ("c.CSV.GZ", b"question,answer\n0+1?,1\n1+1?,2\n2+1?,3\n"),
    ):
        path = write(tmp_path / name, gzip.compress(content))
        assert answers(path) == ANSWERS
    assert (
        one(write(tmp_path / "mine.jsonl.gz", gzip.compress(json.dumps(ROWS[0]).encode())))[
            "source"
        ]
        == "mine"
    )
    for content in (gzip.compress(lines)[:-10], b"no gzip at all"):
        with pytest.raises(InputError, match=r"a\.jsonl\.gz: not a readable gzip file"):
            answers(write(tmp_path / "a.jsonl.gz", content))
    with pytest.raises(InputError, match="unknown kind of file"):
        answers(write(tmp_path / "a.parquet.gz", b"x"))


@pytest.mark.parametrize("cut", [",", ";", "\t"])
def test_what_separates_a_csv(tmp_path: Path, cut: str) -> None:
    lines = [["Question", "Answer"], ['"a; b, c\td"', "1"], ["x", '"2"']]
    path = write(tmp_path / "a.csv", "\r\n".join(cut.join(line) for line in lines).encode())
    imported = import_problems(path)
    assert imported.frame["answer"].to_list() == ["1", "2"]
    assert imported.frame["prompt"][0][0]["content"] == "a; b, c\td"


def test_a_csv_with_an_index_and_a_long_text(tmp_path: Path) -> None:
    text = "x" * 300_000
    path = write(tmp_path / "a.csv", f'\ufeff,question,answer\n0,"{text}",1\n\n1,b,2\n'.encode())
    imported = import_problems(path)
    assert imported.frame["answer"].to_list() == ["1", "2"]
    assert imported.frame["prompt"][0][0]["content"] == text
    assert imported.frame["metadata"].null_count() == 2
    with pytest.raises(InputError, match="column answer stands twice"):
        answers(write(path, b"question,answer,answer\n1,2,3\n"))


def test_math_as_folders_of_one_problem_a_file(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for subject in ("algebra", "geometry"):
            for number in (1, 2):
                row = {
                    "problem": f"{split} {subject} {number}",
                    "level": "Level 1",
                    "type": subject,
                    "solution": rf"So $\boxed{{{number}}}$.",
                }
                folder = tmp_path / "MATH" / split / subject
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{number}.json").write_text(json.dumps(row))
    imported = import_problems(tmp_path / "MATH/train")
    assert (imported.report["format"], imported.report["file_count"]) == ("math", 4)
    assert imported.frame["answer"].to_list() == ["1", "2", "1", "2"]
    assert imported.frame["source"].unique().to_list() == ["train"]
    with pytest.raises(InputError, match="holds the splits test, train; give one's folder"):
        import_problems(tmp_path / "MATH")
    broken = write(tmp_path / "MATH/train/algebra/3.json", b'{"problem": "x", "solution"}')
    with pytest.raises(InputError, match=r"3\.json, row 1: line 1: not valid JSON"):
        import_problems(tmp_path / "MATH/train")
    skipped = import_problems(tmp_path / "MATH/train", skip_bad=True).report
    assert (skipped["problems"], skipped["bad"]) == (4, 1)
    assert skipped["left_out"][0]["file"] == str(broken)


def test_other_folders(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "b.jsonl", ROWS[1:])
    write_jsonl(folder / "a.jsonl", ROWS[:1])
    write_json(folder / "dataset_infos.json", [{"default": 1}])  # what libraries write beside
    write_json(folder / ".hidden.json", [])
    assert answers(folder) == ANSWERS
    write_json(folder / "c.json", ROWS)
    with pytest.raises(InputError, match="holds json and jsonl files"):
        answers(folder)
    for split in ("train", "test"):
        (tmp_path / "hub/data").mkdir(parents=True, exist_ok=True)
        write_parquet(tmp_path / f"hub/data/{split}-00000-of-00001.parquet", ROWS)
    with pytest.raises(InputError, match="holds the splits test, train"):
        answers(tmp_path / "hub")
    (tmp_path / "hub/data/test-00000-of-00001.parquet").unlink()
    assert answers(tmp_path / "hub") == ANSWERS


@pytest.mark.parametrize("level", ["oldest", "newest"])
def test_a_saved_hugging_face_dataset(tmp_path: Path, level: str) -> None:
    """As datasets.save_to_disk leaves it: Arrow streams, named by state.json."""
    compatible = getattr(pl.CompatLevel, level)()
    table = pl.DataFrame(
        {"choices": [["x", "y"]] * 4, "question": list("abcd"), "answer": [0, 1, 1, 0]}
    )
    train = tmp_path / "saved" / "train"
    train.mkdir(parents=True)
    names = [f"data-0000{i}-of-00002.arrow" for i in (0, 1)]
    for part, name in enumerate(names):
        rows = table.slice(2 * part, 2)
        rows.write_ipc_stream(train / name, compat_level=compatible)
    table.write_ipc_stream(train / "cache-1234.arrow", compat_level=compatible)
    write_json(train / "dataset_info.json", [])
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (train / "state.json").write_text(json.dumps(state))
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train"]}')
    for path in (train, tmp_path / "saved"):
        imported = import_problems(path)
        assert imported.report["format"] == "mmlu"
        assert imported.frame["answer"].to_list() == ["A", "B", "B", "A"]
        assert len(imported.report["files"]) == 2
    test = tmp_path / "saved/test"
    test.mkdir()
    (test / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match="the splits test, train; give one's folder"):
        import_problems(tmp_path / "saved")
    with pytest.raises(InputError, match=r"data-00000-of-00002\.arrow: no such file"):
        import_problems(test)
    write(test / names[0], b"\xff\xff\xff\xff broken")
    with pytest.raises(InputError, match="not a readable Arrow file"):
        import_problems(test)
    with_footer = tmp_path / "one.arrow"
    table.write_ipc(with_footer)
    assert answers(with_footer) == ["A", "B", "B", "A"]


def test_one_object_that_holds_lists_is_a_problem(tmp_path: Path) -> None:
    row = {"question": "?", "choices": ["x", "y"], "answer": "B", "tags": ["a"]}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(row))
    assert one(path)["answer"] == "B"


# --- bad rows ------------------------------------------------------------------------------------

GOOD = b'{"question": "%d?", "answer": 1}\n'
BAD_FILES: dict[str, tuple[str, bytes, list[int], str]] = {
    "utf8.jsonl": (
        "line 2: not UTF-8",
        GOOD % 1 + b'{"question": "\xff", "answer": 1}\n' + GOOD % 3,
        [2],
        "not UTF-8",
    ),
    "json.jsonl": (
        "line 2: not valid JSON",
        GOOD % 1 + b'{"question": \n' + GOOD % 3 + b"[1]\n",
        [2, 4],
        "not valid JSON",
    ),
    "utf8.json": (
        "row 2: not UTF-8",
        b"[" + GOOD % 1 + b',{"question": "\xff", "answer": 1},' + GOOD % 3 + b"]",
        [2],
        "not UTF-8",
    ),
    "object.json": (
        "row 2: expected an object, found text",
        b"[" + GOOD % 1 + b',"x",' + GOOD % 3 + b"]",
        [2],
        "expected an object",
    ),
    "utf8.csv": (
        "row 2: not UTF-8; save the file as UTF-8",
        "question,answer\n1?,1\nWieviel für?,2\n3?,1\n".encode("latin-1"),
        [2],
        "not UTF-8",
    ),
    "ragged.csv": (
        "row 2: 3 fields, where the header has 2",
        b"question,answer\n1?,1\n2?,1,2\n3?,1\n4?\n",
        [2, 4],
        "3 fields",
    ),
    "quotes.csv": (
        "row 2: not readable as CSV",
        b'question,answer\n1?,1\n"2"?,1\n3?,1\n',
        [2],
        "not readable as CSV",
    ),
    "question.csv": (
        "row 2: question is empty",
        b"question,answer\n1?,1\n,1\n3?,1\n",
        [2],
        "empty",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_row_is_named_or_skipped(tmp_path: Path, name: str) -> None:
    words, content, bad, why = BAD_FILES[name]
    path = write(tmp_path / name, content)
    with pytest.raises(InputError, match=words) as caught:
        import_problems(path)
    assert str(caught.value).startswith(f"{path}, ")
    lines: list[str] = []
    imported = import_problems(path, skip_bad=True, log=lines.append)
    assert [prompt[0]["content"] for prompt in imported.frame["prompt"]] == ["1?", "3?"]
    assert imported.report["bad"] == len(bad)
    assert imported.report["rows"] == 2 + len(bad)
    assert [entry["row"] for entry in imported.report["left_out"]] == bad
    assert why in imported.report["left_out"][0]["why"]
    assert any(f"left out {len(bad)} rows that cannot be read" in line for line in lines)


def test_the_first_three_bad_rows_are_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "", "answer": 1}] * 30 + ROWS)
    lines: list[str] = []
    imported = import_problems(path, skip_bad=True, log=lines.append)
    assert (imported.report["bad"], imported.frame.height) == (30, 3)
    assert [entry["row"] for entry in imported.report["left_out"]] == [1, 2, 3]
    [line] = [line for line in lines if "left out" in line]
    assert line.count("question is empty") == 3


def test_a_file_of_bad_rows_is_no_problem_set(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "", "answer": 1}] * 3)
    with pytest.raises(InputError, match=r"question is empty.*no problem is left of 3 rows"):
        import_problems(path, skip_bad=True)
    with pytest.raises(InputError, match=r"the header is not UTF-8"):
        answers(write(tmp_path / "a.csv", "question,answer\n1?,2\n".encode("utf-16")))


# --- from the command line and the recipe --------------------------------------------------------


def test_columns_and_skip_bad_on_the_command_line(exgrpo: Exgrpo, tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b'"Frage, bitte";Wert\n1+1?;2\n2+2?\n')
    columns = "question=Frage, bitte,answer=Wert"
    line = exgrpo("problems", path, "--columns", columns, code=2).stderr
    assert "row 2: 1 fields, where the header has 2" in line
    out = tmp_path / "p.parquet"
    done = exgrpo("problems", path, "--columns", columns, "--skip-bad", "--out", out, "--json")
    report = json.loads(done.stdout)
    assert (report["problems"], report["bad"]) == (1, 1)
    assert pl.read_parquet(out)["answer"].to_list() == ["2"]
    assert "expected FIELD=COLUMN" in exgrpo("problems", path, "--columns", "Frage", code=2).stderr


def test_a_recipe_can_tell_columns(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"Frage": "1?", "Wert": 1}, {"Frage": "", "Wert": 1}])
    recipe = load_recipe(
        None,
        [
            "problems.columns.question=Frage",
            "problems.columns.answer=Wert",
            "problems.skip_bad=true",
        ],
    )
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "recipe.toml") == recipe
    report = import_into(tmp_path / "p.parquet", path, recipe, None, lambda _: None)
    assert (report["problems"], report["bad"]) == (1, 1)
    # they are the training set's, and a held-out set has its own columns
    with pytest.raises(InputError, match="no known schema has the columns Frage, Wert"):
        import_into(None, path, recipe, None, lambda _: None, held_out=True)
    with pytest.raises(InputError, match=r"problems\.columns\.frage"):
        parse_recipe({"problems": {"columns": {"frage": "Frage"}}}, "x.toml")

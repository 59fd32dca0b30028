"""Problem sets from the formats that users have."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.problems import import_problems
from problem_files import WRITERS, one, write_jsonl, write_parquet

BENCHMARKS = Path(__file__).parents[3] / "shared" / "data" / "math-benchmarks.verl.parquet"

VERL = {
    "data_source": "org/set",
    "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "split": "train"},
}
OPENR1 = {
    "problem": "What is $1+1$?",
    "solution": "It is 2.",
    "answer": "2",
    "problem_type": "Algebra",
    "source": "olympiads",
    "uuid": "abc-1",
    "generations": ["long", "longer"],
    "correctness_math_verify": [True, False],
    "messages": [{"role": "user", "content": "What is $1+1$?"}],
}
CHAT = {
    "messages": [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": r"So \boxed{2}"},
    ]
}

# name: rows, expected format, expected prompt of the first, its answer, id and source
# (None: the hash, or the file's name)
SCHEMAS: dict[str, tuple[list[dict[str, Any]], str, list[tuple[str, str]], str, str | None]] = {
    "verl": ([VERL], "verl", [("system", "Think."), ("user", "1+1?")], "2", "org-set-7"),
    "dapo": (
        [VERL | {"extra_info": {"index": "9a9b-uuid"}}],
        "dapo",
        [("system", "Think."), ("user", "1+1?")],
        "2",
        "org-set-9a9b-uuid",
    ),
    "gsm8k": (
        [{"question": "How many?", "answer": "40*60=2400\n#### 2,400"}],
        "gsm8k",
        [("user", "How many?")],
        "2400",
        None,
    ),
    "math": (
        [
            {
                "problem": "Half?",
                "solution": r"\boxed{3}, no: \boxed{\frac{1}{2}}.",
                "level": "Level 1",
                "type": "Algebra",
            }
        ],
        "math",
        [("user", "Half?")],
        r"\frac{1}{2}",
        None,
    ),
    "math500": (
        [
            {
                "problem": "Half?",
                "solution": r"\boxed{3}",
                "answer": "1/2",
                "subject": "Algebra",
                "level": 1,
                "unique_id": "test/algebra/807.json",
            }
        ],
        "math",
        [("user", "Half?")],
        "1/2",
        "test-algebra-807.json",
    ),
    "openr1": ([OPENR1], "openr1", [("user", "What is $1+1$?")], "2", "abc-1"),
    "deepscaler": (
        [{"problem": "1+1?", "answer": "2", "solution": ""}],
        "deepscaler",
        [("user", "1+1?")],
        "2",
        None,
    ),
    "plain": ([{"prompt": "1+1?", "answer": 2}], "plain", [("user", "1+1?")], "2", None),
    "plain_messages": (
        [{"prompt": CHAT["messages"], "answer": "2", "id": 4}],
        "plain",
        [("system", "Think."), ("user", "1+1?")],
        "2",
        "4",
    ),
    "plain_solution": (
        [{"prompt": "1+1?", "solution": r"$\frac{4}{2}$"}],
        "plain",
        [("user", "1+1?")],
        r"$\frac{4}{2}$",
        None,
    ),
    "big_math": (
        [{"problem": "1+1?", "answer": "2", "source": "cn_k12", "domain": ["Algebra"]}],
        "plain",
        [("user", "1+1?")],
        "2",
        None,
    ),
    "question_answer": (
        [{"question": "1+1?", "answer": "2"}],
        "plain",
        [("user", "1+1?")],
        "2",
        None,
    ),
    "chat": ([CHAT], "chat", [("system", "Think."), ("user", "1+1?")], "2", None),
    "chat_answer": (
        [CHAT | {"answer": "two"}],
        "chat",
        [("system", "Think."), ("user", "1+1?")],
        "two",
        None,
    ),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_is_detected(tmp_path: Path, name: str, kind: str) -> None:
    rows, fmt, prompt, answer, identifier = SCHEMAS[name]
    path = WRITERS[kind](tmp_path / f"{name}.{kind}", rows)
    for told, verifier in (("auto", "math"), (fmt, "exact")):
        problem = one(path, fmt=told, verifier=verifier)
        assert problem["report"]["format"] == fmt
        assert [(m["role"], m["content"]) for m in problem["prompt"]] == prompt
        assert problem["answer"] == answer
        if identifier is None:
            assert len(problem["problem_id"]) == 16
            int(problem["problem_id"], 16)
        else:
            assert problem["problem_id"] == identifier
        assert problem["verifier"] == verifier
        assert problem["report"]["gold_faults"] == []


def test_what_goes_into_source_and_metadata(tmp_path: Path) -> None:
    problem = one(write_jsonl(tmp_path / "train.jsonl", [OPENR1]))
    assert problem["source"] == "olympiads"
    metadata = json.loads(problem["metadata"])
    assert metadata == {"solution": "It is 2.", "problem_type": "Algebra", "uuid": "abc-1"}
    problem = one(write_jsonl(tmp_path / "train.jsonl", [VERL]))
    assert problem["source"] == "org/set"
    assert json.loads(problem["metadata"]) == {
        "ability": "math",
        "reward_model": {"style": "rule"},
        "extra_info": {"index": 7, "split": "train"},
    }
    plain = write_jsonl(tmp_path / "mine.v2.jsonl", [{"prompt": "1+1?", "answer": "2"}])
    assert one(plain)["source"] == "mine"
    assert one(plain)["metadata"] is None
    assert one(plain, source="other")["source"] == "other"
    assert one(write_jsonl(tmp_path / "b.jsonl", [VERL]), source="other")["source"] == "org/set"


def test_csv_and_tsv(tmp_path: Path) -> None:
    csv = tmp_path / "a.csv"
    csv.write_text('question,answer\n"What, is\n2*600?","so\n#### 1,200"\nWhat?,#### 007\n')
    imported = import_problems(csv, workers=1)
    assert imported.report["format"] == "gsm8k"
    assert imported.frame["answer"].to_list() == ["1200", "007"]
    assert imported.frame["prompt"][0][0]["content"] == "What, is\n2*600?"
    tsv = tmp_path / "a.tsv"
    tsv.write_text("prompt\tanswer\n1+1?\t2\n")
    assert one(tsv)["answer"] == "2"


def test_json_files_in_other_shapes(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "1+2?", "answer": "3"}]
    wrapped = tmp_path / "wrapped.json"
    wrapped.write_text(json.dumps({"version": 1, "data": rows}), encoding="utf-8")
    lines = write_jsonl(tmp_path / "lines.json", rows)
    for path in (wrapped, lines):
        assert import_problems(path, workers=1).frame["answer"].to_list() == ["2", "3"]
    blank = tmp_path / "blank.jsonl"
    blank.write_bytes(
        b"\xef\xbb\xbf" + b"\n\n".join(json.dumps(r).encode() for r in rows) + b"\n\n"
    )
    assert import_problems(blank, workers=1).frame["answer"].to_list() == ["2", "3"]


def test_a_folder_of_parquet_files(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_parquet(folder / "b.parquet", [{"prompt": "2?", "answer": "2"}])
    write_parquet(folder / "a.parquet", [{"prompt": "1?", "answer": "1"}])
    imported = import_problems(folder, workers=1)
    assert imported.frame["answer"].to_list() == ["1", "2"]
    assert imported.frame["source"].to_list() == ["set", "set"]
    write_parquet(folder / "c.parquet", [{"prompt": "", "answer": "3"}])
    with pytest.raises(InputError, match=r"c\.parquet, row 1: prompt is empty"):
        import_problems(folder, workers=1)


def test_an_imported_table_comes_back_as_it_was(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [VERL, VERL | {"prompt": CHAT["messages"][:2]}])
    first = import_problems(path, verifier="numeric", dedupe=False, workers=1).frame
    assert first.schema == pl.Schema(tables.polars_schema("problems"))
    out = tmp_path / "problems.parquet"
    tables.write_table("problems", first, out)
    again = import_problems(out, dedupe=False, workers=1)
    assert again.report["format"] == "problems"
    assert again.frame.equals(first)
    assert again.frame["verifier"].to_list() == ["numeric"] * 2


def test_duplicates(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1?", "answer": "2"},
        {"prompt": "1+2?", "answer": "3"},
        {"prompt": " 1+1?\n", "answer": "2"},
        {"prompt": "1+2?", "answer": "4"},
    ]
    lines: list[str] = []
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    imported = import_problems(path, log=lines.append, workers=1)
    report = imported.report
    assert (report["rows"], report["problems"], report["duplicates"]) == (4, 2, 2)
    assert imported.frame["answer"].to_list() == ["2", "3"]
    [conflict] = report["conflicts"]
    assert (conflict["row"], conflict["answer"], conflict["kept_answer"]) == (4, "4", "3")
    assert any("read 4 rows" in line and "2 duplicates" in line for line in lines)
    assert any("another gold answer" in line for line in lines)
    kept = import_problems(path, dedupe=False, workers=1).frame["problem_id"].to_list()
    assert len(set(kept)) == 4
    assert kept[3] == f"{kept[1]}-2"


def test_ids_do_not_depend_on_the_limit(tmp_path: Path) -> None:
    unique = [{"prompt": f"{i}?", "answer": i, "id": f"a/{i}"} for i in range(5)]
    path = write_jsonl(tmp_path / "unique.jsonl", unique)
    assert import_problems(path, limit=2, workers=1).frame["problem_id"].to_list() == ["a-0", "a-1"]
    # one id twice: the whole set is named by hashes, also where the limit hides the second
    repeated = [*unique, {"prompt": "6?", "answer": 6, "id": "a 4"}]
    path = write_jsonl(tmp_path / "repeated.jsonl", repeated)
    everything = import_problems(path, workers=1).frame["problem_id"].to_list()
    assert all(len(identifier) == 16 for identifier in everything)
    assert len(set(everything)) == 6
    assert import_problems(path, limit=2, workers=1).frame["problem_id"].to_list() == everything[:2]
    # and the hash is a function of the prompt alone
    alone = write_jsonl(tmp_path / "alone.jsonl", [{"question": "3?", "answer": "x"}])
    assert one(alone)["problem_id"] == everything[3]


def test_gold_answers_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1?", "answer": "1/2"},
        {"prompt": "2?", "answer": "$$"},
        {"prompt": "3?", "answer": "9^{9^{9^9}}!!!"},
        {"prompt": "4?", "answer": "np.arcsin(10/13)"},
        {"prompt": "5?", "answer": "K", "verifier": "choice"},
        {"prompt": "6?", "answer": "C", "verifier": "choice"},
    ]
    lines: list[str] = []
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    imported = import_problems(path, log=lines.append, workers=2, timeout=2.0)
    faults = imported.report["gold_faults"]
    assert {2, 4, 5} <= {fault["row"] for fault in faults} <= {2, 3, 4, 5}
    assert {fault["file"] for fault in faults} == {str(path)}
    assert faults[0]["problem_id"] == imported.frame["problem_id"][1]
    assert any("row 2" in line for line in lines)


def test_a_users_own_verifier(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def judge(response, answer, metadata):\n    return True\n")
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1?", "answer": r"{\boxed{1}}"}])
    problem = one(path, verifier=f"{own}:judge")
    assert problem["verifier"] == f"{own}:judge"
    assert problem["answer"] == r"{\boxed{1}}"  # as it is: the function knows what it means
    with pytest.raises(InputError, match="no function other"):
        import_problems(path, verifier=f"{own}:other", workers=1)
    with pytest.raises(InputError, match="unknown verifier 'maths'"):
        import_problems(path, verifier="maths")


def test_lone_surrogates_and_nul(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(r'{"prompt": "a\ud800b\u0000c", "answer": "1", "note": "\udc00"}')
    problem = one(path)
    assert problem["prompt"][0]["content"] == "a\ufffdb\x00c"
    tables.write_table("problems", import_problems(path, workers=1).frame, tmp_path / "p.parquet")


GOOD = {"prompt": "1+1?", "answer": "2"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "1+1?", "answer": ""}], "row 1: the question has no answer; no problem"),
        ([GOOD | {"answer": None}] * 2, "row 1: the question has no answer; no problem is left"),
        ([GOOD, {"prompt": " \n", "answer": "2"}], "line 2: prompt is empty"),
        ([GOOD, {"prompt": None, "answer": "2"}], "line 2: prompt is empty"),
        ([GOOD, {"answer": "2"}], "line 2: "),
        ([GOOD, {"prompt": 5, "answer": "2"}], "line 2: prompt is a number, not text"),
        ([GOOD, {"prompt": "1?", "answer": {"a": "2"}}], "line 2: answer is an object"),
        ([GOOD, {"prompt": "1?", "answer": [["2"]]}], "line 2: an element of answer is a list"),
        ([GOOD, {"prompt": "1?", "answer": True}], "line 2: answer is true or false"),
        ([GOOD, {"prompt": [], "answer": "2"}], "line 2: prompt is empty"),
        ([GOOD, {"prompt": ["1?"], "answer": "2"}], "line 2: a message in prompt is text"),
        ([GOOD, {"prompt": [{"role": "user"}], "answer": "2"}], "line 2: a message's content"),
        (
            [GOOD, {"prompt": [{"role": "assistant", "content": "x"}], "answer": "2"}],
            "line 2: prompt has no user message",
        ),
        ([GOOD, {"prompt": "1?", "answer": "2", "verifier": "maths"}], "line 2: unknown verifier"),
        ([GOOD, [1]], "line 2: expected an object, found a list"),
        ([{"question": "1?", "answer": "#### 1"}, {"question": "2?", "answer": "2"}], "no ####"),
        ([{"question": "1?", "answer": "#### "}], "row 1: answer after #### is empty"),
        ([{"problem": "1?", "solution": "it is 2"}], r"no \\boxed\{...\} in solution"),
        ([{"problem": "1?", "solution": r"\boxed{2"}], r"no \\boxed\{...\} in solution"),
        ([{"messages": CHAT["messages"][:2]}], "neither a column answer nor an assistant"),
        (
            [{"messages": [*CHAT["messages"][:2], {"role": "assistant", "content": "two"}]}],
            r"no \\boxed\{...\}, .* in the last assistant message",
        ),
        ([VERL | {"reward_model": "2"}], "line 1: reward_model is text"),
        ([VERL | {"reward_model": {"style": "rule"}}], "reward_model.ground_truth is empty"),
        ([{"text": "1+1?", "label": "2"}], "no known schema has the columns text, label"),
        ([], "the file is empty"),
    ],
)
def test_bad_rows(tmp_path: Path, rows: list[Any], words: str) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", rows)
    with pytest.raises(InputError, match=words) as caught:
        import_problems(path, workers=1)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"prompt": "1?", "answer": "2"}\n{"prompt": ', "line 2: not valid JSON"),
        ("a.jsonl", b'{"prompt": "\xff", "answer": "2"}', "line 1: not UTF-8"),
        ("a.jsonl", b"\n \n", "no rows"),
        (
            "a.jsonl",
            b'{"prompt": "1?", "answer": 2}\n{"prompt": "2?", "answer": ' + b"9" * 5000 + b"}",
            "line 2: an integer too long",
        ),
        (
            "a.json",
            b'[{"prompt": "1?",\n "answer": ' + b"9" * 5000 + b"}]",
            "line 2: an integer too long",
        ),
        ("a.jsonl", b"[" * 200_000, "line 1: (not valid JSON|JSON nested too deeply)"),
        ("a.json", b'[\n{"prompt": "1?",}]', "line 2: not valid JSON"),
        ("a.json", b"[]", "no rows"),
        ("a.json", b"5", "expected a list of problems, found a number"),
        ("a.json", b'{"a": [], "b": []}', "an object with 2 lists"),
        ("a.csv", b"", "the file is empty"),
        ("a.csv", b"prompt,answer\n", "no rows"),
        ("a.csv", b"prompt,answer\n1?,2,3\n", "row 1: 3 fields, where the header has 2"),
        ("a.csv", b"prompt,answer\n1?,2\n,3\n", "row 2: prompt is empty"),
        ("a.parquet", b"PAR1 nothing", "not a readable Parquet"),
        ("a.parquet", b"", "the file is empty"),
        ("a.xlsx", b"x", "unknown kind of file"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        import_problems(path, workers=1)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_bad_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [GOOD | {"answer": str(i)} for i in range(999)])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="truncated or damaged"):
        import_problems(path)
    write_parquet(path, [{"prompt": "1?", "answer": {"gold": 1}}])
    with pytest.raises(InputError, match="row 1: answer is an object"):
        import_problems(path)
    with pytest.raises(InputError, match="no such file or folder"):
        import_problems(tmp_path / "gone.jsonl")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="no file of problems in this folder"):
        import_problems(tmp_path / "folder")


def test_a_told_format_names_what_is_missing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD])
    with pytest.raises(InputError, match="column question is missing; format gsm8k needs"):
        import_problems(path, fmt="gsm8k")
    with pytest.raises(InputError, match="column reward_model is missing"):
        import_problems(write_jsonl(path, [{"data_source": "a", "prompt": []}]), fmt="verl")
    with pytest.raises(InputError, match="unknown format 'gsm'"):
        import_problems(path, fmt="gsm")


@pytest.mark.skipif(not BENCHMARKS.exists(), reason="no benchmark data here")
def test_real_benchmarks() -> None:
    imported = import_problems(BENCHMARKS, verifier="exact", workers=1)
    report = imported.report
    assert (report["rows"], report["problems"], report["duplicates"]) == (2259, 1590, 669)
    assert report["sources"] == {
        "aime": 30, "math": 500, "olympiad_bench": 675, "amc": 83, "minerva": 272, "aime25": 30,
    }  # fmt: skip
    assert report["format"] == "verl"
    assert imported.frame["problem_id"].is_unique().all()
    assert not imported.frame["problem_id"].str.contains("/").any()
    few = import_problems(BENCHMARKS, limit=100, workers=2)
    assert few.frame.drop("verifier").equals(imported.frame.head(100).drop("verifier"))
    assert few.report["gold_faults"] == []

"""What formats make of their rows: questions, golds, options, and what is no gold."""

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from exgrpo_cli.errors import InputError
from exgrpo_cli.problems import import_problems
from exgrpo_cli.problems.formats import FORMATS
from exgrpo_cli.problems.values import golds_of
from problem_files import WRITERS, one, write_jsonl, write_parquet

ROOT = Path(__file__).parents[2]
USER = [{"role": "user", "content": "1+1?"}]
PARTS = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
SHAREGPT = [
    {"from": "human", "value": "1+1?"},
    {"from": "gpt", "value": r"It is $\boxed{2}$"},
]


def verl(prompt: Any = USER, **model: Any) -> dict[str, Any]:
    return {"data_source": "s", "prompt": prompt, "reward_model": {"style": "rule"} | model}


# name: the row, its format, and its gold answers
ONE_AND_ONE: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "json_text": (
        {
            "prompt": json.dumps(USER),
            "reward_model": json.dumps({"ground_truth": "2"}),
            "data_source": "s",
        },
        "verl",
        ["2"],
    ),
    "python_text": (
        {
            "prompt": str(USER),
            "reward_model": str({"ground_truth": ["2", "3"]}),
            "data_source": "s",
        },
        "verl",
        ["2", "3"],
    ),
    "golds": (verl(ground_truth=["2", "2.0", "2"]), "verl", ["2", "2.0"]),
    "target": (verl(ground_truth={"target": ["2", "3"]}), "verl", ["2", "3"]),
    "one_target": (verl(ground_truth={"target": "2"}), "verl", ["2"]),
    "golds_as_text": (verl(ground_truth='["2", "3"]'), "verl", ["2", "3"]),
    "interval": (verl(ground_truth="[1, 2]"), "verl", ["[1, 2]"]),
    "no_source": ({"prompt": USER, "reward_model": {"ground_truth": "2"}}, "verl", ["2"]),
    "olympiadbench": (
        {"question": "1+1?", "solution": ["So."], "final_answer": ["2"], "id": 7},
        "olympiadbench",
        ["2"],
    ),
    "olympiadbench_several": (
        {"question": "1+1?", "solution": ["So."], "final_answer": ["2", "4"]},
        "olympiadbench",
        ["2", "4"],
    ),
    "aime": ({"ID": "a", "Problem": "1+1?", "Solution": "x", "Answer": "2"}, "deepscaler", ["2"]),
    "capitals": ({"Problem": "1+1?", "Answer": "2"}, "plain", ["2"]),
    "expected_answer": (
        {"problem": "1+1?", "expected_answer": "2", "generated_solution": "long"},
        "plain",
        ["2"],
    ),
    "metamath": (
        {"query": "1+1?", "response": "Add them.\n#### 2\nThe answer is: 2", "type": "x"},
        "plain",
        ["2"],
    ),
    "said": ({"query": "1+1?", "response": "Add them. The answer is: 2"}, "plain", ["2"]),
    "alpaca": ({"instruction": "1+1?", "input": "", "output": "The answer is 2."}, "plain", ["2"]),
    "completion": ({"prompt": "1+1?", "completion": r"So \boxed{2}."}, "plain", ["2"]),
    "box_list": (
        {"problem": "1+1?", "solution": r"$\boxed{1}$ and $\boxed{-2}$"},
        "math",
        ["1, -2"],
    ),
    "box_list_answer": ({"prompt": "1+1?", "answer": r"\boxed{1}, \boxed{2}"}, "plain", ["1, 2"]),
    "answer_list": ({"question": "1+1?", "answer": ["2"]}, "plain", ["2"]),
    "answers": ({"question": "1+1?", "answers": ["2", "two"]}, "plain", ["2", "two"]),
    "hashes": ({"prompt": "1+1?", "answer": "Add.\n#### 2"}, "plain", ["2"]),
    "matrix": ({"prompt": "1+1?", "answer": "(1\n2)"}, "plain", ["(1\n2)"]),
    "sharegpt": ({"conversations": SHAREGPT}, "sharegpt", ["2"]),
    "sharegpt_answer": ({"conversations": SHAREGPT[:1], "answer": 3}, "sharegpt", ["3"]),
    "parts": ({"messages": [{"role": "user", "content": PARTS}], "answer": "2"}, "chat", ["2"]),
    "parts_said": (
        {
            "messages": [
                {"role": "user", "content": PARTS},
                {"role": "assistant", "content": [{"type": "text", "text": r"\boxed{2}"}]},
            ]
        },
        "chat",
        ["2"],
    ),
    "parts_verl": (verl([{"role": "user", "content": PARTS}], ground_truth="2"), "verl", ["2"]),
    "prompt_as_text": ({"prompt": json.dumps(USER), "answer": "2"}, "plain", ["2"]),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", ONE_AND_ONE)
def test_what_a_row_says(tmp_path: Path, name: str, kind: str) -> None:
    row, fmt, golds = ONE_AND_ONE[name]
    path = WRITERS[kind](tmp_path / f"set.{kind}", [row])
    problem = one(path, verifier="exact")
    assert problem["report"]["format"] == fmt
    assert problem["prompt"] == USER
    assert golds_of(problem["answer"], problem["metadata"]) == golds
    assert problem["answer"] == golds[0]
    assert problem["verifier"] == "exact"
    if len(golds) == 1:
        assert "golds" not in json.loads(problem["metadata"] or "{}")


def test_what_stands_before_the_question_belongs_to_it(tmp_path: Path) -> None:
    row = {"question": "How far?", "final_answer": ["2"], "context": "A car drives."}
    problem = one(write_jsonl(tmp_path / "a.jsonl", [row]))
    assert problem["prompt"][0]["content"] == "A car drives.\n\nHow far?"
    alpaca = {"instruction": "Add.", "input": "1, 1", "output": "2"}
    problem = one(write_jsonl(tmp_path / "b.jsonl", [alpaca]))
    assert problem["prompt"][0]["content"] == "Add.\n\n1, 1"


def test_rows_that_are_chats(tmp_path: Path) -> None:
    said = {"from": "assistant", "ground_truth": {"value": r"\frac{1}{2}"}}
    path = tmp_path / "orz.json"
    path.write_text(json.dumps([[{"from": "human", "value": "1/2?"}, said]]))
    problem = one(path)
    assert (problem["prompt"][0]["content"], problem["answer"]) == ("1/2?", r"\frac{1}{2}")


def test_several_golds_survive_a_second_import(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl", [verl(ground_truth=["2", "K"]) | {"verifier": "choice"}]
    )
    first = import_problems(path, workers=1)
    # every gold is checked: neither is a letter that the verifier knows
    assert [fault["answer"] for fault in first.report["gold_faults"]] == ["2", "K"]
    first.frame.write_parquet(tmp_path / "p.parquet")
    assert import_problems(tmp_path / "p.parquet", workers=1).frame.equals(first.frame)


# --- numbers -----------------------------------------------------------------------------------

NUMBERS = ["1e-7", "6.02e23", "2.5e-5", "1.0", "1E5", "-0.50", "12345678901234567890", "7", "-3"]


@pytest.mark.parametrize("answer", ["{}", "[{}]"])
def test_a_json_number_stays_as_it_is_written(tmp_path: Path, answer: str) -> None:
    values = [answer.replace("{}", number) for number in NUMBERS]
    rows = [f'{{"question": "{i}?", "answer": {value}}}' for i, value in enumerate(values)]
    lines, whole = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines.write_text("\n".join(rows))
    whole.write_text(f"[{', '.join(rows)}]")
    for path in (lines, whole):
        assert import_problems(path, verifier="exact").frame["answer"].to_list() == NUMBERS


@pytest.mark.parametrize("dtype", [pl.Float32, pl.Float64])
def test_numbers_of_a_parquet_file(tmp_path: Path, dtype: Any) -> None:
    values = [1e-7, 6.02e23, 0.1, 3.0, -2.5]
    table = pl.DataFrame({"question": list("abcde"), "answer": pl.Series(values, dtype=dtype)})
    table.write_parquet(tmp_path / "a.parquet")
    imported = import_problems(tmp_path / "a.parquet", verifier="exact")
    assert imported.frame["answer"].to_list() == ["1e-7", "6.02e23", "0.1", "3", "-2.5"]


def test_a_decimal_and_a_column_with_gaps(tmp_path: Path) -> None:
    answers = pl.Series(["1.50", "2.25"]).cast(pl.Decimal(10, 2))
    pl.DataFrame({"question": ["a", "b"], "answer": answers}).write_parquet(tmp_path / "a.parquet")
    assert import_problems(tmp_path / "a.parquet").frame["answer"].to_list() == ["1.50", "2.25"]
    gaps = pl.DataFrame({"question": ["a", "b"], "answer": [7, None]}).cast({"answer": pl.Float64})
    gaps.write_parquet(tmp_path / "b.parquet")
    assert import_problems(tmp_path / "b.parquet").frame["answer"].to_list() == ["7"]


# --- no gold -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    ["proof", "Proof", "notfound", "", "  ", None, "None", "N/A", "n/a", [], [None], ["proof"]],
)
def test_what_is_no_gold_is_left_out_and_counted(tmp_path: Path, answer: Any) -> None:
    numina = {"problem": "Show it.", "solution": "x", "answer": answer, "uuid": "a", "source": "o"}
    rows = [numina, numina | {"problem": "1+1?", "answer": "2", "uuid": "b"}]
    lines: list[str] = []
    imported = import_problems(write_jsonl(tmp_path / "a.jsonl", rows), log=lines.append)
    assert imported.frame["answer"].to_list() == ["2"]
    report = imported.report
    assert (report["rows"], report["problems"], report["without_gold"]) == (2, 1, 1)
    assert report["left_out"][0]["row"] == 1
    assert any("left out 1 rows without a gold answer" in line for line in lines)


def test_a_solution_that_is_missing_is_no_gold(tmp_path: Path) -> None:
    rows = [{"question": "1?", "answer": "So\n#### 1"}, {"question": "2?", "answer": None}]
    report = import_problems(write_jsonl(tmp_path / "a.jsonl", rows)).report
    assert (report["format"], report["problems"], report["without_gold"]) == ("gsm8k", 1, 1)


def test_a_functions_golds_are_its_own(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def judge(response, answer, metadata):\n    return True\n")
    rows = [{"prompt": "1?", "answer": "proof"}, {"prompt": "2?", "answer": '["a"]'}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    imported = import_problems(path, verifier=f"{own}:judge", workers=1)
    assert imported.frame["answer"].to_list() == ["proof", '["a"]']


# --- options -----------------------------------------------------------------------------------

RED_OR_BLUE = "Which is the sky's?\n\nA. red\nB. blue\nC. green\nD. brown\n\n"
QUESTION = "Which is the sky's?"
COLOURS = ["red", "blue", "green", "brown"]
WITH_LETTERS = dict(zip("ABCD", COLOURS, strict=True))

CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "arc": (
        {"id": "x", "choices": {"text": COLOURS, "label": list("ABCD")}, "answerKey": "B"},
        "arc",
    ),
    "arc_numbers": ({"choices": {"text": COLOURS, "label": list("1234")}, "answerKey": "2"}, "arc"),
    "arc_list": (
        {"choices": [{"text": t, "label": k} for k, t in WITH_LETTERS.items()], "answerKey": "B"},
        "arc",
    ),
    "mmlu": ({"choices": COLOURS, "answer": 1, "subject": "astronomy"}, "mmlu"),
    "mmlu_letter": ({"choices": COLOURS, "answer": "B"}, "mmlu"),
    "mmlu_place_as_text": ({"choices": COLOURS, "answer": "1"}, "mmlu"),
    "mmlu_json_text": ({"choices": json.dumps(COLOURS), "answer": "1"}, "mmlu"),
    "mmlu_python_text": ({"choices": str(COLOURS), "answer": "1"}, "mmlu"),
    "mmlu_text": ({"choices": COLOURS, "answer": "blue"}, "mmlu"),
    "mmlu_columns": (WITH_LETTERS | {"answer": "B"}, "mmlu"),
    "agieval": ({"choices": ["(A)red", "(B)blue", "(C)green", "(D)brown"], "gold": [1]}, "mmlu"),
    "mmlu_pro": ({"options": COLOURS, "answer": "B", "answer_index": 1}, "mmlu_pro"),
    "mmlu_pro_index": ({"options": COLOURS, "answer_index": 1}, "mmlu_pro"),
    "supergpqa": (
        {"uuid": "u", "options": COLOURS, "answer": "blue", "answer_letter": "B"},
        "mmlu_pro",
    ),
    "aqua": ({"options": ["A)red", "B)blue", "C)green", "D)brown"], "correct": "B"}, "mmlu_pro"),
    "medqa": ({"options": WITH_LETTERS, "answer": "blue", "answer_idx": "B"}, "mmlu_pro"),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", CHOICES)
def test_options_stand_in_the_prompt(tmp_path: Path, name: str, kind: str) -> None:
    row, fmt = CHOICES[name]
    path = WRITERS[kind](tmp_path / f"set.{kind}", [{"question": QUESTION} | row])
    problem = one(path)
    assert problem["report"]["format"] == fmt
    [message] = problem["prompt"]
    assert message["content"].startswith(RED_OR_BLUE)
    assert (problem["answer"], problem["verifier"]) == ("B", "choice")
    assert one(path, verifier="exact")["verifier"] == "exact"


def test_ten_options_and_the_letter_i(tmp_path: Path) -> None:
    options = [f"{i} m" for i in range(10)]
    row = {"question": "How far?", "options": options, "answer": "I", "answer_index": 8}
    problem = one(write_jsonl(tmp_path / "a.jsonl", [row]))
    assert (problem["answer"], problem["verifier"]) == ("I", "choice")
    assert "\nI. 8 m\nJ. 9 m\n" in problem["prompt"][0]["content"]
    with pytest.raises(InputError, match="11 options; from 2 to 10"):
        one(write_jsonl(tmp_path / "b.jsonl", [row | {"options": [*options, "x"]}]))


@pytest.mark.parametrize("answer", ["AC", "A, C", ["C", "A"], [0, 2], ["red", "green"]])
def test_several_right_options(tmp_path: Path, answer: Any) -> None:
    row = {"question": QUESTION, "options": COLOURS, "answer": answer}
    problem = one(write_jsonl(tmp_path / "a.jsonl", [row]))
    assert (problem["answer"], problem["verifier"]) == ("AC", "choice")
    assert problem["prompt"][0]["content"].endswith("the letters of all right options.")
    assert problem["report"]["gold_faults"] == []


def test_options_of_a_chat_stand_in_its_last_question(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": QUESTION}]
    problem = one(
        write_jsonl(tmp_path / "a.jsonl", [{"prompt": chat, "options": COLOURS, "answer": "B"}])
    )
    assert problem["prompt"][0] == chat[0]
    assert problem["prompt"][1]["content"].startswith(RED_OR_BLUE)


def test_arc_as_it_was_first_published(tmp_path: Path) -> None:
    choices = [{"text": t, "label": k} for k, t in WITH_LETTERS.items()]
    row = {"id": "a", "question": {"stem": QUESTION, "choices": choices}, "answerKey": "B"}
    problem = one(write_jsonl(tmp_path / "a.jsonl", [row]))
    assert problem["prompt"][0]["content"].startswith(RED_OR_BLUE)
    assert (problem["report"]["format"], problem["answer"]) == ("arc", "B")


def test_gpqa_is_shuffled_by_the_question_alone(tmp_path: Path) -> None:
    wrong = {f"Incorrect Answer {i}": f"wrong {i}\n" for i in (1, 2, 3)}
    rows = [{"Question": f"Q{i}?", "Correct Answer": "right\n"} | wrong for i in range(40)]
    first = import_problems(write_jsonl(tmp_path / "a.jsonl", rows), workers=1)
    again = import_problems(
        write_parquet(tmp_path / "b.parquet", rows[::-1]), source="a", workers=1
    )
    assert first.report["format"] == "gpqa"
    assert again.frame[::-1].equals(first.frame)
    for prompt, gold in first.frame.select("prompt", "answer").iter_rows():
        assert f"\n{gold}. right\n" in prompt[0]["content"]
        assert {f"wrong {i}" in prompt[0]["content"] for i in (1, 2, 3)} == {True}
    assert set(first.frame["answer"]) == set("ABCD")
    assert set(first.frame["verifier"]) == {"choice"}
    assert all("wrong" not in (metadata or "") for metadata in first.frame["metadata"])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"options": COLOURS, "answer": "E"}, "names none of the 4 options"),
        ({"options": COLOURS, "answer": 4}, "answer is 4, which is no place among 4 options"),
        ({"options": COLOURS, "answer": "B", "answer_index": 2}, "the columns disagree"),
        ({"options": ["red"], "answer": "A"}, "1 options; from 2 to 10"),
        ({"options": ["red", " "], "answer": "A"}, "an option is empty"),
        ({"options": ["red", None], "answer": "A"}, "an option is empty"),
        ({"options": ["red", ["blue"]], "answer": "A"}, "an option in options is a list"),
        ({"options": "red, blue", "answer": "A"}, "options is text that is no list"),
        ({"choices": "['red' 'blue']", "answer": "A"}, "choices is text that is no list"),
        ({"options": ["1", "2", "3"], "answer": "2"}, "names several options, by place or text"),
        ({"options": COLOURS, "answer": None}, "no column names the right option"),
    ],
)
def test_options_that_are_wrong(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": QUESTION} | row])
    with pytest.raises(InputError, match=words):
        one(path)


def test_options_are_never_lost_in_silence(tmp_path: Path) -> None:
    plain = [{"question": f"{i}?", "answer": i} for i in range(30)]
    path = write_jsonl(
        tmp_path / "a.jsonl", [*plain, {"question": "?", "options": COLOURS, "answer": "B"}]
    )
    with pytest.raises(InputError, match="line 31: it has options, unlike the first rows"):
        import_problems(path)
    rows = [{"question": "?", "options": COLOURS, "answer": "B"}, *plain]
    mixed = import_problems(write_jsonl(path, rows)).frame
    assert mixed["verifier"].to_list() == ["choice"] + ["math"] * 30
    told = import_problems(path, "plain", verifier="exact").frame
    assert told["prompt"][0][0]["content"] == "?"


# --- what the user says ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "columns", "question", "gold"),
    [
        ({"Frage": "1+1?", "Wert": "2"}, {"question": "Frage", "answer": "Wert"}, "1+1?", "2"),
        ({"prompt": "no", "Frage": "1+1?", "answer": "2"}, {"question": "Frage"}, "1+1?", "2"),
        (
            {"Frage": "1+1?", "a": "So\n#### 1,2"},
            {"question": "Frage", "answer": "a"},
            "1+1?",
            "1,2",
        ),
        (
            {"Frage": "1+1?", "a": "So.\nIt is $\\boxed{2}$."},
            {"question": "Frage", "answer": "a"},
            "1+1?",
            "2",
        ),
        (
            {"q": "1+1?", "info": {"gold": {"value": ["2"]}}},
            {"question": "q", "answer": "info.gold.value"},
            "1+1?",
            "2",
        ),
        (
            {"q": "1+1?", "o": ["2", "x"], "a": "A"},
            {"question": "q", "answer": "a", "options": "o"},
            "1+1?\n\nA. 2\nB. x\n\nAnswer with the letter of the right option.",
            "A",
        ),
    ],
)
def test_told_columns(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], question: str, gold: str
) -> None:
    row |= {"nr": "7", "von": "me"}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    problem = one(path, columns=columns | {"id": "nr", "source": "von"}, verifier="exact")
    assert problem["prompt"] == [{"role": "user", "content": question}]
    assert problem["answer"] == gold
    assert (problem["problem_id"], problem["source"]) == ("7", "me")


def test_told_columns_that_are_wrong(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"Frage": "1+1?", "Wert": "2"}])
    with pytest.raises(InputError, match="no column Fage for question; found are Frage, Wert"):
        one(path, columns={"question": "Fage", "answer": "Wert"})
    with pytest.raises(InputError, match="--columns frage=Frage: known are question, answer"):
        one(path, columns={"frage": "Frage"})
    with pytest.raises(InputError, match="--columns question=NAME,answer=NAME"):
        one(path)
    chat = write_jsonl(path, [verl(ground_truth="2")])
    with pytest.raises(InputError, match="format verl reads"):
        one(chat, fmt="verl", columns={"question": "prompt"})


def test_code_that_only_the_data_names_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(r, a, m): return True\n")
    row = {"prompt": "1?", "answer": "2", "verifier": f"{own}:f"}
    path = write_jsonl(tmp_path / "a.jsonl", [row, {"prompt": "2?", "answer": "2"}])
    with pytest.raises(InputError, match=r"line 1: the data names verifier .*own\.py:f"):
        import_problems(path)
    skipped = import_problems(path, skip_bad=True)
    assert (skipped.report["bad"], skipped.frame.height) == (1, 1)
    assert not (tmp_path / "ran").exists()
    trusted = import_problems(path, verifier=f"{own}:f", workers=1)
    assert trusted.frame["verifier"].to_list() == [f"{own}:f"] * 2


def test_which_format_was_taken_is_said(tmp_path: Path) -> None:
    lines: list[str] = []
    row = {"problem": "1?", "solution": r"\boxed{3}", "answer": "2"}
    one(write_jsonl(tmp_path / "a.jsonl", [row]), log=lines.append)
    assert any("read as deepscaler; math would fit too" in line for line in lines)


def test_every_format_is_documented() -> None:
    text = (ROOT / "data/README.md").read_text(encoding="utf-8")
    for name in FORMATS:
        assert re.search(rf"^\| `{name}` \|", text, re.MULTILINE), f"data/README.md lacks {name}"

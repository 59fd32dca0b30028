"""Trajectories of others, in the formats that they come in."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from exgrpo_cli.errors import InputError
from exgrpo_cli.problems.readers import RowError
from exgrpo_cli.problems.trajectories import Answered, read_answered
from exgrpo_cli.stages.imports import without_opening

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
SAID = {"role": "assistant", "content": "2"}
VERL = {"data_source": "set", "prompt": CHAT, "extra_info": {"index": 7}}
OPENR1 = {"problem": "1 + 1?", "answer": "2", "uuid": "u-1", "messages": [CHAT[1], SAID]}


def read(folder: Path, row: dict[str, Any], **told: str) -> Answered:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (found,) = read_answered(file, told)
    assert isinstance(found, Answered)
    return found


@pytest.mark.parametrize(
    ("row", "ids", "responses"),
    [
        (VERL | {"target": [SAID], "reward_model": {"ground_truth": "2"}}, ("set-7",), ["2"]),
        (VERL | {"reward_model": {"ground_truth": "2", "candidates": ["2", "Two: 2"]}},
         ("set-7",), ["2", "Two: 2"]),
        (VERL | {"reward_model": {"ground_truth": "2", "candidates": None}}, ("set-7",), []),
        (OPENR1 | {"generations": ["a", "b", "c"], "finish_reasons": ["stop", "length", "stop"],
                   "is_reasoning_complete": [True, True, False]}, ("u-1",), ["a"]),
        (OPENR1 | {"generations": ["a", "b"], "finish_reasons": None}, ("u-1",), ["a", "b"]),
        (OPENR1, ("u-1",), ["2"]),
        ({"prompt": "1 + 1?", "response": "It is 2.", "answer": "2", "id": 3}, (), ["It is 2."]),
        ({"Question": " 1  + 1? ", "completion": "[2]"}, (), ["[2]"]),
        ({"query": "1 + 1?", "responses": '["a", "b"]', "target": 2}, (), ["a", "b"]),
        ({"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]},
         (), ["2"]),
    ],
)  # fmt: skip
def test_known_formats(tmp_path: Path, row: dict, ids: tuple, responses: list[str]) -> None:
    found = read(tmp_path, row)
    assert (found.question, found.ids, found.responses) == ("1 + 1?", ids, responses)
    assert found.cut == (2 if "is_reasoning_complete" in row else 0)


def test_a_problem_of_the_run_may_be_named_alone(tmp_path: Path) -> None:
    found = read(tmp_path, {"problem_id": "17", "answer": "2", "output": "x"})
    assert (found.question, found.ids, found.responses) == (None, ("17",), ["x"])
    row = {"nr": 17, "Frage": "1 + 1?", "said": {"by": "me", "text": "two"}}
    found = read(tmp_path, row, question="Frage", response="said.text", id="nr", source="said.by")
    assert (found.question, found.ids, found.responses) == ("1 + 1?", ("17",), ["two"])
    assert found.source == "me"


def test_parquet_is_read_with_its_long_columns(tmp_path: Path) -> None:
    file = tmp_path / "pool.parquet"
    pl.DataFrame([{"problem": "1 + 1?", "generations": ["a", "b"]}]).write_parquet(file)
    (found,) = read_answered(file, {})
    assert isinstance(found, Answered)
    assert found.responses == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1 + 1?", "answer": "2"}, "no response that is text; known are the columns"),
        ({"response": "2"}, "neither a question nor a problem_id"),
        ({"prompt": "1 + 1?", "response": 2}, "no response that is text; known"),
        ({"prompt": "1 + 1?", "responses": ["2", 3]}, "responses is a number, not text"),
        ({"prompt": "1 + 1?", "target": [CHAT[1], SAID, CHAT[1], SAID]}, "has 2 messages of"),
    ],
)
def test_what_cannot_be_read_names_its_row(tmp_path: Path, row: dict, words: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(InputError) as caught:
        list(read_answered(file, {}))
    assert str(caught.value).startswith(f"{file}, line 2: ")
    assert words in str(caught.value)
    _, bad = read_answered(file, {}, skip_bad=True)
    assert isinstance(bad, RowError)
    with pytest.raises(InputError, match="known are response, question, id, source"):
        list(read_answered(file, {"answer": "x"}))


@pytest.mark.parametrize(
    ("text", "prompt", "said"),
    [
        ("<think>\nWell.</think>2", "assistant\n<think>\n", "Well.</think>2"),
        ("<think>\nWell.</think>2", "assistant\n<think>", "\nWell.</think>2"),
        ("<think>Well.</think>2", "assistant\n", "<think>Well.</think>2"),
        ("Well.</think>2", "assistant\n<think>\n", "Well.</think>2"),
    ],
)
def test_a_thought_is_opened_once(text: str, prompt: str, said: str) -> None:
    assert without_opening(text, prompt) == said

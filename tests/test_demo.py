"""The demo's problems, tokenizer and model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from exgrpo_cli.demo import (
    PHASES,
    SLIPS,
    demo_problems,
    draw_chain,
    make_demo_model,
    make_tokenizer,
    prompt_of,
    work_out,
    write_demo_problems,
)
from exgrpo_cli.errors import InputError

DATA = Path(__file__).parent.parent / "data" / "arithmetic"


def evaluate(prompt: str) -> int:
    """An evaluator of its own: nested brackets, Python's arithmetic, reduced once at the end."""
    expression = ""
    for token in re.findall(r"\d+|[-+*]", prompt.removesuffix("=")):
        expression = (
            f"({expression}{token})" if token.isdigit() and expression else (expression + token)
        )
    return int(eval(expression)) % 20


def operations(prompt: str) -> int:
    return len(re.findall(r"[-+*]", prompt))


def test_the_evaluator_reads_from_left_to_right() -> None:
    assert evaluate("7+5*3-8=") == 8
    assert evaluate("0-3*9=") == 13


@pytest.mark.parametrize(
    ("split", "count", "fewest", "most"),
    [("train", 2000, 2, 6), ("heldout", 300, 2, 6), ("ood", 200, 7, 9)],
)
def test_problems(split: str, count: int, fewest: int, most: int) -> None:
    rows = demo_problems()[split]
    assert len(rows) == count
    for row in rows:
        assert set(row) == {"id", "prompt", "answer", "source"}
        assert row["answer"] == str(evaluate(row["prompt"])), row
        assert row["source"] == ("arithmetic-long" if split == "ood" else "arithmetic")
    lengths = [operations(row["prompt"]) for row in rows]
    assert {*lengths} == {*range(fewest, most + 1)}
    share = count / (most - fewest + 1)
    assert all(lengths.count(n) > 0.7 * share for n in range(fewest, most + 1))
    answers = [row["answer"] for row in rows]
    assert max(answers.count(str(n)) for n in range(20)) < 0.2 * count


def test_no_problem_is_in_two_splits_or_twice() -> None:
    rows = [row for split in demo_problems().values() for row in split]
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert len({row["id"] for row in rows}) == len(rows)


def test_the_committed_files_are_what_the_code_makes(tmp_path: Path) -> None:
    paths = write_demo_problems(tmp_path / "out")
    assert {path.name for path in DATA.glob("*.jsonl")} == {path.name for path in paths.values()}
    for split, path in paths.items():
        assert path.read_bytes() == (DATA / f"{split}.jsonl").read_bytes(), split
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert rows == demo_problems()[split]


def test_problems_are_not_written_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")
    with pytest.raises(InputError, match="taken: is a file"):
        write_demo_problems(tmp_path / "taken")


def test_work_is_written_out_step_by_step() -> None:
    chain = (7, (("+", 5), ("*", 3), ("-", 8)))
    assert prompt_of(chain) == "7+5*3-8="
    assert work_out(chain) == r"7+5=12;12*3=16;16-8=8;\boxed{8}"


def test_slips_are_as_often_as_stated_and_carried_on() -> None:
    rng = random.Random(0)
    wrong = dict.fromkeys(SLIPS, 0)
    seen = dict.fromkeys(SLIPS, 0)
    for _ in range(3000):
        chain = draw_chain(rng, 1, 6)
        text = work_out(chain, SLIPS, rng)
        *steps, box = text.split(";")
        value = str(chain[0])
        for step, (operator, operand) in zip(steps, chain[1], strict=True):
            left, result = step.split("=")
            assert left == f"{value}{operator}{operand}"
            off = (int(result) - evaluate(f"{left}=")) % 20
            assert off in {0, 1, 19}
            seen[operator] += 1
            wrong[operator] += off != 0
            value = result
        assert box == f"\\boxed{{{value}}}"
    for operator, probability in SLIPS.items():
        assert wrong[operator] / seen[operator] == pytest.approx(probability, abs=0.03)


# --- tokenizer --------------------------------------------------------------------------------


def test_the_tokenizer_goes_there_and_back_and_reloads(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = "7+5*3-8=7+5=12;12*3=16;16-8=8;\\boxed{8}\nWhat, ~is~  this?  "
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        ids = one.encode(text, add_special_tokens=False)
        assert len(ids) == len(text)
        assert one.decode(ids) == text
        assert one.decode([*ids, one.eos_token_id], skip_special_tokens=True) == text
        assert one(text).input_ids == ids  # no token is added
        assert one.chat_template is None
        assert len({one.pad_token_id, one.eos_token_id, one.unk_token_id}) == 3
        unknown = one.encode("7é+∑", add_special_tokens=False)
        assert len(unknown) == 4
        assert unknown.count(one.unk_token_id) == 2


# --- model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    folder = tmp_path_factory.mktemp("demo") / "new" / "model"
    lines: list[str] = []
    return folder, make_demo_model(folder, log=lines.append, steps=(3, 2), samples=8), lines


def test_the_folder_opens_in_transformers(made: tuple[Path, dict[str, Any], list[str]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder, result, lines = made
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert str(model.dtype) == "torch.float32"
    assert model.config.architectures == ["Qwen2ForCausalLM"]
    assert model.config.vocab_size == len(tokenizer)
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert generation.pad_token_id == tokenizer.pad_token_id
    assert result["path"] == str(folder)
    assert result["parameters"] == model.num_parameters()
    assert 500_000 < result["parameters"] < 1_000_000
    assert 0.0 <= result["pass_at_1"] <= 1.0
    assert result["loss"] > 0
    assert any("step 3 of 3" in line for line in lines)
    json.dumps(result)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]  # nothing temporary


def test_the_same_seed_gives_the_same_weights(
    made: tuple[Path, dict[str, Any], list[str]], tmp_path: Path
) -> None:
    import torch

    torch.manual_seed(12345)  # what the caller did before does not matter
    before = torch.get_rng_state()
    make_demo_model(tmp_path / "same", steps=(3, 2), samples=0)
    assert torch.equal(before, torch.get_rng_state())
    make_demo_model(tmp_path / "other", seed=1, steps=(3, 2), samples=0)
    weights = (made[0] / "model.safetensors").read_bytes()
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights


def test_the_warm_up_learns(tmp_path: Path) -> None:
    lines: list[str] = []
    result = make_demo_model(tmp_path / "m", steps=(20, 1), samples=0, log=lines.append)
    first_phase = float(lines[0].rsplit(" ", 1)[1])
    assert first_phase < 2.5  # guessing among the characters costs log(99) = 4.6
    assert result["pass_at_1"] is None


@pytest.mark.slow
def test_the_command_makes_a_model_that_has_something_to_learn(exgrpo: Any, tmp_path: Path) -> None:
    """The whole warm-up; a model that is always or never right would learn nothing by replay."""
    result = json.loads(exgrpo("demo-model", tmp_path / "model", "--json").stdout)
    assert 0.1 < result["pass_at_1"] < 0.45


def test_the_warm_up_never_sees_what_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    from exgrpo_cli import demo

    assert len(PHASES) == 2
    held_out = {row["prompt"] for row in demo_problems()["heldout"]}
    # Chains that come from the held-out set half of the time are drawn again.
    rng = random.Random(0)
    chains = []
    while len(chains) < 20:
        chain = draw_chain(rng, 1, 6)
        if prompt_of(chain) not in held_out:
            chains.append(chain)
    known = [
        (int(re.match(r"\d+", p)[0]), tuple((o, int(n)) for o, n in re.findall(r"([-+*])(\d)", p)))  # type: ignore[index]
        for p in sorted(held_out)[:20]
    ]
    monkeypatch.setattr(demo, "draw_chain", lambda rng, low, high: rng.choice(chains + known))
    tokenizer = make_tokenizer()
    for ids, labels in demo._batch(tokenizer, rng, held_out, None):
        for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
            text = tokenizer.decode(row, skip_special_tokens=True)
            prompt = text[: text.index("=") + 1]
            assert prompt not in held_out
            assert evaluate(prompt) == int(re.findall(r"\d+", text)[-1])
            # the prompt and the padding are not learnt, the response and its end are
            learnt = [token for token in label if token >= 0]
            assert tokenizer.decode(learnt) == text[len(prompt) :] + "<eos>"


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"taken: exists and is not empty"):
        make_demo_model(taken, steps=(1, 1), samples=0)
    assert (taken / "notes.txt").read_text() == "mine"
    with pytest.raises(InputError, match="is a file"):
        make_demo_model(taken / "notes.txt", steps=(1, 1), samples=0)
    make_demo_model(taken, steps=(1, 1), samples=0, force=True)
    assert not (taken / "notes.txt").exists()
    assert (taken / "model.safetensors").exists()
    (tmp_path / "empty").mkdir()
    make_demo_model(tmp_path / "empty", steps=(1, 1), samples=0)
    assert (tmp_path / "empty" / "config.json").exists()


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from exgrpo_cli import demo

    def broken(*arguments: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_pass_at_1", broken)
    with pytest.raises(KeyboardInterrupt):
        make_demo_model(tmp_path / "m", steps=(1, 1), samples=4)
    assert list(tmp_path.iterdir()) == []

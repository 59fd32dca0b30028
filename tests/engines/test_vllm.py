"""The real vLLM engine, on a tiny random model; one engine for all tests, since it starts slowly.

Where vLLM is not installed these tests skip; with EXGRPO_REQUIRE_VLLM=1 they fail instead.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from exgrpo_cli.demo import make_tokenizer
from exgrpo_cli.engines import Completion, Engine, Request, Sampling, open_engine
from exgrpo_cli.errors import InputError, StageError
from exgrpo_cli.recipe import Recipe, parse_recipe
from making import adapter_of, qwen, save

pytestmark = pytest.mark.vllm

ENDS = [1, 20, 21, 22]
PROMPT, NEW = 20, 24


def require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        message = "vLLM is not installed"
        if os.environ.get("EXGRPO_REQUIRE_VLLM") == "1":
            pytest.fail(f"{message}, and EXGRPO_REQUIRE_VLLM=1")
        pytest.skip(message)


def build(folder: Path, seed: int) -> Path:
    """A tiny random Qwen2 with several end tokens and a generation_config that must not matter."""
    return save(
        qwen(seed, vocab_size=len(make_tokenizer()), hidden_size=64, num_hidden_layers=2,
             intermediate_size=96, tie_word_embeddings=False),
        folder, eos_token_id=ENDS, pad_token_id=0, do_sample=True, top_k=3, repetition_penalty=1.5,
    )  # fmt: skip


def adapter(base: Path, folder: Path, seed: int) -> Path:
    adapter_of(base, seed).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    require_vllm()
    root = tmp_path_factory.mktemp("policies")
    first = build(root / "first", 0)
    return {
        "first": first,
        "second": build(root / "second", 1),
        "adapter": adapter(first, root / "adapter", 2),
        "other-adapter": adapter(first, root / "other-adapter", 3),
    }


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return parse_recipe(
        {
            "rollout": {"engine": "vllm", "max_prompt_tokens": PROMPT, "max_new_tokens": NEW},
            "lora": {"enabled": True, "rank": 4},
        },
        "test",
    )


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path], recipe: Recipe) -> Iterator[Engine]:
    opened = open_engine(recipe, str(folders["first"]))
    yield opened
    opened.close()


def requests(count: int, first_seed: int = 2**61) -> list[Request]:
    return [
        Request(i, [(7 * i + 3 * j) % 90 + 4 for j in range(1 + i % 9)], first_seed + i)
        for i in range(count)
    ]


def by_index(completions: Iterator[Completion]) -> dict[int, Completion]:
    rows = list(completions)
    table = {row.index: row for row in rows}
    assert len(table) == len(rows)
    return table


def check_against_forward(
    folder: Path, rows: dict[int, Completion], asked: list[Request], temperature: float = 1.0
) -> None:
    """The log-probabilities equal those of one pass over the whole sequence."""
    from exgrpo_cli.models import load_model
    from exgrpo_cli.recipe import ModelSettings

    model = load_model(str(folder), ModelSettings(), torch.device("cpu"), torch.float32)
    assert set(rows) == {request.index for request in asked}
    for request in asked:
        row = rows[request.index]
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt_ids + row.token_ids])).logits
        log_p = torch.log_softmax(logits[0, len(request.prompt_ids) - 1 : -1] / temperature, -1)
        expected = log_p.gather(1, torch.tensor(row.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(row.logprobs), expected, atol=1e-3), request.index


def mean_entropy(folder: Path, request: Request, row: Completion, temperature: float) -> float:
    from exgrpo_cli.models import load_model
    from exgrpo_cli.recipe import ModelSettings

    model = load_model(str(folder), ModelSettings(), torch.device("cpu"), torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([request.prompt_ids + row.token_ids])).logits[0]
    log_p = torch.log_softmax(logits[len(request.prompt_ids) - 1 : -1] / temperature, -1)
    return float(-(log_p.exp() * log_p).sum(-1).mean())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_sampled_distribution(
    engine: Engine, folders: dict[str, Path], temperature: float
) -> None:
    engine.load(str(folders["first"]))
    asked = requests(20)
    rows = by_index(engine.generate(asked, Sampling(temperature, NEW, entropies=True)))
    check_against_forward(folders["first"], rows, asked, temperature)
    assert all(row.entropies is None and row.topk_entropy is None for row in rows.values())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_most_probable_tokens_estimate_the_mean_entropy(
    engine: Engine, folders: dict[str, Path], temperature: float
) -> None:
    engine.load(str(folders["first"]))
    asked = requests(20)
    rows = by_index(engine.generate(asked, Sampling(temperature, NEW, entropy_top_k=20)))
    check_against_forward(folders["first"], rows, asked, temperature)
    for request in asked:
        row = rows[request.index]
        estimate = row.topk_entropy
        assert estimate is not None
        assert estimate == pytest.approx(
            mean_entropy(folders["first"], request, row, temperature), abs=0.1
        )


def test_rows_end_by_any_end_token_or_by_length(engine: Engine, folders: dict[str, Path]) -> None:
    engine.load(str(folders["first"]))
    rows = by_index(engine.generate(requests(60), Sampling(1.0, 16)))
    last = set()
    for row in rows.values():
        ends = [token in ENDS for token in row.token_ids]
        assert not any(ends[:-1])
        assert row.finish_reason == ("stop" if ends[-1] else "length")
        assert len(row.token_ids) == len(row.logprobs) <= 16
        assert len(row.token_ids) == 16 or ends[-1]
        last |= {row.token_ids[-1]} if ends[-1] else {None}
    assert None in last
    assert len(last) > 2


def test_a_rows_sample_depends_on_its_seed_alone(engine: Engine, folders: dict[str, Path]) -> None:
    engine.load(str(folders["first"]))
    asked = requests(30)
    reference = by_index(engine.generate(asked, Sampling(1.0, NEW)))
    part = by_index(engine.generate(list(reversed(asked))[:11], Sampling(1.0, NEW)))
    assert len(part) == 11
    assert all(row.token_ids == reference[i].token_ids for i, row in part.items())
    others = by_index(engine.generate(requests(30, first_seed=5), Sampling(1.0, NEW)))
    assert sum(others[i].token_ids != reference[i].token_ids for i in range(30)) > 20


def test_temperature_zero_is_greedy(engine: Engine, folders: dict[str, Path]) -> None:
    engine.load(str(folders["first"]))
    asked = requests(6)
    rows = by_index(engine.generate(asked, Sampling(0.0, NEW)))
    check_against_forward(folders["first"], rows, asked)
    again = by_index(engine.generate(requests(6, first_seed=77), Sampling(0.0, NEW)))
    assert all(again[i].token_ids == rows[i].token_ids for i in range(6))


def test_load_reads_other_weights_into_the_running_model(
    engine: Engine, folders: dict[str, Path]
) -> None:
    engine.load(str(folders["first"]))
    asked = requests(12)
    first = by_index(engine.generate(asked, Sampling(1.0, NEW)))
    engine.load(str(folders["second"]))
    second = by_index(engine.generate(asked, Sampling(1.0, NEW)))
    check_against_forward(folders["second"], second, asked)
    assert sum(first[i].token_ids != second[i].token_ids for i in range(12)) > 8
    engine.load(str(folders["first"]))
    back = by_index(engine.generate(asked, Sampling(1.0, NEW)))
    assert all(back[i].token_ids == first[i].token_ids for i in range(12))


def test_adapters_are_put_on_the_running_model_one_after_another(
    engine: Engine, folders: dict[str, Path], tmp_path: Path
) -> None:
    asked = requests(8)
    place = tmp_path / "adapter"  # the same path with other weights must not be mistaken
    for name in ("adapter", "other-adapter"):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folders[name], place)
        engine.load(str(place))
        rows = by_index(engine.generate(asked, Sampling(1.0, NEW)))
        check_against_forward(place, rows, asked)
    engine.load(str(folders["second"]))
    rows = by_index(engine.generate(asked, Sampling(1.0, NEW)))
    check_against_forward(folders["second"], rows, asked)
    engine.load(str(folders["adapter"]))  # its base is another model than the one loaded
    rows = by_index(engine.generate(asked, Sampling(1.0, NEW)))
    check_against_forward(folders["adapter"], rows, asked)


def test_sleep_is_for_gpus(engine: Engine, folders: dict[str, Path]) -> None:
    if not torch.cuda.is_available():
        assert not engine.sleep()
    engine.load(str(folders["first"]))
    rows = by_index(engine.generate(requests(4), Sampling(1.0, NEW)))
    check_against_forward(folders["first"], rows, requests(4))


@pytest.mark.parametrize("level", [1, 2])
def test_load_wakes_a_sleeping_engine(
    engine: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """On a CPU vLLM keeps the memory, but goes through the same states."""
    monkeypatch.setattr(engine, "_can_sleep", True)
    monkeypatch.setattr(engine, "_lora_rank", engine._lora_rank if level == 1 else 0)
    asked = requests(6)
    for name in ("second", "first", "first"):
        assert engine.sleep()
        assert engine.sleep()  # is asleep already
        assert engine.llm.llm_engine.is_sleeping()
        engine.load(str(folders[name]))
        assert not engine.llm.llm_engine.is_sleeping()
        rows = by_index(engine.generate(asked, Sampling(1.0, NEW)))
        check_against_forward(folders[name], rows, asked)


def test_rows_that_are_not_waited_for_do_not_come_up_later(
    engine: Engine, folders: dict[str, Path]
) -> None:
    engine.load(str(folders["first"]))
    generator = engine.generate(requests(40), Sampling(1.0, NEW))
    next(generator)
    generator.close()  # type: ignore[attr-defined]
    asked = [Request(1000 + r.index, r.prompt_ids, r.seed) for r in requests(5)]
    rows = by_index(engine.generate(asked, Sampling(1.0, NEW)))
    assert set(rows) == {1000, 1001, 1002, 1003, 1004}
    assert list(engine.generate([], Sampling(1.0, NEW))) == []


def test_more_prompt_tokens_than_one_batch_takes(engine: Engine) -> None:
    """On a CPU a seeded row cannot bear its prompt being split over two batches."""
    asked = [Request(i, [4 + i % 90] * 31, i) for i in range(300)]
    rows = by_index(engine.generate(asked, Sampling(1.0, 2)))
    assert len(rows) == 300


def test_prompts_that_cannot_be_sampled_are_refused(
    engine: Engine, folders: dict[str, Path], tmp_path: Path
) -> None:
    engine.load(str(folders["first"]))
    with pytest.raises(InputError, match=r"request 3 has 0 prompt tokens"):
        list(engine.generate([Request(3, [], 0)], Sampling(1.0, NEW)))
    with pytest.raises(InputError, match=r"request 4 has 99 prompt tokens; .* takes 1 to 43"):
        list(engine.generate([Request(4, [5] * 99, 0)], Sampling(1.0, NEW)))
    # a prompt that leaves less room than the limit is cut off at the engine's length
    (row,) = engine.generate([Request(5, [5] * 40, 0)], Sampling(1.0, NEW))
    assert len(row.token_ids) <= PROMPT + NEW - 40
    with pytest.raises(InputError, match="no such policy"):
        engine.load(str(tmp_path / "nowhere"))


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real ``vllm serve`` with a policy and an adapter on it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = tmp_path_factory.mktemp("server") / "said.txt"
    with said.open("w") as file:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server",
                "--model", str(folders["first"]), "--host", "127.0.0.1", "--port", str(port),
                "--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill",
                "--max-model-len", str(PROMPT + NEW), "--max-num-batched-tokens", "4096",
                "--kv-cache-memory-bytes", str(1 << 28),
                "--enable-lora", "--max-lora-rank", "8",
                "--lora-modules", f"mine={folders['adapter']}",
            ],
            stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except OSError:
                assert process.poll() is None, said.read_text()[-3000:]
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def server_recipe(url: str, **rollout: Any) -> Recipe:
    lengths = {"max_prompt_tokens": PROMPT, "max_new_tokens": NEW}
    return parse_recipe({"rollout": {"engine": "server", "url": url, **lengths, **rollout}}, "test")


def test_a_running_server_gives_what_the_own_engine_gives(
    engine: Engine, server: str, folders: dict[str, Path]
) -> None:
    remote = open_engine(server_recipe(server), str(folders["first"]))
    asked = requests(30)
    for name in ("first", "adapter"):
        engine.load(str(folders[name]))
        own = by_index(engine.generate(asked, Sampling(1.0, NEW, entropy_top_k=5)))
        remote.load(str(folders[name]))
        rows = by_index(remote.generate(asked, Sampling(1.0, NEW, entropy_top_k=5)))
        check_against_forward(folders[name], rows, asked)
        assert {i: r.token_ids for i, r in rows.items()} == {i: r.token_ids for i, r in own.items()}
        for index, row in rows.items():
            assert row.finish_reason == own[index].finish_reason
            assert row.topk_entropy == pytest.approx(own[index].topk_entropy, abs=1e-3)
    plain = by_index(remote.generate(asked, Sampling(1.0, 3)))
    assert all(row.token_ids == rows[i].token_ids[:3] for i, row in plain.items())


def test_what_a_server_cannot_do_is_said(
    server: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = open_engine(server_recipe(server), str(folders["first"]))
    with pytest.raises(InputError, match=r"serves .*first \(as .*, not .*second; start it with"):
        remote.load(str(folders["second"]))
    with pytest.raises(InputError, match="logprobs-mode processed_logprobs"):
        list(remote.generate(requests(3), Sampling(0.6, NEW)))
    with pytest.raises(InputError, match=r"takes 44 tokens .* the recipe asks for 120"):
        open_engine(server_recipe(server, max_new_tokens=100), str(folders["first"]))
    with pytest.raises(InputError, match=r"status 400: .*out of vocabulary"):
        list(remote.generate([Request(0, [5000], 1)], Sampling(1.0, NEW)))
    with pytest.raises(InputError, match="needs the address"):
        open_engine(server_recipe("node7"), str(folders["first"]))
    with pytest.raises(InputError, match="is vllm serve running there"):
        open_engine(server_recipe("http://127.0.0.1:9"), str(folders["first"]))
    monkeypatch.setattr("exgrpo_cli.engines.server._WAITS", (0.0, 0.01))
    remote._url = "http://127.0.0.1:9"  # type: ignore[attr-defined]
    with pytest.raises(StageError, match=r"no answer .*the same command goes on"):
        list(remote.generate(requests(3), Sampling(1.0, NEW)))


def test_a_server_drops_rows_that_are_not_waited_for(server: str, folders: dict[str, Path]) -> None:
    remote = open_engine(server_recipe(server), str(folders["first"]))
    generator = remote.generate(requests(200), Sampling(1.0, NEW))
    next(generator)
    generator.close()  # type: ignore[attr-defined]
    rows = by_index(remote.generate(requests(5), Sampling(1.0, NEW)))
    assert set(rows) == {0, 1, 2, 3, 4}


def test_close_ends_every_process(engine: Engine) -> None:
    """Last: the engine cannot be used afterwards."""
    import psutil

    def ours() -> list[str]:
        found = []
        for process in psutil.Process().children(recursive=True):
            words = " ".join(process.cmdline())
            lineage = [words, *(" ".join(parent.cmdline()) for parent in process.parents())]
            if "resource_tracker" in words or any("api_server" in line for line in lineage):
                continue
            found.append(words or process.name())
        return found

    assert ours()
    engine.close()
    assert ours() == []
    engine.close()  # twice does no harm

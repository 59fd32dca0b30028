"""The transformers engine against plain forward passes of the same model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from exgrpo_cli.demo import make_tokenizer
from exgrpo_cli.engines import Completion, Request, Sampling, open_engine
from exgrpo_cli.engines.transformers import (
    TransformersEngine,
    choose,
    row_uniforms,
)
from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe import Recipe, parse_recipe
from making import qwen, save


def build(
    folder: Path, *, seed: int = 0, eos: Any = 1, pad: int | None = 0, **generation: Any
) -> Path:
    """A tiny random Qwen2 whose distribution is far from flat."""
    tokenizer = make_tokenizer()
    model = qwen(
        seed, vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, intermediate_size=96,
        tie_word_embeddings=False, initializer_range=0.3, eos_token_id=eos, pad_token_id=pad,
    )  # fmt: skip
    if pad is None:
        tokenizer.pad_token = None
    return save(model, folder, tokenizer, eos_token_id=eos, pad_token_id=pad, **generation)


def recipe(**rollout: Any) -> Recipe:
    return parse_recipe({"rollout": {"engine": "transformers", "device": "cpu", **rollout}}, "test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # As many end tokens as make some rows stop and others run to the limit.
    return build(tmp_path_factory.mktemp("policy"), eos=[1, 20, 21, 22])


@pytest.fixture(scope="module")
def engine(folder: Path) -> TransformersEngine:
    return TransformersEngine(recipe(batch_size=16), str(folder))


def requests(count: int, first_seed: int = 100) -> list[Request]:
    """Prompts of 1 to 9 tokens."""
    return [
        Request(i, [(7 * i + 3 * j) % 90 + 4 for j in range(1 + i % 9)], first_seed + i)
        for i in range(count)
    ]


def by_index(completions: Any) -> dict[int, Completion]:
    rows = list(completions)
    table = {row.index: row for row in rows}
    assert len(table) == len(rows)
    return table


def forward(folder: Path, request: Request, row: Completion, temperature: float) -> Any:
    """Log-probabilities and entropies of a response by one pass over the whole sequence."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([request.prompt_ids + row.token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / temperature
    log_p = torch.log_softmax(logits, dim=-1)
    chosen = log_p.gather(1, torch.tensor(row.token_ids)[:, None])[:, 0]
    return chosen, -(log_p.exp() * log_p).sum(dim=-1), log_p


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_and_entropies_are_those_of_the_sampled_distribution(
    engine: TransformersEngine, folder: Path, temperature: float
) -> None:
    asked = requests(20)
    rows = by_index(engine.generate(asked, Sampling(temperature, 24, entropies=True)))
    assert set(rows) == set(range(20))
    for request in asked:
        row = rows[request.index]
        logprobs, entropies, _ = forward(folder, request, row, temperature)
        assert torch.allclose(torch.tensor(row.logprobs), logprobs, atol=1e-4)
        assert torch.allclose(torch.tensor(row.entropies), entropies, atol=1e-4)


def test_rows_end_by_any_end_token_or_by_length(engine: TransformersEngine) -> None:
    rows = by_index(engine.generate(requests(60), Sampling(1.0, 24)))
    reasons = {row.finish_reason for row in rows.values()}
    assert reasons == {"stop", "length"}
    last = set()
    for row in rows.values():
        ends = [token in {1, 20, 21, 22} for token in row.token_ids]
        assert not any(ends[:-1])
        assert row.finish_reason == ("stop" if ends[-1] else "length")
        assert len(row.token_ids) == 24 or row.finish_reason == "stop"
        assert len(row.logprobs) == len(row.token_ids)
        assert row.entropies is None
        if ends[-1]:
            last.add(row.token_ids[-1])
    assert len(last) > 1


def test_a_rows_sample_depends_on_its_seed_alone(folder: Path, engine: TransformersEngine) -> None:
    asked = requests(40)
    sampling = Sampling(1.0, 24)
    reference = by_index(engine.generate(asked, sampling))
    # another order, another batch size, a part of the rows only
    other = TransformersEngine(recipe(batch_size=7), str(folder))
    shuffled = by_index(other.generate(list(reversed(asked))[:25], sampling))
    for index, row in shuffled.items():
        assert row.token_ids == reference[index].token_ids
    alone = by_index(engine.generate([asked[8]], sampling))
    assert alone[8].token_ids == reference[8].token_ids
    again = by_index(engine.generate(requests(40, first_seed=900), sampling))
    assert sum(again[i].token_ids != reference[i].token_ids for i in range(40)) > 30
    # a longer limit goes on from the same tokens
    longer = by_index(engine.generate(asked, Sampling(1.0, 40)))
    assert all(longer[i].token_ids[:24] == reference[i].token_ids for i in range(40))


def test_sampled_frequencies_match_the_distribution(
    engine: TransformersEngine, folder: Path
) -> None:
    count = 4000
    prompt = [10, 11, 12]
    asked = [Request(i, prompt, i) for i in range(count)]
    wide = TransformersEngine(recipe(batch_size=1000), str(folder))
    rows = list(wide.generate(asked, Sampling(1.5, 1)))
    _, _, log_p = forward(folder, asked[0], rows[0], 1.5)
    expected = log_p[0].exp().double() * count
    observed = torch.bincount(
        torch.tensor([row.token_ids[0] for row in rows]), minlength=len(expected)
    ).double()
    usual = expected >= 5
    groups_e = [*expected[usual].tolist(), float(expected[~usual].sum())]
    groups_o = [*observed[usual].tolist(), float(observed[~usual].sum())]
    statistic = sum((o - e) ** 2 / e for o, e in zip(groups_o, groups_e, strict=True))
    degrees = len(groups_e) - 1
    assert degrees > 10
    # the chi-square's mean is its degrees of freedom, its variance twice that
    assert abs(statistic - degrees) < 4 * (2 * degrees) ** 0.5


def test_temperature_zero_is_greedy_with_the_models_own_logprobs(
    engine: TransformersEngine, folder: Path
) -> None:
    asked = requests(9)
    rows = by_index(engine.generate(asked, Sampling(0.0, 16, entropies=True)))
    for request in asked:
        row = rows[request.index]
        logprobs, entropies, log_p = forward(folder, request, row, 1.0)
        assert row.token_ids == log_p.argmax(dim=-1).tolist()
        assert torch.allclose(torch.tensor(row.logprobs), logprobs, atol=1e-4)
        assert torch.allclose(torch.tensor(row.entropies), entropies, atol=1e-4)


def test_settings_in_the_models_generation_config_do_not_bend_the_distribution(
    folder: Path, engine: TransformersEngine, tmp_path: Path
) -> None:
    bent = build(
        tmp_path / "bent",
        eos=[1, 20, 21, 22],
        do_sample=True,
        repetition_penalty=1.8,
        top_k=3,
        top_p=0.5,
        temperature=0.3,
        min_new_tokens=20,
        suppress_tokens=[30, 31],
    )
    rows = by_index(
        TransformersEngine(recipe(), str(bent)).generate(requests(12), Sampling(1.0, 24))
    )
    reference = by_index(engine.generate(requests(12), Sampling(1.0, 24)))
    assert {i: row.token_ids for i, row in rows.items()} == {
        i: row.token_ids for i, row in reference.items()
    }


def test_a_model_without_pad_token_and_one_without_end_token(tmp_path: Path) -> None:
    bare = build(tmp_path / "nopad", eos=[1, 20, 21, 22], pad=None)
    engine = TransformersEngine(recipe(), str(bare))
    asked = requests(9)
    for row in engine.generate(asked, Sampling(1.0, 9)):
        logprobs, _, _ = forward(bare, asked[row.index], row, 1.0)
        assert torch.allclose(torch.tensor(row.logprobs), logprobs, atol=1e-4)

    make_endless = build(tmp_path / "endless", eos=None, pad=None)
    config = make_endless / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"eos_token": "<eos>",', ""))
    rows = by_index(
        TransformersEngine(recipe(), str(make_endless)).generate(asked, Sampling(1.0, 9))
    )
    assert all(len(row.token_ids) == 9 and row.finish_reason == "length" for row in rows.values())


def test_bfloat16_weights(folder: Path) -> None:
    half = TransformersEngine(
        parse_recipe(
            {"model": {"dtype": "bfloat16"}, "rollout": {"device": "cpu", "batch_size": 16}}, "test"
        ),
        str(folder),
    )
    asked = requests(9)
    rows = by_index(half.generate(asked, Sampling(1.0, 12, entropies=True)))
    for request in asked:
        row = rows[request.index]
        logprobs, entropies, _ = forward(folder, request, row, 1.0)
        assert (torch.tensor(row.logprobs) - logprobs).abs().mean() < 0.2
        assert (torch.tensor(row.entropies) - entropies).abs().mean() < 0.2


def test_load_goes_over_to_other_weights_and_to_an_adapter(folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    other = build(tmp_path / "other", seed=1, eos=[1, 20, 21, 22])
    engine = TransformersEngine(recipe(), str(folder))
    asked = requests(6)
    engine.load(str(other))
    for row in engine.generate(asked, Sampling(1.0, 12)):
        logprobs, _, _ = forward(other, asked[row.index], row, 1.0)
        assert torch.allclose(torch.tensor(row.logprobs), logprobs, atol=1e-4)

    torch.manual_seed(0)
    adapted: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    adapted.save_pretrained(tmp_path / "adapter")
    engine.load(str(tmp_path / "adapter"))
    for row in engine.generate(asked, Sampling(1.0, 12)):
        ids = torch.tensor([asked[row.index].prompt_ids + row.token_ids])
        with torch.no_grad():
            logits = adapted.eval()(ids).logits[0, len(asked[row.index].prompt_ids) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(row.token_ids)[:, None])
        assert torch.allclose(torch.tensor(row.logprobs), expected[:, 0], atol=1e-4)


def test_bad_input(engine: TransformersEngine, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="empty prompt"):
        list(engine.generate([Request(5, [], 0)], Sampling(1.0, 4)))
    with pytest.raises(InputError, match="no such policy"):
        open_engine(recipe(), str(tmp_path / "nowhere"))
    assert list(engine.generate([], Sampling(1.0, 4))) == []


def test_a_token_of_probability_zero_is_never_chosen() -> None:
    log_p = torch.log(torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]))
    for u, token in [(0.0, 1), (0.2499, 1), (0.2501, 3), (1 - 2**-53, 3)]:
        assert choose(log_p, torch.tensor([u], dtype=torch.float64)).tolist() == [token]


def test_row_uniforms_are_uniform_and_differ_between_neighbouring_seeds() -> None:
    rows = torch.stack([torch.from_numpy(row_uniforms(seed, 1000)) for seed in range(50)])
    assert float(rows.min()) >= 0.0
    assert float(rows.max()) < 1.0
    assert rows.mean().item() == pytest.approx(0.5, abs=0.006)
    assert rows.var().item() == pytest.approx(1 / 12, abs=0.003)
    correlations = torch.corrcoef(rows)
    for i, j in itertools.combinations(range(50), 2):
        assert abs(float(correlations[i, j])) < 0.17
    assert row_uniforms(2**62 - 1, 3).tolist() == row_uniforms(2**62 - 1, 5).tolist()[:3]

"""Log-probabilities and entropies against plain log_softmax, transformers, and the vectors."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from exgrpo_cli.errors import InputError
from exgrpo_cli.training import logprobs as lp
from exgrpo_cli.training.packing import even_chunks, packs, padded_batches, rounds

VECTORS = Path(__file__).parents[2].parent / "shared" / "vectors" / "entropy.json"
VOCABULARY = 53
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 256,
    "initializer_range": 0.3,
}  # fmt: skip


def qwen(**changes):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SMALL | {"tie_word_embeddings": True} | changes)).eval()


def rows(count=7, seed=1):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        size = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(0, VOCABULARY, (size,), generator=generator).tolist()

    return [draw(1, 9) for _ in range(count)], [draw(1, 14) for _ in range(count)]


def plain(model, prompt, response, temperature):
    """One row by itself, straight from the model's logits."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    picked = logprobs.gather(-1, torch.tensor(response)[:, None])[:, 0]
    return picked, -(logprobs.exp() * logprobs).sum(-1)


# --- the head ---------------------------------------------------------------------------------


def problem(tokens=6, hidden=5, vocabulary=11, bias=True, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return (
        draw(tokens, hidden).requires_grad_(),
        draw(vocabulary, hidden).requires_grad_(),
        draw(vocabulary).requires_grad_() if bias else None,
        labels,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_gradcheck(temperature, chunk):
    hidden, weight, bias, labels = problem()

    def both(h, w, b):
        return lp.linear_statistics(h, w, b, labels, temperature, chunk_tokens=chunk)

    def entropy_only(h, w, b):
        return both(h, w, b)[1]

    def logprob_only(h, w, b):
        return lp.linear_statistics(
            h, w, b, labels, temperature, entropies=False, chunk_tokens=chunk
        )[0]

    for function in (both, entropy_only, logprob_only):
        assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_equals_plain_log_softmax_with_gradients(dtype, tolerance):
    hidden, weight, bias, labels = problem(tokens=40, hidden=16, vocabulary=97, dtype=dtype)
    up, up_entropy = torch.linspace(-1, 1, 40, dtype=dtype), torch.linspace(1, -2, 40, dtype=dtype)
    inputs = (hidden, weight, bias)

    logprobs, entropies = lp.linear_statistics(*inputs, labels, 0.7, chunk_tokens=7)
    ours = torch.autograd.grad((up * logprobs + up_entropy * entropies).sum(), inputs)

    wide = [x.double().detach().requires_grad_() for x in inputs]
    reference = ((wide[0] @ wide[1].T + wide[2]) / 0.7).log_softmax(-1)
    picked = reference.gather(-1, labels[:, None])[:, 0]
    entropy = -(reference.exp() * reference).sum(-1)
    theirs = torch.autograd.grad((up * picked + up_entropy * entropy).sum(), wide)

    torch.testing.assert_close(logprobs.double(), picked, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entropies.double(), entropy, rtol=tolerance, atol=tolerance)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=10 * tolerance, atol=10 * tolerance)


def test_frozen_head_gets_no_gradient_and_hidden_still_does():
    hidden, weight, _, labels = problem(bias=False)
    weight.requires_grad_(False)
    logprobs, entropies = lp.linear_statistics(hidden, weight, None, labels, 1.0, entropies=False)
    assert entropies is None
    logprobs.sum().backward()
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_bfloat16_autocast_keeps_float32_results_and_gradients():
    hidden, weight, bias, labels = problem(tokens=30, hidden=16, vocabulary=97, dtype=torch.float32)
    exact, entropy = lp.linear_statistics(hidden, weight, bias, labels, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        rough, rough_entropy = lp.linear_statistics(hidden, weight, bias, labels, 1.0)
    assert rough.dtype == rough_entropy.dtype == torch.float32
    assert not torch.equal(rough, exact)  # it did run in bfloat16
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0.1)
    grads = torch.autograd.grad((rough + rough_entropy).sum(), (hidden, weight, bias))
    wanted = torch.autograd.grad((exact + entropy).sum(), (hidden, weight, bias))
    for got, want in zip(grads, wanted, strict=True):
        assert got.dtype == torch.float32
        assert torch.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.999


def test_no_tensor_of_tokens_by_vocabulary_is_made():
    vocabulary, tokens = 5000, 400
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    with torch.profiler.profile(profile_memory=True) as profile:
        logprobs, entropies = lp.linear_statistics(
            hidden, weight, None, labels, 1.0, chunk_tokens=20
        )
        (logprobs + entropies).sum().backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < tokens * vocabulary * 4 / 10


@pytest.mark.skipif(not VECTORS.exists(), reason="no vectors here")
def test_entropy_vectors():
    identity = torch.eye(7, dtype=torch.float64)
    for case in json.loads(VECTORS.read_text())["cases"]:
        logits = torch.tensor(case["logits"], dtype=torch.float64)
        labels = torch.tensor(case["labels"])
        for temperature, want in case["at_temperature"].items():
            for got in (
                lp.linear_statistics(logits, identity, None, labels, float(temperature)),
                lp.logits_statistics(logits, labels, float(temperature)),
            ):
                for values, key in zip(got, ("label_logprob", "entropy"), strict=True):
                    torch.testing.assert_close(
                        values, torch.tensor(want[key], dtype=torch.float64), rtol=1e-8, atol=1e-13
                    )
            mask = torch.tensor(case["mask"], dtype=torch.bool)
            assert got[1][mask].mean().item() == pytest.approx(want["mean_entropy"], rel=1e-8)


def test_entropy_without_the_vectors():
    logits = torch.tensor([[1.8075, 1.3786, -1.3924, -0.4019, -3.7365, 0.948, -4.9598]])
    logprobs, entropies = lp.linear_statistics(logits, torch.eye(7), None, torch.tensor([0]), 0.6)
    assert logprobs.item() == pytest.approx(-0.5642266885, abs=1e-6)
    assert entropies.item() == pytest.approx(1.025613348, abs=1e-6)


def test_impossible_tokens_have_no_entropy():
    logits = torch.tensor([[0.0, float("-inf"), 0.0]], requires_grad=True)
    logprobs, entropies = lp.logits_statistics(logits, torch.tensor([0]), 1.0)
    assert entropies.item() == pytest.approx(torch.tensor(2.0).log().item())
    assert logprobs.item() == pytest.approx(-entropies.item())


# --- models -----------------------------------------------------------------------------------


def gemma2():
    torch.manual_seed(0)
    config = Gemma2Config(**SMALL, final_logit_softcapping=2.0, query_pre_attn_scalar=8)
    return Gemma2ForCausalLM(config).eval()


def granite():
    torch.manual_seed(0)
    return GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)).eval()


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    return GPT2LMHeadModel(config).eval()


def lora():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(qwen(), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model.eval()


def lora_on_the_head():
    from peft import LoraConfig, get_peft_model

    model = qwen(tie_word_embeddings=False)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"]))
    with torch.no_grad():
        model.get_base_model().lm_head.lora_B["default"].weight.normal_(std=0.3)
    return model.eval()


def sliding_window():
    """Windows shorter than the rows, in some of the layers."""
    return qwen(use_sliding_window=True, sliding_window=4, max_window_layers=1)


def eager():
    model = qwen()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("make", "is_linear", "is_packed"),
    [
        (qwen, True, True),
        (sliding_window, True, True),
        (gpt2, True, True),
        (lora, True, True),
        (eager, True, False),
        (gemma2, False, True),
        (granite, False, True),
        (lora_on_the_head, False, True),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_equal_a_plain_forward_pass(make, is_linear, is_packed, temperature):
    model = make()
    prompts, responses = rows()
    head = lp.open_head(model)
    assert (head.decoder is not None) == is_linear
    assert bool(head.packed) == is_packed
    model.train()
    scored = lp.score_sequences(model, prompts, responses, temperature, tokens_per_batch=40)
    assert model.training  # left as it was, though scoring is without dropout
    untouched = make().eval()
    for prompt, response, (got, got_entropy) in zip(prompts, responses, scored, strict=True):
        with torch.no_grad():
            want, entropy = plain(untouched, prompt, response, temperature)
        assert got.dtype == got_entropy.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
        torch.testing.assert_close(got_entropy.double(), entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [qwen, sliding_window, gemma2, lora], ids=lambda f: f.__name__)
def test_gradients_equal_a_plain_forward_pass(make):
    model = make().double()
    prompts, responses = rows(4)
    plain_model = make().double()

    def grads(loss, model=model):
        model.zero_grad()
        loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    logprobs, entropies = lp.token_statistics(lp.open_head(model), prompts, responses, 0.8)
    ours = grads((logprobs * entropies).sum())
    pairs = [plain(plain_model, p, r, 0.8) for p, r in zip(prompts, responses, strict=True)]
    theirs = grads(sum((a * b).sum() for a, b in pairs), plain_model)
    assert ours.keys() == theirs.keys()
    for name in ours:  # these models' norms run in float32 even so
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def test_scores_do_not_depend_on_the_batch():
    model = qwen()
    prompts, responses = rows(9)
    alone = lp.score_sequences(model, prompts, responses, 1.0, tokens_per_batch=1)
    together = lp.score_sequences(model, prompts, responses, 1.0, tokens_per_batch=10_000)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-5)


class Deaf(Qwen2ForCausalLM):
    """Takes what packed rows need, and does not hand it to its attention."""

    def forward(self, input_ids, position_ids=None, sequence_bounds=None, **options):
        return super().forward(input_ids, position_ids=position_ids, **options)


def test_a_model_whose_tokens_would_see_across_rows_gets_padded_ones():
    model = Deaf(qwen().config).eval()
    model.model.register_forward_pre_hook(
        lambda _, args, options: (
            args,
            {k: v for k, v in options.items() if k != "sequence_bounds"},
        ),
        with_kwargs=True,
    )
    head = lp.open_head(model)
    assert head.packed == ""
    assert model.config._attn_implementation == "sdpa"
    prompts, responses = rows(3)
    scored = lp.score_sequences(model, prompts, responses, 1.0, 200, head=head)
    for prompt, response, (got, _) in zip(prompts, responses, scored, strict=True):
        want, _ = plain(model, prompt, response, 1.0)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def test_empty_responses_and_no_rows():
    model = qwen()
    scored = lp.score_sequences(model, [[1], [2, 3]], [[], [4]], 1.0, 100)
    assert [len(logprobs) for logprobs, _ in scored] == [0, 1]
    assert lp.score_sequences(model, [], [], 1.0, 100) == []


def test_bad_rows_are_refused():
    model = qwen()
    with pytest.raises(InputError, match="row 2 holds token id 53, outside the policy"):
        lp.score_sequences(model, [[1], [2]], [[3], [VOCABULARY]], 1.0, 100)
    with pytest.raises(InputError, match="row 1 has no prompt_ids"):
        lp.score_sequences(model, [[]], [[3]], 1.0, 100)
    with pytest.raises(InputError, match="temperature is 0"):
        lp.score_sequences(model, [[1]], [[3]], 0.0, 100)


# --- packing ------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 60)),
    budget=st.integers(1, 200),
    ranks=st.sampled_from([1, 2, 3]),
)
def test_packs_hold_every_row_once_within_the_budget(lengths, budget, ranks):
    found = packs(lengths, budget, ranks)
    assert sorted(row for pack in found for row in pack) == list(range(len(lengths)))
    assert len(found) % ranks == 0
    loads = [sum(lengths[row] for row in pack) for pack in found]
    assert all(load <= budget or len(pack) == 1 for load, pack in zip(loads, found, strict=True))
    assert loads == sorted(loads, reverse=True)
    # Balanced: no pack could give its shortest row to the emptiest one and both be the better.
    for load, pack in zip(loads, found, strict=True):
        if len(pack) > 1:
            assert load - min(loads) <= max(lengths[row] for row in pack)


def test_packs_are_few_and_even():
    lengths = [100, 90, 80, 70, 60, 50, 40, 10]
    loads = [sum(lengths[row] for row in pack) for pack in packs(lengths, 260)]
    assert loads == [260, 240]
    assert packs([5, 5], 100, multiple=4)[2:] == [[], []]
    # Rows beyond the budget are one pack each, and make no empty ones.
    assert packs([90, 70, 50], 10) == [[0], [1], [2]]
    assert packs([90, 4, 3, 3], 10) == [[0], [1, 2, 3]]


@given(lengths=st.lists(st.integers(0, 60)), budget=st.integers(1, 200))
def test_padded_batches_hold_every_row_once_within_the_budget(lengths, budget):
    batches = padded_batches(lengths, budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(max(lengths[row] for row in batch), 1)
        assert padded <= budget or len(batch) == 1
    if lengths:
        assert lengths[batches[0][0]] == max(lengths)


@pytest.mark.parametrize("packed", [True, False])
def test_every_process_has_a_batch_in_every_round(packed):
    lengths = [7, 3, 9, 1, 4, 8, 2]
    found = rounds(lengths, 10, packed=packed, ranks=3)
    assert all(len(batches) == 3 for batches in found)
    assert sorted(row for batches in found for batch in batches for row in batch) == list(range(7))


@given(count=st.integers(1, 500), size=st.integers(1, 100))
def test_even_chunks(count, size):
    chunks = even_chunks(count, size)
    assert [i for chunk in chunks for i in chunk] == list(range(count))
    sizes = [len(chunk) for chunk in chunks]
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert len(chunks) == -(-count // size)

"""The objective against the public implementation's numbers, and its own promises."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exgrpo_cli.training import objective
from exgrpo_cli.training.objective import Clip

VECTORS = Path(__file__).parents[2].parent / "shared" / "vectors"

# Taken from loss_mixed.json (paper_mixed, its first tokens), so that they stand alone.
PAPER = {
    "old": [-2.9983, -2.8799, -0.0811, -1.5243],
    "new": [-3.3953, -2.7901, -0.0001, -1.3514],
    "advantages": [0.625, 0.625, -0.375, -0.375],
    "replayed": [True, True, False, False],
    "gradient": [-0.005870478817, -0.003996889633, 0.03388659052, 0.03714835076],
}


def cases(name: str):
    file = VECTORS / name
    return json.loads(file.read_text())["cases"] if file.exists() else []


def loss_inputs() -> dict:
    return json.loads((VECTORS / "loss_mixed.json").read_text())["inputs"]


def options(case: dict) -> dict:
    given_options = case["options"]
    reshape = given_options["off_policy_reshape"]
    shaping, beta, power = {
        "no_reshape": ("none", 0.1, 0.5),
        "square_root": ("sqrt", 0.1, 0.5),
        "pow": ("power", 0.1, given_options.get("off_policy_reshape_pow_exp", 0.5)),
    }.get(reshape, ("ratio", float(reshape.rpartition("_")[2]) if "p_div" in reshape else 0, 0.5))
    low = given_options["cliprange"]
    clip = Clip(low, max(given_options["clip_upper_bound"], 1 + low) - 1)
    return {
        "clip": None if given_options["loss_remove_clip"] else clip,
        "shaping": shaping,
        "beta": beta,
        "power": power,
    }


def flatten(tensors: dict, dtype: torch.dtype):
    mask = torch.tensor(tensors["response_mask"], dtype=torch.bool)
    values = {
        name: torch.tensor(tensors[name], dtype=dtype)[mask]
        for name in ("log_prob", "old_log_prob", "advantages")
    }
    replayed = torch.tensor(tensors["off_policy_mask"], dtype=torch.bool)[mask]
    return mask, values, replayed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "case",
    # A bound on the replay ratio is no setting here: the shaping has one.
    [c for c in cases("loss_mixed.json") if not c["options"].get("off_max_clip")],
    ids=lambda c: c["name"],
)
def test_loss_gradient_and_metrics_equal_the_public_implementation(case, dtype):
    mask, values, replayed = flatten(loss_inputs()[case["inputs"]], dtype)
    rows, width = mask.shape
    logprobs = values["log_prob"].clone().requires_grad_()
    aggregate = "fixed_length" if case["options"]["loss_remove_token_mean"] else "token_mean"
    scale = rows if aggregate == "fixed_length" else 1  # theirs is the sum over rows
    weights = objective.row_weights(mask.sum(-1), aggregate, width) * scale
    per_token = weights.repeat_interleave(mask.sum(-1)).to(dtype)
    losses, sums = objective.policy_loss(
        logprobs, values["old_log_prob"], values["advantages"], replayed, **options(case)
    )
    loss = (per_token * losses).sum()
    loss.backward()
    gradient = torch.zeros(mask.shape, dtype=dtype)
    gradient[mask] = logprobs.grad
    exact = dtype == torch.float64
    near = {"rel": 1e-8, "abs": 1e-9} if exact else {"rel": 1e-5, "abs": 1e-6}
    want = case["outputs"]
    assert loss.item() == pytest.approx(want["pg_loss"], **near)
    torch.testing.assert_close(
        gradient.double(),
        torch.tensor(case["grad_log_prob"], dtype=torch.float64),
        rtol=1e-8 if exact else 1e-5,
        atol=1e-11 if exact else 1e-7,
    )

    got = objective.summarise(sums)
    pairs = {
        "on_pg_loss": ("on_policy_loss", None),
        "off_pg_loss": ("off_policy_loss", 0.0),
        "on_ratio_mean": ("ratio_mean", 0.0),
        "off_ratio_mean": ("shaped_ratio_mean", 0.0),
        "ppo_kl": ("kl_old", None),
    }
    for theirs, (ours, when_empty) in pairs.items():
        if got[ours] is None:  # theirs is a placeholder where there is no such token
            assert want[theirs] == when_empty
        else:
            assert got[ours] == pytest.approx(want[theirs], **near)
    # Theirs counts replayed tokens as if they were clipped too; ours only fresh ones.
    _, as_fresh = objective.policy_loss(
        logprobs.detach(),
        values["old_log_prob"],
        values["advantages"],
        torch.zeros_like(replayed),
        **options(case),
    )
    clipped = objective.summarise(as_fresh)["clip_fraction"]
    assert clipped == pytest.approx(want["on_pg_clipfrac"], abs=1e-6)


@pytest.mark.parametrize("case", cases("grpo_advantage.json"), ids=lambda c: c["name"])
def test_advantages_equal_the_public_implementation(case):
    names = sorted(set(case["question"]))
    groups = torch.tensor([names.index(q) for q in case["question"]])
    rewards = torch.tensor(case["rewards"], dtype=torch.float64)
    for key, by_std in (("advantages_without_std", False), ("advantages_with_std", True)):
        got = objective.group_advantages(rewards, groups, by_std)
        want = torch.tensor(case[key], dtype=torch.float64)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)
    single = objective.group_advantages(rewards.float(), groups, True)
    torch.testing.assert_close(single.double(), want, rtol=1e-5, atol=1e-6)


def test_paper_values_without_the_vectors():
    logprobs = torch.tensor(PAPER["new"], dtype=torch.float64, requires_grad=True)
    losses, _ = objective.policy_loss(
        logprobs,
        torch.tensor(PAPER["old"], dtype=torch.float64),
        torch.tensor(PAPER["advantages"], dtype=torch.float64),
        torch.tensor(PAPER["replayed"]),
        clip=None,
        shaping="ratio",
        beta=0.1,
    )
    (losses / 12).sum().backward()
    torch.testing.assert_close(
        logprobs.grad, torch.tensor(PAPER["gradient"], dtype=torch.float64), rtol=1e-8, atol=1e-12
    )


def test_replayed_success_with_seven_failures():
    rewards = torch.tensor([1.0] + [0.0] * 7)
    advantages = objective.group_advantages(rewards, torch.zeros(8, dtype=torch.int64))
    assert advantages.tolist() == [0.875] + [-0.125] * 7


@given(
    value=st.floats(-3, 3) | st.sampled_from([0.1, 0.7]),
    size=st.integers(2, 9),
    by_std=st.booleans(),
)
def test_equal_rewards_give_exactly_zero(value, size, by_std):
    rewards = torch.full((size,), value, dtype=torch.float64)
    advantages = objective.group_advantages(rewards, torch.zeros(size, dtype=torch.int64), by_std)
    assert advantages.tolist() == [0.0] * size


def test_clipping_by_hand():
    # Ratios 1.5, 1.5, 0.5, 0.5 with advantages +, -, +, -: PPO clips the first and the last.
    logprobs = torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=torch.float64).log().requires_grad_()
    losses, sums = objective.policy_loss(
        logprobs,
        torch.zeros(4, dtype=torch.float64),
        torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64),
        torch.zeros(4, dtype=torch.bool),
        clip=Clip(0.2, 0.3),
        shaping="ratio",
        beta=0.1,
    )
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-1.3, 1.5, -0.5, 0.8])
    assert logprobs.grad.tolist() == pytest.approx([0, 1.5, -0.5, 0])
    assert objective.summarise(sums)["clip_fraction"] == 0.5
    assert objective.summarise(sums)["ratio_max"] == pytest.approx(1.5)


def test_a_clipped_replay_ratio_is_clipped_as_a_fresh_one():
    logprobs = torch.tensor([-3.0, -1.2, -1.0, -0.9, -0.1] * 2, requires_grad=True)
    old = torch.full((10,), -1.0)
    advantages = torch.tensor([0.5] * 5 + [-0.25] * 5)
    clip = Clip(0.2, 0.3)
    gradients = []
    for replayed in (False, True):
        losses, _ = objective.policy_loss(
            logprobs, old, advantages, torch.full((10,), replayed), clip=None if replayed else clip,
            shaping="clip", beta=0.1, past_clip=clip,
        )  # fmt: skip
        gradients.append(torch.autograd.grad(losses.sum(), logprobs)[0])
    assert torch.equal(*gradients)
    assert gradients[0].count_nonzero() == 8


@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_shaped_ratio_cannot_overflow(gap):
    log_ratio = torch.tensor([gap], requires_grad=True)
    shaped = objective.shape_ratio(log_ratio, "ratio", 0.1, 0.5)
    shaped.sum().backward()
    assert shaped.item() == pytest.approx(1.0 if gap > 0 else 0.0)
    assert log_ratio.grad.isfinite().all()


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    aggregate=st.sampled_from(["fixed_length", "token_mean", "sequence_mean"]),
)
def test_row_weights_are_the_three_means(lengths, aggregate):
    losses = [torch.randn(n, dtype=torch.float64) for n in lengths]
    weights = objective.row_weights(torch.tensor(lengths), aggregate, 16)
    got = sum(w * x.sum() for w, x in zip(weights, losses, strict=True))
    want = {
        "fixed_length": sum(x.sum() / 16 for x in losses) / len(losses),
        "token_mean": torch.cat(losses).mean(),
        "sequence_mean": sum(x.mean() for x in losses if len(x)) / len(losses),
    }[aggregate]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 40), max_size=5))
def test_token_sums_do_not_depend_on_the_cut(seed, cuts):
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages = (
        torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    replayed = torch.rand(40, generator=generator) < 0.3

    def run(part: slice):
        return objective.policy_loss(
            new[part], old[part], advantages[part], replayed[part],
            clip=Clip(0.2, 0.2), shaping="ratio", beta=0.1,
        )  # fmt: skip

    whole, sums = run(slice(None))
    ends = sorted({0, 40, *cuts})
    parts = [run(slice(a, b)) for a, b in itertools.pairwise(ends)]
    cut = torch.cat([losses for losses, _ in parts])
    torch.testing.assert_close(cut, whole, rtol=1e-13, atol=1e-15)
    merged: dict = {}
    for _, part_sums in parts:
        merged = objective.merge_sums(merged, part_sums)
    assert objective.summarise(merged) == pytest.approx(objective.summarise(sums), nan_ok=True)


def test_k3_is_zero_at_equal_policies_and_positive_elsewhere():
    logprobs = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    kl = objective.k3_kl(logprobs, reference)
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([0, math.exp(-1), math.exp(0.5) - 1.5])
    assert logprobs.grad.tolist() == pytest.approx([0, 1 - math.exp(-1), 1 - math.exp(0.5)])


def test_entropy_bonus_lowers_the_loss_by_the_token_mean():
    entropies = torch.tensor([1.0, 2.0])
    assert objective.entropy_bonus(entropies, 0.01, 4).item() == pytest.approx(-0.03 / 4)

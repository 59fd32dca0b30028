"""Options of the ratio: sequence level, dual clip, and the bound on its logarithm."""

import math

import torch

from exgrpo_cli.training.objective import Clip, policy_loss, shape_ratio

OPTIONS = {"clip": None, "shaping": "ratio", "beta": 0.1}


def test_a_sequence_s_ratio_is_that_of_all_its_tokens() -> None:
    """Against GSPO's s_i = (pi(y) / pi_old(y)) ** (1 / |y|); its gradient is spread evenly."""
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.0], dtype=torch.float64)
    new = torch.tensor([-0.5, -2.5, -0.25, -2.0, -1.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.5, 0.5, -0.25, -0.25, -0.25], dtype=torch.float64)
    rows = torch.tensor([3, 3, 1, 1, 1])  # numbers need not be dense, and rows not sorted
    replayed = torch.zeros(5, dtype=torch.bool)
    losses, sums = policy_loss(new, old, advantages, replayed, sequences=rows, **OPTIONS)
    first, second = math.exp(0.0), math.exp((0.25 + 1.0 - 0.5) / 3)
    expected = [-0.5 * first] * 2 + [0.25 * second] * 3
    assert torch.allclose(losses, torch.tensor(expected, dtype=torch.float64))
    assert math.isclose(sums["ratio"], 2 * first + 3 * second)
    losses.sum().backward()
    gradient = torch.tensor([-0.5 * first] * 2 + [0.25 * second] * 3, dtype=torch.float64)
    assert torch.allclose(new.grad, gradient)
    clipped, _ = policy_loss(
        new, old, advantages, replayed, sequences=rows, **(OPTIONS | {"clip": Clip(0.1, 0.1)})
    )
    assert torch.allclose(clipped[2:], losses[2:])  # A < 0 and above: PPO leaves it


def test_replayed_tokens_keep_their_own_ratios() -> None:
    old, new = torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -4.0])
    replayed = torch.tensor([True, True])
    advantages = torch.ones(2)
    rows = torch.zeros(2, dtype=torch.int64)
    alone, _ = policy_loss(new, old, advantages, replayed, **OPTIONS)
    together, _ = policy_loss(new, old, advantages, replayed, sequences=rows, **OPTIONS)
    assert torch.equal(alone, together)


def test_dual_clip_bounds_what_a_failure_costs() -> None:
    """Against the formula of dual clip: max(min(w A, clip(w) A), c A) where A < 0."""
    ratios = torch.tensor([0.5, 1.0, 2.0, 5.0, 0.5, 5.0])
    advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0])
    replayed = torch.zeros(6, dtype=torch.bool)
    options = OPTIONS | {"clip": Clip(0.2, 0.2), "dual_clip": 3.0}
    losses, _ = policy_loss(ratios.log(), torch.zeros(6), advantages, replayed, **options)
    assert torch.allclose(losses, torch.tensor([0.8, 1.0, 2.0, 3.0, -0.5, -1.2]))
    free, _ = policy_loss(
        ratios.log(), torch.zeros(6), advantages, replayed, **(OPTIONS | {"dual_clip": 3.0})
    )
    assert torch.allclose(free, torch.tensor([0.5, 1.0, 2.0, 3.0, -0.5, -5.0]))


def test_no_ratio_overflows_and_what_is_not_finite_is_seen() -> None:
    far = torch.tensor([500.0, -500.0, 19.0, math.nan, math.inf])
    losses, _ = policy_loss(
        far, torch.zeros(5), torch.ones(5), torch.zeros(5, dtype=torch.bool), **OPTIONS
    )
    assert losses[:3].isfinite().all()
    assert losses[0] == -math.exp(20.0) or math.isclose(losses[0], -math.exp(20.0), rel_tol=1e-6)
    assert losses[2] == -torch.tensor(19.0).exp()  # inside the bound, to the bit
    assert not losses[3:].isfinite().any()
    for shaping in ("none", "power", "sqrt"):
        assert shape_ratio(far[:3], shaping, 0.1, 2.0).isfinite().all()


def test_a_replayed_failure_pushes_no_harder_than_its_advantage() -> None:
    """f(w*) = w* / (w* + beta) is below 1, and so is its slope in log w*: 1/4 at most."""
    new = torch.linspace(-30, 30, 61, requires_grad=True)
    losses, _ = policy_loss(
        new, torch.zeros(61), -torch.ones(61), torch.ones(61, dtype=torch.bool), **OPTIONS
    )
    assert losses.max() <= 1
    losses.sum().backward()
    assert new.grad.min() >= 0
    assert new.grad.max() <= 0.25


def test_an_uncorrected_token_counts_as_if_sampled_now() -> None:
    """The gradient is the advantage's, however far the policy has moved since."""
    new = torch.tensor([-30.0, -1.0, 0.0], requires_grad=True)
    old = torch.tensor([-1.0, -1.0, -9.0])
    advantages = torch.tensor([0.5, -0.25, 1.0])
    losses, sums = policy_loss(
        new, old, advantages, torch.ones(3, dtype=torch.bool),
        **(OPTIONS | {"shaping": "uncorrected"}),
    )  # fmt: skip
    assert torch.equal(losses, -advantages)
    assert sums["shaped"] == 3
    losses.sum().backward()
    assert torch.equal(new.grad, -advantages)

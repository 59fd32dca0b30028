"""The optimizer, and what its settings are on the scale of the published loss."""

import pytest
import torch

from exgrpo_cli.recipe import ObjectiveSettings, TrainSettings
from exgrpo_cli.training.batch import Row
from exgrpo_cli.training.head import open_head
from exgrpo_cli.training.update import Terms, make_optimizer, run_updates
from train_files import VOCABULARY, tiny

LENGTH, PROMPT, TOKENS = 10, 3, 5
RATE, CLIP, EPS, BONUS, DECAY = 1e-3, 0.05, 3e-4, 0.02, 0.01
RANKS, ROWS, MICRO = 2, 8, 2  # rows of an update, and of a micro-batch


def drawn_rows():
    generator = torch.Generator().manual_seed(4)

    def draw(count):
        return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()

    advantages = [0.75, -0.25, -0.25, -0.25, 0.5, -0.5, 0.5, -0.5]
    return [
        Row(f"r{i}", draw(PROMPT), draw(TOKENS), a, False, None) for i, a in enumerate(advantages)
    ]


def published_step(model, rows, optimizer):
    """An update as in the public implementation: each rank adds up its micro-batches, in each the
    token sum over a fixed length, less a coefficient times the token mean of the entropies; the
    ranks' gradients are averaged."""
    optimizer.zero_grad()
    for first in range(0, ROWS, MICRO):
        part = rows[first : first + MICRO]
        ids = torch.tensor([row.prompt_ids + row.token_ids for row in part])
        logps = model(input_ids=ids).logits[:, PROMPT - 1 : -1].log_softmax(-1)
        chosen = logps.gather(-1, ids[:, PROMPT:, None]).squeeze(-1)
        ratio = (chosen - chosen.detach()).exp()
        advantages = torch.tensor([row.advantage for row in part], dtype=ratio.dtype)
        entropy = -(logps.exp() * logps).sum(-1).mean()
        loss = -(advantages[:, None] * ratio).sum() / LENGTH - BONUS * entropy
        (loss / RANKS).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    assert norm > 2 * CLIP  # so that the clip is at work
    optimizer.step()


def trained_as_published(updates=3):
    model, rows = tiny().double(), drawn_rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPS, weight_decay=DECAY)
    for _ in range(updates):
        published_step(model, rows, optimizer)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained_here(updates=3, **changes):
    """With what the paper's recipes do: clip and eps over the scale, the bonus times the
    micro-batches of a rank."""
    scale = ROWS / RANKS
    values = {
        "learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": CLIP / scale,
        "adam_eps": EPS / scale, "minibatch_questions": ROWS, "device": "cpu",
    }  # fmt: skip
    settings = TrainSettings(**values | changes)
    micro_batches = ROWS / RANKS / MICRO
    terms = Terms(ObjectiveSettings(entropy_bonus=BONUS * micro_batches / scale), None, LENGTH, 1.0)
    model, rows = tiny().double(), drawn_rows()
    optimizer = make_optimizer(model, settings)
    for _ in range(updates):
        groups = [rows[:4], rows[4:]]
        run_updates(open_head(model), groups, terms, optimizer, settings, seed=0)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_clip_eps_and_bonus_over_the_scale_make_the_published_updates():
    published = trained_as_published()
    moved = float(
        (published - torch.cat([p.flatten() for p in tiny().parameters()])).detach().norm()
    )
    # torch's clip adds 1e-6 to the norm, which is not scaled.
    assert float((trained_here() - published).norm()) < 1e-4 * moved
    for unscaled in ({"adam_eps": EPS}, {"max_grad_norm": CLIP}, {"weight_decay": 0.0}):
        assert float((trained_here(**unscaled) - published).norm()) > 1e-3 * moved, unscaled


@pytest.mark.parametrize("eps", [1e-8, 1e-12])
def test_adam_eps_is_adamws(eps):
    (group,) = make_optimizer(tiny(), TrainSettings(adam_eps=eps, device="cpu")).param_groups
    assert group["eps"] == eps


def test_by_default_adamws_eps_is_torchs():
    (group,) = make_optimizer(tiny(), TrainSettings()).param_groups
    assert group["eps"] == torch.optim.AdamW([torch.zeros(1)]).defaults["eps"] == 1e-8

"""The demo: a tiny model that ships as code, and the arithmetic that it is warmed up on.

A problem is a chain of operations modulo 20, worked strictly from left to right and reduced after
each one: ``7+5*3-8=`` has the answer 8. A response writes each operation out and boxes the
result: ``7+5=12;12*3=16;16-8=8;\\boxed{8}``. The model is a Qwen2 of half a million parameters
over characters. Its supervised warm-up has two phases: first correct work, then work with
*misconceptions* (some operations are often off by one), which leaves a policy that knows the facts
and has bad habits, so that reinforcement learning has something to find within minutes on a CPU.

The *weak* start is for experiments: worse habits, longer chains in the warm-up, and every result
is boxed (``\\boxed{12,16,8}``), so that no answer is right by chance, as one in twenty is in the
demo.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.tables import atomic_folder, row_seed, write_text

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

MODULUS = 20
OPERANDS = {"+": range(1, 10), "-": range(1, 10), "*": range(2, 10)}

SPLITS: dict[str, tuple[int, int, int, str]] = {
    "train": (2000, 2, 6, "arithmetic"),
    "heldout": (300, 2, 6, "arithmetic"),
    "ood": (200, 7, 9, "arithmetic-long"),
}
"""Each split: problems, fewest and most operations, source."""

SLIPS = {"+": 0.05, "-": 0.5, "*": 0.2}
"""Probability that an operation is off by one in the second phase of the warm-up."""

PHASES = ((500, 3e-3, False), (120, 7e-4, True))
"""The warm-up's phases: optimizer steps, peak learning rate, whether the work has slips."""


@dataclass(frozen=True)
class Start:
    """How a model is warmed up, and on what."""

    slips: dict[str, float]
    phases: tuple[tuple[int, float, bool], tuple[int, float, bool]]
    longest: int
    """Operations of the longest chains of the warm-up."""
    totals: bool
    """Whether the answer is every operation's result, not only the last one's."""


DEMO = Start(SLIPS, PHASES, longest=6, totals=False)
WEAK = Start(
    {"+": 0.3, "-": 0.85, "*": 0.6},
    ((1000, 3e-3, False), (150, 7e-4, True)),
    longest=9,
    totals=True,
)

_RAMP = 30  # steps over which a phase's learning rate rises
_ROWS, _MICRO = 32, 8  # rows of a batch, and of one pass

Chain = tuple[int, tuple[tuple[str, int], ...]]
"""A start and its operations, such as ``(7, (("+", 5), ("*", 3)))``."""


# --- problems ---------------------------------------------------------------------------------


def apply(left: int, operator: str, right: int) -> int:
    """One operation modulo 20, in 0..19."""
    value = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return value % MODULUS


def draw_chain(rng: random.Random, fewest: int, most: int) -> Chain:
    """A chain of ``fewest``..``most`` operations, each length equally likely."""
    length = rng.randint(fewest, most)
    start = rng.randrange(MODULUS)
    operators = [rng.choice("+-*") for _ in range(length)]
    return start, tuple((o, rng.choice(OPERANDS[o])) for o in operators)


def prompt_of(chain: Chain) -> str:
    """``7+5*3-8=``"""
    return f"{chain[0]}{''.join(f'{o}{n}' for o, n in chain[1])}="


def work_out(
    chain: Chain,
    slips: dict[str, float] | None = None,
    rng: random.Random | None = None,
    *,
    totals: bool = False,
) -> str:
    """The response: ``7+5=12;12*3=16;16-8=8;\\boxed{8}``.

    Args:
        slips: probability, by operator, that a result is off by one (up or down); the
            operations after it go on from the wrong value. None: correct work.
    """
    value, text, results = chain[0], "", []
    for operator, operand in chain[1]:
        result = apply(value, operator, operand)
        if slips and rng and rng.random() < slips[operator]:
            result = (result + rng.choice((-1, 1))) % MODULUS
        text += f"{value}{operator}{operand}={result};"
        value = result
        results.append(str(value))
    return f"{text}\\boxed{{{','.join(results if totals else results[-1:])}}}"


def demo_problems(start: Start = DEMO) -> dict[str, list[dict[str, str]]]:
    """The demo's problems by split (:data:`SPLITS`), all different: rows with id, prompt, answer
    and source."""
    rng = random.Random("arithmetic 0")
    seen: set[str] = set()
    splits: dict[str, list[dict[str, str]]] = {}
    for split, (count, fewest, most, source) in SPLITS.items():
        rows: list[dict[str, str]] = []
        while len(rows) < count:
            chain = draw_chain(rng, fewest, most)
            prompt = prompt_of(chain)
            if prompt in seen:
                continue
            seen.add(prompt)
            boxed = re.search(r"{(.*)}", work_out(chain, totals=start.totals))
            assert boxed is not None
            identity = f"{split}-{len(rows):04d}"
            row = {"id": identity, "prompt": prompt, "answer": boxed[1], "source": source}
            rows.append(row | ({"verifier": "exact"} if start.totals else {}))
        splits[split] = rows
    return splits


def write_demo_problems(out: Path, start: Start = DEMO) -> dict[str, Path]:
    """Write ``train.jsonl``, ``heldout.jsonl`` and ``ood.jsonl`` into a folder."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; give a folder for the demo problems")
    paths = {}
    for split, rows in demo_problems(start).items():
        paths[split] = out / f"{split}.jsonl"
        write_text(paths[split], "".join(json.dumps(row) + "\n" for row in rows))
    return paths


# --- tokenizer and model ----------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters: printable ASCII and newline, and pad, end and unknown."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>"]
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: i for i, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=512,
    )


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    """The Qwen2 architecture of the demo model: 0.5M parameters, 512 positions."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        # About 1/sqrt(hidden_size): the usual 0.02 is for wide models, and here it learns
        # the arithmetic several times more slowly.
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_demo_model(
    out: Path,
    seed: int = 0,
    log: Log = quiet,
    *,
    start: Start = DEMO,
    force: bool = False,
    steps: tuple[int, int] | None = None,
    samples: int = 300,
) -> dict[str, Any]:
    """Make the demo model and warm it up; the same seed gives the same weights on a machine.

    Args:
        out: the folder to write: a plain Hugging Face folder in float32, with tokenizer.
        seed: of the weights and of the warm-up's problems.
        steps: optimizer steps of the two phases; default those of ``start``.
        samples: held-out problems for the accuracy, at most 300; 0 measures none.

    Returns:
        path, parameters, pass_at_1 (temperature 1, one sample a held-out problem; None where
        none was measured), loss (the last one) and seconds.
    """
    import torch
    from transformers import GenerationConfig, Qwen2ForCausalLM

    target_folder(out, force)
    started = time.monotonic()
    tokenizer = make_tokenizer()
    with reproducible(seed):
        model = Qwen2ForCausalLM(model_config(tokenizer))
        loss = _warm_up(model, tokenizer, seed, start, steps, log)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    accuracy = None
    with atomic_folder(out) as folder:
        model.to(torch.float32).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if samples:
            held_out = demo_problems(start)["heldout"][:samples]
            accuracy = _pass_at_1(folder, held_out, seed)
    seconds = time.monotonic() - started
    if accuracy is not None:
        log(f"held-out pass@1 {accuracy:.3f} at temperature 1, after {seconds:.0f} s")
    return {
        "path": str(out),
        "parameters": sum(p.numel() for p in model.parameters()),
        "pass_at_1": accuracy,
        "loss": loss,
        "seconds": round(seconds, 1),
    }


def target_folder(out: Path, force: bool) -> None:
    """Refuse a folder for a model that is a file, or (without ``force``) holds something."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; give a folder for the demo model")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise InputError(f"{out}: exists and is not empty; give another folder, or --force")


@contextlib.contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Seed torch and fix its threads (sums depend on their number); restore both afterwards."""
    import torch

    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    start: Start,
    steps: tuple[int, int] | None,
    log: Log,
) -> float:
    """Supervised training in place: AdamW, batches of 32, a trapezoid for each phase.

    The loss is the mean over response tokens. Those problems that are evaluated are never drawn.
    Returns the last loss.
    """
    import torch
    from torch.nn.functional import cross_entropy

    problems = demo_problems()
    held_out = {row["prompt"] for split in ("heldout", "ood") for row in problems[split]}
    rng = random.Random(f"warm-up {seed}")
    model.train()
    value = math.nan
    for phase, (usual, peak, slipping) in enumerate(start.phases):
        count = steps[phase] if steps else usual
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01
        )
        for step in range(count):
            # Up within _RAMP steps, level, and down to zero over the last two fifths: the
            # arithmetic falls into place late, and a cosine would already be low by then.
            shape = min(1.0, (step + 1) / _RAMP, (count - step) / (0.4 * count))
            for group in optimizer.param_groups:
                group["lr"] = peak * shape
            batch = _batch(tokenizer, rng, held_out, start.slips if slipping else None, start)
            tokens = sum(int((labels >= 0).sum()) for _, labels in batch)
            optimizer.zero_grad()
            value = 0.0
            for ids, labels in batch:
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
                loss = cross_entropy(
                    logits.flatten(0, 1),
                    labels[:, 1:].flatten(),
                    ignore_index=-100,
                    reduction="sum",
                )
                (loss / tokens).backward()  # type: ignore[no-untyped-call]
                value += float(loss.detach()) / tokens
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 50 == 49 or step == count - 1:
                log(f"warm-up phase {phase + 1} of 2, step {step + 1} of {count}: loss {value:.3f}")
    model.eval()
    return value


def _batch(
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    held_out: set[str],
    slips: dict[str, float] | None,
    start: Start = DEMO,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A batch as passes of rows of like length, so that little is padding.

    Returns:
        Token ids and labels of each pass, both [rows, longest] int64, padded on the right, labels
        with -100 on prompt and padding. Padding comes after everything that attends, so no
        attention mask is needed.
    """
    import torch

    end = [tokenizer.eos_token_id]
    texts: list[tuple[int, list[int]]] = []  # length of the prompt, token ids
    while len(texts) < _ROWS:
        chain = draw_chain(rng, 1, start.longest)
        if (prompt := prompt_of(chain)) not in held_out:
            text = prompt + work_out(chain, slips, rng, totals=start.totals)
            texts.append((len(prompt), tokenizer(text).input_ids + end))
    texts.sort(key=lambda item: len(item[1]))
    passes = []
    for first in range(0, _ROWS, _MICRO):
        rows = texts[first : first + _MICRO]
        ids = torch.full((len(rows), len(rows[-1][1])), int(tokenizer.pad_token_id or 0))
        labels = torch.full(ids.shape, -100)
        for i, (prompt_length, row) in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            labels[i, prompt_length : len(row)] = ids[i, prompt_length : len(row)]
        passes.append((ids, labels))
    return passes


def _pass_at_1(folder: Path, problems: list[dict[str, str]], seed: int) -> float:
    """Share of the problems solved by one sample each at temperature 1."""
    from exgrpo_cli.engines import Request, Sampling
    from exgrpo_cli.engines.transformers import TransformersEngine
    from exgrpo_cli.recipe import parse_recipe

    recipe = parse_recipe(
        {"model": {"path": str(folder)}, "rollout": {"device": "cpu"}}, "the demo model"
    )
    engine = TransformersEngine(recipe, str(folder))
    tokenizer = make_tokenizer()
    requests = [
        Request(i, tokenizer(row["prompt"]).input_ids, row_seed("demo", seed, row["id"]))
        for i, row in enumerate(problems)
    ]
    solved = 0
    for completion in engine.generate(requests, Sampling(temperature=1.0, max_new_tokens=96)):
        text = str(tokenizer.decode(completion.token_ids, skip_special_tokens=True))
        solved += text.endswith(f"\\boxed{{{problems[completion.index]['answer']}}}")
    engine.close()
    return solved / len(problems)

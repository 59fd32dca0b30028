"""Saved policies open elsewhere, and trainer state comes back bit for bit."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe import TrainSettings
from exgrpo_cli.training import policy
from exgrpo_cli.training import trainer_state as checkpoint
from exgrpo_cli.training.update import make_optimizer
from making import qwen

SETTINGS = TrainSettings(learning_rate=1e-2, weight_decay=0.1)


def tiny(**changes):
    return qwen(vocab_size=20, intermediate_size=40, **changes)


def tokenizer_folder(path):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({c: i for i, c in enumerate("abcdefghij<>")}, unk_token="<"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=">", unk_token="<", chat_template="{{ messages }}"
    ).save_pretrained(path)
    return path


def trained(model, updates=2):
    """An optimizer that has made some updates."""
    optimizer = make_optimizer(model, SETTINGS)
    generator = torch.Generator().manual_seed(5)
    for _ in range(updates):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return optimizer


def one_more(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def save(folder, model, optimizer, **changes):
    values = {"step": 1, "updates": 2, "masters": False, "metrics": {"train/loss": 0.5}}
    checkpoint.save_trainer(folder, model, optimizer, **values | changes)


# --- folders ------------------------------------------------------------------------------------


def test_a_failed_folder_leaves_nothing_and_the_old_one_stands(tmp_path):
    target = tmp_path / "step-00001"
    with tables.atomic_folder(target) as folder:
        (folder / "a").write_text("old")

    def fail(folder):
        (folder / "a").write_text("new")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"), tables.atomic_folder(target) as folder:
        fail(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00001"]
    assert (target / "a").read_text() == "old"
    with tables.atomic_folder(target) as folder:
        (folder / "b").write_text("new")
    assert [p.name for p in target.iterdir()] == ["b"]


def test_what_a_killed_writer_left_is_removed_but_not_others(tmp_path):
    (tmp_path / ".step-00001.abc.tmp" / "deep").mkdir(parents=True)
    (tmp_path / ".step-00002.abc.tmp").mkdir()
    with tables.atomic_folder(tmp_path / "step-00001"):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == [".step-00002.abc.tmp", "step-00001"]


def test_folders_are_readable_by_others_as_their_parent_is(tmp_path):
    tmp_path.chmod(0o755)
    with tables.atomic_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


# --- policies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_policy_is_a_plain_folder(tmp_path, dtype, tied):
    model = tiny(tie_word_embeddings=tied)
    model.generation_config.eos_token_id = [3, 4]
    source = tokenizer_folder(tmp_path / "source")
    out = tmp_path / "policy" / "step-00001"
    policy.save_policy(model, str(source), out, dtype)

    names = {p.name for p in out.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not [n for n in names if n.endswith((".bin", ".pt", ".pkl", ".pth"))]
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert policy.saved_dtype(str(out)) == dtype
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) != tied
    opened = AutoModelForCausalLM.from_pretrained(out)
    assert opened.dtype == dtype
    assert opened.generation_config.eos_token_id == [3, 4]
    for name, value in model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], value.to(dtype)), name
    assert AutoTokenizer.from_pretrained(out)("abc")["input_ids"] == [0, 1, 2]
    assert AutoTokenizer.from_pretrained(out).chat_template == "{{ messages }}"
    assert model.dtype == torch.float32  # the live model is as it was


def test_a_contradictory_generation_config_does_not_stop_a_save(tmp_path):
    model = tiny()
    model.generation_config.temperature = 0.5  # without do_sample: transformers refuses to save it
    model.generation_config.eos_token_id = 7
    with pytest.raises(ValueError, match="temperature"):
        model.generation_config.validate(strict=True)
    policy.save_policy(model, str(tmp_path), tmp_path / "out", torch.float32)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert opened.generation_config.eos_token_id == 7


def test_an_adapter_opens_in_peft_and_names_its_base_absolutely(tmp_path, monkeypatch):
    from peft import LoraConfig, PeftModel, get_peft_model

    monkeypatch.chdir(tmp_path)
    policy.save_policy(
        tiny(), str(tokenizer_folder(tmp_path / "t")), tmp_path / "base", torch.float32
    )
    model = AutoModelForCausalLM.from_pretrained("base")
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    policy.save_policy(model, "base", tmp_path / "adapter", torch.float32)

    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert policy.saved_dtype(str(tmp_path / "adapter")) == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter")("abc")["input_ids"] == [0, 1, 2]
    monkeypatch.chdir("/")
    opened = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"]),
        tmp_path / "adapter",
    )
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(opened(ids).logits, model.eval()(ids).logits, rtol=0, atol=1e-6)


# --- trainer state ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_comes_back_bit_for_bit(tmp_path, dtype):
    model = tiny()
    optimizer = trained(model)
    masters = dtype != torch.float32
    policy.save_policy(model, str(tmp_path), tmp_path / "policy", dtype)
    save(tmp_path / "trainer", model, optimizer, masters=masters)
    assert (tmp_path / "trainer" / "masters.safetensors").exists() == masters
    want = one_more(model, optimizer)

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    fresh = make_optimizer(again, SETTINGS)
    assert checkpoint.load_trainer(tmp_path / "trainer", again, fresh, step=1) == 2
    got = one_more(again, fresh)
    for name in want:
        assert torch.equal(got[name], want[name]), name
    assert checkpoint.read_trainer(tmp_path / "trainer")["metrics"] == {"train/loss": 0.5}


def test_state_holds_no_pickle(tmp_path):
    model = tiny()
    save(tmp_path / "trainer", model, trained(model), masters=True)
    for file in (tmp_path / "trainer").iterdir():
        assert file.suffix in (".json", ".safetensors")
        if file.suffix == ".safetensors":
            load_file(file)


def test_an_optimizer_that_never_stepped_can_be_saved(tmp_path):
    model = tiny()
    save(tmp_path / "t", model, make_optimizer(model, SETTINGS), updates=0)
    assert checkpoint.load_trainer(tmp_path / "t", model, trained(model), step=1) == 0
    # Several processes have nothing to write then.
    (tmp_path / "t" / "optimizer.safetensors").unlink()
    assert checkpoint.load_trainer(tmp_path / "t", model, trained(model), step=1) == 0


def test_a_missing_file_of_a_state_is_noticed(tmp_path):
    model = tiny()
    save(tmp_path / "t", model, trained(model), masters=True)
    (tmp_path / "t" / "masters.safetensors").unlink()
    with pytest.raises(InputError, match="a file is missing from this trainer state"):
        checkpoint.load_trainer(tmp_path / "t", model, make_optimizer(model, SETTINGS), step=1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: None, "belongs to the policy of step 1, not to that of step 2"),
        (lambda t: (t / "trainer.json").unlink(), "trainer.json is missing"),
        (lambda t: (t / "trainer.json").write_text("{"), "not valid JSON"),
        (lambda t: (t / "trainer.json").write_text("{}"), "not a trainer state"),
        (lambda t: (t / "optimizer.safetensors").unlink(), "optimizer.safetensors: missing"),
        (lambda t: os.truncate(t / "optimizer.safetensors", 900), "not readable as safetensors"),
    ],
)
def test_bad_state_is_refused(tmp_path, damage, message):
    model = tiny()
    save(tmp_path / "t", model, trained(model))
    damage(tmp_path / "t")
    step = 2 if "step 2" in message else 1
    with pytest.raises(InputError, match=message) as error:
        checkpoint.load_trainer(tmp_path / "t", model, make_optimizer(model, SETTINGS), step=step)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changes", [{"hidden_size": 48}, {"num_hidden_layers": 2}])
def test_state_of_another_model_is_refused(tmp_path, changes):
    for saved, opened in ((tiny(), tiny(**changes)), (tiny(**changes), tiny())):
        save(tmp_path / "t", saved, trained(saved))
        with pytest.raises(InputError, match="another model's"):
            checkpoint.load_trainer(
                tmp_path / "t", opened, make_optimizer(opened, SETTINGS), step=1
            )


def test_masters_of_another_policy_are_refused(tmp_path):
    model = tiny()
    save(tmp_path / "t", model, trained(model), masters=True)
    with torch.no_grad():
        model.lm_head.weight[3, 4] += 0.1
    with pytest.raises(InputError, match="differs from the policy's"):
        checkpoint.load_trainer(tmp_path / "t", model, make_optimizer(model, SETTINGS), step=1)


def test_pruning_keeps_the_newest(tmp_path):
    for name in ("step-00001", "step-00002", "step-00010", "step-00011", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer.json").touch()
    removed = checkpoint.prune_trainers(tmp_path / "step-00010", keep=2)
    assert [p.name for p in removed] == ["step-00001"]
    assert (tmp_path / "step-00011").is_dir()
    assert (tmp_path / "notes").is_dir()


def test_pruning_leaves_policies_beside_the_states(tmp_path):
    """As `exgrpo train --out DIR/step-00003` puts them."""
    for number in (1, 2, 3):
        (tmp_path / f"step-0000{number}").mkdir()
        (tmp_path / f"step-0000{number}-trainer").mkdir()
        (tmp_path / f"step-0000{number}-trainer" / "trainer.json").touch()
    removed = checkpoint.prune_trainers(tmp_path / "step-00003-trainer", keep=1)
    assert [p.name for p in removed] == ["step-00001-trainer", "step-00002-trainer"]
    assert len(list(tmp_path.glob("step-0000?"))) == 3
    # Neither where a state of another name lies beside them, nor a state that lies among them.
    assert checkpoint.prune_trainers(tmp_path / "state", keep=1) == []
    (tmp_path / "step-00004").mkdir()
    (tmp_path / "step-00004" / "trainer.json").touch()
    assert checkpoint.prune_trainers(tmp_path / "step-00004", keep=1) == []
    assert len(list(tmp_path.glob("step-0000?"))) == 4

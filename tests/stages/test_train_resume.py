"""Steps one after the other: resumed, killed, done again; LoRA adapters."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.models import load_model
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.training import update
from exgrpo_cli.training.head import open_head
from exgrpo_cli.training.update import Terms
from train_files import (
    LONGEST,
    make_step,
    read_groups,
    recipe,
    run,
    same,
    three_steps,
    tiny,
    train,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_steps_from_files_equal_steps_in_memory_bit_for_bit(tmp_path, model_folder):
    given = recipe(
        train={"minibatch_questions": 2, "weight_decay": 0.1, "warmup_steps": 3},
        objective={"entropy_bonus": 0.01},
    )
    arguments = three_steps(tmp_path, model_folder, given, scores=False)
    model = load_model(str(model_folder), given.model, torch.device("cpu"), torch.float32)
    optimizer = update.make_optimizer(model, given.train)
    done = 0
    for step, files in enumerate(arguments):
        groups = read_groups(files, given, scores=None)
        terms = Terms(given.objective, None, LONGEST, 1.0)
        result = update.run_updates(
            open_head(model), groups, terms, optimizer, given.train,
            seed=tables.row_seed(given.seed, "train", step), done=done,
        )  # fmt: skip
        done = result.total_updates
    assert done == 9
    last = arguments[-1]
    saved = weights(last["out_policy"])
    state = load_file(last["out_trainer"] / "optimizer.safetensors")
    for index, (name, parameter) in enumerate(model.named_parameters()):
        assert torch.equal(saved[name], parameter.detach()), name
        for key, value in optimizer.state_dict()["state"][index].items():
            assert torch.equal(state[f"{name}/{key}"], value), (name, key)


def test_bfloat16_policies_keep_float32_masters(tmp_path, model_folder):
    """A tiny learning rate would be lost in bfloat16; it is not, since the masters go on."""
    given = recipe(train={"save_dtype": "bfloat16", "learning_rate": 1e-5})
    arguments = three_steps(tmp_path, model_folder, given)
    last = arguments[-1]
    saved, masters = (
        weights(last["out_policy"]),
        load_file(last["out_trainer"] / "masters.safetensors"),
    )
    start = weights(model_folder)
    for name, master in masters.items():
        assert master.dtype == torch.float32
        assert saved[name].dtype == torch.bfloat16
        assert torch.equal(saved[name], master.bfloat16())
        moved = (master - start[name]).abs().max()
        assert 0 < moved < 4e-5, name  # three small updates from the float32 start, not rounded
    config = json.loads((last["out_policy"] / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    # auto: as the policy that was trained
    other = {"out_policy": tmp_path / "auto", "out_trainer": tmp_path / "auto-trainer"}
    train(**last | other, recipe=recipe(train={"learning_rate": 1e-5}))
    assert same(weights(tmp_path / "auto"), saved)


KILLED = textwrap.dedent("""
    import json, os, signal, sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM
    from exgrpo_cli.policy import checkpoint
    from exgrpo_cli.recipe import parse_recipe
    from train_files import train
    arguments = json.loads(sys.argv[1])
    recipe = parse_recipe(arguments.pop("recipe"), "test")

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def run(point):
        values = {k: Path(v) if k in sys.argv[2].split(",") and v else v
                  for k, v in arguments.items()}
        for name in ("out_policy", "out_trainer"):
            values[name] = values[name].parent / point / values[name].name
        log = lambda line: None
        if point == "update":
            log = lambda line: "update 2/3" in line and die()
        if point == "trainer":
            checkpoint.save_file = die
        if point == "between":
            checkpoint.save_policy = die
        if point == "policy":
            checkpoint._save_tokenizer = die
        train(**values, recipe=recipe, log=log)

    for point in ("update", "trainer", "between", "policy"):
        child = os.fork()
        if child == 0:
            run(point)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, point
""")


@pytest.mark.slow
def test_a_killed_step_is_done_again_to_the_same_bits(tmp_path, model_folder):
    given = recipe(train={"minibatch_questions": 2})
    arguments = three_steps(tmp_path, model_folder, given)[1]  # has a trainer state before it
    paths = [key for key, value in arguments.items() if isinstance(value, Path)]
    values = {k: str(v) if isinstance(v, Path) else v for k, v in arguments.items()}
    values["recipe"] = given.model_dump(mode="json")
    subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(values), ",".join(paths)],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    policy, trainer = arguments["out_policy"], arguments["out_trainer"]
    for point in ("update", "trainer", "between", "policy"):
        other = {
            "out_policy": policy.parent / point / policy.name,
            "out_trainer": trainer.parent / point / trainer.name,
        }
        assert not other["out_policy"].exists(), point
        assert other["out_trainer"].exists() == (point in ("between", "policy"))
        metrics = train(**arguments | other, recipe=given)
        assert "skipped" not in metrics
        assert same(weights(other["out_policy"]), weights(policy)), point
        state = load_file(other["out_trainer"] / "optimizer.safetensors")
        assert same(state, load_file(trainer / "optimizer.safetensors")), point
        # Nothing of the killed attempt is left.
        assert [p.name for p in other["out_policy"].parent.iterdir()] == [policy.name]
        assert [p.name for p in other["out_trainer"].parent.iterdir()] == [trainer.name]


def test_a_step_that_is_done_is_not_done_again(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    metrics = run(arguments, model_folder)
    before = (arguments["out_policy"] / "model.safetensors").stat().st_mtime_ns
    again = run(arguments, "/no/such/policy")
    assert again == {"skipped": True, "policy": str(arguments["out_policy"])} | metrics
    assert (arguments["out_policy"] / "model.safetensors").stat().st_mtime_ns == before


def test_the_callers_random_numbers_are_left_alone(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    torch.manual_seed(7)
    want = torch.rand(3)
    torch.manual_seed(7)
    run(arguments, model_folder)
    assert torch.equal(torch.rand(3), want)


def test_dropout_is_seeded_by_the_step(tmp_path):
    tiny(dropout=0.3).save_pretrained(tmp_path / "model")
    results = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        arguments = make_step(tmp_path / name, tiny())
        torch.manual_seed(hash(name) % 1000)
        run(arguments, tmp_path / "model", replace_seed(recipe(), seed))
        results.append(weights(arguments["out_policy"]))
    assert same(results[0], results[1])
    assert not same(results[0], results[2])


def replace_seed(given: Recipe, seed: int) -> Recipe:
    return given.model_copy(update={"seed": seed})


def test_old_trainer_states_are_removed_when_asked(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    old = arguments["out_trainer"].parent / "step-00000"
    old.mkdir(parents=True)
    (old / "trainer.json").write_text("{}")
    run(arguments, model_folder, recipe(train={"keep": 1}))
    assert [p.name for p in old.parent.iterdir()] == ["step-00001"]


def test_gradient_checkpointing_changes_memory_not_results(tmp_path, model_folder):
    results = []
    for on in (False, True):
        arguments = make_step(tmp_path / str(on), tiny())
        run(arguments, model_folder, recipe(train={"gradient_checkpointing": on}))
        results.append(load_file(arguments["out_trainer"] / "optimizer.safetensors"))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-8)


# --- LoRA -----------------------------------------------------------------------------------------


def test_lora_trains_an_adapter_over_two_steps_that_opens_in_peft_and_generates(
    tmp_path, model_folder
):
    from peft import AutoPeftModelForCausalLM

    given = recipe(lora={"enabled": True, "rank": 4, "alpha": 8})
    first = make_step(tmp_path / "0", tiny())
    run(first, model_folder, given)
    names = {p.name for p in first["out_policy"].iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert "model.safetensors" not in names
    one = load_file(first["out_policy"] / "adapter_model.safetensors")
    assert any(value.abs().sum() > 0 for name, value in one.items() if "lora_B" in name)

    device, dtype = torch.device("cpu"), torch.float32
    model = load_model(str(first["out_policy"]), given.model, device, dtype)
    second = make_step(tmp_path / "1", model, step=1)
    metrics = run(second, first["out_policy"], given, trainer=first["out_trainer"])
    assert metrics["train/sampling_logp_difference_max"] < 1e-5  # the adapter was in the policy
    two = load_file(second["out_policy"] / "adapter_model.safetensors")
    assert two.keys() == one.keys()
    assert all(not torch.equal(one[name], two[name]) for name in one)
    state = load_file(second["out_trainer"] / "optimizer.safetensors")
    assert {name.rpartition("/")[0].rpartition(".")[2] for name in state} == {"weight"}
    assert all("lora_" in name for name in state)
    assert {int(v) for name, v in state.items() if name.endswith("/step")} == {2}

    opened = AutoPeftModelForCausalLM.from_pretrained(second["out_policy"])
    ids = torch.tensor([[5, 6, 7]])
    generated = opened.generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert generated.shape[1] > 3
    base = tiny()
    assert (opened(ids).logits - base(ids).logits).abs().max() > 1e-3


def test_an_adapter_is_not_trained_as_a_whole_model(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    run(arguments, model_folder, recipe(lora={"enabled": True}))
    other = {"out_policy": tmp_path / "p2", "out_trainer": tmp_path / "t2"}
    with pytest.raises(InputError, match=r"lora\.enabled is false"):
        run(arguments, arguments["out_policy"], **other)


def test_unknown_lora_targets_are_refused(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    with pytest.raises(InputError, match=r"lora\.targets = \['nothing'\]"):
        run(arguments, model_folder, recipe(lora={"enabled": True, "targets": ["nothing"]}))

"""Training in several processes gives what one process gives."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from exgrpo_cli import tables
from exgrpo_cli.recipe import to_toml
from exgrpo_cli.stages.train import train
from train_files import make_step, recipe, tiny, weights

PATHS = ("rollouts", "verdicts", "scores", "curated", "trainer", "policy")


def in_processes(count, arguments, given, out, step=0):
    """`exgrpo train` under torchrun, on loose files; what it printed."""
    file = out.parent / "recipe.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_toml(given))
    options = [f"--{name}={arguments[name]}" for name in PATHS if arguments.get(name) is not None]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(count), "-m", "exgrpo_cli", "train", *options]
    command += [f"--recipe={file}", f"--step={step}", f"--out={out}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def assert_close(one, other):
    assert one.keys() == other.keys()
    for name in one:
        # A key's bias shifts all scores of a query alike: its gradient is rounding, of any sign.
        if "k_proj.bias" not in name:
            torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-5, msg=name)


def test_two_processes_give_the_weights_of_one_and_either_can_go_on(tmp_path):
    model = tiny(layers=2)
    model.save_pretrained(tmp_path / "model")
    given = recipe(
        train={"learning_rate": 1e-3, "minibatch_questions": 3, "tokens_per_microbatch": 40},
        objective={"entropy_bonus": 0.01, "sampler_cap": 2.0},
        loop={"steps": 4},
    )
    files = make_step(tmp_path / "files", model, noise=0.3)
    files["policy"] = tmp_path / "model"
    alone = train(**files | {"policy": str(tmp_path / "model")}, recipe=given)
    one = files["out_policy"]

    both = tmp_path / "both" / "step-00001"
    metrics, said = in_processes(2, files, given, both)
    assert "2 processes, cpu" in said
    assert said.count("update 1/2") == 1  # one of them speaks
    for name in metrics:
        if not name.endswith(("seconds", "per_second", "memory_mb")):
            assert metrics[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
    assert_close(weights(one), weights(both))
    # The moments are the gradients: equal too, and in as many files as there were processes.
    state = load_file(files["out_trainer"] / "optimizer.safetensors")
    trainer = both.parent / "step-00001-trainer"
    shards = sorted(trainer.glob("shard-*.safetensors"))
    assert len(shards) == 2
    assert {file.suffix for file in trainer.iterdir()} == {".safetensors", ".json"}
    whole = [load_file(file) for file in shards]
    name = "model.layers.0.mlp.up_proj.weight/exp_avg"
    torch.testing.assert_close(torch.cat([part[name] for part in whole]), state[name])

    # Step 1 from the state that two processes wrote: by one, and by two.
    files = make_step(tmp_path / "files1", tiny(layers=2), step=1, scores=False)
    start = {"policy": both, "trainer": trainer}
    by_one = train(**files | {k: v if k == "trainer" else str(v) for k, v in start.items()},
                   recipe=given)  # fmt: skip
    by_two, _ = in_processes(2, files | start, given, tmp_path / "both" / "step-00002", step=1)
    assert_close(weights(files["out_policy"]), weights(tmp_path / "both" / "step-00002"))
    assert by_one["train/loss"] == pytest.approx(by_two["train/loss"], rel=1e-4)
    notes = json.loads((files["out_trainer"] / "trainer.json").read_text())["notes"]
    assert notes["first_entropy"] == pytest.approx(alone["train/entropy"], rel=1e-4)


def test_adapters_and_recomputed_activations_in_two_processes(tmp_path):
    model = tiny(layers=2)
    model.save_pretrained(tmp_path / "model")
    given = recipe(
        train={"learning_rate": 1e-3, "gradient_checkpointing": True, "minibatch_questions": 2},
        lora={"enabled": True, "rank": 2},
    )
    files = make_step(tmp_path / "files", model, scores=False)
    files["policy"] = tmp_path / "model"
    alone = train(**files | {"policy": str(tmp_path / "model")}, recipe=given)
    both = tmp_path / "both" / "step-00001"
    metrics, _ = in_processes(2, files, given, both)
    assert metrics["train/loss"] == pytest.approx(alone["train/loss"], rel=1e-3)
    assert metrics["train/grad_norm"] == pytest.approx(alone["train/grad_norm"], rel=1e-4)
    assert sorted(p.name for p in both.iterdir()) == sorted(
        p.name for p in files["out_policy"].iterdir()
    )
    ours = load_file(both / "adapter_model.safetensors")
    assert_close(load_file(files["out_policy"] / "adapter_model.safetensors"), ours)


def test_bad_input_is_one_line(tmp_path):
    tiny().save_pretrained(tmp_path / "model")
    files = make_step(tmp_path / "files", tiny())
    files["policy"] = tmp_path / "model"
    rows = tables.read_table("verdicts", files["verdicts"])
    tables.write_table("verdicts", rows.slice(1), files["verdicts"])
    with pytest.raises(AssertionError) as error:
        in_processes(2, files, recipe(), tmp_path / "both" / "step-00001")
    assert str(error.value).count("no verdict on rollout") == 1
    assert not (tmp_path / "both" / "step-00001").exists()

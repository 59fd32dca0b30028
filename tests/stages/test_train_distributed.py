"""Training in several processes gives what one process gives."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exgrpo_cli.recipe import to_toml
from exgrpo_cli.runs.processes import _why_failed
from making import parts, small_run
from train_files import make_step, recipe, tiny, train, weights

ROOT = Path(__file__).parents[2]
PATHS = ("rollouts", "verdicts", "scores", "curated", "trainer", "policy")


def in_processes(exgrpo, arguments, given, out, step=0):
    """`exgrpo train` in two processes, as torchrun starts them, on loose files; what they say."""
    file = out.parent / "recipe.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_toml(given))
    options = [f"--{name}={arguments[name]}" for name in PATHS if arguments.get(name) is not None]
    options += [f"--recipe={file}", f"--step={step}", f"--out={out}", "--json"]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port())}
    with (out.parent / "out.txt").open("w+") as said, (out.parent / "err.txt").open("w+") as log:
        streams = {"stdout": said.fileno(), "stderr": log.fileno()}
        children = [
            exgrpo.start("train", *options, **streams, **shared, RANK=rank, LOCAL_RANK=rank)
            for rank in "01"
        ]
        codes = [child.wait(300) for child in children]
        words = [Path(file.name).read_text() for file in (said, log)]
    assert codes == [0, 0], words
    return json.loads(words[0]), words[1]


def save(model, guesser, folder):
    """A policy folder, with a tokenizer."""
    model.save_pretrained(folder)
    for file in guesser.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)


def assert_close(one, other):
    assert one.keys() == other.keys()
    for name in one:
        # A key's bias shifts all scores of a query alike: its gradient is rounding, of any sign.
        if "k_proj.bias" not in name:
            torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-5, msg=name)


def test_two_processes_give_the_weights_of_one_and_either_can_go_on(tmp_path, exgrpo, guesser):
    model = tiny(layers=2)
    save(model, guesser, tmp_path / "model")
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
    metrics, said = in_processes(exgrpo, files, given, both)
    assert "2 processes, cpu" in said
    assert said.count("update 1/2") == 1  # one of them speaks
    assert {name for name in metrics if name.startswith("train/")} == alone.keys()
    for name in alone:
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
    by_two, _ = in_processes(exgrpo, files | start, given, tmp_path / "both" / "step-00002", step=1)
    assert_close(weights(files["out_policy"]), weights(tmp_path / "both" / "step-00002"))
    assert by_one["train/loss"] == pytest.approx(by_two["train/loss"], rel=1e-4)
    notes = json.loads((files["out_trainer"] / "trainer.json").read_text())["notes"]
    assert notes["first_entropy"] == pytest.approx(alone["train/entropy"], rel=1e-4)


def test_adapters_and_recomputed_activations_in_two_processes(tmp_path, exgrpo, guesser):
    model = tiny(layers=2)
    save(model, guesser, tmp_path / "model")
    given = recipe(
        train={"learning_rate": 1e-3, "gradient_checkpointing": True, "minibatch_questions": 2},
        lora={"enabled": True, "rank": 2},
    )
    files = make_step(tmp_path / "files", model, scores=False)
    files["policy"] = tmp_path / "model"
    alone = train(**files | {"policy": str(tmp_path / "model")}, recipe=given)
    both = tmp_path / "both" / "step-00001"
    metrics, _ = in_processes(exgrpo, files, given, both)
    assert metrics["train/loss"] == pytest.approx(alone["train/loss"], rel=1e-3)
    assert metrics["train/grad_norm"] == pytest.approx(alone["train/grad_norm"], rel=1e-4)
    assert sorted(p.name for p in both.iterdir()) == sorted(
        p.name for p in files["out_policy"].iterdir()
    )
    ours = load_file(both / "adapter_model.safetensors")
    assert_close(load_file(files["out_policy"] / "adapter_model.safetensors"), ours)


SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


def test_the_loop_slurm_and_a_node_train_in_processes(tmp_path, exgrpo, guesser):
    """A step that only lacks its policy: made by one process, by the loop's two (with the scores),
    by SLURM's; and a whole iteration in two processes of each stage."""
    run = tmp_path / "one"
    few = ["--set", "rollout.max_new_tokens=12"]
    exgrpo("run", run, *small_run(guesser), *few, "--steps", 1)
    for name in ("loop", "slurm"):
        shutil.copytree(run, tmp_path / name)
        for made in ("policy", "trainer", "metrics", "metrics.jsonl"):
            path = tmp_path / name / made
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(tmp_path / "loop" / "scores")
    two = ["--set", "train.processes=2", "--set", "score.processes=2"]
    done = exgrpo("run", tmp_path / "loop", *small_run(guesser), *few, "--steps", 1, *two, "--json",
                  OMP_NUM_THREADS="1")  # fmt: skip
    assert json.loads(done.stdout)["steps"] == 1
    scored = [parts(tmp_path / name / "scores/step-00000") for name in ("one", "loop")]
    assert scored[0].equals(scored[1])
    tools = tmp_path / "bin"
    tools.mkdir()
    scripts = {"srun": SRUN, "scontrol": "#!/usr/bin/env bash\necho localhost\n"}
    scripts["exgrpo"] = exgrpo.script
    scripts["torchrun"] = f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    for name, text in scripts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    subprocess.run(
        ["bash", ROOT / "recipes/slurm/stage.sbatch", "train", tmp_path / "slurm", "0"],
        check=True,
        timeout=300,
        env=os.environ
        | {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_GPUS_ON_NODE": "2", "SLURM_NNODES": "1"}
        | {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "MASTER_PORT": str(free_port())},
    )
    exgrpo("init", tmp_path / "node", *small_run(guesser), *few)
    for _ in range(2):  # the second time nothing is left
        subprocess.run(
            [ROOT / "recipes/node.sh", tmp_path / "node", "1", "2"],
            check=True,
            timeout=300,
            cwd=ROOT,
            env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"},
        )
    sampled = [parts(tmp_path / name / "rollouts/step-00000") for name in ("one", "node")]
    assert sampled[0].equals(sampled[1])
    for name in ("loop", "slurm", "node"):
        assert len(list((tmp_path / name / "trainer/step-00001").glob("shard-*"))) == 2
        policy = tmp_path / name / "policy/step-00001"
        assert_close(weights(run / "policy/step-00001"), weights(policy))
        line = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])
        assert line["train/updates"] >= 1
        assert line["time/train"] > 0


SAID = """Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 17183)  (SIGTERM)
  traceback : Signal 15 (SIGTERM) received by PID 17183
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : %s
=======================================================
"""


def test_the_loop_names_why_a_process_failed():
    """What torchrun prints at its end, shortened."""
    miss = "exgrpo: RuntimeError: connection closed by peer"
    killed = SAID % "-9 (pid: 17184)  (SIGKILL)"
    assert "1 (local_rank: 1) was ended, exit code -9 (pid: 17184)  (SIGKILL)" in _why_failed(
        [miss, *killed.splitlines()]
    )
    failed = SAID % "2 (pid: 17184)"
    assert _why_failed(["exgrpo: too bad", *failed.splitlines()]) == "too bad"
    assert _why_failed(["Traceback", "ImportError: no torch", "====="]) == "ImportError: no torch"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_bad_input_is_said_once_a_machine(exgrpo, tmp_path):
    said = []
    for local in ("0", "1"):
        ranks = {"WORLD_SIZE": "2", "RANK": local, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": "2"}
        done = exgrpo("train", tmp_path / "nowhere", "--step", 0, code=2, **ranks)
        said += done.stderr.splitlines()
    assert len(said) == 1
    assert "nowhere" in said[0]


ENDS = """
import atexit, sys
from exgrpo_cli.cli import main

class Last:
    def __del__(self):
        print("taken apart", flush=True)

kept = Last()
atexit.register(print, "at exit")
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["train", "nowhere"], 2)])
def test_a_process_of_several_ends_without_taking_the_interpreter_apart(arguments, code):
    """A thread of gloo that frees a tensor meanwhile would abort it, its work done."""
    said = []
    for count in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", ENDS, *arguments],
            env=os.environ | {"WORLD_SIZE": count, "RANK": "0", "LOCAL_RANK": "0"},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        said.append(done.stdout.splitlines())
    assert said[0] == [*said[1], "taken apart"]
    assert said[1][-1] == "at exit"

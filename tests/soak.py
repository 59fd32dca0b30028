"""Kills: exgrpo as real processes that are killed, over and over, until the run is finished.

    python tests/soak.py --kills 200 [--seed 0] [--keep FOLDER]

Several ways, each on a tiny policy, and each compared with an undisturbed run: every table row for
row, every weight and optimizer tensor to the bit.

- ``points``: ``exgrpo run`` dies right before each call that changes its files' names or waits for
  the disk (rename, unlink, fsync, ...), each one once.
- ``times``: ``exgrpo run`` is killed at random times, by SIGKILL or SIGTERM.
- ``shards``: the stages by hand, in several processes at once that are killed at random.
- ``back``: a step is trained again, and then sampled again, by commands that die as in ``points``.
- ``sides``: ``exgrpo run`` with a lag, or one of its two sides, is killed at random times.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from same import differences  # noqa: E402

from deadly import Deadly, Process  # noqa: E402

STEPS = 4
SETTINGS = f"""
    model.template=plain rollout.engine=transformers rollout.samples=4 rollout.max_new_tokens=8
    rollout.questions_per_part=2 rollout.max_prompt_tokens=32 curate.questions=6
    curate.start_success=0.0 curate.store_before_start=true objective.length_divisor=8
    train.learning_rate=1e-3 train.keep=1 train.minibatch_questions=3 verify.workers=1
    evaluate.every=2 evaluate.samples=1 evaluate.bootstrap=100 loop.steps={STEPS}""".split()
KEEP_ALL = ("--set", "train.keep_every=1", "--set", "train.keep=9")
VERIFIER = """
import zlib
def judge(response, answer, metadata):
    return zlib.crc32(response.encode()) % 2 == 0
"""

ENDED = {signal.SIGKILL: (-signal.SIGKILL,), signal.SIGTERM: (143, -signal.SIGTERM)}
"""Exit codes by signal; SIGTERM ends a process by itself before it has taken it over."""

# --- the world ------------------------------------------------------------------------------------


@dataclass
class World:
    """A tiny policy with its problems, an undisturbed run, and what happened in the others."""

    folder: Path
    rng: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    """By what was killed."""
    compared: Counter[str] = field(default_factory=Counter)
    runs: int = 0

    @classmethod
    def make(cls, folder: Path, seed: int) -> World:
        import torch
        from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

        from exgrpo_cli.demo import make_tokenizer

        tokenizer = make_tokenizer()
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48,
                num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                tie_word_embeddings=True, initializer_range=0.2, max_position_embeddings=64,
                bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )  # fmt: skip
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        model.save_pretrained(folder / "policy")
        tokenizer.save_pretrained(folder / "policy")
        (folder / "verifier.py").write_text(VERIFIER)
        for name, count in (("train", 16), ("held", 3)):
            rows = [{"prompt": f"{name[0]}{i}=", "answer": str(i)} for i in range(count)]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return cls(folder, random.Random(seed))

    @property
    def recipe(self) -> list[str]:
        sets = [
            f"problems.verifier={self.folder}/verifier.py:judge",
            f"evaluate.problems.held={self.folder}/held.jsonl", *SETTINGS,
        ]  # fmt: skip
        given = ["--model", str(self.folder / "policy")]
        given += ["--problems", str(self.folder / "train.jsonl")]
        return [*given, *(word for one in sets for word in ("--set", one))]

    @property
    def plain(self) -> Path:
        """The undisturbed run."""
        path = self.folder / "plain"
        if not path.exists():
            self.succeed("init", path, *self.recipe)  # the server has imported all by now
            began = time.monotonic()
            self.succeed("run", path)
            self.seconds = time.monotonic() - began
        return path

    def new(self) -> Path:
        assert self.plain.exists()
        self.runs += 1
        return self.folder / f"run-{self.runs}"

    def log(self, run: Path) -> Path:
        return run.with_suffix(".log")

    def succeed(self, command: str, run: Path, *words: object) -> str:
        process = Process([command, run, *words], self.log(run))
        code = process.wait()
        assert code == 0, f"exgrpo {command} {run} {words}: exit code {code}\n{process.said()}"
        return process.said()

    def look(self, run: Path) -> None:
        """``status`` works on whatever a kill has left."""
        if not (run / "recipe.toml").exists():
            return
        from exgrpo_cli.cli import main

        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = None
            try:
                main(["status", str(run)])
            except SystemExit as ended:
                code = ended.code
        assert not code, said.getvalue()

    def compare(self, run: Path, plain: Path | None = None) -> None:
        """With an undisturbed run, but for times and starts, which the report has too."""
        found = [
            line
            for line in differences(plain or self.plain, run, self.compared)
            if not line.startswith(("report.html", "provenance.json", "metrics.jsonl: time/"))
            and "/time-" not in line.split(":")[0]
        ]
        assert not found, f"{run}:\n" + "\n".join(found)

    def sweep(self, run: Path) -> None:
        """What a kill has left is gone once it is old, with the next ``exgrpo run``."""
        long_ago = time.time() - 7200
        for path in leftovers(run):
            os.utime(path, (long_ago, long_ago))
        self.succeed("run", run)
        assert not leftovers(run), leftovers(run)


def leftovers(run: Path) -> list[Path]:
    """Files and folders in a run whose writers have not finished them."""
    found = [path for path in run.rglob("*") if path.name.startswith((".", "tmp_"))]
    return [path for path in found if not path.name.startswith(".lock")]


# --- the ways -------------------------------------------------------------------------------


def die(world: World, way: str, run: Path, deadly: Deadly, *words: object) -> bool:
    """Whether a command was killed at a new point; otherwise it is done."""
    process = Process([words[0], run, *words[1:]], world.log(run), deadly)
    code = process.wait()
    if code != 0:
        assert code == -signal.SIGKILL, f"exit code {code}\n{process.said()}"
        world.kills[way] += 1
        world.look(run)
    return code != 0


def points(world: World, kills: int, chance: float = 1.0) -> None:
    """Up to so many kills of one run, before each new call on its files."""
    run = world.new()
    deadly = Deadly(world.log(run).with_suffix(".points"), chance)
    while world.kills["points"] < kills:
        if not die(world, "points", run, deadly, "run", *world.recipe):
            break
    world.succeed("run", run, *world.recipe)
    world.compare(run)
    world.sweep(run)
    world.compare(run)


def back(world: World, kills: int, chance: float = 1.0) -> None:
    """Kills while a run goes back to an earlier step, and while a step is trained again.

    From whatever is left the run goes on to what it was.
    """
    plain, lost = world.new(), world.new()
    world.succeed("run", plain, *world.recipe, *KEEP_ALL)
    shutil.copytree(plain, lost)
    deadly = Deadly(world.log(lost).with_suffix(".points"), chance)
    for words in (
        ("train", "--step", STEPS - 1, "--force"),
        ("rollout", "--step", 1, "--force", "--discard-later"),
    ):
        while world.kills["back"] < kills and die(world, "back", lost, deadly, *words):
            copy = world.new()
            shutil.copytree(lost, copy)
            world.succeed("run", copy)
            world.compare(copy, plain)
            shutil.rmtree(copy)
    world.succeed("run", lost)
    world.compare(lost, plain)
    world.sweep(lost)


def times(world: World, kills: int, way: str = "times", *more: str) -> None:
    """At least so many kills of runs, or of one of their sides, at random times."""
    until, plain = world.kills[way] + kills, world.plain
    if more:
        plain = world.new()
        world.succeed("run", plain, *world.recipe, *more)
    while world.kills[way] < until:
        run = world.new()
        while True:
            process = Process(["run", run, *world.recipe, *more], world.log(run))
            deadline = time.monotonic() + world.rng.uniform(
                0.1, (2 if more else 0.6) * world.seconds
            )
            while process.runs() and time.monotonic() < deadline:
                time.sleep(0.01)
            how = world.rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            sides = process.sides()
            victim = world.rng.choice([process, *sides])
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill(how) if victim is process else victim.send_signal(how)
            code = process.wait()
            assert psutil.wait_procs(sides, timeout=60)[1] == []
            if code == 0:
                break
            expected = (1,) if victim is not process else ENDED[how]
            assert code in expected, f"exit code {code}\n{process.said()}"
            world.kills[way] += 1
            world.look(run)
        world.compare(run, plain)
        world.sweep(run)
        shutil.rmtree(run)


def shards(world: World, kills: int) -> None:
    """At least so many kills of the stages by hand, in processes that share them."""
    until = world.kills["shards"] + kills
    while world.kills["shards"] < until:
        run = world.new()
        _finish(world, run, [["init", run, *world.recipe]])
        for step in range(STEPS):
            for stage in ("rollout", "verify", "score"):
                count = world.rng.choice([1, 2, 3])
                _finish(world, run, [
                    [stage, run, "--step", step, "--shard", f"{i}/{count}"] for i in range(count)
                ])  # fmt: skip
            _finish(world, run, [["curate", run, "--step", step]])
            _finish(world, run, [["train", run, "--step", step]])
            if step % 2 == 0:
                _finish(world, run, [["evaluate", run, "--step", step]])
        _finish(world, run, [["evaluate", run, "--step", STEPS]])
        world.compare(run)
        world.sweep(run)
        shutil.rmtree(run)


def _finish(world: World, run: Path, commands: list[list[object]]) -> None:
    """Run commands at once, kill some of them, and begin those again until all are done."""
    while commands:
        began = time.monotonic()
        processes = [Process(words, world.log(run)) for words in commands]
        victims = [p for p in processes if world.rng.random() < 0.6]
        waits = sorted((began + world.rng.uniform(0.05, 1.5), i) for i in range(len(victims)))
        killed = {}
        for at, i in waits:
            while victims[i].runs() and time.monotonic() < at:
                time.sleep(0.01)
            killed[id(victims[i])] = world.rng.choice([signal.SIGKILL, signal.SIGTERM])
            victims[i].kill(killed[id(victims[i])])
        left = []
        for words, process in zip(commands, processes, strict=True):
            code = process.wait()
            if code == 0:
                continue
            ended = ENDED.get(killed.get(id(process), 0), ())
            assert code in ended, f"{words}: {code}\n{process.said()}"
            world.kills["shards"] += 1
            left.append(words)
        if left:
            world.look(run)
        commands = left


def sides(world: World, kills: int) -> None:
    times(world, kills, "sides", "--set", "loop.lag=1")


WAYS = {"points": points, "times": times, "shards": shards, "back": back, "sides": sides}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="*", default=[*WAYS], choices=[*WAYS])
    parser.add_argument("--keep", type=Path, help="folder for the runs; default a temporary one")
    given = parser.parse_args()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    world = World.make(folder.resolve(), given.seed)
    for way in given.ways:
        WAYS[way](world, -(-given.kills // len(given.ways)))
        print(f"{time.monotonic() - began:6.0f} s  {way}: {world.kills[way]} kills", flush=True)
    compared = ", ".join(f"{count:,} {what}" for what, count in sorted(world.compared.items()))
    print(f"{sum(world.kills.values())} kills; compared {compared}: no difference")
    if given.keep is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

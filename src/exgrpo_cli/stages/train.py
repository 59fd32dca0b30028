"""The train stage: one step of the mixed-policy objective, from files to the next policy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.machine import is_first_process
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.retention import prune_policies
from exgrpo_cli.rundir import REMOVED, refuse_removed
from exgrpo_cli.step import Result, Step
from exgrpo_cli.training.batch import Batch, Group

if TYPE_CHECKING:
    import torch

    from exgrpo_cli.training.update import StepResult, Terms


def train(step: Step, recipe: Recipe, *, force: bool = False, log: Log = quiet) -> Result:
    """Update the policy of step t on the mixed batch of step t.

    The batch: a fresh question's rollouts are a group; a replay question's rollouts and its
    curated trajectories (first, with the rewards that they were collected with) are a group whose
    advantages come from all its rewards together. A replay question without one is a fresh group.

    With ``objective.truncated = "zero_advantage"`` (as DAPO's overlong filtering, arXiv 2503.14476,
    section 3.4) a fresh response that was cut off at the length limit still counts in its group's
    mean and deviation, and as a row and its tokens where losses are averaged, but its own advantage
    is 0: it has no policy gradient. Entropy bonus and KL, where set, still see its tokens.

    The result follows from the files and the recipe alone: on a CPU a step that was killed and is
    run again gives the same bits. ``next_trainer`` is written first, then ``next_policy``, each
    whole; where ``next_policy`` exists the step is done and nothing is run. Rows of an update that
    was left out are written to ``skipped.jsonl`` in ``next_trainer``.

    Under ``torchrun`` this is called in every process; they share the model (FSDP2) and the batch,
    and the first one writes.

    Args:
        step: reads ``rollouts``, ``verdicts``, ``scores`` (for the old log-probabilities; where
            there are none they are computed here, or, where an earlier policy sampled, the
            engine's), ``curated``, the policy t and its ``trainer`` (a run's step 0 and loose files
            without one start a fresh optimizer); writes ``next_policy`` and ``next_trainer``, and
            in a run the metrics.
        recipe: ``objective``, ``train``, ``lora``, ``model``, ``seed`` and ``rollout``'s
            temperature.
        force: train anew where ``next_policy`` exists.
        log: gets plain lines.

    Returns:
        Done or skipped; metrics ``train/...``, see docs/metrics.md (None where there is no finite
        value; of a step that was done before, as far as ``next_trainer`` still has them). Notes
        are warnings.

    Raises:
        InputError: bad files, files of different steps or policies, a missing trainer state, or
            settings that cannot train.
    """
    from exgrpo_cli.models import check_policy, check_tokenizer, resolve_device
    from exgrpo_cli.training import distributed
    from exgrpo_cli.training.trainer_state import read_trainer

    started = time.monotonic()
    out = step.next_policy
    with distributed.process_group(recipe.train.device) as device_name:
        say = log if distributed.rank() == 0 else quiet
        if distributed.gather(out.exists())[0] and not force:
            was = "was trained and then removed" if (out / REMOVED).exists() else "exists already"
            say(f"{out} {was} and is left as it is")
            state = step.next_trainer / "trainer.json"  # may have been pruned
            kept = read_trainer(step.next_trainer)["metrics"] if state.exists() else {}
            _record(step, kept, again=True)
            _prune(step, recipe, say)
            return Result(skipped=1, metrics=kept)
        policy = step.policy(recipe.model.path)
        check_trainer(step)
        check_policy(policy)
        if step.run is not None:
            check_tokenizer(policy)  # or only the next rollout would miss it
        device = resolve_device(device_name)
        batch = Batch.read(step)
        work = _Work(step, recipe, policy, device, say, batch.lag)
        with _seeded(work.seed, device):
            metrics, notes, seconds = work.train(batch, started)
    _record(step, metrics)
    return Result(done=1, metrics=metrics, notes=tuple(notes), compute_seconds=seconds)


def check_trainer(step: Step) -> None:
    """Refuse a step whose optimizer state is gone."""
    trainer = step.find("trainer")
    if trainer is None or trainer.is_dir():
        return
    if "trainer" in step.given:
        raise InputError(f"{trainer}: no such trainer state")
    assert step.run is not None
    refuse_removed(step.run.policy(step.number))
    first = step.run.restarts(step.number)[-1]
    before = f"the latest before it is of step {first}" if first else "none before it is kept"
    raise InputError(
        f"{trainer}: the optimizer's state of step {step.number} is not there ({before}); restore"
        f" it, or train the steps from there on again: exgrpo train {step.run.root} --step {first}"
        " --force"
    )


def _record(step: Step, metrics: dict[str, Any], *, again: bool = False) -> None:
    """Leave the metrics in the run; of a step that was done before only where they are missing."""
    if step.run is None or not is_first_process() or "train/loss" not in metrics:
        return
    if not (again and step.run.stage_metrics(step.number, "train").exists()):
        step.run.record(step.number, "train", metrics)


def _forget(step: Step) -> None:
    """What the step made before: a kill then leaves it undone, not half of it old and half new."""
    if not is_first_process():
        return
    if step.next_policy.is_dir():
        tables.remove_folder(step.next_policy)
    if step.run is not None:
        step.run.stage_metrics(step.number, "train").unlink(missing_ok=True)


def _prune(step: Step, recipe: Recipe, log: Log) -> None:
    """Remove old trainer states and policies, also those that a killed process was to remove."""
    from exgrpo_cli.training.trainer_state import prune_trainers

    if not is_first_process():
        return
    if recipe.train.keep is not None:
        prune_trainers(step.next_trainer, recipe.train.keep)
    if step.run is not None and "next_policy" not in step.given:
        gone = prune_policies(step.run, recipe, step.number + 1)
        if len(gone) > 1:  # one a step is what it keeps to
            log(f"{len(gone)} policies of steps {gone[0]} to {gone[-1]} removed: train.keep_every")


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's random numbers from a seed inside the block, and as they were after it."""
    import torch

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class _Work:
    """One step's training on one device, its settings resolved."""

    def __init__(
        self, step: Step, recipe: Recipe, policy: str, device: torch.device, log: Log, lag: int
    ) -> None:
        self.step = step
        self.recipe = recipe
        self.policy = policy
        self.device = device
        self.seed = tables.row_seed(recipe.seed, "train", step.number)
        self.terms = self._terms(lag)
        self._log = log

    def say(self, line: str) -> None:
        self._log(f"train step {self.step.number}: {line}")

    def _terms(self, lag: int) -> Terms:
        from exgrpo_cli.training.objective import Clip
        from exgrpo_cli.training.update import Terms

        settings = self.recipe.objective
        auto = lag > 0 or not self._replaying()
        on = auto if settings.clip == "auto" else settings.clip == "on"
        return Terms(
            settings=settings,
            clip=Clip(settings.clip_low, settings.clip_high) if on else None,
            length_divisor=self.recipe.length_divisor,
            temperature=self.recipe.rollout.temperature,
        )

    def _replaying(self) -> bool:
        """Whether replay is on in the step; decides ``objective.clip = "auto"``."""
        if self.step.run is None:
            return self.step.find("curated") is not None
        from exgrpo_cli.experience.pool import replay_on

        return replay_on(self.step.run, self.step.number)

    def train(self, batch: Batch, started: float) -> tuple[dict[str, Any], list[str], float]:
        """Open the policy, update it, save it: its metrics, warnings, and seconds of updates."""
        import torch

        from exgrpo_cli.training import distributed
        from exgrpo_cli.training import trainer_state as states
        from exgrpo_cli.training.head import open_head
        from exgrpo_cli.training.logprobs import check_rows
        from exgrpo_cli.training.metrics import step_metrics, warnings_of
        from exgrpo_cli.training.policy import dtype_to_save, open_policy, save_policy
        from exgrpo_cli.training.update import make_optimizer, run_updates

        recipe, step, device = self.recipe, self.step, self.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        groups = batch.groups(recipe)
        if recipe.objective.kl > 0:
            groups = self._with_reference(groups)
        ranks = distributed.ranks()
        where = f"{ranks} processes, {device.type}" if ranks > 1 else str(device)
        self.say(f"opening {self.policy} on {where}")
        at_first = torch.device("cpu") if ranks > 1 else device
        model = open_policy(self.policy, recipe, device, at_first)
        head = open_head(model, distributed.shard(model, device))
        rows = [row for group in groups for row in group]
        check_rows(
            [row.prompt_ids for row in rows],
            [row.token_ids for row in rows],
            head.vocabulary,
            [f"rollout {row.rollout_id}" for row in rows],
        )
        optimizer = make_optimizer(model, recipe.train)
        done = 0
        remembered: dict[str, Any] = {}
        trainer = step.find("trainer")
        if trainer is not None and trainer.exists():
            done = states.load_trainer(trainer, model, optimizer, step=step.number)
            remembered = states.read_trainer(trainer).get("notes", {})
        self.say(
            f"{len(rows)} rows ({sum(row.replayed for row in rows)} replayed) in {len(groups)}"
            f" groups, clipping {'off' if self.terms.clip is None else 'on'}"
        )
        at = time.monotonic()
        steps = recipe.loop.steps
        result = run_updates(
            head,
            groups,
            self.terms,
            optimizer,
            recipe.train,
            seed=self.seed,
            done=done,
            progress=(min(step.number / steps, 1.0), min((step.number + 1) / steps, 1.0)),
            log=self.say,
        )
        seconds = time.monotonic() - at
        metrics = step_metrics(result, groups, seconds, device) | batch.facts()
        if metrics["train/entropy"] is not None:
            remembered = {"first_entropy": metrics["train/entropy"]} | remembered
        flags, warnings = warnings_of(metrics, remembered.get("first_entropy"))
        for line in warnings:
            self._log(f"warning: {line}")
        metrics |= flags
        metrics["train/seconds"] = time.monotonic() - started
        dtype = dtype_to_save(self.policy, recipe)
        _forget(step)
        states.save_trainer(
            step.next_trainer,
            model,
            optimizer,
            step=step.number + 1,
            updates=result.total_updates,
            masters=dtype != torch.float32,
            metrics=metrics,
            notes=remembered,
            skipped=_skipped_rows(result),
        )
        notes = [f"warning: {line}" for line in warnings]
        if result.skipped:
            skipped = f"the rows of skipped updates are in {step.next_trainer}/skipped.jsonl"
            self.say(skipped)
            notes += [f"train step {step.number}: {line}" for line in (*result.said, skipped)]
        save_policy(model, self.policy, step.next_policy, dtype, recipe.model)
        _prune(step, recipe, self._log)
        return metrics, notes, seconds

    def _with_reference(self, groups: list[Group]) -> list[Group]:
        """Every row with its log-probabilities under the reference policy."""
        from exgrpo_cli.models import load_model, resolve_dtype
        from exgrpo_cli.training.logprobs import score_sequences
        from exgrpo_cli.training.update import autocast

        recipe, device = self.recipe, self.device
        path = recipe.objective.reference or recipe.model.path
        if not path:
            raise InputError(
                "objective.kl needs a reference: set objective.reference or model.path"
            )
        self.say(f"scoring the batch under the reference policy {path}")
        model = load_model(path, recipe.model, device, resolve_dtype(recipe.model.dtype, device))
        rows = [row for group in groups for row in group]
        with autocast(device, recipe.train.autocast):
            scored = score_sequences(
                model,
                [row.prompt_ids for row in rows],
                [row.token_ids for row in rows],
                self.terms.temperature,
                recipe.train.tokens_per_microbatch,
            )
        found = iter(scored)
        return [[replace(row, reference=next(found)[0]) for row in group] for group in groups]


def _skipped_rows(result: StepResult) -> list[dict[str, Any]]:
    """The rows of updates that were left out, to find the one that spoilt it."""
    return [
        {"update": one.update, "reason": one.reason, "norm": tables.finite_or_none(one.norm)}
        | {name: tables.finite_or_none(value) for name, value in asdict(row).items()}
        for one in result.skipped
        for row in one.rows
    ]

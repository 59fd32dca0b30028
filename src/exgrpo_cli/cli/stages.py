"""The commands of the stages: rollout, verify, score, curate and train."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exgrpo_cli.cli.app import command
from exgrpo_cli.cli.options import (
    EngineOption,
    ForceOption,
    MaxNewTokensOption,
    OwnRun,
    PolicyOption,
    ProblemsOption,
    RolloutsOption,
    RunArgument,
    SamplesOption,
    ScoresOption,
    SeedOption,
    ShardOption,
    Shared,
    StepOption,
    TemperatureOption,
    UrlOption,
    VerdictsOption,
    open_step,
    print_result,
)
from exgrpo_cli.errors import InputError
from exgrpo_cli.progress import to_stderr

if TYPE_CHECKING:
    from exgrpo_cli.rundir import RunDir

PANEL = "Stages"


@command(PANEL)
def rollout(
    shared: Shared,
    run: RunArgument = None,
    step: StepOption = None,
    engine: EngineOption = None,
    url: UrlOption = None,
    policy: PolicyOption = None,
    problems: ProblemsOption = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Plan table; default RUN/plan/step-….parquet.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the parts; default RUN/rollouts/step-…."),
    ] = None,
    samples: SamplesOption = None,
    temperature: TemperatureOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    seed: SeedOption = None,
    shard: ShardOption = None,
    force: ForceOption = False,
    discard_later: Annotated[
        bool,
        typer.Option(
            "--discard-later", help="With --force on a trained step: remove what came after it."
        ),
    ] = False,
) -> None:
    """Sample the planned questions from the current policy, to Parquet.

    Without RUN: every problem of --problems, K samples each, from --policy into --out.
    """
    settings = shared.settings(
        run,
        rollout__engine=engine,
        rollout__url=url,
        rollout__samples=samples,
        rollout__temperature=temperature,
        rollout__max_new_tokens=max_new_tokens,
        seed=seed,
        stage=True,
    )
    from exgrpo_cli.runs.times import timed
    from exgrpo_cli.stages.rollout import rollout as stage
    from exgrpo_cli.tables import parse_shard

    of = open_step(
        shared,
        run,
        step,
        kind="policy",
        source=plan,
        needs={"problems": problems, "policy": policy, "out": out},
        policy=policy,
        problems=problems,
        plan=plan,
        rollouts=out,
    )
    if discard_later and not force:
        raise InputError(
            "--discard-later: removes what came after a step that --force samples anew"
        )
    if force and of.run is not None and out is None:
        later = of.next_policy.is_dir() or max(of.run.steps("rollouts"), default=0) > of.number
        if discard_later or later:
            _go_back(of.run, of.number, settings.loop.lag, discard_later)
    share = parse_shard(shard)
    result = timed(
        of, "rollout", lambda: stage(of, settings, shard=share, force=force, log=to_stderr), share
    )
    shared.print(of, result)


def _go_back(run: RunDir, step: int, lag: int, allowed: bool) -> None:
    """Sampling a trained step again throws away what everything after it was derived from."""
    from exgrpo_cli.runs.discard import discard_after

    if not allowed:
        raise InputError(
            f"{run.root}: step {step} is trained or followed already, and its rollouts are the log"
            " from which all that came later is derived; --discard-later removes that (policies,"
            f" trainer states, rollouts of the steps after {step}) and samples anew"
        )
    with run.locked():
        removed = discard_after(run, step, lag)
    to_stderr(f"removed what came after the rollouts of step {step}: policies {removed}")


@command(PANEL)
def verify(
    shared: Shared,
    run: RunArgument = None,
    step: StepOption = None,
    rollouts: RolloutsOption = None,
    problems: ProblemsOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder or file; default RUN/verdicts/step-….")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Hard limit for one answer, seconds.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, metavar="N", help="Worker processes; default the cores."),
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option("--verifier", help="Judge all by this one, such as path.py:function."),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option("--explain", help="Only explain one verdict.", metavar="ROLLOUT_ID"),
    ] = None,
    shard: ShardOption = None,
    force: ForceOption = False,
) -> None:
    """Judge each rollout's final answer against the gold answer.

    Worker processes judge, each answer within a hard time limit; math by math-verify.
    """
    settings = shared.settings(run, verify__timeout=timeout, verify__workers=workers, stage=True)
    from exgrpo_cli.runs.times import timed
    from exgrpo_cli.stages import verify as stage
    from exgrpo_cli.tables import parse_shard

    named = re.match(r"s(\d{5,})/", explain or "")
    of = open_step(
        shared,
        run,
        int(named[1]) if named and step is None else step,
        kind="rollouts",
        source=rollouts,
        needs={"rollouts": rollouts, "problems": problems, "out": out or explain},
        rollouts=rollouts,
        problems=problems,
        verdicts=out,
    )
    if explain is not None:
        print_result(stage.explain(of, settings, explain, verifier), shared.as_json)
        return
    share = parse_shard(shard)
    result = timed(
        of,
        "verify",
        lambda: stage.verify(
            of, settings, shard=share, force=force, log=to_stderr, verifier=verifier
        ),
        share,
    )
    shared.print(of, result)
    stage.refuse_errors(result, of.verdicts)


@command(PANEL)
def score(
    shared: Shared,
    run: RunArgument = None,
    step: StepOption = None,
    policy: PolicyOption = None,
    rollouts: RolloutsOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the parts; default RUN/scores/step-….")
    ] = None,
    shard: ShardOption = None,
    force: ForceOption = False,
) -> None:
    """Exact log-probabilities and entropies of rollouts and replay candidates.

    A forward pass of the current policy. May be left out: the rollouts' own numbers then serve.
    """
    settings = shared.settings(run, stage=True)
    from exgrpo_cli.runs.times import timed
    from exgrpo_cli.stages.score import score as stage
    from exgrpo_cli.tables import parse_shard

    of = open_step(
        shared,
        run,
        step,
        kind="rollouts",
        source=rollouts,
        needs={"rollouts": rollouts, "policy": policy, "out": out},
        policy=policy,
        rollouts=rollouts,
        scores=out,
    )
    share = parse_shard(shard)
    result = timed(
        of, "score", lambda: stage(of, settings, shard=share, force=force, log=to_stderr), share
    )
    shared.print(of, result)


@command(PANEL)
def curate(
    shared: Shared,
    run: OwnRun,
    step: StepOption = None,
    rollouts: RolloutsOption = None,
    verdicts: VerdictsOption = None,
    scores: ScoresOption = None,
    problems: ProblemsOption = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Derive the tables anew from the whole log.")
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(
            "--explain", help="Only say what each rule made of a question.", metavar="PROBLEM_ID"
        ),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Choose what is replayed, take in new successes, retire the mastered, plan the next step.

    DuckDB queries over the run's tables; the log of rollouts and verdicts is the truth. Loose
    files (--rollouts, --verdicts, --scores, --problems) are first linked into RUN's log.
    """
    settings = shared.settings(run, stage=True)
    from exgrpo_cli.runs.times import timed
    from exgrpo_cli.stages.curate import curate as stage

    if rollouts is not None and verdicts is not None:
        from exgrpo_cli.runs.prepare import adopt
        from exgrpo_cli.step import Step

        step = step or 0
        adopt(
            Step.of(
                run, step, rollouts=rollouts, verdicts=verdicts, scores=scores, problems=problems
            )
        )
    elif (rollouts, verdicts, scores, problems) != (None, None, None, None):
        raise InputError("loose files: give --rollouts and --verdicts together")
    of = open_step(shared, run, step, kind="rollouts", needs={})
    assert of.run is not None
    if explain is not None:
        from exgrpo_cli.experience.explain import explain as ask
        from exgrpo_cli.experience.explain import format_explanation

        found = ask(of.run, settings, of.number, explain)
        print(json.dumps(found) if shared.as_json else format_explanation(found))
        return
    with of.run.locked("curate"):
        result = timed(
            of, "curate", lambda: stage(of, settings, rebuild=rebuild, force=force, log=to_stderr)
        )
    shared.print(of, result)


@command(PANEL)
def train(
    shared: Shared,
    run: RunArgument = None,
    step: StepOption = None,
    policy: PolicyOption = None,
    rollouts: RolloutsOption = None,
    verdicts: VerdictsOption = None,
    scores: ScoresOption = None,
    curated: Annotated[
        Path | None, typer.Option("--curated", help="Chosen trajectories to replay.")
    ] = None,
    trainer: Annotated[
        Path | None, typer.Option("--trainer", help="Optimizer state to go on from.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The new policy; default RUN/policy/step-….")
    ] = None,
    trainer_out: Annotated[
        Path | None, typer.Option("--trainer-out", help="The new optimizer state.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", "--lr", help="AdamW's learning rate.")
    ] = None,
    lora: Annotated[
        bool | None, typer.Option("--lora/--no-lora", help="Train a LoRA adapter.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1 or mps.")
    ] = None,
    force: ForceOption = False,
) -> None:
    """Update the policy on the mixed batch of fresh rollouts and replayed successes.

    On several GPUs: torchrun --nproc-per-node N -m exgrpo_cli train RUN
    """
    if trainer is not None and not trainer.is_dir():
        raise InputError(f"{trainer}: no such trainer state")
    settings = shared.settings(
        run,
        train__learning_rate=learning_rate,
        lora__enabled=lora,
        train__device=device,
        stage=True,
    )
    from contextlib import nullcontext

    from exgrpo_cli.models import check_policy, check_tokenizer
    from exgrpo_cli.runs.times import timed
    from exgrpo_cli.stages.train import train as stage

    of = open_step(
        shared,
        run,
        step,
        kind="curated",
        source=curated,
        needs={"policy": policy, "rollouts": rollouts, "verdicts": verdicts, "out": out},
        policy=policy,
        rollouts=rollouts,
        verdicts=verdicts,
        scores=scores,
        curated=curated,
        trainer=trainer,
        next_policy=out,
        next_trainer=trainer_out,
    )
    if of.run is None and policy is not None:
        check_policy(policy)
        check_tokenizer(policy)
    with nullcontext() if of.run is None else of.run.locked("train"):
        result = timed(of, "train", lambda: stage(of, settings, force=force, log=to_stderr))
    shared.print(of, result, policy=str(of.next_policy))

"""The commands of the stages: rollout, verify, score, curate and train."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from exgrpo_cli.cli.app import app, guarded
from exgrpo_cli.cli.options import (
    DryRunOption,
    EngineOption,
    ForceOption,
    JsonOption,
    MaxNewTokensOption,
    PolicyOption,
    ProblemsOption,
    RecipeOption,
    RolloutsOption,
    RunArgument,
    SamplesOption,
    ScoresOption,
    SeedOption,
    SetOption,
    ShardOption,
    StepOption,
    TemperatureOption,
    UrlOption,
    VerdictsOption,
    due_step,
    is_over,
    name_of_policy,
    need,
    open_run,
    print_result,
    resolve_settings,
)
from exgrpo_cli.errors import InputError
from exgrpo_cli.machine import is_first_process
from exgrpo_cli.progress import to_stderr
from exgrpo_cli.rundir import step_name
from exgrpo_cli.step import Step


@app.command(rich_help_panel="Stages")
@guarded
def rollout(
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
    recipe: RecipeOption = None,
    sets: SetOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Sample the planned questions from the current policy, to Parquet.

    Without RUN: every problem of --problems, K samples each, from --policy into --out.
    """
    settings = resolve_settings(
        run,
        recipe,
        sets,
        dry_run,
        as_json,
        rollout__engine=engine,
        rollout__url=url,
        rollout__samples=samples,
        rollout__temperature=temperature,
        rollout__max_new_tokens=max_new_tokens,
        seed=seed,
        stage=True,
    )
    from exgrpo_cli.stages.rollout import ensure_plan
    from exgrpo_cli.stages.rollout import rollout as sample
    from exgrpo_cli.tables import parse_shard

    need(run, problems=problems, policy=policy, out=out)
    place = open_run(run, problems=problems, plan=plan, rollouts=out)
    if step is None:
        step = max(place.steps("policy"), default=0) if run is not None else 0
    if run is not None and plan is None:
        if is_over(place, step, as_json):
            return
        plan = ensure_plan(place, step, settings, to_stderr)
    if force and run is not None and place.policy(step + 1).is_dir():
        to_stderr(
            f"step {step} is trained already: {place.policy(step + 1)} comes from the rollouts that"
            " are replaced now"
        )
    result = sample(
        problems=place.problems,
        plan=plan,
        out=place.rollouts(step),
        policy=policy or place.policy_path(step, settings.model.path),
        policy_name=name_of_policy(policy) or step_name(step),
        step=step,
        recipe=settings,
        shard=parse_shard(shard),
        stale=() if run is None else (place.verdicts(step), place.scores(step)),
        force=force,
        log=to_stderr,
    )
    print_result({"step": step, **result}, as_json)


@app.command(rich_help_panel="Stages")
@guarded
def verify(
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
        int | None, typer.Option("--workers", min=1, help="Worker processes; default the cores.")
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
    recipe: RecipeOption = None,
    sets: SetOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Judge each rollout's final answer against the gold answer.

    Worker processes with a hard time limit an answer; math by math-verify.
    """
    settings = resolve_settings(
        run,
        recipe,
        sets,
        dry_run,
        as_json,
        verify__timeout=timeout,
        verify__workers=workers,
        stage=True,
    )
    from exgrpo_cli.stages import verify as stage
    from exgrpo_cli.tables import parse_shard

    need(run, rollouts=rollouts, problems=problems, out=out or explain)
    place = open_run(run, rollouts=rollouts, problems=problems, verdicts=out)
    named = re.match(r"s(\d{5,})/", explain or "")
    if named and step is None:
        step = int(named[1])
    if rollouts is None and is_over(place, step, as_json):
        return
    step = due_step(place, step, "rollouts", rollouts, f"run: exgrpo rollout {run}")
    if explain is not None:
        found = stage.explain(place.rollouts(step), place.problems, explain, settings, verifier)
        print_result(found, as_json)
        return
    result = stage.verify(
        place.rollouts(step),
        place.problems,
        place.verdicts(step),
        settings,
        shard=parse_shard(shard),
        force=force,
        verifier=verifier,
        log=to_stderr,
    )
    print_result(result, as_json)
    stage.refuse_errors(result, place.verdicts(step))


@app.command(rich_help_panel="Stages")
@guarded
def score(
    run: RunArgument = None,
    step: StepOption = None,
    policy: PolicyOption = None,
    rollouts: RolloutsOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the parts; default RUN/scores/step-….")
    ] = None,
    shard: ShardOption = None,
    force: ForceOption = False,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Exact log-probabilities and entropies of rollouts and replay candidates.

    A forward pass of the current policy. May be left out: the rollouts' own numbers then serve.
    """
    settings = resolve_settings(run, recipe, sets, dry_run, as_json, stage=True)
    from exgrpo_cli.stages.score import score as stage
    from exgrpo_cli.tables import parse_shard

    need(run, rollouts=rollouts, policy=policy, out=out)
    place = open_run(run, rollouts=rollouts, scores=out)
    if rollouts is None and is_over(place, step, as_json):
        return
    step = due_step(place, step, "rollouts", rollouts, f"run: exgrpo rollout {run}")
    result = stage(
        rollouts=place.rollouts(step),
        out=place.scores(step),
        policy=policy or place.policy_path(step, settings.model.path),
        policy_name=name_of_policy(policy) or step_name(step),
        step=step,
        recipe=settings,
        run=None if run is None else place,
        shard=parse_shard(shard),
        force=force,
        log=to_stderr,
    )
    print_result(result, as_json)


@app.command(rich_help_panel="Stages")
@guarded
def curate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    step: StepOption = None,
    rollouts: RolloutsOption = None,
    verdicts: VerdictsOption = None,
    scores: ScoresOption = None,
    problems: ProblemsOption = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Derive the tables anew from the whole log.")
    ] = False,
    force: ForceOption = False,
    recipe: RecipeOption = None,
    sets: SetOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Choose what is replayed, take in new successes, retire the mastered, plan the next step.

    DuckDB queries over the run's tables; the log of rollouts and verdicts is the truth. Loose
    files (--rollouts, --verdicts, --scores, --problems) are first linked into RUN's log.
    """
    settings = resolve_settings(run, recipe, sets, dry_run, as_json, stage=True)
    from exgrpo_cli.stages.curate import curate as stage

    if rollouts is not None and verdicts is not None:
        from exgrpo_cli.runs.prepare import adopt

        step = step or 0
        adopt(
            Step.of(
                run, step, rollouts=rollouts, verdicts=verdicts, scores=scores, problems=problems
            )
        )
    elif (rollouts, verdicts, scores, problems) != (None, None, None, None):
        raise InputError("loose files: give --rollouts and --verdicts together")
    place = open_run(run)
    if is_over(place, step, as_json):
        return
    step = due_step(place, step, "rollouts", None, f"run: exgrpo rollout {run}")
    with place.locked():
        result = stage(Step.of(place, step), settings, rebuild=rebuild, force=force, log=to_stderr)
    for note in result.notes:
        to_stderr(note)
    print_result({"step": step, **result.as_dict()}, as_json)


@app.command(rich_help_panel="Stages")
@guarded
def train(
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
    recipe: RecipeOption = None,
    sets: SetOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Update the policy on the mixed batch of fresh rollouts and replayed successes.

    On several GPUs: torchrun --nproc-per-node N -m exgrpo_cli train RUN
    """
    if trainer is not None and not trainer.is_dir():
        raise InputError(f"{trainer}: no such trainer state")
    settings = resolve_settings(
        run,
        recipe,
        sets,
        dry_run,
        as_json,
        train__learning_rate=learning_rate,
        lora__enabled=lora,
        train__device=device,
        stage=True,
    )
    if run is not None:
        from exgrpo_cli.runs.processes import train_step

        given = {
            "rollouts": rollouts,
            "verdicts": verdicts,
            "scores": scores,
            "curated": curated,
        }
        place = open_run(run, **given)
        if curated is None and is_over(place, step, as_json):
            return
        step = due_step(place, step, "curated", curated, f"run: exgrpo curate {run}")
        with place.locked():
            result = train_step(
                place,
                step,
                settings,
                to_stderr,
                policy=policy,
                trainer=trainer,
                out_policy=out,
                out_trainer=trainer_out,
                force=force,
            )
        if is_first_process():
            print_result(result, as_json)
        return
    from exgrpo_cli.models import check_policy, check_tokenizer
    from exgrpo_cli.stages.train import train as stage

    need(run, policy=policy, rollouts=rollouts, verdicts=verdicts, out=out)
    assert policy is not None
    assert rollouts is not None
    assert verdicts is not None
    assert out is not None
    check_policy(policy)
    check_tokenizer(policy)
    result = stage(
        rollouts=rollouts,
        verdicts=verdicts,
        scores=scores,
        curated=curated,
        policy=str(name_of_policy(policy)),
        trainer=trainer,
        out_policy=out,
        out_trainer=trainer_out or out.parent / f"{out.name}-trainer",
        step=step or 0,
        recipe=settings,
        replay_started=curated is not None,
        force=force,
        log=to_stderr,
    )
    if is_first_process():
        print_result(result, as_json)

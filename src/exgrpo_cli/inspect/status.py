"""``exgrpo status``: one screen about a run.

What it has come to, what is done, missing or being made, and the next command to type.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from exgrpo_cli.inspect.overview import overview, overview_lines
from exgrpo_cli.rundir import RunDir, step_name
from exgrpo_cli.runs import state
from exgrpo_cli.runs.state import ARRAYS
from exgrpo_cli.terminal import harmless

SCRIPT = "recipes/slurm/stage.sbatch"
"""What sends a stage's tasks to SLURM."""


def numbers(values: Iterable[int], join: str = ",") -> str:
    """Numbers as SLURM takes them: ``[0, 1, 2, 5]`` is ``0-2,5``."""
    ranges: list[list[int]] = []
    for value in sorted(set(values)):
        if ranges and value == ranges[-1][1] + 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    return join.join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def shards(missing: Sequence[int], tasks: int) -> list[int]:
    """Which of an array's tasks do these parts."""
    return sorted({part % tasks for part in missing})


def describe(run: RunDir, step: int | None = None) -> dict[str, Any]:
    """What the screen says, as plain data: ``kind`` is ``run``.

    See :func:`exgrpo_cli.runs.state.describe` and :func:`exgrpo_cli.inspect.overview.overview`.
    """
    found = state.describe(run, step)
    return {"kind": "run", **found, **overview(run, found["steps"])}


def format_status(found: Mapping[str, Any], tasks: int | None = None) -> str:
    """What :func:`describe` found, for a terminal; ``tasks`` share a step's parts, by default one a
    part."""
    step = found["step"]
    planned = found["steps_planned"]
    start = found["replay_started_step"]
    head = [
        f"{found['path']}: {found['steps']}" + (f" of {planned}" if planned else "") + " steps done"
    ]
    if found["policy"]:
        name = Path(found["policy"]).name if found["steps"] else found["policy"]
        head.append(f"policy {name}")
    head.append("replay not started" if start is None else f"replay since step {start}")
    lines = [", ".join(head)]
    if found["origin"]:
        lines.append("goes on from step {step} of {run}".format_map(found["origin"]))
    if found["at_work"]:
        lines.append("at work: an exgrpo run, curate or train holds this run")
    lines += overview_lines(dict(found))
    finished = found["next"]["stage"] in ("done", "finished", "init")
    if not finished or step["step"] != found["steps"]:
        for one in (step, *found["ahead"]):
            lines += _step_lines(one, found, tasks)
    for number, gaps in found["behind"].items():
        said = ", ".join(f"{stage} {numbers(parts, ' ')}" for stage, parts in gaps.items())
        lines.append(f"step {number} is trained, but parts are missing: {said}")
    if found["removed_policies"]:
        gone = numbers(found["removed_policies"], " ")
        lines.append(f"policies removed, of steps {gone} (train.keep_policies)")
    for name, evaluation in found["evaluations"].items():
        done = numbers(evaluation["done"], " ") or "none yet"
        missing = f", missing {numbers(evaluation['missing'], ' ')}" * bool(evaluation["missing"])
        lines.append(f"evaluated on {name}: {done}{missing}")
    if found["learning_curve"]:
        lines.append(found["learning_curve"])
    lines += [f"mend: {line}" for line in found["faults"]]
    return harmless("\n".join([*lines, *_next_lines(found)]))


def _next_lines(found: Mapping[str, Any]) -> list[str]:
    following = found["next"]
    words = {"done": "all steps are trained", "finished": "every question is retired"}
    stage = following["stage"]
    lines = [f"finished: {words[stage]}"] if stage in words else []
    if stage == "init":
        lines.append("there are no problems yet")
    when = "next, once that has ended" if found["at_work"] else "next"
    lines.append(f"{when}: {following['command']}")
    if stage not in (*words, "init") and not found["faults"] and found["steps_planned"]:
        lines.append(f"all that is left: exgrpo run {shlex.quote(found['path'])}")
    return lines


def _step_lines(step: Mapping[str, Any], found: Mapping[str, Any], tasks: int | None) -> list[str]:
    lines = [f"step {step['step']} ({step_name(step['step'])})"]
    plan = step["plan"]
    if plan is not None:
        lines.append(
            f"  plan     {plan['questions']} questions: {plan['fresh']} fresh,"
            f" {plan['replay']} replay"
        )
    else:
        lines.append("  plan     not made yet")
        if all(step["stages"][stage]["expected"] is None for stage in ARRAYS):
            return lines  # nor anything else
    unknown: set[str] = set()
    for stage in ARRAYS:
        entry = step["stages"][stage]
        lines.append(f"  {stage:<8} {_array_words(entry)}")
        ready = entry["ready"] + (entry["replay"]["missing"] if stage == "score" else [])
        ready += entry["imports"]["missing"] if "imports" in entry else []
        if ready and entry["expected"] and (entry["done"] or tasks) and not found["at_work"]:
            count = tasks or entry["expected"]
            wanted = numbers(shards(ready, count))
            kind = "CPU" if stage == "verify" else "GPU"
            options = found["sbatch"][kind]
            what = f"{SCRIPT} {stage} {shlex.quote(found['path'])} {step['step']} {count}"
            line = f"sbatch {options or f'${kind}_OPTIONS'} --array={wanted} {what}"
            lines.append(f"           shards {wanted} of {count}: {line}")
            unknown |= set() if options else {kind}
    for stage in ("curate", "train"):
        done = step["stages"][stage]["complete"]
        lines.append(f"  {stage:<8} {'done' if done else 'not yet'}")
    for kind in sorted(unknown):
        example = "--partition=gpu --gres=gpu:1" if kind == "GPU" else "--partition=cpu"
        lines.append(f'           first: {kind}_OPTIONS="{example}", as your cluster has it')
    return lines


def _array_words(entry: Mapping[str, Any]) -> str:
    """``13/16 parts, missing 3 7 11; 1 being written; the last 2 min ago``."""
    if entry.get("enabled") is False and not entry["done"]:
        return "left out by the recipe"
    total = entry["expected"]
    if total is None:
        words = "not begun"
    elif total == 0:
        words = "done" if entry["complete"] else "not begun"
    else:
        words = f"{entry['done']}/{total} parts"
        if entry["done"] and entry["missing"]:
            words += f", missing {numbers(entry['missing'], ' ')}"
    for kind, what in (("replay", "candidates"), ("imports", "imports")):
        more = entry.get(kind)
        if more and more["expected"]:
            words += f"; {what} {more['done']}/{more['expected']} parts"
            if more["done"] and more["missing"]:
                words += f", missing {numbers(more['missing'], ' ')}"
    if entry["writing"]:
        words += f"; being made: {numbers(entry['writing'], ' ')}"
    if entry["left"]:
        words += f"; left unfinished: {numbers(entry['left'], ' ')}"
    if entry["newest_seconds"] is not None and not entry["complete"]:
        words += f"; the last {_ago(entry['newest_seconds'])}"
    return words


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"

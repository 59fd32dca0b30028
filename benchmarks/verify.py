"""How fast `exgrpo verify` is, against math-verify in a loop over whole responses.

    python benchmarks/verify.py [--data problems.verl.parquet] [--questions 1000] [--workers 2]

The rollouts: 8 a question; half of the right ones in the question's usual spelling, the others in
any of ten; wrong answers of four near misses a question, half of them the same one, as models
repeat their mistakes: other numbers for a number, else the answer with a sign, a factor or a number
changed, and one in ten another question's answer; 500 to 4,000 tokens of reasoning with formulas
before the answer; 3% are cut off. The loop parses each whole response and the gold answer and
verifies, as trainers do that call math-verify as their reward function. `exgrpo verify` runs from
file to file, the start of its workers included. Where both differ in a verdict, it is shown with
the answers that both have read, and why they differ. Departures that docs/verifiers.md lists are
counted by their kind; the exit status is 1 if verdicts on the same answer differ for another
reason.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

OWN = [
    "42", "-7", "113", "2025", "0", "1", r"\frac{3}{4}", r"-\frac{5}{12}", r"\frac{1}{1024}",
    r"\sqrt{2}", r"2\sqrt{3}", r"\frac{\sqrt{5}-1}{2}", "0.5", "3.14", r"\pi", r"\frac{\pi}{6}",
    r"2^{10}", "2n+1", "x^2-3x+2", r"\{1,2,3\}", "(3, 4)", "[0, 1]", r"(-\infty, 2)", "x=5",
    r"50\%", r"\text{even}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"120^\circ",
    "3+4i", r"\binom{10}{3}", r"\log_2 3", r"e^{-2t}", r"\frac{n(n+1)}{2}", "1,234,567",
]  # fmt: skip
WORDS = (
    "so we have that the sum of these terms is then equal to which gives let us consider the case"
    " where now since both sides are positive we can square them and obtain hence it follows wait"
    " that cannot be right because the triangle would need an angle above check again with small"
    " numbers first note this also holds by symmetry for every other pair therefore only one choice"
    " remains substituting back into the first equation yields"
)
FORMULAS = [
    "$x^2 + {a}x - {b} = 0$", "$\\frac{{{a}}}{{{b}}}$", "$f({a}) = {b}$", "{a} + {b}",
    "$n \\equiv {a} \\pmod{{{b}}}$", "$$\\int_0^{{{a}}} x\\,dx = {b}$$",
    "\\[ \\sum_{{k=1}}^{{{a}}} k = {b} \\]", "$\\sqrt{{{a}}} < {b}$", "$({a}, {b})$",
    "$\\angle ABC = {a}^\\circ$", "$a_{{{a}}} = 2a_{{{b}}} - 1$",
]  # fmt: skip
ENDINGS = [
    "\n\nTherefore the answer is $\\boxed{{{x}}}$.",
    "\n\n**Final Answer**\n\n\\[ \\boxed{{{x}}} \\]",
    "\n\nWe conclude that it equals \\boxed{{{x}}}.",
    "\n\nHence \\(\\boxed{{{x}}}\\)",
    "\n\n$$\\boxed{{{x}}}$$",
]


def spellings(gold: str) -> list[str]:
    """The gold answer as models write it; mostly equal to it."""
    bare = gold.strip().strip("$").strip()
    found = [bare, bare.replace("\\frac", "\\dfrac"), f" {bare} ", bare.replace(" ", "")]
    if re.fullmatch(r"-?\d+", bare):
        found += [bare, bare, f"{bare}.0", f"{int(bare):,}", f"\\text{{{bare}}}", f"n = {bare}"]
    if match := re.fullmatch(r"\\frac\{(\d+)\}\{(\d+)\}", bare):
        found += [f"{match[1]}/{match[2]}", f"{int(match[1]) / int(match[2]):.6f}"]
        found += [f"\\frac{{{2 * int(match[1])}}}{{{2 * int(match[2])}}}"]
    return [*found, bare.replace("+", " + "), bare.replace("{", "{ ")]


def near_misses(gold: str, others: list[str], draw: random.Random) -> list[str]:
    """Four wrong answers of a question."""
    bare = gold.strip().strip("$").strip()
    if re.fullmatch(r"-?\d+", bare):
        n = int(bare)
        found = [str(v) for v in (n + 1, n - 1, n + 2, 2 * n, 10 * n, n // 2, n + 10, -n) if v != n]
        found += [f"{n}.5", f"\\frac{{{2 * n + 1}}}{{2}}"]
    else:
        found = [bare.removeprefix("-") if bare.startswith("-") else f"-{bare}", f"2{bare}"]
        for number in re.finditer(r"\d+", bare):
            for value in (int(number[0]) + 1, abs(int(number[0]) - 1), 2 * int(number[0])):
                found.append(f"{bare[: number.start()]}{value}{bare[number.end() :]}")
    found = [answer for answer in dict.fromkeys(found) if answer != bare]
    found = draw.sample(found, min(4, len(found)))
    return [draw.choice(others).strip("$") if draw.random() < 0.1 else answer for answer in found]


def reasoning(tokens: int, draw: random.Random) -> str:
    """Text with formulas; about four characters a token."""
    parts: list[str] = []
    length = 0
    while length < 4 * tokens:
        words = draw.choices(WORDS.split(), k=draw.randint(5, 15))
        formula = draw.choice(FORMULAS).format(a=draw.randint(2, 99), b=draw.randint(2, 999))
        parts.append(" ".join([*words, formula]) + draw.choice([". ", ", ", ".\n\n"]))
        length += len(parts[-1])
    return "".join(parts)


def make_rollouts(golds: list[str], samples: int, seed: int) -> list[dict[str, Any]]:
    """Rows with `rollout_id`, `problem_id` and `text`, question by question."""
    draw = random.Random(seed)
    rows = []
    for index, gold in enumerate(golds):
        success, wrong = draw.random(), near_misses(gold, golds, draw)
        forms = spellings(gold)
        usual = draw.choice(forms)  # a model mostly writes an answer in one way
        for sample in range(samples):
            text = "<think>\n" + reasoning(draw.randint(500, 4000), draw)
            if draw.random() > 0.03:  # the others are cut off
                if draw.random() < 0.1:
                    text += f"So \\boxed{{{wrong[0]}}}? Wait. " + reasoning(100, draw)
                right = draw.random() < success
                if right:
                    answer = usual if draw.random() < 0.5 else draw.choice(forms)
                else:
                    answer = draw.choices(wrong, weights=[4, 2, 1, 1][: len(wrong)])[0]
                text += "\n</think>" + draw.choice(ENDINGS).format(x=answer)
            rows.append(
                {
                    "rollout_id": f"q{index}/{sample}",
                    "problem_id": f"q{index}",
                    "text": text,
                }
            )
    return rows


def departure(gold: str, extracted: str) -> str | None:
    """Why `math` departs from math-verify on the same answer, as docs/verifiers.md has it; None
    where it should not."""
    from math_verify import parse, verify

    from exgrpo_cli.verifiers.math import judge, read, usual
    from exgrpo_cli.verifiers.shapes import compare
    from exgrpo_cli.verifiers.sure import equal_numbers

    usual_gold, found = usual(gold), usual(extracted)
    ours = judge(gold, extracted).correct
    if ours == bool(verify(parse(f"\\boxed{{{usual_gold}}}"), parse(f"\\boxed{{{found}}}"))):
        return "spelling: math-verify agrees when it is given the usual one"
    if usual_gold == found:
        return "spelling: the same one"
    if equal_numbers(usual_gold, found) is not None:
        return "numbers: compared exactly, or to their own precision"
    if compare(usual_gold, found, lambda a, b: judge(a, b).correct) is not None:
        return "form: bases, times, words, sequences, relations"
    if any(isinstance(read(text)[0], str) for text in (usual_gold, found) if text):
        return "read whole or not at all"
    return None


def processor_seconds() -> float:
    """Of this process and its ended children; other work on the machine does not count."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


def read_golds(data: Path | None, count: int, seed: int) -> tuple[list[str], str]:
    """Gold answers of as many questions, and where they are from."""
    draw = random.Random(seed)
    if data is None or not data.exists():
        return [OWN[i % len(OWN)] for i in range(count)], "the benchmark's own answers"
    import polars as pl

    rows = pl.read_parquet(data, columns=["prompt", "reward_model"])
    rows = rows.unique("prompt", maintain_order=True)  # evaluation sets repeat questions
    golds = rows["reward_model"].struct.field("ground_truth").drop_nulls().to_list()
    return draw.sample(golds, min(count, len(golds))), str(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="problems as verl has them")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    import polars as pl
    from math_verify import parse, verify

    from exgrpo_cli import tables
    from exgrpo_cli.recipe import parse_recipe
    from exgrpo_cli.stages import verify as stage
    from exgrpo_cli.step import Step
    from exgrpo_cli.verifiers.sure import number

    def is_number(gold: str) -> bool:
        return number(gold.strip().strip("$").strip()) is not None

    logging.disable(logging.CRITICAL)
    golds, origin = read_golds(options.data, options.questions, options.seed)
    rows = make_rollouts(golds, options.samples, options.seed)
    by_id = {f"q{index}": gold for index, gold in enumerate(golds)}
    characters = sum(len(row["text"]) for row in rows)
    print(f"{len(rows)} rollouts of {len(golds)} questions ({origin}), {characters / 1e6:.1f} MB")

    parse("\\boxed{1}")  # imports and compiled patterns
    began, used = time.perf_counter(), processor_seconds()
    loop, read, loop_each = [], [], []
    for row in rows:
        start = time.perf_counter()
        gold, found = parse(f"\\boxed{{{by_id[row['problem_id']]}}}"), parse(row["text"])
        loop.append(bool(verify(gold, found)))
        loop_each.append(time.perf_counter() - start)
        read.append(str(found[0]) if found else None)
    loop_seconds, loop_used = time.perf_counter() - began, processor_seconds() - used

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        pl.DataFrame(rows).write_parquet(root / "rollouts.parquet", compression="zstd")
        problems = [
            {"problem_id": name, "prompt": [{"role": "user", "content": name}], "answer": gold,
             "verifier": "math", "source": "benchmark"}
            for name, gold in by_id.items()
        ]  # fmt: skip
        tables.write_table(
            "problems", tables.frame("problems", problems), root / "problems.parquet"
        )
        recipe = parse_recipe({"verify": {"workers": options.workers}}, "benchmark")
        step = Step.of(
            None,
            rollouts=root / "rollouts.parquet",
            problems=root / "problems.parquet",
            verdicts=root / "out.parquet",
        )
        began, used = time.perf_counter(), processor_seconds()
        stage.verify(step, recipe)
        seconds, stage_used = time.perf_counter() - began, processor_seconds() - used
        verdicts = tables.read_table("verdicts", root / "out.parquet").to_dicts()

    same_answer, classes = 0, Counter[str]()
    for row, verdict, expected, peer_read in zip(rows, verdicts, loop, read, strict=True):
        if verdict["correct"] == expected:
            continue
        gold, extracted = by_id[row["problem_id"]], verdict["extracted"]
        if verdict["status"] in ("timeout", "error"):
            kind = "a limit of time or memory was hit"
        elif extracted is None:
            kind = "no final answer, so no_answer; the loop takes a formula out of the reasoning"
        elif verdict["correct"] == bool(
            verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{extracted}}}"))
        ):
            kind = "the loop reads another text than the final answer; on that, both agree"
        elif why := departure(gold, extracted):
            kind = f"departure, {why}"
        else:
            kind = "DIFFERENT on the same answer"
            same_answer += 1
        classes[kind] += 1
        shown = {"gold": gold, "answer": extracted, "the loop compared": peer_read}
        print(f"  {row['rollout_id']}: exgrpo {verdict['correct']}, loop {expected}; {kind}")
        print(f"    {json.dumps(shown, ensure_ascii=False)}"[:400])

    right = sum(verdict["correct"] for verdict in verdicts)
    asked = [verdict["seconds"] for verdict in verdicts]
    each = [seconds for seconds in asked if seconds > 0]
    print(f"math-verify in a loop   {len(rows) / loop_seconds:9.1f} rollouts/s")
    print(
        f"exgrpo verify           {len(rows) / seconds:9.1f} rollouts/s, {options.workers} workers"
    )
    print(f"ratio                   {loop_seconds / seconds:9.1f}")
    print(f"wall seconds            {loop_seconds:9.1f} and {seconds:.1f}")
    print(f"processor seconds       {loop_used:9.1f} and {stage_used:.1f}")
    free = loop_used / stage_used * options.workers
    print(f"ratio at best           {free:9.1f} with {options.workers} cores free for it")
    print(f"in the loop             {sum(loop_each):9.1f} s, {slowest(loop_each)}")
    print(f"in exgrpo's workers     {sum(each):9.1f} s for {len(each)} pairs, {slowest(each)}")
    for kind, plain in (("numbers", True), ("other golds", False)):
        chosen = [i for i, row in enumerate(rows) if is_number(by_id[row["problem_id"]]) == plain]
        peer, ours = (sum(x[i] for i in chosen) for x in (loop_each, asked))
        print(f"  {kind:12} {len(chosen):9d} rollouts: {peer:9.1f} s and {ours:.1f} s")
    print(f"correct                 {right / len(rows):9.1%}")
    departures = sum(count for kind, count in classes.items() if kind.startswith("departure"))
    others = sum(classes.values()) - same_answer - departures
    print(f"different verdicts      {same_answer:9d} on the same answer")
    print(f"                        {departures:9d} departures, as docs/verifiers.md lists them")
    print(f"                        {others:9d} for another reason")
    for kind, count in classes.most_common():
        print(f"  {count:4d}  {kind}")
    sys.exit(1 if same_answer else 0)


def slowest(seconds: list[float]) -> str:
    """The share of the time that the slowest took."""
    ordered, total = sorted(seconds, reverse=True), sum(seconds) or 1.0
    parts = [f"{sum(ordered[:n]) / total:.0%} in the slowest {n}" for n in (10, 50, 200)]
    return ", ".join(parts)


if __name__ == "__main__":
    main()

"""Other spellings of gold answers, and near misses: how often verifiers are wrong, by kind.

    python benchmarks/spellings.py PROBLEMS [--every 1] [--workers 2] [--show 3] [--forms]

PROBLEMS is a problems table, or whatever `exgrpo problems` can import. For each of its gold answers
that `math` judges, the spellings that it allows (which are right) and near misses (which are wrong)
are judged by `math` and by the library alone (`math_verify`). A right one judged wrong is a false
negative, a wrong one judged right a false positive. With --forms, only: each gold answer as a
response in eight forms, and how many of them are found and right.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

Case = tuple[str, str]
"""Kind and answer."""

INTEGER = re.compile(r"-?[0-9]+")
FRACTION = re.compile(r"(-?)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
SCIENTIFIC = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)e(-?[0-9]+)")
DEGREES = re.compile(r"([0-9.]+)\s*\^\{?\\circ\}?")
PERCENT = re.compile(r"([0-9.]+)\s*\\?%")
PAIR = re.compile(r"(\\left)?\s*([(\[])([^()\[\],]+),([^()\[\],]+?)(\\right)?\s*([)\]])")
WORD = re.compile(r"\\text\{([A-Za-z]{3,})\}")
MATRIX = re.compile(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}")
FULL_WIDTH = str.maketrans("0123456789-.", "０１２３４５６７８９－．")
RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")

FORMS = {
    "box": "So it is \\boxed{{{x}}}.",
    "box in dollars": "Therefore\n$$\\boxed{{{x}}}$$",
    "box after a thought": "<think>Perhaps \\boxed{{0}}?</think>\n\\[ \\boxed{{{x}}} \\]",
    "final answer": "Final Answer: The final answer is ${x}$. I hope it is correct.",
    "answer tag": "<think>Well.</think> <answer>{x}</answer>",
    "hashes": "First this, then that.\n#### {x}",
    "phrase": "Hence the answer is ${x}$.",
    "line": "**Answer:** ${x}$",
}


def bare(gold: str) -> str:
    text = gold.strip().rstrip(".")
    return text[1:-1].strip() if text.startswith("$") and text.count("$") == 2 else text


def right(gold: str) -> Iterator[Case]:
    """Spellings of a gold answer that are right."""
    x = bare(gold)
    if "$" in x:  # a list of formulas
        yield "delimiters", x.replace("$", "")
        return
    yield "as it is", x
    yield "delimiters", f"${x}$"
    yield "delimiters", f"\\({x}\\)"
    yield "delimiters", f"\\[ {x} \\]"
    yield "trailing", f"{x}."
    yield "trailing", f"{x}\\ "
    yield "trailing", f"{x},"
    yield "spaces", f"~{x}"
    yield "spaces", f"\\,{x}\\,"
    if "frac" in x:
        yield "dfrac", x.replace("\\frac", "\\dfrac")
        yield "tfrac", x.replace("\\dfrac", "\\frac").replace("\\frac", "\\tfrac")
    if re.fullmatch(r"[^,;=<>]*", x) and "text" not in x and "in" not in x and "\\pm" not in x:
        yield "assignment", f"q={x}"
        yield "assignment", f"q = {x}"
        yield "bold", f"\\boldsymbol{{{x}}}"
        yield "bold", f"\\mathbf{{{x}}}"
    if "(" in x and "\\left" not in x and ")" in x:
        yield "left right", x.replace("(", "\\left(").replace(")", "\\right)")
    yield from number_spellings(x)
    yield from structure_spellings(x)


def number_spellings(x: str) -> Iterator[Case]:
    if INTEGER.fullmatch(x):
        n = int(x)
        yield "decimals", f"{x}.0"
        yield "decimals", f"{x}.00"
        yield "fractions", f"\\frac{{{2 * n}}}{{2}}"
        yield "bold", f"**{x}**"
        yield "text", f"\\text{{{x}}}"
        yield "text", f"\\mathrm{{{x}}}"
        yield "text", f"\\textbf{{{x}}}"
        yield "digits", x.translate(FULL_WIDTH)
        yield "digits", "".join(chr(0x660 + int(c)) if c.isdigit() else "\u2212" for c in x)
        yield "relation", f"= {x}"
        yield "relation", f"\\approx {x}"
        yield "base", f"{x}_{{10}}" if n >= 0 else x
        if abs(n) >= 1000:
            for separator in (",", "{,}", "\\,", " ", "~", "\u202f", "\u00a0", "\\ ", ",\\!"):
                yield "separators", f"{n:,}".replace(",", separator)
            yield "separators", f"q={n:,}"
        if n and n % 1000 == 0:
            yield "scientific", f"{n // 1000} \\times 10^3"
            yield "scientific", f"{n // 1000} \\times 10^{{3}}"
        if n >= 0:
            yield from measured(x)
    elif match := FRACTION.fullmatch(x):
        sign, above, below = match[1], int(match[2]), int(match[3])
        yield "fractions", f"{sign}{above}/{below}"
        yield "fractions", f"{sign}{above} / {below}"
        yield "fractions", f"{sign}\\frac{{{2 * above}}}{{{2 * below}}}"
        yield "fractions", f"\\frac{{{sign}{above}}}{{{below}}}"
        if above > below:
            whole, rest = divmod(above, below)
            if rest:
                yield "mixed", f"{sign}{whole}\\frac{{{rest}}}{{{below}}}"
                yield "mixed", f"{sign}{whole} {rest}/{below}"
                yield "mixed", f"{sign}{whole}\\ \\frac{{{rest}}}{{{below}}}"
        exact = f"{above / below:.6f}".rstrip("0")
        if Fraction(exact) == Fraction(above, below):
            yield "decimals", sign + exact
            yield "decimals", f"{sign}{exact}0"
        if not sign:
            yield from measured(x)
    elif match := SCIENTIFIC.fullmatch(x):
        mantissa, power = match[1], int(match[2])
        yield "scientific", f"{mantissa} \\times 10^{{{power}}}"
        yield "scientific", f"{mantissa} \\cdot 10^{{{power}}}"
        yield "scientific", f"{mantissa}\\times10^{power}"
        yield "scientific", f"{mantissa}×10{str(power).translate(RAISED)}"
        yield "scientific", f"{mantissa}E{power:+03d}"
        yield "scientific", f"{mantissa} * 10^({power})"
        value = Fraction(mantissa) * Fraction(10) ** power
        yield (
            "scientific",
            f"{value * 1000 / Fraction(10) ** power} \\times 10^{{{power - 3}}}"
            if ((value * 1000 / Fraction(10) ** power).denominator == 1)
            else f"{mantissa}e{power}",
        )
        yield "units", f"{mantissa} \\times 10^{{{power}}} \\text{{ J}}"
        if -7 < power < 16:
            digits = len(mantissa.partition(".")[2])
            yield "decimals", f"{float(value):.{max(0, digits - power)}f}"
    elif re.fullmatch(r"-?[0-9]*\.[0-9]+", x):
        value = Fraction(x)
        yield "decimals", f"{x}0"
        yield "decimals", x.replace("0.", ".") if x.lstrip("-").startswith("0.") else x
        yield "fractions", f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
        yield "digits", x.translate(FULL_WIDTH)
        yield "scientific", f"{x} \\times 10^{{0}}"
        if value > 0:
            yield from measured(x)
    elif match := DEGREES.fullmatch(x):
        for form in ("{}", "{}°", "{}^{{\\circ}}", "{}^\\circ", "{}^ \\circ", "{} degrees",
                     "{}\\text{{ degrees}}", "{}\\degree",
                     "\\boldsymbol{{{}^\\circ}}"):  # fmt: skip
            yield "degrees", form.format(match[1])
    elif match := PERCENT.fullmatch(x):
        for form in ("{}\\%", "{}%", "{} \\%", "{} percent", "{}\\text{{ percent}}", "{}"):
            yield "percent", form.format(match[1])
        yield "percent", f"{float(match[1]) / 100:g}"


def measured(x: str) -> Iterator[Case]:
    for unit in ("\\text{ cm}", "~\\text{hours}", "\\ \\mathrm{m/s^2}", "\\text{ cm}^2", " cm",
                 " hours", " dollars", "\\text{ square units}", " km/h", "\\,\\mathrm{kg}",
                 "\\mbox{ inches}", " people"):  # fmt: skip
        yield "units", f"{x}{unit}"
    for form in ("\\${}", "€{}", "£{}", "{} euros", "\\text{{\\${}}}", "US\\${}"):
        yield "currency", form.format(x)
    for form in ("{}°", "{}^\\circ", "{}^{{\\circ}}", "{} degrees"):
        yield "degrees", form.format(x)


def structure_spellings(x: str) -> Iterator[Case]:
    if match := WORD.fullmatch(x):
        for form in ("{}", "\\textbf{{{}}}", "\\mathrm{{{}}}", "\\textit{{{}}}", "**{}**", "{}."):
            yield "words", form.format(match[1])
        yield "words", match[1].lower()
    if match := MATRIX.fullmatch(x):
        rows = match[1]
        yield "matrices", f"\\begin{{bmatrix}}{rows}\\end{{bmatrix}}"
        columns = "c" * (rows.split("\\\\")[0].count("&") + 1)
        array = f"\\begin{{array}}{{{columns}}}{rows}\\end{{array}}"
        yield "matrices", f"\\left(\\begin{{matrix}}{rows}\\end{{matrix}}\\right)"
        yield "matrices", f"\\left[{array}\\right]"
        yield "matrices", f"\\begin{{pmatrix}}{rows.replace(' ', '')}\\end{{pmatrix}}"
        yield "matrices", f"\\left(\\begin{{smallmatrix}}{rows}\\end{{smallmatrix}}\\right)"
    match = PAIR.fullmatch(x)
    if match:
        _, left, a, b, _, close = match.groups()
        a, b = a.strip(), b.strip()
        yield "tuples", f"{left}{a},{b}{close}"
        yield "tuples", f"{left} {a} , {b} {close}"
        yield "tuples", f"\\left{left} {a}, {b} \\right{close}"
        yield "tuples", f"\\bigl{left}{a},\\,{b}\\bigr{close}"
        if (left, close) == ("(", ")") and "infty" not in x:
            yield "tuples", f"\\langle {a}, {b}\\rangle"
            yield "tuples", f"({a};{b})" if "," not in a + b else x
        elif "infty" in x or left != "(" or close != ")":
            yield from interval(left, a, b, close)
    if re.fullmatch(r"-?[0-9]+(?:, ?-?[0-9]+)+", x) and not re.fullmatch(
        r"[0-9]{1,3}(,[0-9]{3})+", x
    ):
        parts = [part.strip() for part in x.split(",")]
        yield "sets", ", ".join(reversed(parts))
        yield "sets", f"\\{{{', '.join(parts)}\\}}"
        yield "sets", f"\\left\\{{{','.join(parts)}\\right\\}}"
        yield "sets", f"{', '.join(parts[:-1])} and {parts[-1]}"
        yield "sets", f"{', '.join(parts[:-1])}\\text{{ and }}{parts[-1]}"
        yield "sets", ", ".join(f"${part}$" for part in parts)


def interval(left: str, a: str, b: str, close: str) -> Iterator[Case]:
    low, high = ("<", "\\le ")[left == "["], ("<", "\\le ")[close == "]"]
    turned_low, turned_high = low.replace("le", "ge").replace("<", ">"), high
    if "infty" in b:
        yield "intervals", f"x {turned_low} {a}"
        yield "intervals", f"{a} {low} x"
    elif "infty" in a:
        yield "intervals", f"x {turned_high} {b}"
        yield "intervals", f"x{turned_high}{b}"
    else:
        yield "intervals", f"{a} {low} x {high} {b}"
        yield "intervals", f"{a} {low.replace('le', 'leq')} y {high.replace('le', 'leqslant')} {b}"
    yield "intervals", f"x \\in {left}{a}, {b}{close}"


def wrong(gold: str, others: list[str], draw: random.Random) -> Iterator[Case]:
    """Near misses of a gold answer."""
    x = bare(gold)
    if INTEGER.fullmatch(x):
        n = int(x)
        for value in {n + 1, n - 1, -n, 10 * n, n + 10} - {n}:
            yield "other number", str(value)
        yield "other number", f"{n}.5"
        yield "other number", f"\\frac{{{2 * n + 1}}}{{2}}"
        yield "other number", f"{n}\\text{{ million}}" if n else "1"
        for form in ("\\neq {}", "> {}", ">{}", "\\ge {}", "< {}", "x > {}", "x \\neq {}"):
            yield "relations", form.format(x)
        yield "relations", f"{n + 1000003} = {x}"
        if n >= 0:
            yield "bases", f"{x}_7"
            yield "bases", f"{x}_{{12}}"
        for form in ("{}/", "{}--", "{}^", "{}+", "{}\\times", "({}", "{}_", "{}="):
            yield "malformed", form.format(x)
        yield "lists", f"{x}, {n + 1}"
        yield "lists", f"{x} or {n + 1}"
        yield "lists", f"{x} {x}"
        yield "words", f"not {x}"
        if 1000 <= n < 9000:
            yield "dates and times", f"{n + 20}-01-19"
    elif match := FRACTION.fullmatch(x):
        above, below = int(match[2]), int(match[3])
        yield "other number", f"{match[1]}\\frac{{{above + 1}}}{{{below}}}"
        if above != below:
            yield "other number", f"{match[1]}\\frac{{{below}}}{{{above}}}"
        yield "other number", f"{'' if match[1] else '-'}\\frac{{{above}}}{{{below}}}"
        yield "other number", f"{match[1]}{above}"
        yield "malformed", f"\\frac{{{above}}}{{{below}"
        yield "relations", f"> {x}"
    elif match := SCIENTIFIC.fullmatch(x):
        mantissa, power = match[1], int(match[2])
        next_to = Fraction(mantissa) + Fraction(1, 10 ** len(mantissa.partition(".")[2]))
        yield "precision", f"{float(next_to):g} \\times 10^{{{power}}}"
        yield "precision", f"{mantissa} \\times 10^{{{power - 1}}}"
        yield "precision", f"{mantissa} \\times 10^{{{power + 1}}}"
        yield "precision", f"-{mantissa} \\times 10^{{{power}}}"
        yield "precision", mantissa
    elif re.fullmatch(r"-?[0-9]*\.[0-9]+", x):
        digits = len(x.partition(".")[2])
        yield "other number", f"{float(x) + 10**-digits:.{digits}f}"
        yield "other number", f"{10 * float(x):.{digits}f}" if float(x) else "1"
        if float(x):
            yield "precision", f"{float(x) * 1.01:.12f}"
    elif match := re.fullmatch(r"([0-7]+)_\{?([0-9])\}?", x):
        yield "bases", f"{match[1]}_{{{int(match[2]) + 1}}}"
        yield "bases", f"{int(match[1]) + 1}_{{{match[2]}}}"
    elif match := WORD.fullmatch(x):
        letters = list(match[1].lower())
        draw.shuffle(letters)
        if "".join(letters) != match[1].lower():
            yield "words", "".join(letters)
            yield "words", f"\\text{{{''.join(letters)}}}"
        yield "words", f"not {match[1]}"
    yield from structure_misses(x)
    kinds = [o for o in others if shape(o) != shape(x) or (shape(x) == "integer" and o != x)]
    for other in draw.sample(kinds, min(2, len(kinds))):
        yield "another gold", other


def structure_misses(x: str) -> Iterator[Case]:
    if match := PAIR.fullmatch(x):
        _, left, a, b, _, close = match.groups()
        a, b = a.strip(), b.strip()
        if "infty" in x or (left, close) != ("(", ")"):
            if "infty" not in a:
                yield "intervals", f"{'[' if left == '(' else '('}{a},{b}{close}"
            if "infty" not in b:
                yield "intervals", f"{left}{a},{b}{']' if close == ')' else ')'}"
                yield "intervals", f"x > {b}"
        if a != b:
            yield "tuples", f"({b},{a})"
        yield "tuples", f"({a},{b},0)"
        yield "tuples", f"({a})"
    if match := MATRIX.fullmatch(x):
        rows = match[1]
        number = re.search(r"[0-9]+", rows)
        if number:
            changed = f"{rows[: number.start()]}{int(number[0]) + 1}{rows[number.end() :]}"
            yield "matrices", f"\\begin{{pmatrix}}{changed}\\end{{pmatrix}}"
    if re.fullmatch(r"-?[0-9]+(?:, ?-?[0-9]+)+", x):
        parts = [part.strip() for part in x.split(",")]
        if len(set(parts)) == len(parts):
            yield "lists", ", ".join(parts[:-1]) if len(parts) > 1 else "x"
            yield "lists", ", ".join([*parts, "123456789"])
            yield "lists", ", ".join([*parts[:-1], str(int(parts[-1]) + 1000)])
            yield "lists", f"{parts[0]}, \\ldots, {parts[-1]}" if len(parts) > 2 else "x"


def shape(x: str) -> str:
    if INTEGER.fullmatch(x):
        return "integer"
    if WORD.fullmatch(x) or re.fullmatch(r"[A-Za-z(){}\\]+", x):
        return "word"
    return "word" if MATRIX.fullmatch(x) else "other"


def read_golds(path: Path) -> list[str]:
    """The gold answers that `math` judges, each once."""
    from exgrpo_cli import tables

    with tempfile.TemporaryDirectory() as folder:
        try:
            data = tables.read_table("problems", path)
        except Exception:
            table = Path(folder) / "problems.parquet"
            command = [sys.executable, "-m", "exgrpo_cli", "problems", str(path), "--out",
                       str(table), "--keep-duplicates", "--skip-bad"]  # fmt: skip
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            data = tables.read_table("problems", table)
    chosen = data["answer"].filter(data["verifier"] == "math")
    return sorted(set(chosen.to_list()))


def count_forms(golds: list[str], workers: int) -> None:
    from exgrpo_cli.verifiers.extract import extract_answer
    from exgrpo_cli.verifiers.pool import Job, Pool

    total = 0
    with Pool(workers, timeout=20) as pool:
        for name, form in FORMS.items():
            answers = [extract_answer(form.format(x=bare(gold))) for gold in golds]
            pairs = list(zip(golds, answers, strict=True))
            verdicts = pool.judge([Job("math", gold, answer) for gold, answer in pairs])
            found = sum(verdict.correct for verdict in verdicts)
            total += found
            print(f"{name:22} {found:6d} of {len(golds)}")
            for (gold, answer), verdict in zip(pairs, verdicts, strict=True):
                if not verdict.correct:
                    print(f"    {gold!r}: {answer!r} ({verdict.status})"[:200])
    print(f"{'all eight':22} {total:6d} of {8 * len(golds)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", type=Path)
    parser.add_argument("--every", type=int, default=1, help="only each n-th gold answer")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--show", type=int, default=3, help="examples of a kind that math gets wrong"
    )
    parser.add_argument("--forms", action="store_true", help="only count the eight forms")
    options = parser.parse_args()

    from exgrpo_cli.verifiers.pool import Job, Pool

    golds = read_golds(options.problems)[:: options.every]
    print(f"{len(golds)} gold answers")
    if options.forms:
        count_forms(golds, options.workers)
        return
    draw = random.Random(options.seed)
    bares = [bare(gold) for gold in golds]
    cases = []
    for gold in golds:
        cases += [(True, kind, gold, text) for kind, text in dict.fromkeys(right(gold))]
        cases += [
            (False, kind, gold, text) for kind, text in dict.fromkeys(wrong(gold, bares, draw))
        ]
    judged = {}
    for verifier in ("math_verify", "math"):
        with Pool(options.workers, timeout=10) as pool:
            jobs = [Job(verifier, gold, text) for _, _, gold, text in cases]
            judged[verifier] = [verdict.correct for verdict in pool.judge(jobs)]
    for expected, title in ((True, "false negatives"), (False, "false positives")):
        rows: dict[str, Counter[str]] = defaultdict(Counter)
        examples: dict[str, list[str]] = defaultdict(list)
        for index, (truth, kind, gold, text) in enumerate(cases):
            if truth is not expected:
                continue
            rows[kind]["all"] += 1
            for verifier, verdicts in judged.items():
                rows[kind][verifier] += verdicts[index] is not expected
            if judged["math"][index] is not expected:
                examples[kind].append(f"{gold} | {text}")
        print(f"\n{title:18} {'cases':>7} {'math_verify':>12} {'math':>7}")
        for kind in sorted(rows):
            row = rows[kind]
            print(f"{kind:18} {row['all']:7d} {row['math_verify']:12d} {row['math']:7d}")
            for example in examples[kind][: options.show]:
                print(f"    {example}"[:150])
        sums = [sum(row[name] for row in rows.values()) for name in ("all", "math_verify", "math")]
        print(f"{'all':18} {sums[0]:7d} {sums[1]:12d} {sums[2]:7d}")


if __name__ == "__main__":
    main()

"""What ``exgrpo diff`` says of each mechanism of docs/ideas.md over a run: the page's table.

python benchmarks/ideas.py runs/demo
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

from exgrpo_cli.inspect.diff import diff
from exgrpo_cli.recipe import load_recipe, parse_recipe
from exgrpo_cli.rundir import RunDir

PAGE = Path(__file__).parents[1] / "docs" / "ideas.md"
HEAD = "| | other questions | other trajectories | age, steps | stored | retired |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run directory")
    run = RunDir(parser.parse_args().run)
    recorded = load_recipe(run.recipe)
    base = recorded.model_dump(mode="json", exclude_none=True)
    text = PAGE.read_text(encoding="utf-8")
    print(HEAD, "|---|---|---|---|---|---|", sep="\n")
    for name, block in re.findall(r"^### (.+?)\n.*?```toml\n(.*?)```", text, re.M | re.S):
        curate = base["curate"] | tomllib.loads(block)["curate"]
        total = diff(run, recorded, parse_recipe({**base, "curate": curate}, name))["total"]
        found, both = total["other"], total["common"]
        if found["replayed"]:
            cells = [
                f"{1 - both['replay'] / found['replay']:.0%}",
                f"{1 - both['replayed'] / found['replayed']:.0%} of {found['replayed']}",
                f"{found['age_mean']:.1f}",
            ]
        else:
            cells = ["–", "none replayed", "–"]
        cells += [str(found["pool_trajectories"]), str(found["pool_retired"])]
        print("|", " | ".join([name, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()

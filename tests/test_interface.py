"""The public interface: lazily imported, documented, and the README's loop in Python runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import exgrpo_cli
from exgrpo_cli import RunDir, Step

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import exgrpo_cli\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("['exgrpo_cli']", "['__future__', 'exgrpo_cli']")


@pytest.mark.parametrize("name", [n for n in exgrpo_cli.__all__ if n != "__version__"])
def test_every_public_name_is_there_and_documented(name: str) -> None:
    found = getattr(exgrpo_cli, name)
    assert found.__doc__
    if name in ("rollout", "verify", "score", "curate", "train", "evaluate"):
        for part in ("Args:", "Returns:", "Raises:"):
            assert part in found.__doc__


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nosuch"):
        exgrpo_cli.nosuch  # noqa: B018


def test_a_step_without_a_run_needs_its_paths(tmp_path: Path) -> None:
    step = Step.of(None, rollouts=tmp_path / "r")
    assert step.rollouts == tmp_path / "r"
    with pytest.raises(exgrpo_cli.errors.InputError, match="--verdicts"):
        _ = step.verdicts
    with pytest.raises(exgrpo_cli.errors.InputError, match="--policy"):
        step.policy("")
    of_run = Step.of(RunDir(str(tmp_path)), 3, verdicts=tmp_path / "v")
    assert of_run.rollouts == tmp_path / "rollouts" / "step-00003"
    assert of_run.verdicts == tmp_path / "v"
    assert of_run.next_policy == tmp_path / "policy" / "step-00004"


def test_the_readmes_loop_in_python_runs(guesser: Path, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    small = f'["curate.questions=8", "model.path={guesser}", "rollout.samples=2"]'
    script = tmp_path / "loop.py"
    script.write_text(
        code.replace("runs/python", str(tmp_path / "run")).replace('["curate.questions=8"]', small)
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["step-00000", "step-00001"]
    assert RunDir(tmp_path / "run").steps("policy") == [1, 2]

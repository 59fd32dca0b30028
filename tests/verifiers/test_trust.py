"""A table must not choose code that runs: files are named by the command line or the recipe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe import Recipe, parse_recipe
from exgrpo_cli.verifiers import allowed_verifier
from exgrpo_cli.verifiers.pool import Job, Pool
from rollout_files import explain, verify


@pytest.fixture
def evil(tmp_path: Path) -> tuple[str, Path]:
    """A verifier, and the file that shows that it was run."""
    trace = tmp_path / "trace"
    path = tmp_path / "evil.py"
    path.write_text(
        f"open({str(trace)!r}, 'w')\ndef judge(response, answer, metadata):\n    return True\n",
        encoding="utf-8",
    )
    return f"{path}:judge", trace


@pytest.fixture
def tables_with(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    def write(verifier: str) -> tuple[Path, Path]:
        problems, rollouts = [], []
        for name, of in (("a", "exact"), ("b", "exact"), ("c", verifier)):
            prompt = [{"role": "user", "content": name}]
            problems.append(
                {"problem_id": name, "prompt": prompt, "answer": "1", "verifier": of, "source": "s"}
            )
            rollouts.append(
                {"rollout_id": name, "step": 0, "problem_id": name, "sample": 0, "role": "fresh",
                 "policy": "p", "prompt_ids": [1], "token_ids": [2], "text": "\\boxed{1}",
                 "logprobs": [-0.5], "entropies": None, "mean_entropy": 0.5,
                 "entropy_source": "logprobs", "mean_logprob": -0.5, "tokens": 1,
                 "token_hash": tables.token_hash([2]), "finish_reason": "stop", "seed": 1}
            )  # fmt: skip
        paths = tmp_path / "problems.parquet", tmp_path / "rollouts.parquet"
        for kind, rows, path in zip(
            ("problems", "rollouts"), (problems, rollouts), paths, strict=True
        ):
            tables.write_table(kind, tables.frame(kind, rows), path)
        return paths

    return write


def recipe(**problems: Any) -> Recipe:
    return parse_recipe({"verify": {"workers": 1}, "problems": problems}, "test")


def test_a_file_that_only_data_names_is_not_run(
    evil: tuple[str, Path], tables_with: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    name, trace = evil
    problems, rollouts = tables_with(name)
    out = tmp_path / "verdicts.parquet"
    for settings in (recipe(), recipe(verifier="exact"), recipe(verifier="other.py:judge")):
        with pytest.raises(InputError) as caught:
            verify(rollouts, problems, out, settings)
        assert f"{problems}, row 3: " in str(caught.value)
        assert "--verifier" in str(caught.value)
        assert "problems.verifier" in str(caught.value)
        assert "\n" not in str(caught.value)
        with pytest.raises(InputError):
            explain(rollouts, problems, "a", settings)
    assert not out.exists()
    assert verify(rollouts, problems, out, recipe(), verifier="exact")["correct"] == 3
    assert not trace.exists()


def test_one_that_the_recipe_or_the_command_line_names_is_run(
    evil: tuple[str, Path], tables_with: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    name, trace = evil
    problems, rollouts = tables_with(name)
    out = tmp_path / "verdicts.parquet"
    assert verify(rollouts, problems, out, recipe(verifier=name))["correct"] == 3
    assert trace.exists()
    trace.unlink()
    done = verify(rollouts, problems, out, recipe(), force=True, verifier=name)
    assert done["correct"] == 3
    assert trace.exists()


def test_names_count_text_for_text() -> None:
    for name in ("exact", "math", "maths"):
        allowed_verifier(name, [], "here")  # not code
    allowed_verifier("a.py:f", ["a.py:f"], "here")
    for trusted in ([], ["math"], ["a.py:g"], ["./a.py:f"], ["b/a.py:f"]):
        with pytest.raises(InputError, match=r"here: the data names verifier a\.py:f"):
            allowed_verifier("a.py:f", trusted, "here")


def test_a_reason_can_be_stored(user_file: Callable[..., str]) -> None:
    verifier = user_file(
        """
        def judge(response, answer, metadata):
            raise ValueError("half \\ud800 of a character")
        """
    )
    with Pool(1, timeout=20) as pool:
        [verdict] = pool.judge([Job(verifier, "1", None, "x")])
    assert (verdict.status, verdict.why) == ("error", "ValueError: half ? of a character")

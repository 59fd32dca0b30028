"""What the tests of the stages start from."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from exgrpo_cli.rundir import RunDir
from making import qwen, write_problems


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory with problems and nothing else."""
    made = RunDir(tmp_path / "a run")
    write_problems(made, [*"abcdefgh", "zz"])
    return made


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of train_files' steps."""
    folder = tmp_path_factory.mktemp("model")
    qwen().save_pretrained(folder)
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in the same order, for tests to the bit."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

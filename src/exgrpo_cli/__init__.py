"""ExGRPO in offline stages: rollout, verify, score, curate and train, speaking through files.

Each stage is one documented function in :mod:`exgrpo_cli.stages`; the command ``exgrpo`` is a thin
layer over them. The method is *ExGRPO: Learning to Reason from Experience* (arXiv 2510.02245).
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("exgrpo-cli")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

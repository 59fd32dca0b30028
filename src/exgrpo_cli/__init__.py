"""ExGRPO in offline stages: rollout, verify, score, curate and train, speaking through files.

Each stage is one documented function in :mod:`exgrpo_cli.stages`; the command ``exgrpo`` is a thin
layer over them. The method is *ExGRPO: Learning to Reason from Experience* (arXiv 2510.02245).
"""


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("exgrpo-cli")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0.0.0"

"""The command ``exgrpo``, also as ``python -m exgrpo_cli``: Ctrl-C first, then the imports."""

from exgrpo_cli import interrupts


def main() -> None:
    """Entry point."""
    interrupts.install()
    from exgrpo_cli import cli

    cli.main()


if __name__ == "__main__":
    main()

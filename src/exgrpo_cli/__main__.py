"""``python -m exgrpo_cli`` is the command ``exgrpo``."""

from exgrpo_cli.cli import main

if __name__ == "__main__":
    main()

"""The two ways a command ends badly; ``cli.main`` turns them into exit codes."""


class InputError(Exception):
    """Bad usage or bad input (exit code 2).

    The message is one line that names the file, the row or column, and the mend.
    """


class StageError(Exception):
    """The input was fine but the stage failed (exit code 1); the message is one line."""

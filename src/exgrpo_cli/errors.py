"""The two ways a command ends badly; the command line turns them into exit codes."""


class InputError(Exception):
    """Bad usage or bad input (exit code 2).

    The message is one line that names the file, the row or column, and the mend. Whatever reads
    what a user gave may raise it.
    """


class StageError(Exception):
    """The input was fine but the stage failed (exit code 1); the message is one line."""


def first_line(error: BaseException) -> str:
    """What an error of a library says, in one line; its kind where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

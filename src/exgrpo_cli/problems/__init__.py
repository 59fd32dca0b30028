"""Bringing problem sets into the ``problems`` table, from the formats that users have.

:mod:`readers` gives the rows of files, :mod:`formats` finds a file's schema and turns its rows into
problems (:mod:`choices`: those with options; :mod:`values`: chats, texts and gold answers), and
:mod:`importing` makes the table. :mod:`prompts` turns a problem's chat into token ids, and
:mod:`trajectories` reads the responses that others gave to problems.
"""

from exgrpo_cli.problems.formats import FORMATS
from exgrpo_cli.problems.importing import Imported, import_problems
from exgrpo_cli.problems.values import golds_of

__all__ = ["FORMATS", "Imported", "golds_of", "import_problems"]

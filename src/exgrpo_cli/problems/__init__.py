"""Bringing problem sets into the ``problems`` table, from the formats that users have.

:mod:`readers` gives the rows of files, :mod:`formats` finds a file's schema and turns its rows into
problems (:mod:`choices`: those with options; :mod:`values`: chats, texts and gold answers), and
:mod:`importing` makes the table. :mod:`prompts` turns a problem's chat into token ids, and
:mod:`trajectories` reads the responses that others gave to problems.
"""

from exgrpo_cli.problems.importing import import_problems as import_problems

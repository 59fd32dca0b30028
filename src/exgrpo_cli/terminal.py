"""Text on its way to a terminal: from data, such as a model's responses, and in columns."""

from __future__ import annotations

import re
from collections.abc import Sequence

# C0 and C1 controls, line separators, changes of the writing direction, and halves of surrogates.
_HARMFUL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str, keep: str = "\n\t") -> str:
    r"""The text with control characters written out (``\x1b``), but for those to ``keep``: a
    terminal would obey them."""
    return _HARMFUL.sub(lambda match: match[0] if match[0] in keep else _written(match[0]), text)


def _written(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns of equal width, all but the first to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]

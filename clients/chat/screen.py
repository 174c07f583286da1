"""What a conversation looks like: on a terminal in colour, elsewhere the text alone."""

from __future__ import annotations

import re
import sys

from rich.console import Console
from rich.text import Text

from clients.chat.pieces import Piece

STYLES = {True: "green", False: "", None: "dim"}
"""Of accepted drafts, of the target's own tokens, and of text whose origin the server did not tell."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal would obey: a model must not move the cursor or write the clipboard."""


class Screen:
    """The answer goes to standard output, all that is said about it to standard error.

    NO_COLOR and TERM=dumb are honoured.
    """

    def __init__(self) -> None:
        self._out = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
        self._notes = Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)
        self._at_line_start = True

    @property
    def is_terminal(self) -> bool:
        return self._out.is_terminal

    @property
    def colours(self) -> bool:
        return self._out.color_system is not None and not self._out.no_color

    def piece(self, piece: Piece) -> None:
        if not piece.text:
            return
        self._at_line_start = piece.text.endswith("\n")
        if not self.is_terminal:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
            return
        text = CONTROL.sub("\N{REPLACEMENT CHARACTER}", piece.text)
        self._out.out(text, style=STYLES[piece.accepted] or None, end="", highlight=False)

    def end_answer(self) -> None:
        """The next thing begins on a line of its own."""
        if not self._at_line_start:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._at_line_start = True

    def end_prompt(self) -> None:
        """The line that was being typed is given up."""
        sys.stdout.write("\n")
        sys.stdout.flush()

    def legend(self) -> None:
        line = Text("Text in ", style="dim")
        line.append("this colour", style=STYLES[True]).append(
            " was drafted and accepted; the rest is the model's own.", style="dim"
        )
        self._notes.print(line)

    def note(self, text: str) -> None:
        self._notes.print(Text(text, style="dim"))

    def error(self, text: str) -> None:
        self._notes.print(Text(f"paceline: {' '.join(text.split())}"))

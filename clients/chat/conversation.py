"""A conversation: what was said, the commands, and one turn after the other."""

from __future__ import annotations

import contextlib

import msgspec
import openai

from clients.chat.answer import Answer, Messages, Options, stream
from clients.chat.screen import Screen
from clients.client import PacelineClient

HELP = (
    "/system TEXT: what the model is told first (alone: show it)\n"
    "/reset: forget what was said\n"
    "/quit or Ctrl-D: leave; Ctrl-C stops an answer"
)

PROMPT = "> "


class Conversation:
    """``system``: what the model is told first; empty for nothing."""

    def __init__(
        self, client: PacelineClient, options: Options, screen: Screen, system: str = ""
    ) -> None:
        self._client = client
        self._options = options
        self._screen = screen
        self.system = system
        self.said: Messages = []

    def messages(self) -> Messages:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.said]

    def ask(self, prompt: str) -> Answer:
        """One turn; the answer is shown as it comes. Raises openai.OpenAIError.

        Stopped by Ctrl-C, which raises KeyboardInterrupt, what came so far belongs to the conversation.
        """
        self.said.append({"role": "user", "content": prompt})
        answer = Answer()
        try:
            with contextlib.closing(
                stream(self._client, self.messages(), self._options, answer)
            ) as pieces:
                for piece in pieces:
                    self._screen.piece(piece)
        finally:
            self._screen.end_answer()
            if answer.text:
                self.said.append({"role": "assistant", "content": answer.text})
            else:
                self.said.pop()
        self._screen.note(f"[{answer.summary()}]")
        return answer

    def run(self) -> None:
        """Ask for lines until there are no more."""
        self._screen.note(f"{self._options.model}. /help lists the commands.")
        if self._screen.colours:
            self._screen.legend()
        while True:
            try:
                line = input(PROMPT).strip()
            except EOFError:
                self._screen.end_prompt()
                return
            except KeyboardInterrupt:
                self._screen.end_prompt()
                self._screen.note("/quit or Ctrl-D leaves")
                continue
            if line.startswith("/"):
                if not self.command(line):
                    return
            elif line:
                self._turn(line)

    def _turn(self, line: str) -> None:
        try:
            self.ask(line)
        except KeyboardInterrupt:
            self._screen.note("[stopped]")
        except (openai.OpenAIError, msgspec.ValidationError) as error:
            self._screen.error(reason(error, str(self._client.base_url)))

    def command(self, line: str) -> bool:
        """Do what the line says; False to leave."""
        word, _, rest = line.partition(" ")
        if word == "/quit":
            return False
        if word == "/help":
            self._screen.note(HELP)
        elif word == "/reset":
            self.said.clear()
            self._screen.note("forgotten")
        elif word == "/system":
            self.system = rest.strip() or self.system
            self._screen.note(f"system: {self.system or '(none)'}")
        else:
            self._screen.error(f"there is no command {word}; /help lists them")
        return True


def reason(error: Exception, url: str) -> str:
    """Why a request failed, in one line."""
    if isinstance(error, openai.APITimeoutError):
        return f"{url} did not answer in time"
    if isinstance(error, openai.APIConnectionError):
        return f"no server answers at {url}; start one with 'paceline serve' or name another with --url"
    if isinstance(error, openai.APIStatusError):
        body = error.body if isinstance(error.body, dict) else {}
        said = body.get("message") or body.get("detail") or error.message
        return f"{said} (HTTP {error.status_code})"
    return str(error) or type(error).__name__

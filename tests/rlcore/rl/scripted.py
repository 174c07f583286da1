"""Environments and a tokenizer for episodes without a model."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split as SplitText
from transformers import PreTrainedTokenizerFast

from rlcore.environments.base import Environment, Message, Score, Split, Task, Turn

END = "<|end|>"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 :\n"


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character, and END; turns are ``role:content`` and END."""
    words = [END, "?", *LETTERS]
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token="?")
    inner = Tokenizer(model)
    inner.pre_tokenizer = SplitText(Regex(r"<\|end\|>|[\s\S]"), "isolated")
    inner.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, unk_token="?")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}" + END + "\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return tokenizer


class Echo(Environment):
    """Says each reply back until it is ``stop``; scores the number of turns. Some replies are faults."""

    def __init__(self, spec: str, *, tasks: int = 1000) -> None:
        super().__init__(spec)
        self._tasks, self._replies, self._task = tasks, list[str](), 0

    def size(self, split: Split) -> int | None:
        return self._tasks

    def task(self, split: Split, index: int) -> Task:
        return self.make_task(split, index, {"number": index})

    def reset(self, task: Task) -> list[Message]:
        self._replies, self._task = [], task.index
        return [Message("user", f"task {task.index}")]

    def step(self, reply: str) -> Turn:
        self._replies.append(reply)
        if "fault" in reply:
            raise ValueError("a fault")
        if "stop" in reply:
            return Turn([], done=True)
        return Turn([Message("user", f"you said {reply}")], done=False)

    def score(self) -> Score:
        right = any("right" in reply for reply in self._replies)
        return Score(float(right), {"turns": float(len(self._replies))}, right)

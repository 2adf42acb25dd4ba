"""Conversations about documents: in tokens of a model without a tokenizer, or as chats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

PLAIN = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
"""The template of a tokenizer that has none."""


class Talk(ABC):
    """A conversation about a document. ``prompt`` is the latest one, in tokens."""

    prompt: list[int]

    @abstractmethod
    def ask(self, question: str) -> list[int]:
        """Adds a question. Returns the prompt."""

    @abstractmethod
    def answer(self, tokens: list[int]) -> None:
        """Adds the answer to the latest question."""

    def text(self, tokens: list[int]) -> str:
        """Returns an answer as text, empty if its tokens stand for none."""
        return ""


class ByteTalk(Talk):
    """Each byte is a token, its value plus ``offset``. ``tokens`` of the document and ``question_tokens`` of each
    question are used."""

    def __init__(self, document: str, tokens: int, question_tokens: int, offset: int) -> None:
        self._question_tokens = question_tokens
        self._offset = offset
        self.prompt = self._encode(document)[:tokens]

    def ask(self, question: str) -> list[int]:
        self.answer(self._encode(question)[: self._question_tokens])
        return self.prompt

    def answer(self, tokens: list[int]) -> None:
        self.prompt = self.prompt + tokens

    def _encode(self, text: str) -> list[int]:
        return [self._offset + byte for byte in text.encode()]


class ChatTalk(Talk):
    """A chat in the form of the template of ``tokenizer``. Its first message begins with ``tokens`` of the document."""

    def __init__(self, tokenizer: Any, document: str, tokens: int) -> None:
        self._tokenizer = tokenizer
        self._begin = tokenizer.decode(tokenizer.encode(document, add_special_tokens=False)[:tokens]) + "\n\n"
        self._messages: list[dict[str, str]] = []
        self.prompt = []

    def ask(self, question: str) -> list[int]:
        content = question if self._messages else self._begin + question
        self._messages.append({"role": "user", "content": content})
        text = self._tokenizer.apply_chat_template(self._messages, add_generation_prompt=True, tokenize=False)
        self.prompt = list(self._tokenizer.encode(text, add_special_tokens=False))
        return self.prompt

    def answer(self, tokens: list[int]) -> None:
        self._messages.append({"role": "assistant", "content": self.text(tokens)})

    def text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def load_tokenizer(model: str) -> Any:
    """Returns the tokenizer in a model's directory, which has a chat template then."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = tokenizer.chat_template or PLAIN
    return tokenizer

"""Text that looks like a control token, kept apart from the control tokens a template writes.

Data and structure share one string: a user who types `<|im_end|>` would end their own turn. So before a conversation is
rendered, each such text in it is replaced by a private-use character that the conversation does not hold. Templates
strip, split and join around that character as around any other; whatever control token stands in the rendering after
that was written by the template. The rendering is then cut into runs: those that hold marks get their text back and are
encoded as plain text, between the template's own tokens, so their ids are those of the same text in a vocabulary
without control tokens. Cost: two substring searches a message; the rest only where something was found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

MARKS = range(0xF0000, 0xFFFFE)
"""Supplementary Private Use Area-A, whose characters have no meaning by definition (Unicode 17, section 23.5)."""

Value = TypeVar("Value")


class Run(NamedTuple):
    """A text that is encoded in one piece."""

    text: str
    start: bool = False
    """Whether it begins a sequence; else it goes on from what stands before it."""
    plain: bool = False
    """Whether what looks like a control token in it is written out as text."""


class Control(NamedTuple):
    """A token that stands for structure, not for text."""

    text: str
    id: int
    lstrip: bool = False
    """Whether the token takes the blanks before it with it."""
    rstrip: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """The control tokens of a tokenizer, made by `make_controls`."""

    ids: frozenset[int]
    """Those that text alone must not become; the unknown token is none of them, for unknown text becomes it."""
    heads: tuple[str, ...]
    """What their texts begin with; a text without any of these holds no control token."""
    pattern: re.Pattern[str]
    """Matches the longest control token at a place."""
    splitter: re.Pattern[str]
    """Matches control tokens in a row, each with the blanks it takes along."""

    def occur(self, texts: Iterable[str]) -> bool:
        """Whether any text holds the text of a control token."""
        return any(any(head in text for head in self.heads) and self.pattern.search(text) for text in texts)

    def marks(self, texts: Sequence[str]) -> dict[str, str]:
        """A character for each control token that occurs in the texts, itself in none of them."""
        whole = "\0".join(texts)
        free = (chr(code) for code in MARKS if chr(code) not in whole)
        return dict(zip(dict.fromkeys(self.pattern.findall(whole)), free, strict=False))

    def quote(self, value: Value, marks: dict[str, str]) -> Value:
        """The same JSON value with each control token's text replaced by its mark, in keys as well."""
        return cast("Value", self._quote(value, marks))

    def _quote(self, value: Any, marks: dict[str, str]) -> Any:
        if isinstance(value, str):
            return self.pattern.sub(lambda found: marks[found[0]], value)
        if isinstance(value, dict):
            return {self._quote(k, marks): self._quote(v, marks) for k, v in cast("dict[str, Any]", value).items()}
        if isinstance(value, list | tuple):
            return [self._quote(item, marks) for item in cast("list[Any]", value)]
        return value

    def runs(self, text: str, marks: dict[str, str], *, start: bool) -> list[Run]:
        """Cut rendered text into runs; those that hold marks get their text back and are plain."""
        if not any(mark in text for mark in marks.values()):
            return [Run(text, start)] if text else []
        back = {ord(mark): control for control, mark in marks.items()}
        runs: list[Run] = []
        for piece in filter(None, self.splitter.split(text)):
            unquoted = piece.translate(back)
            plain = unquoted != piece
            if runs and not plain and not runs[-1].plain:
                runs[-1] = Run(runs[-1].text + piece, runs[-1].start)
            else:
                runs.append(Run(unquoted, start and not runs, plain))
        return runs

    def parted(self, text: str) -> list[str]:
        """The text in parts, cut after the first character of each control token in it."""
        cuts = [0, *(found.start() + 1 for found in self.pattern.finditer(text)), len(text)]
        return [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]


def make_controls(tokens: Iterable[Control], unknown: int | None = None) -> Controls:
    """Prepare the searches for a tokenizer's control tokens; `unknown` is the id of what is not in the vocabulary."""
    longest_first = sorted(tokens, key=lambda token: (-len(token.text), token.text))
    texts = [re.escape(token.text) for token in longest_first]
    reaching = [
        (r"\s*" if token.lstrip else "") + text + (r"\s*" if token.rstrip else "")
        for token, text in zip(longest_first, texts, strict=True)
    ]
    nothing = "(?!)"
    return Controls(
        ids=frozenset(token.id for token in longest_first if token.id != unknown),
        heads=tuple(dict.fromkeys(token.text[:2] for token in longest_first)),
        pattern=re.compile("|".join(texts) or nothing),
        splitter=re.compile(f"((?:{'|'.join(reaching) or nothing})+)"),
    )


def strings(value: Any) -> Iterator[str]:
    """Every string of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in cast("dict[str, Any]", value).items():
            yield key
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from strings(item)

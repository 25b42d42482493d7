"""The elements of a JSON array, one by one, from a window of its text.

The standard decoder tells where a value ends, but wants all of its text. So the window is decoded from, read on where a
value may not be whole yet, and never kept beyond the value at hand: memory is twice the largest element. Reading on
doubles the window, so an element is tried a logarithmic number of times.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator

BLANK = re.compile(r"[\ufeff \t\r\n]*")

ENDS = tuple(" \t\r\n,]")
"""What may follow a number or a word."""

TAIL = 16
"""A fault this near to the end of the text may be the end itself: no literal or escape is longer."""


class EndsInside(Exception):
    """The text ends before the array does; `number` is the element it ends in, `rest` what there is of it."""

    def __init__(self, number: int, rest: str) -> None:
        super().__init__(number, rest)
        self.number = number
        self.rest = rest


class Broken(Exception):
    """The array is not JSON at element `number`, and the elements after it cannot be found."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(number, why)
        self.number = number
        self.why = why


def elements(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The JSON text of each element of the array that `blocks` spell; bytes that are not UTF-8 stay as they are.

    Raises:
        EndsInside: the blocks end before the array.
        Broken: the array is broken.
    """
    window = Window(blocks)
    number = 1
    if window.peek() != "[":
        raise Broken(number, "no array")
    window.at += 1
    closed = window.peek() == "]"
    while not closed:
        yield window.value(number).encode("utf-8", "surrogateescape")
        number += 1
        mark = window.peek()
        if not mark:
            raise EndsInside(number, "")
        if mark not in ",]":
            raise Broken(number, f"{mark!r} where , or ] must stand")
        closed = mark == "]"
        window.at += not closed
    window.at += 1
    if mark := window.peek():
        raise Broken(number, f"{mark!r} after the end of the array")


class Window:
    """The part of a text that is being decoded."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._texts = (decoder.decode(block) for block in blocks)
        self._scan = json.JSONDecoder().raw_decode
        self.text = ""
        self.at = 0

    def peek(self) -> str:
        """The next character that is not a blank; empty at the end of the text."""
        while True:
            blank = BLANK.match(self.text, self.at)
            self.at = blank.end() if blank else self.at
            if self.at < len(self.text) or not self.grow():
                return self.text[self.at : self.at + 1]

    def value(self, number: int) -> str:
        """The text of the JSON value that stands next, which is element `number`."""
        self.peek()
        while True:
            try:
                _, end = self._scan(self.text, self.at)
                closed = self.text[self.at] in '{["' or self.text[end : end + 1] in ENDS
                if closed or end < len(self.text) - TAIL:
                    value, self.at = self.text[self.at : end], end
                    return value
                if not self.grow():  # 12 that was 123, 0 that was 0.5
                    raise EndsInside(number, self.text[self.at :])
            except json.JSONDecodeError as error:
                goes_on = error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - TAIL
                if not goes_on:
                    raise Broken(number, str(error)) from None
                if not self.grow():
                    raise EndsInside(number, self.text[self.at :]) from None
            except RecursionError:
                raise Broken(number, "nested too deeply") from None

    def grow(self) -> bool:
        """Drop what has been read, and read on until what is left has doubled; False at the end of the text."""
        parts = [self.text[self.at :]]
        self.at, left = 0, len(parts[0])
        size = left
        for text in self._texts:
            parts.append(text)
            size += len(text)
            if size > 2 * left:
                break
        self.text = "".join(parts)
        return size > left

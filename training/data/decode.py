"""A tokenized pair back as text, piece by piece, for a person to look at.

Ids are decoded one after the other in the sequence they stand in, because the text of a token can depend on what comes
before it (a space that only a beginning drops, a character spread over several tokens). Tokens that yield a character
only together are shown together. Cost: the prompt is decoded once for each side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from training.data.tokenize import TokenizedPair
from training.data.tokenizer import Tokenizer


class Shown(NamedTuple):
    """The fewest tokens in a row that make up whole characters."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of a pair that is supervised as a whole, or not at all."""

    part: str
    """prompt, chosen or rejected."""
    supervised: bool
    tokens: tuple[Shown, ...]

    @property
    def text(self) -> str:
        """What the piece says, control tokens included."""
        return "".join(shown.text for shown in self.tokens)


def pieces(pair: TokenizedPair, tokenizer: Tokenizer) -> list[Piece]:
    """The prompt, then each completion cut where supervision begins or ends."""
    found = [Piece(part="prompt", supervised=False, tokens=tuple(_decoded([], pair.prompt_ids, tokenizer)))]
    for part, ids, mask in (
        ("chosen", pair.chosen_ids, pair.chosen_mask),
        ("rejected", pair.rejected_ids, pair.rejected_mask),
    ):
        place = 0
        for supervised, tokens in groupby(mask or [True] * len(ids)):
            end = place + len(list(tokens))
            before, here = [*pair.prompt_ids, *ids[:place]], ids[place:end]
            found.append(Piece(part=part, supervised=supervised, tokens=tuple(_decoded(before, here, tokenizer))))
            place = end
    return found


def _decoded(before: Sequence[int], ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[Shown]:
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    for token in before:
        stream.step(tokenizer.backend, token)
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = stream.step(tokenizer.backend, token)
        if text is not None:
            yield Shown(tuple(waiting), text)
            waiting = []
    if waiting:
        yield Shown(tuple(waiting), tokenizer.backend.decode(waiting, skip_special_tokens=False))

"""Tokens shown one by one read as the text they are of."""

import pytest

from pipeline.commands.inspect import _pieces
from tests.training.data import tiny


@pytest.mark.parametrize("tokenizer", [tiny.byte_level(), tiny.metaspace()], ids=["byte level", "metaspace"])
@pytest.mark.parametrize(
    "text", ["price $46 as of today", "Which river? The Ebro. [bold]1[/] 2", "the answer is the answer"]
)
def test_pieces_join_to_the_text(tokenizer, text):
    ids = tokenizer.encode(text).ids
    pieces = _pieces(tokenizer, ids)
    assert len(pieces) == len(ids) > 2
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)

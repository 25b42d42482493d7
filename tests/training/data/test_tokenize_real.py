"""A tokenizer in use and real preference sets, against what transformers makes of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from training.data.pair import Message, Pair, make_pair
from training.data.recipe import make_recipe
from training.data.tokenize import TokenizedPair, tokenize_pairs
from training.data.tokenizer import Tokenizer, load_tokenizer

DATA = os.environ.get("PAIRLEDGER_TEST_DATA", "")
pytestmark = pytest.mark.skipif(
    not DATA, reason="set PAIRLEDGER_TEST_DATA to a folder with data/sharegpt_dpo_*.json and tokenizers/qwen3"
)
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def _pairs(language: str) -> Iterator[Pair]:
    def said(turn: dict[str, str]) -> Message:
        return Message(role=ROLES[turn["from"]], content=turn["value"])

    for row in json.loads((Path(DATA) / "data" / f"sharegpt_dpo_{language}.json").read_text(encoding="utf-8")):
        system = [Message(role="system", content=row["system"])] if row.get("system") else []
        history = [*system, *map(said, row["conversations"])]
        made = make_pair(history, [said(row["chosen"])], [said(row["rejected"])], source=language, locator="x")
        if isinstance(made, Pair):
            yield made


@pytest.fixture(scope="module")
def qwen() -> Tokenizer:
    return load_tokenizer(Path(DATA) / "tokenizers" / "qwen3")


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(DATA) / "tokenizers" / "qwen3")


def _whole(theirs: Any, turns: list[Message], **arguments: Any) -> list[int]:
    """Ids of the whole conversation in one piece, as transformers renders and encodes it."""
    text = theirs.apply_chat_template([turn.to_dict() for turn in turns], tokenize=False, **arguments)
    return theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_prompt_and_answer_are_the_whole_conversation(qwen: Tokenizer, theirs: Any, language: str) -> None:
    pairs = list(_pairs(language))[:60]
    results, notes = tokenize_pairs(pairs, qwen, make_recipe(qwen))
    assert language == "zh" or max(len(pair.prompt) for pair in pairs) > 3, "several turns of history"
    newline = theirs("\n")["input_ids"]
    for pair, got in zip(pairs, results, strict=True):
        assert isinstance(got, TokenizedPair), got
        for completion, ids in ((pair.chosen, got.chosen_ids), (pair.rejected, got.rejected_ids)):
            assert got.prompt_ids + ids + newline == _whole(theirs, [*pair.prompt, *completion])
        assert got.prompt_ids == _whole(theirs, list(pair.prompt), add_generation_prompt=True)
        assert got.chosen_ids[-1] == got.rejected_ids[-1] == theirs.eos_token_id
        assert got.chosen_mask is None and got.rejected_mask is None
    assert notes.counts == {}


def test_tools_and_calls_are_rendered_as_transformers_does(qwen: Tokenizer, theirs: Any) -> None:
    """Case: tool-null-padding (arguments stay as they were; no turn gains a null)."""
    tools = [{"type": "function", "function": {"name": "w", "parameters": {"type": "object", "properties": {}}}}]
    call = Message(
        role="assistant",
        content="",
        tool_calls=({"type": "function", "function": {"name": "w", "arguments": {"x": 1}}},),
    )
    asked, answer = Message(role="user", content="weather?"), Message(role="tool", content="3 C")
    good, bad = (Message(role="assistant", content=text) for text in ("3 C", "9 C"))
    pair = make_pair([asked], [call, answer, good], [bad], tools=tools, source="s", locator="l")
    assert isinstance(pair, Pair)
    (got,), notes = tokenize_pairs([pair], qwen, make_recipe(qwen))
    assert isinstance(got, TokenizedPair) and notes.counts == {}
    whole = got.prompt_ids + got.chosen_ids
    assert whole == _whole(theirs, [asked, call, answer, good], tools=tools)[:-1]
    learned = [t for t, keep in zip(got.chosen_ids, got.chosen_mask or [], strict=True) if keep]
    text = qwen.backend.decode(learned, skip_special_tokens=False)
    assert text == (
        '<tool_call>\n{"name": "w", "arguments": {"x": 1}}\n</tool_call><|im_end|><think>\n\n</think>\n\n3 C<|im_end|>'
    )


def test_a_conversation_that_goes_on_after_the_border_is_cut_at_its_turns(qwen: Tokenizer, theirs: Any) -> None:
    """The template takes thoughts out of turns that others follow, so no turn reads as it would at the end."""
    said = lambda role, text: Message(role=role, content=text)  # noqa: E731
    history = [said("user", "1+1?")]
    chosen = [said("assistant", "<think>easy</think>2"), said("user", "+1?"), said("assistant", "3")]
    pair = make_pair(history, chosen, [said("assistant", "5")], source="s", locator="l")
    assert isinstance(pair, Pair)
    (got,), _ = tokenize_pairs([pair], qwen, make_recipe(qwen))
    assert isinstance(got, TokenizedPair)
    assert got.prompt_ids + got.chosen_ids == _whole(theirs, [*history, *chosen])[:-1]
    learned = [t for t, keep in zip(got.chosen_ids, got.chosen_mask or [], strict=True) if keep]
    assert qwen.backend.decode(learned, skip_special_tokens=False) == "2<|im_end|><think>\n\n</think>\n\n3<|im_end|>"


def test_ids_are_the_same_in_batches_of_any_size(qwen: Tokenizer) -> None:
    pairs = [*list(_pairs("en"))[:20], *list(_pairs("zh"))[:20]]
    recipe = make_recipe(qwen, max_tokens=1024, overflow="completion_right")
    whole, notes = tokenize_pairs(pairs, qwen, recipe)
    single = [tokenize_pairs([pair], qwen, recipe) for pair in pairs]
    assert [result for (result,), _ in single] == whole
    assert any(isinstance(result, TokenizedPair) and result.chosen_cut for result in whole)
    assert sum((count for _, count in single), type(notes)()) == notes


@pytest.mark.slow
def test_nearly_all_the_time_is_the_encoders(qwen: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [*_pairs("en"), *_pairs("zh")]
    recipe = make_recipe(qwen, max_tokens=2048)
    spent = [0.0]
    encode = Tokenizer._encode  # pyright: ignore[reportPrivateUsage]

    def timed(self: Tokenizer, texts: Any, start: bool) -> Any:
        began = time.process_time()
        found = encode(self, texts, start)
        spent[0] += time.process_time() - began
        return found

    monkeypatch.setattr(Tokenizer, "_encode", timed)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    tokenize_pairs(pairs[:50], qwen, recipe)
    shares: list[float] = []
    for _ in range(3):
        spent[0], began = 0.0, time.process_time()
        tokenize_pairs(pairs, qwen, recipe)
        shares.append(spent[0] / (time.process_time() - began))
    assert max(shares) > 0.8, shares

"""Any conversation, several tokenizers and templates: ids equal those of a second, slow implementation.

The reference knows no template language and no batch: for each template it says in Python what stands around a message,
and encodes message by message, the text between two control tokens at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from tests.training.data import tiny
from training.data.pair import Message, Pair, make_pair
from training.data.recipe import Recipe, make_recipe
from training.data.tokenize import TokenizedPair, tokenize_pairs
from training.data.tokenizer import Tokenizer, load_tokenizer

FRAGMENTS = (
    *("a", "The", " price", "$46", " ", "\n", "no ", "1", "é", "€", "\U000f0000"),
    *("<|im_end|>", "<|im_start|>", "</s>", "<unk>", "<|", "<think>", "</think>"),
)


@dataclass(frozen=True)
class Way:
    """One tokenizer with one template, and what the reference knows about them."""

    tokenizer: Tokenizer
    bare: Backend
    """The same vocabulary, never putting a blank in front of anything; made from the library, not from our rules."""
    begin: tuple[str, ...]
    """Control tokens at the start of a conversation."""
    head: Callable[[str], tuple[str | None, str]]
    """(control token, text) in front of a turn of a role."""
    end: str
    after: str


def _chatml(role: str) -> tuple[str | None, str]:
    return "<|im_start|>", f"{role}\n"


def _bars(role: str) -> tuple[str | None, str]:
    return None, f"<|{role}|>\n"


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Way]:
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    made: dict[str, Way] = {}
    never = pre_tokenizers.Metaspace(prepend_scheme="never")
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, build, template, bare, shape in (
        ("bytes-chatml", tiny.byte_level, tiny.CHATML, byte, ((), _chatml, "<|im_end|>", "\n")),
        ("bytes-bos", tiny.byte_level, tiny.WITH_BOS, byte, (("<s>",), _bars, "</s>", "\n")),
        ("adds-bos", lambda: tiny.byte_level(adds_bos=True), tiny.WITH_BOS, byte, (("<s>",), _bars, "</s>", "\n")),
        ("metaspace-bos", tiny.metaspace, tiny.WITH_BOS, never, (("<s>",), _bars, "</s>", "\n")),
        ("metaspace-chatml", tiny.metaspace, tiny.CHATML, never, ((), _chatml, "<|im_end|>", "\n")),
    ):
        folder: Path = tmp_path_factory.mktemp(name)
        tokenizer = load_tokenizer(tiny.write(folder, build(), template, **named))
        raw = Backend.from_file(str(folder / "tokenizer.json"))
        raw.pre_tokenizer = bare
        raw.encode_special_tokens = True
        begin, head, end, after = shape
        made[name] = Way(tokenizer=tokenizer, bare=raw, begin=begin, head=head, end=end, after=after)
    return made


def _reference(way: Way, messages: list[tuple[str, str]], closing: str | None) -> Iterator[tuple[list[int], bool]]:
    """(ids, whether an assistant said them) from the head of the first message on; `closing` is a role's head."""
    control = functools.partial(way.bare.token_to_id)
    text = lambda written: way.bare.encode(written, add_special_tokens=False).ids if written else []  # noqa: E731
    before = ""
    for role, content in messages:
        token, words = way.head(role)
        head = text(before) + [control(token)] if token else []
        opening = words if token else before + words
        if role == "assistant":
            yield head + text(opening), False
            yield [*text(content), control(way.end)], True
        else:
            yield [*head, *text(opening + content), control(way.end)], False
        before = way.after
    if closing is not None:
        token, words = way.head(closing)
        yield ([*text(before), control(token), *text(words)] if token else text(before + words)), False


def _expected(way: Way, pair: Pair) -> tuple[list[int], list[tuple[list[int], list[bool]]]]:
    said = lambda turns: [(turn.role, turn.content) for turn in turns]  # noqa: E731
    history = said(pair.prompt)
    prompt = [way.bare.token_to_id(token) for token in way.begin]
    prompt += [token for ids, _ in _reference(way, history, "assistant") for token in ids]
    sides: list[tuple[list[int], list[bool]]] = []
    for completion in (pair.chosen, pair.rejected):
        parts = list(_reference(way, history + said(completion), None))
        heads = sum(2 if role == "assistant" else 1 for role, _ in history) + 1
        ids = [token for part, _ in parts[heads:] for token in part]
        sides.append((ids, [spoken for part, spoken in parts[heads:] for _ in part]))
    return prompt, sides


texts = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=6).map("".join).filter(str.strip)


@st.composite
def pairs(draw: st.DrawFn) -> Pair | None:
    def talk(roles: list[str]) -> tuple[Message, ...]:
        return tuple(Message(role=role, content=draw(texts)) for role in roles)

    rounds = ["user", "assistant"] * draw(st.integers(0, 2)) + ["user"]
    history = talk((["system"] if draw(st.booleans()) else []) + rounds)
    sides = [talk(["assistant"] + ["user", "assistant"] * draw(st.integers(0, 2))) for _ in range(2)]
    made = make_pair(history, *sides, source="s", locator="l")
    return made if isinstance(made, Pair) else None


@pytest.mark.parametrize("name", ["bytes-chatml", "bytes-bos", "adds-bos", "metaspace-bos", "metaspace-chatml"])
def test_ids_are_those_of_a_slow_reference(ways: dict[str, Way], name: str) -> None:
    way, seen = ways[name], {"in": 0, "masked": 0, "marked": 0}
    recipe = make_recipe(way.tokenizer)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(drawn=st.lists(pairs(), min_size=1, max_size=4))
    def check(drawn: list[Pair | None]) -> None:
        batch = [pair for pair in drawn if pair is not None]
        results, notes = tokenize_pairs(batch, way.tokenizer, recipe)
        seen["marked"] += notes.counts.get("control_text", 0)
        for pair, got in zip(batch, results, strict=True):
            prompt, ((chosen, chosen_mask), (rejected, rejected_mask)) = _expected(way, pair)
            if chosen == rejected:
                continue
            assert isinstance(got, TokenizedPair), got
            assert (got.prompt_ids, got.chosen_ids, got.rejected_ids) == (prompt, chosen, rejected)
            assert (got.chosen_mask or [True] * len(chosen)) == chosen_mask
            assert (got.rejected_mask or [True] * len(rejected)) == rejected_mask
            seen["in"] += 1
            seen["masked"] += got.chosen_mask is not None

    check()
    assert seen["in"] > 60 and seen["masked"] > 10 and seen["marked"] > 10, seen


@pytest.mark.parametrize("overflow", ["drop", "prompt_left", "completion_right"])
def test_a_pair_within_limits_has_a_prompt_and_something_to_learn(ways: dict[str, Way], overflow: Any) -> None:
    way, outcomes = ways["bytes-chatml"], dict[str, int]()
    whole = make_recipe(way.tokenizer)

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(pair=pairs(), limit=st.integers(2, 400))
    def check(pair: Pair | None, limit: int) -> None:
        if pair is None:
            return
        recipe = Recipe(rendering="chat", template=whole.template, max_tokens=limit, overflow=overflow)
        (got,), _ = tokenize_pairs([pair], way.tokenizer, recipe)
        outcome = "in" if isinstance(got, TokenizedPair) else got.reason
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if not isinstance(got, TokenizedPair):
            return
        (full,), _ = tokenize_pairs([pair], way.tokenizer, whole)
        assert isinstance(full, TokenizedPair)
        assert got.prompt_ids and got.prompt_ids == full.prompt_ids[got.prompt_cut :]
        for ids, mask, cut, uncut in (
            (got.chosen_ids, got.chosen_mask, got.chosen_cut, full.chosen_ids),
            (got.rejected_ids, got.rejected_mask, got.rejected_cut, full.rejected_ids),
        ):
            assert len(got.prompt_ids) + len(ids) <= limit
            assert ids == uncut[: len(uncut) - cut]
            assert ids and (mask is None or (len(mask) == len(ids) and any(mask)))

    check()
    assert outcomes["in"] > 10 and sum(outcomes.values()) - outcomes["in"] > 10, outcomes

"""Pairs become ids: one prompt that both sides share, two completions, and masks that come from turns.

A pair is rendered once (`template`), its text cut into runs (`controls`), and the runs of a whole batch are encoded in
one call. The prompt is encoded apart from the completions, so its ids are one list whatever follows; each stretch of a
completion is encoded on its own, so a mask is a matter of lengths and never of what a token is. Limits come last, by a
pure function over three lengths. A pair leaves here with a prompt and at least one supervised token on each side, or as
a `Rejection` that says why. Cost: the encoder; all the rest is below a sixth of the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from training.data.controls import Run, strings
from training.data.fingerprint import pair_fingerprint
from training.data.pair import Pair, Refused, Rejection
from training.data.recipe import Overflow, Recipe, template_for
from training.data.template import Conversation, Rendering, Segment, Template
from training.data.tokenizer import Tokenizer

NOTES = {
    "history_rewritten": "chat template changed text of earlier turns",
    "generation_prompt_differs": "chat template asks for an answer in other words than it renders one with",
    "no_end_token": "a completion ends without an end-of-turn token",
    "tools_ignored": "chat template does not show the tools",
    "control_text": "text that looks like a control token was encoded as plain text",
}
"""What is counted although the pair is let in: code to sentence."""


Span = tuple[bool, int]
"""Whether tokens in a row are supervised, and how many they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedPair:
    """A pair as ids."""

    pair_id: str
    source: str
    locator: str
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    chosen_mask: list[bool] | None = None
    """Which completion tokens are supervised; None where all are."""
    rejected_mask: list[bool] | None = None
    prompt_cut: int = 0
    """Tokens removed from the left of the prompt; a completion's are removed from its right."""
    chosen_cut: int = 0
    rejected_cut: int = 0


@dataclass(frozen=True, slots=True)
class Notes:
    """How many of the pairs let in each code of `NOTES` applies to."""

    counts: Mapping[str, int] = field(default_factory=dict[str, int])

    def __add__(self, other: Notes) -> Notes:
        return Notes(dict(Counter(self.counts) + Counter(other.counts)))


def tokenize_pairs(
    pairs: Sequence[Pair], tokenizer: Tokenizer, recipe: Recipe
) -> tuple[list[TokenizedPair | Rejection], Notes]:
    """Tokenize a batch of pairs; entry i of the list is what became of pair i.

    Raises:
        TokenizerError: the template cannot be used for any pair.
    """
    template = None if recipe.template is None else template_for(tokenizer, recipe, recipe.template)
    drafts = [_draft(pair, tokenizer, template) for pair in pairs]
    encoded = iter(tokenizer.encode([run for draft in drafts if isinstance(draft, _Draft) for run in draft.runs]))
    done: list[TokenizedPair | Rejection] = []
    counts: Counter[str] = Counter()
    for draft in drafts:
        if isinstance(draft, _Draft):
            result = _finish(draft, [next(encoded) for _ in draft.runs], recipe)
            counts.update(draft.notes if isinstance(result, TokenizedPair) else ())
            done.append(result)
        else:
            done.append(draft)
    return done, Notes(dict(counts))


def cuts(
    prompt: int, chosen: int, rejected: int, *, max_tokens: int | None, overflow: Overflow
) -> tuple[int, int, int]:
    """Tokens to remove from the prompt's left and from each completion's right, so that both sides fit.

    `prompt_left` shortens the one prompt by what the longer side is over; a prompt token must stay, because the first
    token of a completion is predicted by the one before it. `completion_right` shortens each side by what it is over.

    Raises:
        Refused: the policy is `drop`, or cutting by the policy leaves no prompt or no completion.
    """
    if max_tokens is None or prompt + max(chosen, rejected) <= max_tokens:
        return 0, 0, 0
    sizes = f"prompt {prompt}, chosen {chosen}, rejected {rejected} tokens; max_tokens is {max_tokens}"
    if overflow == "prompt_left":
        over = prompt + max(chosen, rejected) - max_tokens
        if over >= prompt:
            raise Refused("answer_too_long", sizes)
        return over, 0, 0
    room = max_tokens - prompt
    if room < 1:
        raise Refused("prompt_too_long", sizes)
    if overflow == "drop":
        raise Refused("too_long", sizes)
    return 0, max(0, chosen - room), max(0, rejected - room)


class _Draft(NamedTuple):
    """A pair between rendering and encoding."""

    pair: Pair
    runs: list[Run]
    parts: list[tuple[str, bool, int]]
    """(part, supervised, how many of the runs) in the order of the runs."""
    notes: tuple[str, ...]


def _draft(pair: Pair, tokenizer: Tokenizer, template: Template | None) -> _Draft | Rejection:
    """Render a pair and cut it into runs."""
    sides = [[turn.to_dict() for turn in turns] for turns in (pair.prompt, pair.chosen, pair.rejected)]
    tools = list(pair.tools) or None
    controls, marks = tokenizer.controls, dict[str, str]()
    texts = list(chain(strings(sides), strings(tools)))
    if controls.occur(texts):
        marks = controls.marks(texts)
        sides, tools = controls.quote(sides, marks), controls.quote(tools, marks)
    history, chosen, rejected = sides
    conversation = Conversation(history=history, chosen=chosen, rejected=rejected, tools=tools)
    try:
        rendering = _as_they_are(conversation, tokenizer) if template is None else template.split(conversation)
    except Refused as refusal:
        return _rejection(pair, refusal)
    runs: list[Run] = []
    parts: list[tuple[str, bool, int]] = []
    for part, segment in _stretches(rendering):
        cut = controls.runs(segment.text, marks, start=part == "prompt")
        runs += cut
        parts.append((part, segment.supervised, len(cut)))
    return _Draft(pair, runs, parts, (*rendering.notes, *(("control_text",) if marks else ())))


def _stretches(rendering: Rendering) -> Iterator[tuple[str, Segment]]:
    yield "prompt", Segment(rendering.prompt, False)
    yield from (("chosen", segment) for segment in rendering.chosen)
    yield from (("rejected", segment) for segment in rendering.rejected)


def _as_they_are(conversation: Conversation, tokenizer: Tokenizer) -> Rendering:
    """The `text` rendering: prompt, completion, and the end token where the tokenizer has one."""
    turns = [*conversation.history, *conversation.chosen, *conversation.rejected]
    roles = " ".join(turn["role"] for turn in turns)
    if roles != "user assistant assistant" or conversation.tools or any(turn.get("tool_calls") for turn in turns):
        raise Refused("not_one_turn", "text rendering takes one user and one assistant turn; give a chat template")
    end = tokenizer.specials.get("eos_token")
    closing = () if end is None else (Segment(end, True),)
    question, good, bad = (turn["content"] for turn in turns)
    return Rendering(
        prompt=question,
        chosen=(Segment(good, True), *closing),
        rejected=(Segment(bad, True), *closing),
        notes=() if closing else ("no_end_token",),
    )


def _finish(draft: _Draft, encoded: Sequence[list[int] | None], recipe: Recipe) -> TokenizedPair | Rejection:
    """Put a draft's ids together, apply the limits, and check what a pair must have."""
    try:
        ids, spans = _assemble(draft, encoded)
        if ids["chosen"] == ids["rejected"]:
            raise Refused("identical_tokens", f"fields chosen and rejected: the same {len(ids['chosen'])} tokens")
        lengths = (len(ids[part]) for part in ("prompt", "chosen", "rejected"))
        left, *right = cuts(*lengths, max_tokens=recipe.max_tokens, overflow=recipe.overflow)
        prompt = ids["prompt"][left:]
        if not prompt:
            raise Refused("no_target", "field prompt: becomes no token, so nothing predicts an answer's first")
        chosen, rejected = (
            _shorten(part, ids[part], spans[part], cut) for part, cut in zip(("chosen", "rejected"), right, strict=True)
        )
        if any(right) and chosen[0] == rejected[0]:
            raise Refused("identical_tokens", f"fields chosen and rejected: the same {len(chosen[0])} tokens once cut")
    except Refused as refusal:
        return _rejection(draft.pair, refusal)
    return TokenizedPair(
        pair_id=pair_fingerprint(draft.pair),
        source=draft.pair.source,
        locator=draft.pair.locator,
        prompt_ids=prompt,
        chosen_ids=chosen[0],
        rejected_ids=rejected[0],
        chosen_mask=chosen[1],
        rejected_mask=rejected[1],
        prompt_cut=left,
        chosen_cut=right[0],
        rejected_cut=right[1],
    )


def _assemble(draft: _Draft, encoded: Sequence[list[int] | None]) -> tuple[dict[str, list[int]], dict[str, list[Span]]]:
    """Ids and supervised spans by part, from the ids of a draft's runs."""
    ids: dict[str, list[int]] = {"prompt": [], "chosen": [], "rejected": []}
    spans: dict[str, list[Span]] = {part: [] for part in ids}
    place = 0
    for part, supervised, runs in draft.parts:
        before = len(ids[part])
        for run, tokens in zip(draft.runs[place : place + runs], encoded[place : place + runs], strict=True):
            if tokens is None:
                raise Refused("control_text", f"field {part}: the vocabulary cannot spell {run.text[:40]!r} as text")
            ids[part] += tokens
        spans[part].append((supervised, len(ids[part]) - before))
        place += runs
    return ids, spans


def _shorten(part: str, ids: list[int], spans: list[Span], cut: int) -> tuple[list[int], list[bool] | None]:
    """A completion without its last `cut` tokens, and its mask where not all of it is supervised."""
    kept = len(ids) - cut
    mask = [supervised for supervised, length in spans for _ in range(length)][:kept] if len(spans) > 1 else None
    if kept < 1 or (mask is not None and not any(mask)):
        raise Refused("no_target", f"field {part}: no supervised token" + (f" once {cut} are cut" if cut else ""))
    return ids[:kept], None if mask is None or all(mask) else mask


def _rejection(pair: Pair, refusal: Refused) -> Rejection:
    return Rejection(source=pair.source, locator=pair.locator, reason=refusal.reason, detail=refusal.detail)

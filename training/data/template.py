"""Rendering: a pair becomes one prompt text and two completions cut into turns.

One rendering is the truth: each side's whole conversation, as the chat template writes it. The prompt is a prefix that
both renderings share and that ends at a border between messages; the first of these that is such a prefix is taken:

1. the history with its generation prompt, which is what a model is asked with;
2. the history with what the template writes in front of an answer (what two probe answers' renderings share);
3. the history alone.

Inside a completion of several turns the same search finds where each assistant turn begins, on that side's own
rendering. A turn ends with the template's end-of-turn token, found once on a probe; what stands after it up to the next
assistant turn is kept and not supervised, what stands after the last is not kept. Where a template writes no such
token, a turn is all that it writes for it; no token is invented. A conversation that leaves no border is refused, never
split by guess.

The template runs in the sandbox of transformers, whose renderings these are, byte for byte; a template that asks for
the time is given a pinned day, or refused. Cost: three renderings a pair (40 µs each with the Qwen3 template).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from os.path import commonprefix
from typing import Any, NamedTuple, NoReturn, cast

from training.data.pair import Refused
from training.errors import TokenizerError

Turn = dict[str, Any]

CLOCK = ("strftime_now", "now")
"""Names under which templates ask for the time."""

PROBES = ("0", "1")
"""Two answers with nothing in common, to see what a template writes around an answer."""

METHODS = frozenset(dir(dict))
"""What `x.name` means before it means a field of x."""

FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template raises besides its own errors when a conversation lacks what it wants."""


class Segment(NamedTuple):
    """A stretch of a completion, encoded on its own."""

    text: str
    supervised: bool
    """Whether its tokens are learned: an assistant turn with its end, nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A pair as a template takes it."""

    history: Sequence[Turn]
    chosen: Sequence[Turn]
    rejected: Sequence[Turn]
    tools: Sequence[dict[str, Any]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """A pair as text."""

    prompt: str
    chosen: tuple[Segment, ...]
    rejected: tuple[Segment, ...]
    notes: tuple[str, ...]
    """Codes of `tokenize.NOTES` that apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A chat template with everything that its renderings depend on."""

    text: str
    arguments: Mapping[str, Any]
    """Special tokens and the template's own arguments, by the names the template knows them under."""
    date: str | None
    """Day (YYYY-MM-DD) that a template which asks for the time is given."""
    end: str | None
    """The template's end-of-turn token; None when it writes none."""

    def render(self, turns: Sequence[Turn], tools: Sequence[dict[str, Any]] | None, *, ask: bool = False) -> str:
        """The conversation as text, with the generation prompt when `ask` is set.

        Raises:
            Refused: the template refuses the conversation, or fails on it.
            TokenizerError: the template cannot be compiled, or asks for the time and no day is pinned.
        """
        from jinja2 import TemplateError

        try:
            return _compile(self.text).render(
                messages=turns,
                tools=tools,
                documents=None,
                add_generation_prompt=ask,
                **{**_clock(self.date), **self.arguments},
            )
        except TemplateError as error:
            raise Refused("template_refuses", f"chat template: {error.message}") from None
        except FAULTS as error:
            raise Refused("template_refuses", f"chat template fails: {error}") from None

    def split(self, pair: Conversation) -> Rendering:
        """Render both sides and cut them at their borders.

        Raises:
            Refused: the template refuses the conversation, or leaves no border.
            TokenizerError: see `render`.
        """
        chosen = self.render([*pair.history, *pair.chosen], pair.tools)
        rejected = self.render([*pair.history, *pair.rejected], pair.tools)
        prompt, notes = self._border(pair.history, pair.tools, (chosen, rejected))
        if any(turn["content"].strip() not in prompt for turn in pair.history):
            notes += ("history_rewritten",)
        if pair.tools and chosen == self.render([*pair.history, *pair.chosen], None):
            notes += ("tools_ignored",)
        if self.end is None or self.end not in chosen[len(prompt) :] or self.end not in rejected[len(prompt) :]:
            notes += ("no_end_token",)
        return Rendering(
            prompt=prompt,
            chosen=self._segments(pair.history, pair.chosen, pair.tools, chosen, len(prompt)),
            rejected=self._segments(pair.history, pair.rejected, pair.tools, rejected, len(prompt)),
            notes=notes,
        )

    def _border(
        self, history: Sequence[Turn], tools: Sequence[dict[str, Any]] | None, wholes: Sequence[str]
    ) -> tuple[str, tuple[str, ...]]:
        """(text up to where the next assistant turn begins in all of `wholes`, notes)."""
        asked = self.render(history, tools, ask=True)
        if all(whole.startswith(asked) for whole in wholes):
            return asked, ()
        answered = [self.render([*history, {"role": "assistant", "content": probe}], tools) for probe in PROBES]
        closed = self.render(history, tools)
        for border in (commonprefix(answered), closed):
            if border not in answered and all(whole.startswith(border) for whole in wholes):
                return border, ("generation_prompt_differs",)
        part = min(len(commonprefix([asked, whole])) for whole in wholes)
        shown = " and ".join(repr(whole[part : part + 40]) for whole in wholes)
        raise Refused(
            "template_rewrites",
            f"chat template: the prompt goes on with {asked[part : part + 40]!r} where the conversation goes on with "
            f"{shown}, and no border between messages comes before; use a template that renders history as it was",
        )

    def _segments(
        self,
        history: Sequence[Turn],
        turns: Sequence[Turn],
        tools: Sequence[dict[str, Any]] | None,
        whole: str,
        start: int,
    ) -> tuple[Segment, ...]:
        """Cut `whole[start:]` into assistant turns (supervised) and what stands between them."""
        segments: list[Segment] = []
        for index in range(1, len(turns)):
            if turns[index]["role"] != "assistant":
                continue
            before, answered = [*history, *turns[:index]], [*history, *turns[: _answers(turns, index)]]
            following = len(self._border(before, tools, (whole,))[0])
            end = start + self._inner_end(whole[start:following], self.render(answered, tools)[start:])
            segments += (Segment(whole[start:end], True), Segment(whole[end:following], False))
            start = following
        last = whole[start:]
        return (*segments, Segment(last[: self._end(last)], True))

    def _inner_end(self, stretch: str, answered: str) -> int:
        """Length of the assistant turn that begins a stretch reaching to the next one.

        Where the rendering that stops after this turn (`answered`) is how the stretch begins, the turn ends in it.
        """
        if stretch.startswith(answered):
            return self._end(answered)
        if self.end is None or self.end not in stretch:
            raise Refused(
                "template_rewrites",
                f"chat template: an assistant turn reads {answered[:40]!r} as the last turn and {stretch[:40]!r} "
                "before others, and no end-of-turn token shows where it ends",
            )
        return self._end(stretch)

    def _end(self, text: str) -> int:
        """Length of the assistant turn that begins `text`, its end included."""
        place = -1 if self.end is None else text.find(self.end)
        return len(text) if self.end is None or place < 0 else place + len(self.end)


def end_of_turn(text: str, arguments: Mapping[str, Any], added: Sequence[str]) -> str | None:
    """The first added token that a template writes after an answer, or None."""
    probe = Template(text=text, arguments=arguments, date="2000-01-01", end=None)
    answers = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}] for answer in PROBES]
    try:
        texts = [probe.render(turns, None) for turns in answers]
    except Refused:
        return None
    tail = commonprefix([text[::-1] for text in texts])[::-1]
    found = sorted((tail.find(token), -len(token), token) for token in added if token in tail)
    return found[0][2] if found and texts[0] != texts[1] else None


def asks_for_time(text: str) -> bool:
    """Whether a template names the clock."""
    from jinja2 import nodes

    return any(name.name in CLOCK for name in _compile(text).environment.parse(text).find_all(nodes.Name))


def _answers(turns: Sequence[Turn], index: int) -> int:
    """How many turns there are up to and including the last assistant turn before `index`."""
    return next(i for i in range(index, 0, -1) if turns[i - 1]["role"] == "assistant")


def _clock(date: str | None) -> dict[str, Callable[..., Any]]:
    if date is None:
        return {name: _refusing(name) for name in CLOCK}
    day = datetime.datetime.fromisoformat(date)
    return {"strftime_now": day.strftime, "now": lambda *_: day}


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise TokenizerError(
            f"chat template calls {name}(), so its tokens would change with the day; pin one with "
            '`date = "YYYY-MM-DD"` under [tokenizer]'
        )

    return refuse


@lru_cache(maxsize=16)
def _compile(text: str) -> Any:
    """The template in the environment of transformers; the public `render_jinja_template` takes no clock.

    The sandbox judges an attribute by its owner's type and its name alone, and tries a message's fields as attributes
    first; answering both from memory halves the time of a rendering and changes no answer.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils import chat_template_utils

    try:
        compiled = chat_template_utils._compile_jinja_template(text)  # pyright: ignore[reportPrivateUsage]
    except TemplateSyntaxError as error:
        raise TokenizerError(f"chat template, line {error.lineno}: {error.message}") from None
    environment: Any = compiled.environment.overlay()
    environment.is_safe_attribute = _remembering(environment.is_safe_attribute)
    look_up: Callable[[Any, str], Any] = environment.getattr

    def look_up_field_first(owner: Any, name: str) -> Any:
        if type(owner) is dict and name in owner and name not in METHODS:
            return cast("Turn", owner)[name]
        return look_up(owner, name)

    environment.getattr = look_up_field_first
    return environment.from_string(text)


def _remembering(judge: Callable[[object, str, object], bool]) -> Callable[[object, str, object], bool]:
    verdicts: dict[tuple[type, str], bool] = {}

    def remember(owner: object, attribute: str, value: object) -> bool:
        key = (type(owner), attribute)
        if key not in verdicts:
            verdicts[key] = judge(owner, attribute, value)
        return verdicts[key]

    return remember

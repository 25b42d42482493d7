"""The recipe: everything besides the pair and the tokenizer that decides a pair's ids, as one value with a fingerprint.

A chat template belongs to it with its arguments and its pinned day, under a fingerprint of its own, because a template
is what people change; the rest (rendering, limits, the version of our rules) is the recipe proper.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from training.data.fingerprint import fp, template_fingerprint
from training.data.pair import Refused
from training.data.template import Template, asks_for_time
from training.data.tokenizer import Tokenizer
from training.errors import ConfigError, TokenizerError

VERSION = 1
"""Moves when a rule of `template`, `controls` or `tokenize` changes ids."""

Overflow = Literal["drop", "prompt_left", "completion_right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything besides pair and tokenizer that decides a pair's ids; made by `make_recipe`."""

    rendering: Literal["chat", "text"]
    """Through the chat template, or prompt and completion as they are."""
    template: str | None
    template_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    date: str | None = None
    """Day that the template is given, where it asks for the time."""
    max_tokens: int | None = None
    """Bound of prompt plus completion, on each side."""
    overflow: Overflow = "drop"
    version: int = VERSION

    @property
    def template_fingerprint(self) -> str:
        """`tpl1:…` of the template, its arguments and its day."""
        return template_fingerprint(self.template, self.template_args, self.date)

    @property
    def fingerprint(self) -> str:
        """`rec1:…` of everything but the template."""
        return fp("rec", self.rendering, self.max_tokens, self.overflow, self.version)


def make_recipe(
    tokenizer: Tokenizer,
    *,
    rendering: Literal["chat", "text"] | None = None,
    template_args: Mapping[str, Any] | None = None,
    date: str | None = None,
    max_tokens: int | None = None,
    overflow: Overflow = "drop",
) -> Recipe:
    """The recipe for a tokenizer: `chat` where it has a template, else `text`. `date` is kept only where it is used.

    Raises:
        TokenizerError: there is no template to render `chat` with, or it asks for the time and no day is pinned.
        ConfigError: `date` is not a day.
    """
    template = tokenizer.chat_template
    rendering = rendering or ("text" if template is None else "chat")
    if rendering == "text":
        return Recipe(rendering="text", template=None, max_tokens=max_tokens, overflow=overflow)
    if template is None:
        raise TokenizerError(
            f"tokenizer {tokenizer.path} has no chat template; set `template` under [tokenizer] to a Jinja file, or "
            "render text"
        )
    recipe = Recipe(
        rendering="chat",
        template=template,
        template_args=template_args or {},
        date=_day(date) if asks_for_time(template) else None,
        max_tokens=max_tokens,
        overflow=overflow,
    )
    with suppress(Refused):  # a template may want another conversation; only its clock is asked about here
        template_for(tokenizer, recipe, template).render([{"role": "user", "content": "?"}], None, ask=True)
    return recipe


def template_for(tokenizer: Tokenizer, recipe: Recipe, text: str) -> Template:
    """The recipe's template with all that its renderings depend on."""
    arguments = {**tokenizer.specials, **recipe.template_args}
    return Template(text=text, arguments=arguments, date=recipe.date, end=tokenizer.end_of_turn)


def _day(date: str | None) -> str | None:
    try:
        return None if date is None else datetime.date.fromisoformat(date).isoformat()
    except ValueError:
        raise ConfigError(f"tokenizer.date = {date!r} is not a day; write it YYYY-MM-DD") from None

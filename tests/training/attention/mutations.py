"""Wrong calls of attention operators, each one step from a right one: what a kernel might come to say by mistake.

A mutation takes the positional and named arguments of a call and gives those of the wrong one. Beside it stands what
the strict stand-in says of it, or None where the call is one that the operator takes: its numbers must then differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = tuple[list[Any], dict[str, Any]]
Mutation = tuple[Callable[..., Call], str | None]


def told(**changes: Callable[[Any], Any]) -> Callable[..., Call]:
    """Change named arguments, each by a function of its value."""
    return lambda args, named: (args, {**named, **{name: change(named[name]) for name, change in changes.items()}})


def without(name: str) -> Callable[..., Call]:
    """Leave a named argument at the operator's default."""
    return lambda args, named: (args, {key: value for key, value in named.items() if key != name})


def at(place: int, change: Callable[[Any], Any]) -> Callable[..., Call]:
    """Change one positional argument."""
    return lambda args, named: ([change(x) if i == place else x for i, x in enumerate(args)], named)


def all_tensors(change: Callable[[Any], Any]) -> Callable[..., Call]:
    """Change query, key and value alike."""
    return lambda args, named: ([change(x) if i < 3 else x for i, x in enumerate(args)], named)


def ends(change: Callable[[Any], Any]) -> Callable[..., Call]:
    """Change the borders of queries and keys alike."""
    return told(actual_seq_qlen=change, actual_seq_kvlen=change)


def lengths(borders: list[int]) -> list[int]:
    """Running ends as the lengths that they came from."""
    return [b - a for a, b in zip([0, *borders], borders, strict=False)]


def moved(borders: list[int]) -> list[int]:
    """The first border one token further."""
    return [borders[0] + 1, *borders[1:]]


FUSION: Mapping[str, Mutation] = {
    "mask: the other polarity": (told(atten_mask=torch.logical_not), "hide"),
    "mask: below the diagonal": (told(atten_mask=lambda m: m.t()), "hide"),
    "mask: hides the diagonal too": (told(atten_mask=lambda m: torch.ones_like(m).triu(0)), "hide"),
    "mask: of the row's own size": (told(atten_mask=lambda m: m[:32, :32]), "2048"),
    "mask: none": (without("atten_mask"), "every query sees every key"),
    "mask: scores instead of booleans": (told(atten_mask=lambda m: m.float()), "float32"),
    "scale: left at its default": (without("scale"), None),
    "scale: squared": (told(scale=lambda s: s * s), None),
    "borders: a leading 0": (ends(lambda e: [0, *e]), "leading 0"),
    "borders: lengths": (ends(lengths), "does not rise"),
    "borders: the tail left out": (ends(lambda e: e[:-1]), "ends at"),
    "borders: queries' for keys too": (
        lambda args, named: (args, {**named, "actual_seq_kvlen": named["actual_seq_qlen"]}),
        "ends at",
    ),
    "borders: none": (without("actual_seq_qlen"), "list on the host"),
    "borders: on the device": (told(actual_seq_qlen=torch.tensor), "list on the host"),
    "borders: keys' first one token late": (told(actual_seq_kvlen=moved), None),
    "borders: queries' first one token late": (told(actual_seq_qlen=moved), "takes no segment"),
    "borders: too many": (told(actual_seq_qlen=lambda e: list(range(1, 1026))), "segments"),
    "layout: heads first": (all_tensors(lambda x: x.transpose(0, 1).contiguous()), "head_num"),
    "layout: named otherwise": (at(4, lambda layout: "BSND"), "BSND"),
    "layout: a batch of one": (all_tensors(lambda x: x[None]), "dimensions"),
    "layout: keys' heads counted": (at(3, lambda heads: heads // 2), "head_num"),
    "layout: not contiguous": (at(1, lambda k: k.repeat_interleave(2, 2)[..., ::2]), "contiguous"),
    "layout: float64": (all_tensors(lambda x: x.double()), "float64"),
    "alignment: at the start": (told(sparse_mode=lambda mode: 2), "aligned at the end"),
    "alignment: none": (without("sparse_mode"), "aligned at the end"),
}  # fmt: skip

FUSION_WINDOW: Mapping[str, Mutation] = {
    "window: counts the query": (told(pre_tockens=lambda n: n + 1), None),
    "window: one short": (told(pre_tockens=lambda n: n - 1), None),
    "window: sees the next key": (told(next_tockens=lambda n: n + 1), "not causal"),
    "window: forgotten": (told(sparse_mode=lambda mode: 3), None),
    "window: left at its default": (without("next_tockens"), "not causal"),
}

VARLEN: Mapping[str, Mutation] = {
    "borders: no leading 0": (at(3, lambda cu: cu[1:]), "leading 0"),
    "borders: int64": (at(3, lambda cu: cu.long()), "int32"),
    "borders: the tail left out": (at(4, lambda cu: cu[:-1]), "ends at"),
    "borders: queries' for keys too": (lambda args, named: ([*args[:4], args[3], *args[5:]], named), "ends at"),
    "borders: the longest is one less": (at(6, lambda longest: longest - 1), "longest"),
    "borders: the longest is one more": (at(5, lambda longest: longest + 1), "longest"),
    "scale: left at its default": (without("scale"), None),
    "alignment: later keys seen": (told(window_size=lambda w: (w[0], -1)), "later keys"),
    "layout: heads not grouped": (told(enable_gqa=lambda on: False), "enable_gqa"),
    "layout: not contiguous": (at(2, lambda v: v.repeat_interleave(2, 2)[..., ::2]), "contiguous"),
    "layout: full precision": (all_tensors(lambda x: x.float()), "half precision"),
    "splits: as the kernel likes": (without("num_splits"), "num_splits"),
}

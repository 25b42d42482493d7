"""Declared columns: the kind of a field and which JSON values mean one, without a cast."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from types import NoneType
from typing import Any, get_args, get_type_hints

INT64 = range(-(2**63), 2**63)
KINDS = {int: "an integer", float: "a number", str: "text"}


@dataclass(frozen=True, slots=True)
class Column:
    """A declared column: its kind (int, float or str) and the types of JSON values that mean one."""

    kind: type
    accepted: frozenset[type]
    """Bool is never one of them; NoneType is where null may stand."""

    def plain(self, value: Any) -> int | float | str | None:
        """A value of the trainer (numpy's included) as plain Python of this kind."""
        if value is None:
            assert NoneType in self.accepted, "None in a column that has no unknown"
            return None
        assert not isinstance(value, bool), f"{value} is not a number"
        return operator.index(value) if self.kind is int else self.kind(value)

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether every value belongs here."""
        if not self.accepted.issuperset(map(type, values)):
            return False
        known = [value for value in values if value is not None]
        if self.kind is int:
            return not known or (min(known) in INT64 and max(known) in INT64)
        try:
            if self.kind is float:
                return all(map(math.isfinite, known))
            "".join(known).encode()
            return True
        except (OverflowError, UnicodeEncodeError):  # an integer beyond every float; half a character
            return False

    def exact(self, values: Sequence[Any]) -> list[Any]:
        """Values that belong here, each as its kind: 3 is a number, and that number is 3.0."""
        return [value if value is None else self.kind(value) for value in values]

    def fault(self, values: Sequence[Any]) -> str:
        """What is wrong with the first value that does not belong here."""
        bad = next(value for value in values if not self.fits((value,)))
        if type(bad) is int and self.kind is int:
            return f"{bad} does not fit in 64 bits"
        if type(bad) in self.accepted:
            return f"{bad!r} cannot be kept" + (" as a number of 64 bits" if self.kind is float else " as UTF-8")
        return f"{json.dumps(bad)} is not {KINDS[self.kind]}" + (" or null" if NoneType in self.accepted else "")


def columns_of(kind: type, *, without: Sequence[str] = ()) -> dict[str, Column]:
    """The declared columns of a dataclass of plain values, in order."""
    declared: dict[str, Column] = {}
    for name, hint in get_type_hints(kind).items():
        if name not in without:
            kinds = get_args(hint) or (hint,)
            exact = next(k for k in kinds if k is not NoneType)
            exact = str if exact is datetime else exact
            accepted = {exact, int} if exact is float else {exact}
            declared[name] = Column(exact, frozenset(accepted | ({NoneType} & {*kinds})))
    return declared

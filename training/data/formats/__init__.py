"""The formats preference rows come in, and how a source's is told.

A format is a few columns it needs and a function from a row to drafts of pairs. Detection looks at the columns of
sampled rows of every file of the source together: a format fits where all its columns are found, and one that needs
more columns of the same row beats one that needs fewer of them (explicit prompt over implicit). Where two are left, the
one that more sampled rows can be read as wins; where that is equal too, or none fits, the person is asked. Everything
finer than the format (text or messages, transcripts, lists of answers) is told row by row, so no row is read by what
another one looked like.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from training.data.formats.answers import alpaca, explicit, implicit
from training.data.formats.drafts import BESIDE, Draft, Record, settle
from training.data.formats.judged import PROMPTS, RANK, SCORES, VOTE, labelled, ranked
from training.data.pair import Refused
from training.errors import SourceError

CHOSEN, REJECTED = (("chosen",), ("chosen_messages",)), (("rejected",), ("rejected_messages",))
STEMS, ENDINGS = ("output", "response", "answer", "completion", "conversation"), ("12", "ab", "AB", "01")
TWO_ANSWERS = tuple(tuple(stem + gap + end for end in ends) for stem, ends, gap in product(STEMS, ENDINGS, ("_", "")))
VERDICTS = (("label",), ("preference",), ("winner",), ("votes",), ("annotator1",), ("annotator_1",))
LISTS = (("completions",), ("responses",), ("generations",), ("answers",))
UNPAIRED = ("label", "kto_tag", "is_desirable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A shape of rows."""

    name: str
    needs: tuple[tuple[tuple[str, ...], ...], ...]
    """What must be found: of each group one alternative, all of whose columns are there."""
    drafts: Callable[[Record, tuple[str, ...]], Iterator[Draft]]
    """(row, the columns found for `needs`) -> drafts of pairs; raises `Refused`."""
    beside: tuple[str, ...] = ()
    """Columns it reads where they are there."""
    beside_like: re.Pattern[str] | None = None
    """The same, for columns that are numbered."""

    @property
    def wanted(self) -> str:
        """The columns it needs, by their first names."""
        return ", ".join(name for group in self.needs for name in group[0])

    @property
    def known(self) -> tuple[str, ...]:
        """Every column it may read, by all of its names."""
        return (*(name for group in self.needs for names in group for name in names), *self.beside, *BESIDE)

    def columns(self, found: Iterable[str]) -> tuple[str, ...] | None:
        """The columns of `found` that serve `needs`, in order; None where one is missing."""
        present, chosen = set(found), list[str]()
        for group in self.needs:
            names = next((names for names in group if present.issuperset(names)), None)
            if names is None:
                return None
            chosen.extend(names)
        return tuple(chosen)

    def reads(self, found: Iterable[str]) -> tuple[str, ...]:
        """All columns of `found` that it looks at."""
        found = tuple(found)
        own = {*(self.columns(found) or ()), *self.beside, *BESIDE}
        like = self.beside_like
        return tuple(name for name in found if name in own or (like and like.fullmatch(name)))


FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format(name="explicit", needs=((("prompt",), ("question",)), CHOSEN, REJECTED), drafts=explicit),
        Format(name="implicit", needs=(CHOSEN, REJECTED), drafts=implicit),
        Format(name="sharegpt", needs=((("conversations",), ("conversation",)), CHOSEN, REJECTED), drafts=explicit),
        Format(
            name="alpaca", needs=((("instruction",),), CHOSEN, REJECTED), drafts=alpaca, beside=("input", "history")
        ),
        Format(name="labelled", needs=(TWO_ANSWERS, VERDICTS), drafts=labelled, beside=PROMPTS, beside_like=VOTE),
        Format(
            name="ranked",
            needs=(LISTS,),
            drafts=ranked,
            beside=(*PROMPTS, *(f"{key}s" for key in (*SCORES, RANK))),
        ),
    )
}
"""Every format by its name in a source's configuration."""


def detect(records: Sequence[Record], *, name: str, asked: str = "auto", mapping: Mapping[str, str]) -> Format:
    """The one format of the source `name`, from sampled rows whose columns are already mapped.

    Raises:
        SourceError: none fits, two fit equally well, or the one that was `asked` for does not fit.
    """
    found = columns_of(records)
    if asked != "auto" and asked not in FORMATS:
        raise SourceError(f"source {name}: there is no format {asked!r}; known: auto, {', '.join(FORMATS)}")
    fitting = [form for form in FORMATS.values() if asked in ("auto", form.name) and form.columns(found)]
    if not fitting:
        raise SourceError(_none_fits(name, asked, found, mapping))
    needed = {form.name: set(form.columns(found) or ()) for form in fitting}
    best = [form for form in fitting if not any(needed[form.name] < needed[other.name] for other in fitting)]
    if len(best) > 1:
        counts = {form.name: sum(_readable(form, record) for record in records) for form in best}
        best = [form for form in best if counts[form.name] == max(counts.values())]
    if len(best) > 1:
        raise SourceError(
            f"source {name}: columns [{', '.join(found)}] fit {' and '.join(form.name for form in best)} equally "
            f"well; say which with format = {' or '.join(repr(form.name) for form in best)}"
        )
    return best[0]


def convert(form: Format, record: Record) -> Iterator[Draft]:
    """The drafts of a row's pairs.

    Raises:
        Refused: the row as a whole cannot be read in this format.
    """
    columns = _columns(form.name, tuple(record))
    if columns is None:
        missing = next(group[0] for group in form.needs if not any(record.keys() >= set(names) for names in group))
        raise Refused("missing_field", f"column {' and '.join(missing)}: missing (found: {', '.join(record)})")
    return form.drafts(record, columns)


def columns_of(records: Iterable[Record]) -> tuple[str, ...]:
    """The columns of all records, in the order they are first met."""
    return tuple(dict.fromkeys(name for record in records for name in record))


@lru_cache(maxsize=4096)
def _columns(form: str, found: tuple[str, ...]) -> tuple[str, ...] | None:
    return FORMATS[form].columns(found)


def _readable(form: Format, record: Record) -> bool:
    try:
        for draft in convert(form, record):
            settle(draft, record)
    except Refused:
        return False
    return True


def _none_fits(name: str, asked: str, found: tuple[str, ...], mapping: Mapping[str, str]) -> str:
    has = f"source {name}: columns [{', '.join(found)}]"
    if asked == "auto" and not mapping and set(UNPAIRED) & set(found):
        return (
            f"{has} hold unpaired rows, one answer with a label each, as for KTO; a pair needs two answers to one "
            "prompt, a chosen and a rejected one. If there are two under other names, map them: "
            'map = { chosen = "…", rejected = "…" }, or --map chosen=… --map rejected=…'
        )
    forms = FORMATS.values() if asked == "auto" else (FORMATS[asked],)
    wanted = "; ".join(f"{form.name} ({form.wanted})" for form in forms)
    return (
        f"{has} fit no format; wanted are the columns of one of: {wanted}. If the columns have other names, "
        "map the wanted name to the one found: "
        'map = { prompt = "…", chosen = "…", rejected = "…" }, or --map prompt=… --map chosen=… --map rejected=…'
    )

"""A fast tokenizer as plain data: its backend, its special tokens, its chat template and its fingerprint.

The `tokenizers` library does the encoding, and nothing stands between a text and its ids: no torch, no setting of a
wrapper class, no limit that a file carries over from an earlier use. The encoder never adds special tokens: those that
stand in a sequence are the ones its rendering writes.

Two backends serve one vocabulary. Some tokenizers put a space of their own in front of what they take for the beginning
of a text; a completion is no beginning, so the `continuation` backend is the same tokenizer without that rule. Where
there is no such rule, both are one object. Cost: about 2 s to load a vocabulary of 152k, nearly all of it parsing.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from training.data.controls import Control, Controls, Run, make_controls
from training.data.fingerprint import tokenizer_fingerprint
from training.data.template import end_of_turn
from training.data.tokenizer_files import read_tokenizer_files
from training.errors import IdentityError, TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A tokenizer, ready to encode; made by `load_tokenizer`."""

    path: str
    """Folder it was read from: provenance, never identity."""
    backend: Backend
    """Encodes the beginning of a sequence."""
    continuation: Backend
    """Encodes what goes on from a text; the same object where that makes no difference."""
    config: Mapping[str, Any]
    """tokenizer_config.json."""
    specials: Mapping[str, str]
    """Named special tokens that are set, as templates see them: `bos_token` to its text, and so on."""
    controls: Controls
    """Texts that stand for control tokens: special added tokens, and the template's end of a turn."""
    chat_template: str | None
    end_of_turn: str | None
    """The added token that the template writes after an answer."""
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    """The padding token, else the end token, else 0; it only stands where no length reaches."""
    vocab_size: int
    """Entries of the vocabulary, added tokens included."""
    switched_off: tuple[str, ...]
    """What the file carried over from an earlier use and is not applied: truncation, padding, dropout."""
    fingerprint: str

    def encode(self, runs: Sequence[Run]) -> list[list[int] | None]:
        """Ids of each run, in order; None where this vocabulary cannot write a control token as plain text."""
        found: list[list[int] | None] = [None] * len(runs)
        for start in (True, False):
            for plain in (False, True):
                places = [i for i, run in enumerate(runs) if run.start == start and run.plain == plain]
                encode = self._encode_plain if plain else self._encode
                for place, ids in zip(places, encode([runs[i].text for i in places], start), strict=True):
                    found[place] = ids
        return found

    def check_unchanged(self) -> None:
        """Compare the tokenizer in memory with its fingerprint; to be called before anything is written.

        Raises:
            IdentityError: tokens, truncation, padding or any other setting were changed since it was loaded.
        """
        state = cast("Json", json.loads(self.backend.to_str()))
        changed = [name for name in ("truncation", "padding") if state[name] is not None]
        if changed:
            raise IdentityError(
                f"{' and '.join(changed)} of tokenizer {self.path} was switched on after it was loaded, so ids would "
                "be cut or padded; load it again"
            )
        current = tokenizer_fingerprint(state, self.config, self.specials)
        alike = self.continuation is self.backend or json.loads(self.continuation.to_str()) == _without_prefix(state)
        if current != self.fingerprint or not alike or self.backend.encode_special_tokens:
            raise IdentityError(
                f"tokenizer {self.path} was changed in memory after it was fingerprinted as {self.fingerprint} (now "
                f"{current}); save the changed tokenizer to a folder of its own and load that"
            )

    def _encode(self, texts: Sequence[str], start: bool) -> list[list[int]]:
        backend = self.backend if start else self.continuation
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _encode_plain(self, texts: Sequence[str], start: bool) -> list[list[int] | None]:
        with _specials_as_text(self.backend if start else self.continuation):
            return [
                self._as_text(text, ids, start) for text, ids in zip(texts, self._encode(texts, start), strict=True)
            ]

    def _as_text(self, text: str, ids: list[int], start: bool) -> list[int] | None:
        """`ids` of a plain text, spelled anew where the model's own vocabulary knows a control token's text."""
        if self.controls.ids.isdisjoint(ids):
            return ids
        parts = self.controls.parted(text)
        spelled = [token for i, part in enumerate(parts) for token in self._encode([part], start and i == 0)[0]]
        return spelled if self.controls.ids.isdisjoint(spelled) else None


def load_tokenizer(path: str | Path, template: str | Path | None = None) -> Tokenizer:
    """Read a tokenizer folder; `template` is a Jinja file used instead of the tokenizer's own chat template.

    Raises:
        TokenizerError: the folder holds no fast tokenizer, or a file of it cannot be read or contradicts another.
    """
    folder = Path(path)
    files = read_tokenizer_files(folder, None if template is None else Path(template))
    texts = [entry["content"] for entry in files.raw["added_tokens"]]
    end = None if files.chat_template is None else end_of_turn(files.chat_template, files.specials, texts)
    backend = _build(files.raw, folder)
    _make_special(backend, [*files.specials.values(), *([end] if end else [])])
    state = cast("Json", json.loads(backend.to_str()))
    bare = _without_prefix(state)
    ids = {name: backend.token_to_id(text) for name, text in files.specials.items()}
    for name in ("bos_token", "eos_token"):
        if name in ids and ids[name] is None:
            raise TokenizerError(
                f"{folder}: {name} {files.specials[name]!r} is not in the vocabulary; add it to tokenizer.json, or set "
                f"{name} in tokenizer_config.json to a token that is there"
            )
    pad = next((ids[name] for name in ("pad_token", "eos_token") if ids.get(name) is not None), None)
    return Tokenizer(
        path=str(path),
        backend=backend,
        continuation=backend if bare == state else _build(bare, folder),
        config=files.config,
        specials=files.specials,
        controls=make_controls(
            (
                Control(entry["content"], entry["id"], entry["lstrip"], entry["rstrip"])
                for entry in state["added_tokens"]
                if entry["special"]
            ),
            unknown=_unknown(state["model"], backend),
        ),
        chat_template=files.chat_template,
        end_of_turn=end,
        bos_id=ids.get("bos_token"),
        eos_id=ids.get("eos_token"),
        pad_id=pad or 0,
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        switched_off=files.switched_off,
        fingerprint=tokenizer_fingerprint(state, files.config, files.specials),
    )


@contextmanager
def _specials_as_text(backend: Backend) -> Generator[None]:
    backend.encode_special_tokens = True
    try:
        yield
    finally:
        backend.encode_special_tokens = False


def _build(raw: Json, folder: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(json.dumps(raw))
    except Exception as error:  # the library raises bare Exception for every fault of a file
        raise TokenizerError(f"{folder / 'tokenizer.json'} cannot be loaded: {error}") from None
    for entry in raw["added_tokens"]:
        found = backend.token_to_id(entry["content"])
        if found != entry["id"]:
            raise TokenizerError(
                f"{folder}: token {entry['content']!r} is declared with id {entry['id']}, but the vocabulary gives it "
                f"{found}; mend tokenizer.json and tokenizer_config.json, or save the tokenizer anew"
            )
    return backend


def _unknown(model: Json, backend: Backend) -> int | None:
    """Id of what is not in the vocabulary; Unigram stores the id itself, the others the token."""
    token: str | None = model.get("unk_token")
    return model.get("unk_id") if token is None else backend.token_to_id(token)


def _make_special(backend: Backend, texts: Sequence[str]) -> None:
    """Flag tokens that are control tokens by their role as special, where the vocabulary has them."""
    from tokenizers import AddedToken

    flagged = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in texts:
        token = flagged.get(text) or AddedToken(text, special=False)
        if backend.token_to_id(text) is not None and not token.special:
            special = AddedToken(text, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=True)
            backend.add_special_tokens([special])  # pyright: ignore[reportUnknownMemberType]


def _without_prefix(state: Json) -> Json:
    """The tokenizer's configuration without the rules that put a space in front of a text."""
    return {
        **state,
        "normalizer": _strip_prefix(state.get("normalizer")),
        "pre_tokenizer": _strip_prefix(state.get("pre_tokenizer")),
    }


def _strip_prefix(part: Json | None) -> Json | None:
    match part:
        case {"type": "Prepend"}:
            return None
        case {"type": "Sequence"}:
            steps = next(key for key in ("normalizers", "pretokenizers") if key in part)
            kept = [bare for bare in (_strip_prefix(step) for step in part[steps]) if bare is not None]
            return {**part, steps: kept}
        case {"type": "Metaspace"}:
            return {**part, "prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return {**part, "add_prefix_space": False}
        case _:
            return part

"""Identity: every fingerprint is a hash of content, with its kind and the version of its rules in front.

A fingerprint reads `tok1:9f2c…`: the kind, the version of the kind's rules, and 128 bits of BLAKE3 in hex. Nothing that
is not content takes part: no path, no time, no machine, no worker count, no order of a mapping's keys. Each part is
hashed with its type and its length in front, so that no two lists of parts share a byte string. When a kind's rules
change its version moves; values of an old version stay comparable among themselves. Cost: about 3 µs a pair, and one
reading of each file at memory speed. Source: BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from blake3 import blake3

from training.data.pair import Message, Pair
from training.errors import ModelError

VERSIONS = {"tok": 1, "tpl": 1, "rec": 1, "pair": 1, "file": 1, "src": 1, "ds": 1, "plan": 1, "mdl": 1, "run": 1}
"""Version of each kind's rules; a kind that is not listed is at version 1."""

HEX_DIGITS = 32

NOT_TOKENIZING = frozenset(
    "name_or_path vocab_file merges_file tokenizer_file chat_template_file chat_template added_tokens_decoder "
    "special_tokens_map_file auto_map is_local local_files_only".split()
)
"""Keys of tokenizer_config.json that say where files lie, or repeat what is hashed apart."""

NOT_MODEL = frozenset(("_name_or_path", "name_or_path", "transformers_version"))
"""Keys of a model's config.json that say where it came from, not what it computes."""

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def fp(kind: str, *parts: Any) -> str:
    """Fingerprint of parts in order: bytes as they are, anything else as canonical JSON.

    >>> fp("plan", "ab", 1) != fp("plan", "a", "b1")
    True
    """
    return _finish(kind, _feed(blake3(), parts))


def canonical_json(value: Any) -> bytes:
    """One spelling for equal values: sorted keys, no blanks, ASCII only (half a surrogate pair does not fail)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def bytes_fingerprint(blocks: Iterable[bytes]) -> str:
    """`file1:…` of bytes that come in blocks; where a block ends does not matter."""
    hasher = blake3()
    for block in blocks:
        hasher.update(block)
    return _finish("file", hasher)


def stream_fingerprint(stream: BinaryIO) -> str:
    """`file1:…` of the bytes a binary stream still holds, read a megabyte at a time."""
    return bytes_fingerprint(iter(lambda: stream.read(1 << 20), b""))


def file_fingerprint(path: Path) -> str:
    """`file1:…` of a file's bytes; its name and its times do not matter."""
    with path.open("rb") as stream:
        return stream_fingerprint(stream)


def source_fingerprint(files: Iterable[str], form: str, mapping: Mapping[str, str]) -> str:
    """`src1:…` of a source's file fingerprints, in the order in which the files are read, and of how rows are read.

    Args:
        files: Fingerprint of each file.
        form: Name of the format that was found or asked for.
        mapping: Wanted column to the column's name in the files.
    """
    return fp("src", list(files), form, dict(mapping))


def tokenizer_fingerprint(backend: Mapping[str, Any], config: Mapping[str, Any], specials: Mapping[str, str]) -> str:
    """`tok1:…` of what decides how text becomes ids.

    Args:
        backend: The fast tokenizer's own serialization; its truncation and padding do not count.
        config: tokenizer_config.json; keys that only say where files lie do not count.
        specials: Named special tokens (`bos_token`, …) to their text.
    """
    encoding = {key: value for key, value in backend.items() if key not in ("truncation", "padding")}
    settings = {key: value for key, value in config.items() if key not in NOT_TOKENIZING and value is not None}
    return fp("tok", encoding, settings, specials)


def template_fingerprint(text: str | None, arguments: Mapping[str, Any], date: str | None) -> str:
    """`tpl1:…` of a chat template's text, its arguments and the day it is given; of None where text is not rendered."""
    return fp("tpl", text, arguments, date)


def pair_fingerprint(pair: Pair) -> str:
    """`pair1:…` of both sides' messages and the tools. Swapped sides differ; source and locator do not matter.

    Keys inside tools and tool calls are hashed in the order they stand in, because templates print them so.
    """
    sides = [[_message(m) for m in turns] for turns in (pair.prompt, pair.chosen, pair.rejected)]
    text = json.dumps([*sides, pair.tools], separators=(",", ":"), ensure_ascii=True)
    return _finish("pair", blake3(text.encode("ascii")))


def model_fingerprint(folder: Path) -> str:
    """`mdl1:…` of a model folder: its config, and every tensor's name, type, shape and bytes.

    How safetensors spread over files does not matter; weights in other formats are taken by file. No torch is needed.

    Raises:
        ModelError: config.json or the weights are missing, or a weight file is cut.
    """
    config = folder / "config.json"
    weights = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)})
    if not config.is_file() or not weights:
        missing = f"weights ({', '.join(WEIGHTS)})" if config.is_file() else "config.json"
        raise ModelError(f"model folder {folder} has no {missing}; name a folder that holds a whole model")
    settings = {k: v for k, v in json.loads(config.read_text(encoding="utf-8")).items() if k not in NOT_MODEL}
    tensors: dict[str, str] = {}
    for path in weights:
        tensors |= _tensors(path) if path.suffix == ".safetensors" else {path.name: file_fingerprint(path)}
    return fp("mdl", settings, tensors)


def run_fingerprint(fields: Mapping[str, str]) -> str:
    """`run1:…` of the fingerprints and recipes that decide what a run computes, by field name.

    The fields themselves are kept beside it wherever it is written, so that `differing` can name what moved.
    """
    return fp("run", dict(fields))


def differing(saved: Mapping[str, str], current: Mapping[str, str]) -> list[tuple[str, str | None, str | None]]:
    """(field, saved value, current value) of each field that is not the same on both sides, by field name."""
    names = sorted(saved.keys() | current.keys())
    return [(name, saved.get(name), current.get(name)) for name in names if saved.get(name) != current.get(name)]


class DatasetHasher:
    """Hashes tokenized rows in order into `ds1:…`: what a row says, not where it lies or how it is compressed."""

    def __init__(self, *, tokenizer: str, template: str, recipe: str) -> None:
        self._hasher = _feed(blake3(), (tokenizer, template, recipe))
        self.rows = 0

    def add(
        self,
        pair_id: str,
        ids: Sequence[Sequence[int]],
        masks: Sequence[Sequence[bool] | None],
        cuts: Sequence[int],
    ) -> None:
        """Take the next row: ids of prompt, chosen and rejected, masks of chosen and rejected, the three cuts."""
        parts: list[Any] = [pair_id, list(cuts)]
        parts += [np.asarray(tokens, dtype="<i4").tobytes() for tokens in ids]
        parts += [None if mask is None else np.asarray(mask, dtype=np.bool_).tobytes() for mask in masks]
        _feed(self._hasher, parts)
        self.rows += 1

    def fingerprint(self) -> str:
        """The fingerprint of the rows taken so far; more may follow."""
        return _finish("ds", _feed(self._hasher.copy(), (self.rows,)))


def _tensors(path: Path) -> dict[str, str]:
    """Fingerprint of each tensor of a safetensors file: 8 bytes of header length, a JSON header, then the bytes."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header: dict[str, dict[str, Any]] = json.loads(data[8:start].tobytes())
    except ValueError as error:
        raise ModelError(f"weight file {path} has no safetensors header ({error}); copy or download it again") from None
    found: dict[str, str] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            if start + end > len(data):
                raise ModelError(f"weight file {path} ends inside tensor {name}; copy or download it again")
            found[name] = fp("tensor", entry["dtype"], entry["shape"], data[start + begin : start + end].data)
    return found


def _feed(hasher: blake3, parts: Iterable[Any]) -> blake3:
    for part in parts:
        raw = isinstance(part, bytes | memoryview)
        data = memoryview(cast("bytes", part) if raw else canonical_json(part))
        hasher.update((b"b" if raw else b"j") + data.nbytes.to_bytes(8, "little"))
        hasher.update(data)
    return hasher


def _finish(kind: str, hasher: blake3) -> str:
    return f"{kind}{VERSIONS.get(kind, 1)}:{hasher.hexdigest()[:HEX_DIGITS]}"


def _message(message: Message) -> list[Any]:
    extras = {name: value for name, value in message.to_dict().items() if name not in ("role", "content")}
    return [message.role, message.content, *([extras] if extras else [])]

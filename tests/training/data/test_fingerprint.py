"""Fingerprints move with content and with nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.training.data import tiny
from training.data.fingerprint import (
    DatasetHasher,
    bytes_fingerprint,
    canonical_json,
    differing,
    file_fingerprint,
    fp,
    model_fingerprint,
    pair_fingerprint,
    run_fingerprint,
    source_fingerprint,
)
from training.data.pair import Message
from training.errors import ModelError


def test_a_fingerprint_is_kind_version_and_128_bits_of_blake3_over_tagged_parts() -> None:
    from blake3 import blake3

    by_hand = b"j" + (4).to_bytes(8, "little") + b'"ab"' + b"b" + (2).to_bytes(8, "little") + b"\x00\x01"
    assert fp("plan", "ab", b"\x00\x01") == "plan1:" + blake3(by_hand).hexdigest()[:32]


def test_no_two_lists_of_parts_share_a_fingerprint() -> None:
    lists = [("ab", "c"), ("a", "bc"), ("abc",), (b"abc",), ("abc", ""), (1,), ("1",), (True,), (None,), ([],), ({},)]
    assert len({fp("rec", *parts) for parts in lists}) == len(lists)


def test_the_order_of_a_mappings_keys_does_not_matter() -> None:
    """Case: path-in-key (two configurations that differ in the order of their keys)."""
    assert fp("rec", {"b": 1, "a": {"y": 2, "x": 3}}) == fp("rec", {"a": {"x": 3, "y": 2}, "b": 1})
    assert canonical_json({"b": "é\ud800", "a": 1}) == b'{"a":1,"b":"\\u00e9\\ud800"}'


def test_a_file_is_its_bytes_wherever_it_lies(tmp_path: Path) -> None:
    """Case: path-in-key; case: cache-key-too-small (an edit that keeps size and time is seen)."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.jsonl").write_bytes(b"one pair\n")
    first, second = (tmp_path / folder / "x.jsonl" for folder in ("a", "b"))
    before = file_fingerprint(first)
    assert before == file_fingerprint(second)
    times = first.stat()
    first.write_bytes(b"two pair\n")
    os.utime(first, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert first.stat().st_size == times.st_size
    assert file_fingerprint(first) != before
    assert bytes_fingerprint([b"two ", b"", b"pair\n"]) == file_fingerprint(first)


def test_a_source_is_its_files_in_order_and_how_they_are_read() -> None:
    files, mapping = ["file1:a", "file1:b"], {"prompt": "question", "chosen": "good"}
    one = source_fingerprint(files, "explicit", mapping)
    assert one == source_fingerprint(iter(files), "explicit", dict(reversed(mapping.items())))
    others = [
        source_fingerprint(files[::-1], "explicit", mapping),
        source_fingerprint(files, "alpaca", mapping),
        source_fingerprint(files, "explicit", {}),
    ]
    assert len({one, *others}) == 4


def test_a_pair_is_its_messages() -> None:
    """Vector 22: swapped sides differ; where the pair lies does not matter."""
    one = tiny.pair(["u: Q"], ["a: yes"], ["a: no"])
    swapped = tiny.pair(["u: Q"], ["a: no"], ["a: yes"])
    elsewhere = tiny.pair(["u: Q"], ["a: yes"], ["a: no"], source="other", locator="z.jsonl:9")
    with_tools = dataclasses.replace(one, tools=({"name": "f"},))
    named = dataclasses.replace(one, prompt=(Message(role="user", content="Q", name="Ann"),))
    assert pair_fingerprint(one) == pair_fingerprint(elsewhere)
    assert len({pair_fingerprint(p) for p in (one, swapped, with_tools, named)}) == 4


def test_a_border_between_turns_is_part_of_a_pair() -> None:
    whole = tiny.pair(["u: a b"], ["a: x"], ["a: y"])
    parted = tiny.pair(["s: a", "u: b"], ["a: x"], ["a: y"])
    assert pair_fingerprint(whole) != pair_fingerprint(parted)


def _dataset(rows: list[tuple[str, list[list[int]]]], **inputs: str) -> str:
    hasher = DatasetHasher(**{"tokenizer": "tok1:a", "template": "tpl1:b", "recipe": "rec1:c", **inputs})
    for pair_id, ids in rows:
        hasher.add(pair_id, ids, (None, None), (0, 0, 0))
    return hasher.fingerprint()


def test_a_dataset_is_its_rows_in_order_and_what_made_them() -> None:
    rows = [("pair1:1", [[1, 2], [3], [4]]), ("pair1:2", [[1], [2, 3], [4]])]
    same = _dataset(rows)
    moved_border = [("pair1:1", [[1], [2, 3], [4]]), rows[1]]
    others = [_dataset(rows[::-1]), _dataset(rows[:1]), _dataset(moved_border), _dataset(rows, recipe="rec1:d")]
    assert same == _dataset(rows)
    assert len({same, *others}) == 5


def test_masks_and_cuts_are_part_of_a_row() -> None:
    seen: set[str] = set()
    for masks, cuts in [((None, None), (0, 0, 0)), (([True], None), (0, 0, 0)), ((None, [True]), (0, 0, 0)),
                        (([False], None), (0, 0, 0)), ((None, None), (0, 1, 0))]:  # fmt: skip
        hasher = DatasetHasher(tokenizer="t", template="t", recipe="r")
        hasher.add("p", [[1], [2], [3]], masks, cuts)
        seen.add(hasher.fingerprint())
    assert len(seen) == 5


def _model(folder: Path, files: dict[str, dict[str, np.ndarray]], **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 2, **config}))
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    return folder


def test_a_model_is_its_settings_and_tensors_however_they_are_spread(tmp_path: Path) -> None:
    a, b = np.arange(4, dtype=np.float32), np.ones((2, 2), dtype=np.float16)
    whole = model_fingerprint(_model(tmp_path / "whole", {"model.safetensors": {"a": a, "b": b}}))
    spread = {"model-1.safetensors": {"b": b}, "model-2.safetensors": {"a": a}}
    assert model_fingerprint(_model(tmp_path / "spread", spread, _name_or_path="/x")) == whole
    changed = a.copy()
    changed[3] = -3
    others = [
        _model(tmp_path / "value", {"m.safetensors": {"a": changed, "b": b}}),
        _model(tmp_path / "shape", {"m.safetensors": {"a": a, "b": b.reshape(4)}}),
        _model(tmp_path / "name", {"m.safetensors": {"a": a, "c": b}}),
        _model(tmp_path / "config", {"m.safetensors": {"a": a, "b": b}}, rope_theta=1),
    ]
    assert len({whole, *map(model_fingerprint, others)}) == 5


def test_a_cut_or_missing_weight_file_is_named(tmp_path: Path) -> None:
    folder = _model(tmp_path / "m", {"model.safetensors": {"a": np.arange(64, dtype=np.float32)}})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"model\.safetensors ends inside tensor a"):
        model_fingerprint(folder)
    file.unlink()
    with pytest.raises(ModelError, match="has no weights"):
        model_fingerprint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        model_fingerprint(folder)


def test_a_runs_fields_name_what_differs() -> None:
    saved = {"plan": "plan1:a", "tokenizer": "tok1:a", "loss": "x"}
    current = {"plan": "plan1:b", "tokenizer": "tok1:a", "reference": "mdl1:c"}
    named = [("loss", "x", None), ("plan", "plan1:a", "plan1:b"), ("reference", None, "mdl1:c")]
    assert differing(saved, current) == named
    assert run_fingerprint(saved) == run_fingerprint(dict(reversed(saved.items()))) != run_fingerprint(current)

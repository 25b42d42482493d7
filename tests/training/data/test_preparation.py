"""Preparation as a whole: same bytes, all inputs in the identity, nothing half-written, lost or altered."""

from __future__ import annotations

import errno
import gzip
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.data.tiny import CHATML, byte_level, write
from training.config import LimitsConfig
from training.data import account
from training.data.fingerprint import file_fingerprint
from training.data.manifest import MANIFEST
from training.data.prepare import prepare
from training.data.shards import Dataset, open_dataset
from training.data.sources import SourceSpec, open_source
from training.data.stored import open_pairs, store_pairs
from training.data.target import locked
from training.data.tokenizer import load_tokenizer
from training.errors import ConfigError, DatasetError, IdentityError, SourceError
from training.ledger.store import load, query

GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write(folder, byte_level(), CHATML)
    return folder


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"price {i}", "chosen": f"${i} today", "rejected": f"no {i * 7 % 5}"} for i in range(count)]


def spec(*files: Path) -> SourceSpec:
    return SourceSpec(name="s", inputs=tuple(map(str, files)))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def pairs(dataset: Dataset) -> list[Any]:
    columns = dataset.columns()
    return [dataset.take(int(s), int(r)) for s, r in zip(columns.shard, columns.row, strict=True)]


def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path, tokenizer: Path) -> None:
    source = spec(lines(tmp_path / "in.jsonl", [*rows(1700), {"prompt": "x"}, *rows(5)]))
    one = prepare(source, tokenizer, tmp_path / "one", workers=1, shard_bytes=20_000)
    two = prepare(source, tokenizer, tmp_path / "two", workers=2, shard_bytes=20_000)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    found = one.to_json()
    assert (found["rows"], found["pairs"], found["quarantined"], found["reasons"]) == (
        1706,
        1705,
        1,
        {"missing_field": 1},
    )
    assert found["duplicates"] == {"same": 5, "swapped": 0}
    assert len(found["shards"]) > 2
    assert two.dataset.fingerprint == one.dataset.fingerprint


def test_identity_is_content_not_place_compression_shards_or_route(tmp_path: Path, tokenizer: Path) -> None:
    """case: path-in-key, and pairs that were stored in between."""
    first = prepare(spec(lines(tmp_path / "a" / "p.jsonl", rows(30))), tokenizer, tmp_path / "1", workers=1)
    again = spec(lines(tmp_path / "b" / "p.jsonl.gz", rows(30)))
    packed = prepare(again, tokenizer, tmp_path / "2", workers=1, shard_bytes=500)
    stored = store_pairs(open_source(again), tmp_path / "pairs")
    through = prepare(stored, tokenizer, tmp_path / "3", workers=1)
    assert {one.dataset.fingerprint for one in (first, packed, through)} == {first.dataset.fingerprint}
    assert first.dataset.inputs == packed.dataset.inputs == through.dataset.inputs
    assert len(packed.dataset.manifest.shards) > 1
    assert packed.dataset.manifest.source["files"] == ["p.jsonl.gz"]
    assert open_pairs(stored.path).counts["pairs"] == 30
    assert store_pairs(open_source(again), tmp_path / "pairs") == stored


def test_each_input_is_in_the_identity_case_cache_key_too_small(tmp_path: Path, tokenizer: Path) -> None:
    data, out, seen = tmp_path / "p.jsonl", tmp_path / "out", set[str]()
    other = tmp_path / "other"
    write(other, byte_level(prefix_space=True), CHATML)
    template = tmp_path / "t.jinja"
    template.write_text(CHATML.replace("{{ m.content }}", " {{ m.content }}"), encoding="utf-8")
    lines(data, rows(10))

    def run(**given: Any) -> bool:
        report = prepare(spec(data), given.pop("tokenizer", tokenizer), out, workers=1, **given)
        new = report.dataset.fingerprint not in seen
        seen.add(report.dataset.fingerprint)
        assert report.reused is not new
        return new

    assert run()
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert not run()
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert run(tokenizer=other)
    assert run(template=template)
    assert run(limits=LimitsConfig(max_tokens=64))
    was = data.stat()
    data.write_bytes(data.read_bytes().replace(b"price 3", b"price 4", 1))
    os.utime(data, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert data.stat().st_size == was.st_size
    assert run()
    assert len(seen) == 5


def test_all_rows_dropped_is_a_failure_that_counts_case_all_rows_dropped(tmp_path: Path, tokenizer: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    bad = {"prompt": turns, "chosen": [{"role": "assistant", "content": "x"}], "rejected": turns[1:]}
    data = lines(tmp_path / "pairs.jsonl", [bad] * 3)
    with pytest.raises(SourceError, match=r"3 of 3 rows dropped.*assistant turn \(3\).*pairs\.jsonl:1") as caught:
        prepare(spec(data), tokenizer, tmp_path / "out", workers=1)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out").exists()
    good = {**bad, "prompt": turns[:1]}
    counts = prepare(spec(lines(data, [bad, good, bad, bad])), tokenizer, tmp_path / "out", workers=1).to_json()
    assert (counts["pairs"], counts["quarantined"]) == (1, 3)


def test_strict_names_line_and_field_case_null_answer(tmp_path: Path, tokenizer: Path) -> None:
    """Strict stops with the lines of a null and an empty answer; lenient keeps two and counts two."""
    wrong = [GOOD, {**GOOD, "prompt": "d"}, {**GOOD, "rejected": None}, {**GOOD, "chosen": ""}]
    source = spec(lines(tmp_path / "pairs.jsonl", wrong))
    with pytest.raises(SourceError, match=r"pairs\.jsonl:3: .*rejected.*null.*pairs\.jsonl:4: .*chosen.*empty"):
        prepare(source, tokenizer, tmp_path / "out", workers=1, max_quarantine=0)
    assert not (tmp_path / "out").exists()
    counts = prepare(source, tokenizer, tmp_path / "out", workers=1).to_json()
    assert (counts["pairs"], counts["reasons"]) == (2, {"empty": 1, "null": 1})
    quarantine = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert [row["locator"] for row in quarantine] == ["pairs.jsonl:3", "pairs.jsonl:4"]


def test_shards_are_cut_by_bytes_case_offset_2gib(tmp_path: Path, tokenizer: Path) -> None:
    data = [*rows(40), {"prompt": "q", "chosen": "hello " * 4000, "rejected": "no"}]
    limits = LimitsConfig(max_tokens=100_000)
    done = prepare(
        spec(lines(tmp_path / "p.jsonl", data)), tokenizer, tmp_path / "out", limits=limits, workers=1, shard_bytes=2000
    )
    dataset = done.dataset
    tables = [dataset.table(number) for number in range(len(dataset.manifest.shards))]
    sizes = [4 * shard.tokens for shard in dataset.manifest.shards]
    assert len(tables) >= 3
    assert all(size <= 2000 for size in sizes[:-1])
    assert (dataset.manifest.shards[-1].rows, sizes[-1] > 2000) == (1, True)
    assert len({table.schema.field("prompt_ids").type for table in tables}) == 1
    assert pa.concat_tables(tables).num_rows == 41
    assert sum(shard.tokens for shard in dataset.manifest.shards) == dataset.manifest.tokens["source"]


def test_columns_are_what_a_walk_over_the_rows_gives(tmp_path: Path, tokenizer: Path) -> None:
    ask, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}
    long = {"prompt": [ask], "chosen": [answer, ask, answer], "rejected": [{"role": "assistant", "content": "no"}]}
    data = lines(tmp_path / "p.jsonl", [*rows(20), long, *rows(3)])
    dataset = prepare(spec(data), tokenizer, tmp_path / "out", workers=1, shard_bytes=600).dataset
    columns, walked = dataset.columns(), pairs(dataset)
    assert len(walked) == 24 == dataset.manifest.counts["pairs"]
    assert columns.prompt.tolist() == [len(pair.prompt_ids) for pair in walked]
    for side in ("chosen", "rejected"):
        assert getattr(columns, side).tolist() == [len(getattr(pair, f"{side}_ids")) for pair in walked]
        masks = [getattr(pair, f"{side}_mask") or [True] * len(getattr(pair, f"{side}_ids")) for pair in walked]
        assert getattr(columns, f"{side}_loss").tolist() == [sum(mask) for mask in masks]
    assert int((columns.chosen_loss < columns.chosen).sum()) == 1
    loss = int(columns.chosen_loss.sum() + columns.rejected_loss.sum())
    assert dataset.manifest.tokens["loss"] == loss
    assert len(np.unique(columns.prompt_key)) == len({tuple(pair.prompt_ids) for pair in walked})


def test_the_ledger_holds_the_pairs_of_a_prepared_dataset(tmp_path: Path, tokenizer: Path) -> None:
    """What SQL says of a dataset is what its shards say, pair by pair, over several shards and with a mask."""
    ask, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}
    long = {"prompt": [ask], "chosen": [answer, ask, answer], "rejected": [{"role": "assistant", "content": "no"}]}
    data = lines(tmp_path / "p.jsonl", [*rows(20), long, {"prompt": "x"}])
    place = tmp_path / "store" / "datasets" / "s" / "2026-11-23"
    dataset = prepare(
        spec(data), tokenizer, place, workers=1, shard_bytes=600, by_fingerprint=True, limits=LimitsConfig()
    ).dataset
    load(tmp_path / "store")
    columns = dataset.columns()
    names = ("prompt_tokens", "chosen_tokens", "rejected_tokens", "chosen_loss_tokens", "rejected_loss_tokens")
    _, found = query(
        tmp_path / "store", f"SELECT shard, row, pair_id, locator, {', '.join(names)} FROM pair ORDER BY shard, row"
    )
    wanted = (columns.shard, columns.row, columns.pair_id, columns.locator, columns.prompt, columns.chosen)
    wanted = (*wanted, columns.rejected, columns.chosen_loss, columns.rejected_loss)
    assert found == list(zip(*(np.asarray(column).tolist() for column in wanted), strict=True))
    assert len(found) == 21
    assert len(dataset.manifest.shards) > 1
    assert any(row[5] > row[7] for row in found)  # the mask took part
    _, refused = query(tmp_path / "store", "SELECT locator, reason FROM quarantine")
    assert refused == [("p.jsonl:22", "missing_field")]


def test_the_same_answers_the_other_way_round_are_counted(tmp_path: Path, tokenizer: Path) -> None:
    swapped = {"prompt": "a", "chosen": "c", "rejected": "b"}
    data = lines(tmp_path / "p.jsonl", [GOOD, GOOD, swapped, {**GOOD, "prompt": "other"}])
    assert prepare(spec(data), tokenizer, tmp_path / "out", workers=1).to_json()["duplicates"] == {
        "same": 1,
        "swapped": 1,
    }


def test_workers_start_after_the_parent_used_the_tokenizer_case_worker_fork_hang(
    tmp_path: Path, tokenizer: Path
) -> None:
    load_tokenizer(tokenizer).backend.encode_batch_fast(["once"] * 64)
    began = time.monotonic()
    done = prepare(spec(lines(tmp_path / "p.jsonl", rows(1600))), tokenizer, tmp_path / "out", workers=2)
    assert done.to_json()["pairs"] == 1600
    assert time.monotonic() - began < 60


def test_a_killed_worker_is_an_error_and_nothing_is_visible(tmp_path: Path, tokenizer: Path) -> None:
    def kill(rows_done: int, total: int | None) -> None:
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)

    data = lines(tmp_path / "p.jsonl", rows(6000))
    with pytest.raises(DatasetError, match="worker process died.*nothing was kept"):
        prepare(spec(data), tokenizer, tmp_path / "out", workers=2, progress=kill)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_worker_killed_at_any_moment_never_hangs_its_parent(tmp_path: Path, tokenizer: Path) -> None:
    """A result may be half-way through its pipe."""
    data, rng, ends = lines(tmp_path / "p.jsonl", rows(30_000)), random.Random(0), list[str]()
    for trial in range(12):

        def kill(after: float) -> None:
            deadline = time.monotonic() + 30
            while not (children := multiprocessing.active_children()) and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(after)
            with suppress(ProcessLookupError):
                os.kill(rng.choice(children).pid or 0, signal.SIGKILL)

        killer = threading.Thread(target=kill, args=(rng.uniform(3, 6),))
        killer.start()
        try:
            prepare(spec(data), tokenizer, tmp_path / str(trial), workers=2)
            ends.append("through")
        except DatasetError as error:
            assert "worker process died" in str(error)
            ends.append("died")
        killer.join()
        assert not multiprocessing.active_children()
    assert ends.count("died") > 5, ends


def test_a_worker_with_another_tokenizer_is_noticed(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder changes between the loading of the parent, which writes the identity down, and of its workers."""
    moving = tmp_path / "moving"
    shutil.copytree(tokenizer, moving)

    def changed_afterwards(*given: Any) -> Any:
        loaded = load_tokenizer(*given)
        write(moving, byte_level(prefix_space=True), CHATML)
        return loaded

    monkeypatch.setattr("training.data.prepare.load_tokenizer", changed_afterwards)
    with pytest.raises(IdentityError, match="changed on disk while it was in use: tok1:"):
        prepare(spec(lines(tmp_path / "p.jsonl", rows(1600))), moving, tmp_path / "out", workers=2, shard_bytes=5000)
    assert not (tmp_path / "out").exists()


PREPARE = """
import json, os, sys
from pathlib import Path
from training.data.prepare import prepare
from training.data.sources import SourceSpec
data, tokenizer, out, workers, dies_after = sys.argv[1:]
def show(done, total):
    if done > int(dies_after): os.kill(os.getpid(), 9)
if __name__ == "__main__":
    done = prepare(SourceSpec(name="s", inputs=(data,)), Path(tokenizer), Path(out), workers=int(workers),
                   progress=show, shard_bytes=30_000)
    print(json.dumps(done.to_json()))
"""


def preparing(tmp_path: Path, *given: Any) -> subprocess.Popen[bytes]:
    """A preparation in a process of its own; killed once more than `given[-1]` rows are done."""
    script = tmp_path / "preparing.py"
    script.write_text(PREPARE, encoding="utf-8")
    return subprocess.Popen([sys.executable, str(script), *map(str, given)], stdout=subprocess.PIPE)


def mixed(count: int) -> list[dict[str, Any]]:
    """Rows of which some fall and some come again, so that every count has something to get wrong."""
    made = rows(count)
    made[3::50] = [{"prompt": f"no answer {i}"} for i in range(len(made[3::50]))]
    made[7::90] = [GOOD] * len(made[7::90])
    return made


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_preparation_goes_on_from_its_last_finished_shard(
    tmp_path: Path, tokenizer: Path, workers: int
) -> None:
    """Killed by SIGKILL, its workers with it; what the next run makes is what an unbroken one does."""
    data, out = lines(tmp_path / "p.jsonl", mixed(4000)), tmp_path / "out"
    unbroken = prepare(spec(data), tokenizer, tmp_path / "unbroken", workers=1, shard_bytes=30_000)
    assert len(unbroken.dataset.manifest.shards) > 8
    children: set[int] = set()
    killed = preparing(tmp_path, data, tokenizer, out, workers, 2000)
    while killed.poll() is None:
        with suppress(OSError):
            children |= set(map(int, Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()))
        time.sleep(0.02)
    assert killed.communicate() and killed.returncode == -9
    assert len(children) >= workers * (workers > 1)
    with pytest.raises(DatasetError, match="does not hold a finished dataset"):
        open_dataset(out)
    deadline = time.monotonic() + 10
    while alive := [child for child in children if _alive(child)]:
        assert time.monotonic() < deadline, f"workers outlive their parent: {alive}"
        time.sleep(0.05)
    resumed = preparing(tmp_path, data, tokenizer, out, workers, 10**9)
    assert json.loads(resumed.communicate(timeout=60)[0])["resumed"] >= 4
    assert files(out) == files(tmp_path / "unbroken")
    open_dataset(out)


def _alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def interrupted_anywhere(place: Path, tokenizer: Path, data: st.DataObject) -> None:
    """Interrupted at any chunk, with its files cut or altered afterwards as a lost power may leave them."""
    size = data.draw(st.sampled_from([400, 3000, 20_000]))
    source = spec(lines(place / "p.jsonl", mixed(1800)))
    prepare(source, tokenizer, place / "unbroken", workers=1, shard_bytes=size)
    for _ in range(data.draw(st.integers(1, 3))):
        stop = data.draw(st.integers(0, 1799))

        def interrupt(done: int, total: int | None, stop: int = stop) -> None:
            if done > stop:
                raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            prepare(source, tokenizer, place / "out", workers=1, shard_bytes=size, progress=interrupt)
        for left in sorted(place.glob("out/.staging-*/*")):
            damage = data.draw(st.sampled_from(["none", "none", "none", "cut", "flip", "gone"]))
            held = bytearray(left.read_bytes())
            if damage == "gone":
                left.unlink()
            elif damage != "none" and held:
                at = data.draw(st.integers(0, len(held) - 1))
                held[at] ^= 255 if damage == "flip" else 0
                left.write_bytes(held[:at] if damage == "cut" else held)
    prepare(source, tokenizer, place / "out", workers=1, shard_bytes=size)
    assert files(place / "out") == files(place / "unbroken")


@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_interrupted_anywhere_it_ends_in_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, data: st.DataObject
) -> None:
    interrupted_anywhere(tmp_path_factory.mktemp("interrupted"), tokenizer, data)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_interrupted_anywhere_often(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, data: st.DataObject
) -> None:
    interrupted_anywhere(tmp_path_factory.mktemp("interrupted"), tokenizer, data)


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_in_the_same_bytes(tmp_path: Path, tokenizer: Path) -> None:
    """SIGKILL by the clock, whatever the process is doing, until one run gets through."""
    rng = random.Random(0)
    data, resumed = lines(tmp_path / "p.jsonl", mixed(20_000)), []
    prepare(spec(data), tokenizer, tmp_path / "unbroken", workers=1, shard_bytes=30_000)
    for trial in range(6):
        out, longest = tmp_path / f"out{trial}", 2.5
        while True:
            running = preparing(tmp_path, data, tokenizer, out, trial % 2 + 1, 10**9)
            with suppress(subprocess.TimeoutExpired):
                running.wait(timeout=rng.uniform(0.5, longest))
            running.kill()
            told = running.communicate()[0]
            if running.returncode == 0:
                resumed.append(json.loads(told)["resumed"])
                break
            longest *= 1.3
        assert files(out) == files(tmp_path / "unbroken")
    assert sum(resumed) > 0, resumed


def test_what_an_interrupted_run_left_is_taken_by_its_like_alone(tmp_path: Path, tokenizer: Path) -> None:
    data, out = lines(tmp_path / "p.jsonl", mixed(1500)), tmp_path / "out"

    def interrupt(done: int, total: int | None) -> None:
        if done > 1000:
            raise KeyboardInterrupt

    def left() -> list[str]:
        with pytest.raises(KeyboardInterrupt):
            prepare(spec(data), tokenizer, out, workers=1, shard_bytes=20_000, progress=interrupt)
        return [path.name for path in out.glob(".staging-*")]

    (first,) = left()
    assert prepare(spec(data), tokenizer, out, workers=1, shard_bytes=20_000).resumed > 0
    (out / MANIFEST).unlink()
    assert left() == [first]
    other = prepare(spec(data), tokenizer, out, workers=1, shard_bytes=20_000, limits=LimitsConfig(max_tokens=60))
    assert other.resumed == 0
    assert not list(out.glob(".staging-*"))
    left()
    lines(data, [*mixed(1499), GOOD])
    assert prepare(spec(data), tokenizer, out, workers=1, shard_bytes=20_000).resumed == 0
    assert not list(out.glob(".staging-*"))


def test_a_full_disk_leaves_the_older_version_and_what_was_finished(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    old = prepare(spec(lines(tmp_path / "a.jsonl", rows(5))), tokenizer, out, workers=1)
    new, room = spec(lines(tmp_path / "b.jsonl", rows(900))), [700]
    write_rows = account.ShardWriter.add

    def until_full(self: Any, batch: pa.RecordBatch) -> Any:
        room[0] -= batch.num_rows
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_rows(self, batch)

    monkeypatch.setattr(account.ShardWriter, "add", until_full)
    with pytest.raises(DatasetError, match=r"No space left.*what is finished lies in .*\.staging-.*goes on from there"):
        prepare(new, tokenizer, out, workers=1, shard_bytes=20_000)
    assert open_dataset(out).fingerprint == old.dataset.fingerprint
    room[0] = 10**9
    done = prepare(new, tokenizer, out, workers=1, shard_bytes=20_000)
    assert done.resumed > 0
    assert len(pairs(open_dataset(out))) == 900
    assert not list(out.glob(".staging-*"))


def test_a_disk_that_is_really_full(tmp_path: Path, tokenizer: Path) -> None:
    """A file system of 256 KB; no dataset is visible on it at any time."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        data = lines(tmp_path / "p.jsonl", rows(3000))
        for shard_bytes in (1 << 20, 50_000):
            with pytest.raises(DatasetError, match="No space left"):
                prepare(spec(data), tokenizer, small / "out", workers=1, shard_bytes=shard_bytes)
            with pytest.raises(DatasetError, match="no manifest|is not there"):
                open_dataset(small / "out")
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_writer_waits_for_another_that_leaves_nothing(tmp_path: Path) -> None:
    """The folder that the second one waits for is gone when its turn comes; it makes it anew."""
    out, order = tmp_path / "out", list[str]()

    def second() -> None:
        with locked(out):
            order.append("second")
            (out / "mine").touch()

    with locked(out):
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.2)
        order.append("first")
    waiting.join(timeout=10)
    assert order == ["first", "second"]
    assert (out / "mine").exists()


def test_stored_pairs_are_written_anew_where_they_are_damaged(tmp_path: Path) -> None:
    source = open_source(spec(lines(tmp_path / "p.jsonl", rows(30))))
    stored = store_pairs(source, tmp_path / "pairs")
    whole = files(stored.path)
    (tmp_path / "pairs" / ".staging-dead").mkdir()
    (stored.path / "pairs-00000.arrow").write_bytes(b"cut")
    assert store_pairs(source, tmp_path / "pairs") == stored
    assert files(stored.path) == whole
    assert [path.name for path in (tmp_path / "pairs").iterdir()] == [stored.path.name]


def test_two_writers_of_one_folder_converge(tmp_path: Path, tokenizer: Path) -> None:
    data, out = lines(tmp_path / "p.jsonl", rows(600)), tmp_path / "out"
    script = (
        "import sys, json\nfrom pathlib import Path\nfrom training.data.prepare import prepare\n"
        "from training.data.sources import SourceSpec\n"
        "spec = SourceSpec(name='s', inputs=(sys.argv[1],))\n"
        "print(json.dumps(prepare(spec, Path(sys.argv[2]), Path(sys.argv[3]), workers=1).to_json()))\n"
    )
    command = [sys.executable, "-c", script, str(data), str(tokenizer), str(out)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    reports = [json.loads(writer.communicate(timeout=60)[0]) for writer in both]
    assert sorted(report["reused"] for report in reports) == [False, True]
    assert len({report["dataset"] for report in reports}) == 1
    assert len(pairs(open_dataset(out))) == 600


def test_a_folder_with_other_things_is_not_touched(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    data = lines(tmp_path / "in" / "p.jsonl", rows(5))
    with pytest.raises(ConfigError, match=r"in, thesis\.txt"):
        prepare(spec(data), tokenizer, tmp_path, workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "thesis.txt"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("small")
    data = lines(folder / "p.jsonl", [*rows(4), {"prompt": "x"}])
    return prepare(spec(data), tokenizer, folder / "out", workers=1).dataset.path


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_flipped_byte_is_refused_by_name_or_changes_nothing(small: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(path.name for path in small.iterdir())))
    path, kept = small / name, (small / name).read_bytes()
    wanted = pairs(open_dataset(small))
    place = data.draw(st.integers(0, len(kept) - 1))
    altered = bytearray(kept)
    altered[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(altered))
    try:
        assert pairs(open_dataset(small)) == wanted
        assert name == MANIFEST, "only white space of the manifest may change unnoticed"
    except DatasetError as error:
        assert name in str(error)
    finally:
        path.write_bytes(kept)


@pytest.mark.parametrize("damage", ["cut", "missing", "foreign"])
def test_a_damaged_shard_is_named(tmp_path: Path, tokenizer: Path, damage: str) -> None:
    data = lines(tmp_path / "p.jsonl", rows(50))
    out = prepare(spec(data), tokenizer, tmp_path / "out", workers=1).dataset.path
    shard = out / "shard-00000.arrow"
    if damage == "missing":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        other = prepare(spec(lines(tmp_path / "q.jsonl", rows(49))), tokenizer, tmp_path / "other", workers=1)
        shard.write_bytes((other.dataset.path / shard.name).read_bytes())
    with pytest.raises(DatasetError, match=r"shard-00000\.arrow.*prepare the dataset again"):
        open_dataset(out)
    assert prepare(spec(data), tokenizer, out, workers=1).reused is False
    assert len(pairs(open_dataset(out))) == 50


def test_a_tokenizer_changed_meanwhile_is_noticed_before_anything_is_visible(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.data.prepare.load_tokenizer", lambda *given: _padding(load_tokenizer(*given)))
    with pytest.raises(Exception, match="padding of tokenizer"):
        prepare(spec(lines(tmp_path / "p.jsonl", rows(5))), tokenizer, tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


def _padding(loaded: Any) -> Any:
    loaded.backend.enable_padding()
    return loaded


def test_real_conversations_are_let_in_or_named(tmp_path: Path) -> None:
    """300 rows of real conversations, the Qwen3 tokenizer, counted from the shards."""
    given = os.environ.get("PAIRLEDGER_TEST_DATA")
    if not given:
        pytest.skip("set PAIRLEDGER_TEST_DATA to a folder with data/ and tokenizers/ to run on real pairs")
    source = SourceSpec(name="en", inputs=(f"{given}/data/sharegpt_dpo_en.json",))
    done = prepare(source, Path(given) / "tokenizers" / "qwen3", tmp_path / "out", workers=2)
    counts, walked = done.to_json(), pairs(done.dataset)
    quarantined = (tmp_path / "out" / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    named = {pair.locator for pair in walked} | {json.loads(line)["locator"] for line in quarantined}
    assert len(walked) + len(quarantined) == 300 == counts["rows"] == len(named)
    assert counts["tokens"]["source"] == sum(
        len(pair.prompt_ids) + len(pair.chosen_ids) + len(pair.rejected_ids) for pair in walked
    )
    assert all(len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids)) <= 2048 for pair in walked)
    assert file_fingerprint(tmp_path / "out" / "shard-00000.arrow") == done.dataset.manifest.shards[0].digest

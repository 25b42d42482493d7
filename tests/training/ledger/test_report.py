"""The report page: whole, self-contained, and honest."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.training.ledger import shop
from training.errors import LedgerError
from training.ledger.report import pictures, write_report
from training.ledger.store import load


class Page(HTMLParser):
    """Tags, texts and addresses of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def page_of(store: Path, run_id: str, out: Path) -> Page:
    load(store)
    return Page(write_report(store, run_id, out).read_text(encoding="utf-8"))


def test_the_page_holds_its_pictures_and_the_runs_numbers(tmp_path: Path) -> None:
    page = page_of(shop.make_store(tmp_path / "store"), "r", tmp_path / "new" / "report.html")
    assert "Plan, ledger and manifests agree, to the token." in page.texts
    assert len(page.addresses) == page.tags.count("img") == 6
    assert not {"script", "link", "iframe"} & set(page.tags)
    for address in page.addresses:
        data = base64.b64decode(address.removeprefix("data:image/png;base64,"))
        assert data.startswith(b"\x89PNG")
    follows = list(zip(page.texts, page.texts[1:], strict=False))
    summary = dict(reversed(follows))  # what follows the first time a text stands on the page
    assert (summary["source tokens"], summary["pack fill"], summary["accuracy"]) == ("60", "0.75", "0.75")
    assert summary["Work that does not count"] == "None."


def test_a_picture_shows_what_was_measured(tmp_path: Path) -> None:
    store = shop.make_store(tmp_path)
    load(store)
    shown = pictures(store, "r")
    assert list(shown["fill"].lines["pack fill"][0]) == [1, 2, 3, 4]
    assert list(shown["fill"].lines["pack fill"][1]) == [18 / 32, 12 / 16, 15 / 16, 15 / 16]
    # source b: rows 1, 3, 1, 3
    assert shown["loss_density"].lines["source b"] == ([1, 2, 3, 4], [6 / 9, 2 / 6, 6 / 9, 2 / 6])
    assert list(shown["margin"].lines["margin"][1]) == [pytest.approx(0.3)] * 4
    from matplotlib.image import imread

    image = imread(io.BytesIO(shown["loss"].png()))
    assert image.shape == (330, 990, 4) and image[..., :3].min() < 0.5 < image[..., :3].max()


def test_names_of_runs_and_sources_cannot_break_the_page(tmp_path: Path) -> None:
    shop.write_dataset(tmp_path / "datasets" / "a" / "2026-03-01" / "d")
    first = shop.step(1)
    sources = tuple(replace(row, source=f"<script>{row.source}</script>") for row in first.sources)
    unknown = shop.step(2, counters=None, unknown_reason="no labels", loss=float("nan"))
    shop.train(shop.write_run(tmp_path), [replace(first, sources=sources), unknown], outcome=None)
    page = page_of(tmp_path, "r", tmp_path / "report.html")
    assert "script" not in page.tags and "<script>a</script>" in page.texts
    assert any(re.fullmatch(r"Plan, ledger and manifests differ in \d+ places:", text) for text in page.texts)
    assert "plan = ledger: step 2, pairs: 2 expected, unknown found" in page.texts
    assert pictures(tmp_path, "r")["fill"].lines["pack fill"][1][1] is None


def test_work_that_was_thrown_away_is_shown(tmp_path: Path) -> None:
    store = shop.make_store(tmp_path)
    shop.train(store / "runs" / "r", [shop.step(3), shop.step(4)], from_step=3)
    page = page_of(store, "r", tmp_path / "report.html")
    at = page.texts.index("Work that does not count")
    # attempt, voided by, steps, source tokens, seconds
    assert [text for text in page.texts[at + 1 :] if text][5:10] == ["1", "2", "2", "30", "4"]


def test_a_report_without_steps_is_a_failure(tmp_path: Path) -> None:
    shop.write_run(tmp_path)
    load(tmp_path)
    with pytest.raises(LedgerError, match="has no steps to report"):
        write_report(tmp_path, "r", tmp_path / "report.html")
    with pytest.raises(LedgerError, match="no run nobody is loaded"):
        write_report(tmp_path, "nobody", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()

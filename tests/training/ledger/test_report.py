"""The report page: whole, self-contained, and honest."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from tests.training.ledger import shop
from training.errors import LedgerError
from training.ledger.charts import Amounts, Lines, Parts, png, running_mean, short
from training.ledger.pictures import pictures
from training.ledger.report import write_report
from training.ledger.store import load

NAMES = ["fill", "loss_density", "loss", "accuracy", "margin", "throughput", "time", "waste"]


class Page(HTMLParser):
    """Tags, texts, anchors and addresses of a page; the cells that follow an anchor, row by row."""

    def __init__(self, text: str):
        super().__init__()
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._anchor = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href") and value]
        self._anchor = next((value for name, value in attrs if name == "id" and value), self._anchor)
        if tag == "tr":
            self.tables.setdefault(self._anchor, []).append([])

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())
        if self.tags[-1] in ("td", "i") and data.strip():
            self.tables[self._anchor][-1].append(data.strip())

    def cards(self) -> dict[str, str]:
        """Numbers on top by what they are."""
        told = [text for text in self.texts if text]
        return {name: value for value, name in reversed([*zip(told, told[1:], strict=False)])}  # the first counts


def page_of(store: Path, run_id: str, out: Path) -> Page:
    load(store)
    return Page(write_report(store, run_id, out).read_text(encoding="utf-8"))


def test_the_page_holds_its_pictures_and_the_runs_numbers(tmp_path: Path) -> None:
    page = page_of(shop.make_store(tmp_path / "store"), "r", tmp_path / "new" / "report.html")
    assert "Plan, ledger and manifests agree, to the token." in page.texts
    assert len(page.addresses) == page.tags.count("img") == page.tags.count("figure") == len(NAMES)
    assert not {"script", "link", "iframe"} & set(page.tags)
    for address in page.addresses:
        assert base64.b64decode(address.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    cards = page.cards()
    assert cards["steps of 4 planned"] == "4" and cards["source tokens"] == "60" and cards["supervised tokens"] == "36"
    assert (cards["pack fill"], cards["loss density"], cards["saved by sharing prompts"]) == ("75.0%", "60.0%", "25.0%")
    assert (cards["accuracy over all steps"], cards["in steps"], cards["in steps thrown away"]) == (
        "75.0%",
        "8 s",
        "0 s",
    )
    # source, pairs, source tokens, their share, loss tokens, their share, density
    assert page.tables["sources"][1][:7] == ["a", "4", "30", "50.0%", "20", "55.6%", "66.7%"]
    # predicted, found, difference, steps equal, steps not equal: 18 + 12 + 15 + 15 tokens
    assert ["source tokens", "60", "60", "0", "4", "0"] in [
        [row[0].replace("_", " "), *row[1:]] for row in page.tables["plan"][1:]
    ]
    # row 3: -13 + 12 - (-11 + 11.5), seen in steps 2 and 4, tokens 4 1 1
    assert page.tables["wrong"][1:] == [["b", "file.jsonl:4", "-1.5", "-1.5", "2", "4", "1", "1"]]
    assert page.tables["slowest"][1][:3] == ["1", "2", "1"]  # a step of 2 s, as the median
    assert page.tables["attempts"][1][:2] == ["1", "finished"]
    assert page.tables["datasets"][1][:5] == [shop.DATASET, "datasets/a/2026-03-01/d", "5", "1", "1"]


def test_a_picture_shows_what_was_measured(tmp_path: Path) -> None:
    store = shop.make_two_runs(tmp_path)
    load(store)
    shown = pictures(store, "r")
    assert list(shown) == NAMES
    fill, density, margin, time = (shown[name] for name in ("fill", "loss_density", "margin", "time"))
    assert isinstance(fill, Lines) and isinstance(density, Lines) and isinstance(margin, Lines)
    assert list(fill.lines["pack fill"][0]) == [1, 2, 3, 4]
    assert list(fill.lines["pack fill"][1]) == [18 / 32, 12 / 16, 15 / 16, 15 / 16]
    # source b: rows 1, 3, 1, 3
    assert density.lines["b"] == ([1, 2, 3, 4], [6 / 9, 2 / 6, 6 / 9, 2 / 6])
    assert list(density.lines["all sources"][1]) == [12 / 18, 6 / 12, 10 / 15, 8 / 15]
    assert list(margin.lines["margin"][1]) == [pytest.approx(0.3)] * 4
    accuracy, loss = shown["accuracy"], shown["loss"]
    assert isinstance(accuracy, Lines) and isinstance(loss, Lines)
    assert accuracy.dots["held-out pairs"] == ((2, 4), (0.75, 1.0)) and loss.dots["held-out pairs"][1] == (0.75, 0.75)
    assert isinstance(time, Parts) and list(time.parts["saving"]) == [9.0] * 4
    waste = pictures(store, "s")["waste"]
    # steps 1, 2 and 3 count: 12 + 6 + 10 supervised of 45; the first step 3 had 15
    assert isinstance(waste, Amounts)
    assert waste.amounts == {"learned from": 28, "read as context": 17, "padding": 0, "thrown away": 15}


@pytest.mark.parametrize("name", NAMES)
def test_every_picture_is_drawn(tmp_path: Path, name: str) -> None:
    from matplotlib.image import imread

    store = shop.make_two_runs(tmp_path)
    load(store)
    picture = pictures(store, "s")[name]
    image = imread(io.BytesIO(png(picture, 50)))
    assert image.shape == (round(picture.height * 50), 320, 4)
    assert image[..., :3].min() < 0.5 and image[..., :3].mean() > 0.7  # something dark on a light ground


def test_long_runs_are_smoothed_over_what_is_known() -> None:
    values = np.array([1.0, 3.0, np.nan, 5.0, 7.0, np.nan, np.nan, np.nan])
    assert running_mean(values, 1).tolist()[:6] == [2.0, 2.0, 4.0, 6.0, 6.0, 7.0]
    assert np.isnan(running_mean(values, 1)[6:]).all()
    assert np.array_equal(running_mean(values, 0), values, equal_nan=True)
    steps = list(range(1, 2001))
    long = Lines(title="", caption="", unit="share", lines={"a": (steps, [None, *[0.5] * 1999])})
    assert png(long, 40).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0512, "0.0512"), (0.693147, "0.693"), (60, "60"), (999.6, "1,000"), (1234, "1,234"),
     (9_999.4, "9,999"), (9_999.6, "10 k"),     (45_600, "45.6 k"), (999_400, "999 k"), (999_600, "1 M"),
     (1.25e6, "1.25 M"), (3e9, "3 G"), (-2e6, "-2 M"), (0, "0")],
)  # fmt: skip
def test_numbers_are_said_shortly(value: float, said: str) -> None:
    assert short(value) == said


def test_names_of_runs_and_sources_cannot_break_the_page(tmp_path: Path) -> None:
    shop.write_dataset(tmp_path / "datasets" / "a" / "2026-03-01" / "d")
    first = shop.step(1)
    sources = tuple(replace(row, source=f"<script>{row.source}</script>") for row in first.sources)
    unknown = shop.unknown(shop.step(2), "no labels")
    shop.train(shop.write_run(tmp_path), [replace(first, sources=sources), unknown], outcome=None)
    page = page_of(tmp_path, "r", tmp_path / "report.html")
    assert "script" not in page.tags and "<script>a</script>" in page.texts
    assert any(re.fullmatch(r"Plan, ledger and manifests differ in \d+ places:", text) for text in page.texts)
    assert "plan = ledger: step 2, pairs: 2 expected, unknown found" in page.texts
    cards = page.cards()
    assert cards["steps with unknown counters"] == "1" and cards["non-finite steps, first 2"] == "1"
    fill = pictures(tmp_path, "r")["fill"]
    assert isinstance(fill, Lines) and fill.lines["pack fill"][1][1] is None


def test_work_that_was_thrown_away_is_shown(tmp_path: Path) -> None:
    page = page_of(shop.make_two_runs(tmp_path), "s", tmp_path / "report.html")
    # cause, steps, first, last, tokens, seconds, FLOPs
    assert page.tables["thrown-away"][1:] == [["attempt 1 was killed", "1", "3", "3", "15", "2", "15 k"]]
    assert page.cards()["in steps thrown away"] == "2 s"
    assert page.tables["slowest"][1][:3] == ["3", "4", "2"]  # 4 s, twice the median


def test_a_report_without_steps_is_a_failure(tmp_path: Path) -> None:
    shop.write_run(tmp_path)
    load(tmp_path)
    with pytest.raises(LedgerError, match="has no steps to report"):
        write_report(tmp_path, "r", tmp_path / "report.html")
    with pytest.raises(LedgerError, match="no run nobody is loaded"):
        write_report(tmp_path, "nobody", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()

"""What a person can set, query or type is in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from training.config import ProjectConfig, Section

ROOT = Path(__file__).parents[1]


def section_fields(kind: type[Section]) -> set[str]:
    """Names of the fields of a section and of the sections below it."""
    names: set[str] = set()
    for name, field in kind.model_fields.items():
        names.add(name)
        for inner in [field.annotation, *getattr(field.annotation, "__args__", ())]:
            if isinstance(inner, type) and issubclass(inner, Section):
                names |= section_fields(inner)
    return names


def test_every_configuration_field_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    fields = section_fields(ProjectConfig)
    assert len(fields) > 45
    missing = sorted(name for name in fields if not re.search(rf"`[^`]*\b{name}\b[^`]*`", text))
    assert not missing, f"docs/configuration.md does not name: {missing}"


def test_every_view_is_documented() -> None:
    views = [path.stem for path in (ROOT / "training" / "ledger" / "views").glob("*.sql")]
    assert {"step_rates", "source_density", "run_summary", "consumption"} <= set(views)
    text = (ROOT / "docs" / "sql.md").read_text(encoding="utf-8")
    missing = sorted(name for name in views if name not in text)
    assert not missing, f"docs/sql.md does not name: {missing}"


def test_every_counter_is_documented() -> None:
    from training.geometry import Counters

    counters = list(Counters.__dataclass_fields__)
    assert len(counters) == 14
    text = (ROOT / "docs" / "accounting.md").read_text(encoding="utf-8")
    missing = sorted(name for name in counters if f"`{name}`" not in text)
    assert not missing, f"docs/accounting.md does not name: {missing}"


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")) + ["../README.md"])
def test_links_between_pages_lead_somewhere(page: str) -> None:
    path = ROOT / "docs" / page
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if not (path.parent / link).exists()]
    assert not missing, f"{page} links to {missing}"


def test_every_command_that_is_named_exists() -> None:
    from pipeline.cli import parsers
    from pipeline.commands.ledger import ACTIONS

    _, own = parsers()
    text = "".join(path.read_text(encoding="utf-8") for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
    named = re.findall(r"pairledger ((?:ledger )?[a-z]+)", text)
    assert len(named) > 20
    known = {*own, *(f"ledger {action}" for action in ACTIONS)}
    assert not {name for name in named if name not in known}

"""Metadata that every reader of the event can parse."""

import json

import dagster as dg
import numpy as np
import pyarrow as pa

from assets.reporting import column_schema, markdown_table, portable

VALUES = {"loss": float("nan"), "acc": np.float32(0.5), "tokens": np.int64(7), "big": 2**63, "low": -(2**63)}


def test_portable_case_nan_metadata():
    assert portable(VALUES) == {
        "loss": "NaN",
        "acc": 0.5,
        "tokens": 7,
        "big": "9223372036854775808",
        "low": "-9223372036854775808",
    }
    assert type(portable(VALUES)["acc"]) is float
    assert type(portable(VALUES)["tokens"]) is int
    assert portable({"a": None, "exact": 2**53, "flag": np.bool_(True), "inf": -np.inf}) == {
        "exact": 2**53,
        "flag": True,
        "inf": "-Infinity",
    }
    own = {"picture": dg.MetadataValue.md("x"), "schema": column_schema(pa.schema([("a", pa.int64())]))}
    assert portable(own) == own
    assert portable({"nested": {"x": [np.float64("inf"), 2**60]}}) == {"nested": {"x": ["Infinity", str(2**60)]}}


def test_the_stored_event_is_strict_json_case_nan_metadata():
    @dg.asset
    def reported() -> dg.MaterializeResult:
        return dg.MaterializeResult(metadata=portable(VALUES))

    with dg.DagsterInstance.ephemeral() as instance:
        dg.materialize([reported], instance=instance)
        event = instance.get_latest_materialization_event(dg.AssetKey("reported"))
    assert event is not None

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    stored = json.loads(dg.serialize_value(event), parse_constant=refuse)
    assert "9223372036854775808" in json.dumps(stored)


def test_tables():
    schema = column_schema(pa.schema([("pair_id", pa.string()), ("prompt_ids", pa.list_(pa.int32()))]))
    assert [(column.name, column.type) for column in schema.columns] == [
        ("pair_id", "string"),
        ("prompt_ids", "list<item: int32>"),
    ]
    table = markdown_table(["a", "b"], [("x|y", 0.123456), (None, 3)])
    assert table.value == "| a | b |\n| --- | --- |\n| x\\|y | 0.1235 |\n|  | 3 |"

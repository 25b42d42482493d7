"""The blocking check of the account, in Dagster: a spoiled ledger stops the report."""

import dagster as dg
import pytest

from assets import checks
from assets.ledger import assets
from assets.store import ShardStore, TokenLedger
from tests.training.ledger import shop
from tests.training.ledger.spoiled import SPOILED, spoil


def account(store, instance):
    """Materialise the group `ledger` with its check; gives the result, and the check's where it came to it."""
    own = [check for check in checks.checks() if check.check_key.asset_key == dg.AssetKey("token_ledger")]
    resources = {"store": ShardStore(root=str(store)), "ledger": TokenLedger(root=str(store))}
    result = dg.materialize([*assets(), *own], instance=instance, resources=resources, raise_on_error=False)
    return result, result.get_asset_check_evaluations()


def reported(result) -> bool:
    return bool(result.asset_materializations_for_node("fill_report"))


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


def test_a_sound_account_passes(tmp_path, instance):
    result, (check,) = account(shop.make_store(tmp_path), instance)
    assert result.success and check.passed and reported(result)
    assert check.description == "0 differences in 1 runs"


@pytest.mark.parametrize("way", [way for way in SPOILED if way != "corrupted"])
def test_a_spoiled_account_stops_the_report(tmp_path, instance, way):
    said = spoil(shop.make_store(tmp_path), way)
    result, (check,) = account(tmp_path, instance)
    assert not result.success and not check.passed and not reported(result)
    assert said.partition(": ")[2] in str(check.metadata["differences"].value)


def test_a_line_that_cannot_be_read_fails_the_load_itself(tmp_path, instance):
    spoil(shop.make_store(tmp_path), "corrupted")
    result, evaluated = account(tmp_path, instance)
    data = result.failure_data_for_node("token_ledger")
    assert data is not None and data.user_failure_data is not None
    assert "steps.jsonl:2: not strict JSON" in (data.user_failure_data.description or "")
    assert not result.success and not evaluated and not reported(result)

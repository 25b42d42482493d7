"""The packed, sequence-parallel DPO trainer and everything it needs; works without Dagster."""

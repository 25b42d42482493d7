"""Models that packs serve, and those that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.memory import write_model
from training.config import ModelConfig
from training.errors import ModelError
from training.model import Policy, inspect
from training.parallel.device import pick
from training.scores import open_policy, prove

TINY = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}


def test_a_model_that_computes_something_else_is_refused_by_trial(tmp_path: Path) -> None:
    policy = open_policy(ModelConfig(path=str(write_model(tmp_path / "model"))), pick("cpu"))
    prove(policy, pick("cpu"))
    module = policy.module
    forward = module.forward

    def doubled(*args: object, **kwargs: object) -> object:
        out = forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    module.forward = doubled  # a head with a scale that no setting tells of
    with pytest.raises(ModelError, match="Qwen3ForCausalLM.*its own forward pass"):
        prove(Policy(module=module), pick("cpu"), "bf16")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_what_packs_cannot_serve_is_refused_before_weights_are_read(
    tmp_path: Path, settings: dict[str, object], said: str
) -> None:
    folder = write_model(tmp_path / "model")
    import json

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **settings}), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"")  # never opened
    with pytest.raises(ModelError, match=said) as caught:
        inspect(folder)
    assert "Qwen3ForCausalLM" in str(caught.value) and caught.value.exit_code == 3


def test_recurrent_layers_are_refused_by_class(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, state_size=2)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="MambaBlock|MambaMixer"):
        inspect(tmp_path)


def test_caps_on_attention_scores_are_refused(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**TINY, head_dim=4, num_attention_heads=2, num_key_value_heads=1)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="attn_logit_softcapping"):
        inspect(tmp_path)


def test_attention_sinks_are_refused(tmp_path: Path) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(**TINY, head_dim=4, num_attention_heads=2, num_key_value_heads=1, num_local_experts=2)
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="sinks"):
        inspect(tmp_path)


def test_dropout_is_set_to_0_and_said(tmp_path: Path) -> None:
    """case: step0-not-ln2"""
    folder = write_model(tmp_path / "model", attention_dropout=0.1)
    policy = open_policy(ModelConfig(path=str(folder)), pick("cpu"))
    assert policy.module.config.attention_dropout == 0.0 and policy.module.training
    assert any("attention_dropout 0.1 was set to 0" in note for note in policy.notes)


@pytest.mark.parametrize(("break_it", "said"), [("config.json", "config.json"), ("model.safetensors", "safetensors")])
def test_a_folder_that_holds_no_model_is_named(tmp_path: Path, break_it: str, said: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / break_it).unlink()
    with pytest.raises(ModelError, match=said) as caught:
        inspect(folder)
    assert str(folder) in str(caught.value)

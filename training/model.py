"""The policy: a Hugging Face causal language model whose layers attend over packed rows.

What the kernels and the head cannot serve is refused twice. By name, from the configuration and the classes of the
layers alone, before a weight is read: recurrent, convolutional and linear-attention layers, attention sinks and caps,
frequencies that follow the longest position (dynamic and longrope RoPE), vision inputs, extra prediction heads. And by
trial, after loading: the log-probabilities of two tiny pairs in one shared pack must equal those of the model's own
forward pass over each sequence alone (`training.scores.open_policy`), which catches whatever a name does not tell.

Weights are fp32 whatever the file holds; lower precision is autocast around the forward pass. Dropout is set to 0, and
said so, because a policy equal to its reference must have a loss of ln 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from training import adapter
from training.attention import Packed, register
from training.compiling import compile_parts
from training.config import ModelConfig
from training.errors import ModelError
from training.head import Head
from training.parallel.device import Device
from training.parallel.fsdp import Gathered
from training.parallel.mesh import ALONE, World
from training.weights import sharded_model, whole_model

T = TypeVar("T")

UNSERVED_LAYERS = re.compile(
    r"Mamba|SSM|Rwkv|Recurrent|Retention|LinearAttention|LightningAttention|DeltaNet|ShortConv|Conv1d|Conv1D(?!$)|Hyena"
)
SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A model ready to be trained or scored, and what was changed when it was loaded.

    `root` gathers the parameters of a module that is sharded over ranks.
    """

    module: PreTrainedModel
    notes: tuple[str, ...] = ()
    root: Gathered | None = None
    bare: bool = False
    """Whether the adapter is left out, so that it is the frozen model that computes."""

    def without_adapter(self) -> Policy:
        """The frozen model under the adapter."""
        return replace(self, bare=True)

    def compute(self, function: Callable[[], T]) -> T:
        """Run a forward pass; every parameter is whole when the function reads it."""
        with adapter.off(self.module) if self.bare else nullcontext():
            return function() if self.root is None else self.root.run(function)

    @property
    def head(self) -> Head:
        """The head's parameters as they are now."""
        layer: Any = self.module.get_output_embeddings()
        config = self.module.config
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        return Head(
            weight=layer.weight,
            bias=getattr(layer, "bias", None),
            scale=scale,
            cap=getattr(config, "final_logit_softcapping", None),
        )

    def hidden(self, ids: Tensor, position: Tensor, packed: Packed) -> Tensor:
        """Hidden rows of a packed row: int64 `[1, T]` twice -> `[T, H]`; the head is not called."""
        base = self.module.base_model
        return base(input_ids=ids, position_ids=position, use_cache=False, packed=packed).last_hidden_state[0]


def load_model(config: ModelConfig, device: Device, world: World = ALONE, seed: int = 0) -> Policy:
    """Load a policy, sharded where there are several ranks; `training.scores.open_policy` also tries it.

    `seed` is what an adapter starts from.

    Raises:
        ModelError: no such model, weights that are missing or left over, or layers that cannot be served, by class.
    """
    settings, notes = inspect(config.path)
    register()

    def change(module: PreTrainedModel) -> None:
        if config.checkpointing:
            module.activation_checkpointing_enable({"use_reentrant": False})
        if config.compile:
            compile_parts(module, device)
        if config.lora is not None:
            adapter.inject(module, config.lora, seed)

    root = None
    if world.parameters is None:
        module = whole_model(config.path, settings)
        change(module)
        placed: Any = module
        module = placed.to(device.torch)
    else:
        module, root = sharded_model(config.path, settings, change, device, world)
    return Policy(module=module.train(), notes=notes, root=root)


def inspect(path: str | Path) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    """A model's configuration as it is trained with, and sentences on what was changed; reads no weights.

    Raises:
        ModelError: names the folder, and the class or setting that cannot be served.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{path}: is no folder of a Hugging Face model (it has no config.json)")
    if not list(folder.glob("*.safetensors")):
        raise ModelError(
            f"{path}: has no *.safetensors; save the model with save_pretrained first (pickles are not read)"
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"{path}: is no causal language model that transformers knows: {error}") from None
    for sentence in _unserved(config, skeleton):
        raise ModelError(f"{path}: {type(skeleton).__name__}: {sentence}")
    return config, tuple(_quiet(config))


def _unserved(config: PreTrainedConfig, skeleton: PreTrainedModel) -> Iterator[str]:
    for name, module in skeleton.named_modules():
        if UNSERVED_LAYERS.search(type(module).__name__) and not isinstance(module, PreTrainedModel):
            yield f"layer {name} is a {type(module).__name__}; only attention over spans is served"
    types = set(getattr(config, "layer_types", None) or ())
    if types - SERVED_LAYER_TYPES:
        yield f"layers of type {', '.join(sorted(types - SERVED_LAYER_TYPES))} are not served"
    for name in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if name in ("dynamic", "longrope"):
            yield f"RoPE of type {name} follows the longest position of a row, so packs would change results"
    for key, meaning in (
        ("attn_logit_softcapping", "a cap on attention scores"),
        ("use_bidirectional_attention", "attention to later tokens"),
        ("vision_config", "vision inputs"),
        ("num_nextn_predict_layers", "extra prediction heads"),
    ):
        if getattr(config, key, None):
            yield f"{key} = {meaning}, which is not served"
    if any(name.endswith("sinks") for name, _ in skeleton.named_parameters()):
        yield "attention sinks are not served"
    if not isinstance(skeleton.get_output_embeddings(), torch.nn.Linear):
        yield f"its head is a {type(skeleton.get_output_embeddings()).__name__}, not one linear layer"


def _rope_types(parameters: dict[str, Any]) -> Iterator[str]:
    for key, value in parameters.items():
        if isinstance(value, dict):
            yield from _rope_types(value)
        elif key in ("rope_type", "type"):
            yield str(value)


def _quiet(config: PreTrainedConfig) -> Iterator[str]:
    """Set every source of noise to 0."""
    for name, value in sorted(vars(config).items()):
        noisy = re.search(r"drop|jitter", name) and isinstance(value, float)
        if noisy and value > 0:
            setattr(config, name, 0.0)
            yield f"{name} {value} was set to 0: log-probabilities need a policy without noise"

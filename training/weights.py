"""A model's weights from its safetensors: whole in one process, or each rank's part of them.

With several ranks the model is made without memory for its parameters, sharded, and only then read, a slice of each
tensor a rank (torch's reader of Hugging Face folders): no rank ever holds a whole copy. Where a file's tensors are not
the module's (experts that transformers joins as it loads), every rank loads the whole model before it is sharded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from training.attention import NAME
from training.errors import ModelError
from training.parallel.device import Device
from training.parallel.fsdp import Gathered, shard
from training.parallel.mesh import World

log = logging.getLogger("training")

Change = Callable[[PreTrainedModel], None]
"""What is done to a model before its parameters are sharded."""


def whole_model(path: str, settings: PreTrainedConfig) -> PreTrainedModel:
    """Load a model, all of it, in fp32.

    Raises:
        ModelError: weights that are missing, left over or of another shape, by name.
    """
    disable_progress_bar()  # a log has no use for a line that redraws itself
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        config=settings,
        dtype=torch.float32,
        attn_implementation=NAME,
        local_files_only=True,
        output_loading_info=True,
    )
    module, report = loaded
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report.get(kind):
            raise ModelError(f"{path}: weights do not fit the configuration: {kind} {sorted(report[kind])[:5]}")
    return module


def sharded_model(
    path: str, settings: PreTrainedConfig, change: Change, device: Device, world: World
) -> tuple[PreTrainedModel, Gathered]:
    """Load each rank's part of a model, changed before it is sharded, in fp32.

    Raises:
        ModelError: as `whole_model`.
    """
    assert world.parameters is not None
    reader = HuggingFaceStorageReader(path)
    there = {
        name: tuple(found.size)
        for name, found in reader.read_metadata().state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata)
    }
    with init_empty_weights(include_buffers=False):
        made: Any = AutoModelForCausalLM.from_config(settings, attn_implementation=NAME, dtype=torch.float32)
    module: PreTrainedModel = made
    module.tie_weights()
    wanted = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if wanted != {name: shape for name, shape in there.items() if name in wanted}:
        log.info("%s: its files hold other tensors than its layers, so each rank reads all of them", path)
        loaded: Any = whole_model(path, settings)
        change(loaded)
        module = loaded.to(device.torch)
        return module, shard(module, world.parameters)
    change(module)
    root = _materialized(module, device, world.parameters)
    named = {name.replace(".base_layer.", "."): parameter.detach() for name, parameter in module.named_parameters()}
    load({name: named[name] for name in wanted}, storage_reader=reader, process_group=world.host)
    return module, root


def _materialized(module: PreTrainedModel, device: Device, mesh: DeviceMesh) -> Gathered:
    """Shard a module and give its empty parameters memory; those that have values (an adapter's) keep them."""
    root = shard(module, mesh)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    kept = {name: tensor.detach().clone() for name, tensor in tensors if not tensor.is_meta}
    module.to_empty(device=device.torch)
    module.tie_weights()  # each of two tied parameters got memory of its own
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in kept:
                tensor.copy_(kept[name])
    return root

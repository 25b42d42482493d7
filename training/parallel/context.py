"""Context parallelism: every rank keeps its own queries and sees the keys and values of the whole row.

They are all-gathered in one call a layer, and their gradients summed back to the rank that made them (Grattafiori et
al. 2024, The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2). Which of them a query sees is said by its span.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from training.parallel.collectives import all_gather


def gather_keys(k: Tensor, v: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """`[t, Hk, D]` twice -> `[n * t, Hk, D]` twice, tokens in order of ranks."""
    if group is None:
        return k, v
    both = all_gather(torch.cat([k, v], 1), group)
    keys, values = both.split([k.shape[1], v.shape[1]], 1)
    return keys, values

"""Model FLOPs of a step, from document lengths and the model's configuration alone.

What the mathematics of one forward and backward pass needs, not what a kernel spends: no recomputation, no padding, a
shared prompt once whatever the layout. A multiplication with its addition is 2 FLOPs; normalisations, activations and
embeddings are left out, as usual (Kaplan et al. 2020, arXiv:2001.08361, table 1; Chowdhery et al. 2022,
arXiv:2204.02311, appendix B). For a pair of prompt p, completions c and r, with s supervised tokens:

    tokens  = p + c + r
    seen    = p(p+1)/2 + cp + c(c+1)/2 + rp + r(r+1)/2        (query, key) pairs of a full-attention layer
    forward = 2·tokens·weights + 4·heads·head_dim·Σ_layers seen + 2·s·hidden·vocabulary
    FLOPs   = 3·forward                                       the backward pass is twice the forward pass

In a layer with a sliding window w, a query at position q sees min(q+1, w) keys. Only supervised rows meet the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GATED = {
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3", "olmo", "olmo2"),
    *("olmo3", "phi3", "granite", "glm", "glm4", "cohere", "cohere2", "exaone4", "seed_oss", "helium"),
}
"""`model_type`s whose layers are attention and a gated MLP; another has other matrices, and its FLOPs stay unknown."""
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that decide a dense decoder's FLOPs."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    full_layers: int
    sliding_layers: int = 0
    window: int = 0

    @property
    def weights(self) -> int:
        """Entries of all layers' matrices: query, key, value, output, and a gated MLP's three."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return (self.full_layers + self.sliding_layers) * (attention + 3 * self.hidden * self.intermediate)


def model_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape of a Hugging Face configuration, or None where this formula does not know the model.

    Known are dense decoders with a gated MLP whose layers attend fully or in a sliding window.
    """
    layer_types: list[str] | None = config.get("layer_types")
    known = config.get("model_type") in GATED and all(isinstance(config.get(name), int) for name in NEEDED)
    if not known or set(layer_types or ()) - {"full_attention", "sliding_attention"}:
        return None
    layers, window = config["num_hidden_layers"], config.get("sliding_window") or 0
    everywhere = window and config.get("use_sliding_window", True) and layer_types is None
    sliding = layers if everywhere else (layer_types or []).count("sliding_attention")
    if sliding and not window:
        return None
    heads = config["num_attention_heads"]
    return ModelShape(
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        full_layers=layers - sliding,
        sliding_layers=sliding,
        window=window if sliding else 0,
    )


def pair_flops(shape: ModelShape, *, prompt: int, chosen: int, rejected: int, supervised: int) -> int:
    """FLOPs of one pair's forward and backward pass; lengths in tokens, `supervised` over both sides."""

    def seen(window: int | None) -> int:
        whole = (keys(prompt + chosen, window), keys(prompt + rejected, window))
        return sum(whole) - keys(prompt, window)

    pairs = shape.full_layers * seen(None)
    if shape.sliding_layers:
        pairs += shape.sliding_layers * seen(shape.window)
    dense = 2 * (prompt + chosen + rejected) * shape.weights
    attention = 4 * shape.heads * shape.head_dim * pairs
    head = 2 * supervised * shape.hidden * shape.vocabulary
    return 3 * (dense + attention + head)


def keys(tokens: int, window: int | None = None) -> int:
    """(query, key) pairs of a causal document, each query seeing at most `window` keys."""
    growing = tokens if window is None else min(tokens, window)
    return growing * (growing + 1) // 2 + (tokens - growing) * (window or 0)

"""Llama 2 and 3 and what shares their shape: the layers as they stand.

Optional biases and the rotary embedding come from the config.
"""

from __future__ import annotations

from models.layers import Family, layer_specs, mlp, plain_heads

FAMILY = Family(layer_specs=layer_specs, heads=plain_heads, feed_forward=mlp)

"""Exceptions of the models package: a leaf that imports nothing of ours.

    ModelError
    |-- UnsupportedModel   the configuration asks for something we do not compute
    `-- CheckpointError    the files are missing, incomplete or do not fit the configuration

Knows nothing of the engine, which turns these into its own error tree.
"""

from __future__ import annotations


class ModelError(Exception):
    """Base: a model that cannot be served. The message names the key, file or tensor at fault."""


class UnsupportedModel(ModelError):
    """A config.json (or the sharding asked for) that we do not compute. Names the key and value."""


class CheckpointError(ModelError):
    """Weights that are missing, extra, misshaped or unreadable. Names the files and tensors."""

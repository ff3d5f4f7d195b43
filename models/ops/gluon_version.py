"""Importing this fails unless Gluon is the one that our kernels have run with.

Gluon is experimental: names and what a compiler makes of them change between Triton's releases.
Whoever cannot import it takes other kernels.
"""

from __future__ import annotations

import triton

if not triton.__version__.startswith("3.6."):
    raise ImportError(f"Triton {triton.__version__}: kernels in Gluon have run with 3.6 only")

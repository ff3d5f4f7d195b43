"""A part of a bench that never ends by itself."""

from __future__ import annotations

import time

if __name__ == "__main__":
    time.sleep(1000)

"""All cases, in one list (see case.py)."""

from __future__ import annotations

from tests.server import cases_answers, cases_requests
from tests.server.case import CASES, Case

__all__ = ["CASES", "Case", "cases_answers", "cases_requests"]

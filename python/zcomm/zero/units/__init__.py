"""Stage 3 by units: modules whose parameters are gathered around their use."""

from __future__ import annotations

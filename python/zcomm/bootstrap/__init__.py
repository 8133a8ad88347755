"""Bootstrap: from environment variables to ranks that are connected and belong to one job."""

from __future__ import annotations

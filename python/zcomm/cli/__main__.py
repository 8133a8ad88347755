"""`python -m zcomm.cli` is the `zcomm` command."""

from __future__ import annotations

import sys

from zcomm.cli.main import main

sys.exit(main())

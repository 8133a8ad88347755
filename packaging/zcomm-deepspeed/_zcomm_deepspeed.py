"""Appends zcomm's folder of the name ``deepspeed`` to ``sys.path``; zcomm_deepspeed.pth imports this at each start.

zcomm itself is not imported: a start costs a search for it.
"""

from __future__ import annotations

import importlib.util
import os
import sys

_spec = importlib.util.find_spec("zcomm")
for _place in (_spec.submodule_search_locations or ()) if _spec else ():  # an editable zcomm has several
    _folder = os.path.join(_place, "compat", "site")
    if os.path.isdir(_folder) and _folder not in sys.path:
        sys.path.append(_folder)

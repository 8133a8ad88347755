"""Keeps torch.compile out of code that it must not trace.

Source: torch._dynamo.eval_frame.skip_code; its C half is called here, because importing torch._dynamo takes a second.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch


def skip(code: CodeType) -> None:
    """Run frames of ``code`` and their callees without tracing."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action, action))
    elif hasattr(frames, "skip_code"):  # until torch 2.6
        frames.skip_code(code)

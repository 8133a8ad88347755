"""Errors raised in an engine name the engine's methods and configuration keys."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.engine.words import in_engines_words, speaks_of_the_engine

FOREIGN_WORDS = re.compile(
    r"ZeroOptimizer|(?<!\w)close\(\)|\bopt\.(\w+\(|boundary)|\bclip_norm=|grad_accum="
    r"|\b(a|the|another|closed) (a|an|the) engine\b"
)


def engine_of(model: nn.Module, **config: Any) -> Any:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, **config}
    return zcomm.initialize(model=model, config=config)[0]


def thawed(engine: Any, model: nn.Module) -> None:
    model[1].requires_grad_(True)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()


def unscaled(engine: Any, model: nn.Module) -> None:
    engine.destroy()
    engine = engine_of(model, fp16={"enabled": True})
    engine(torch.ones(1, 2).half()).float().sum().backward()
    engine.step()


def of_another_optimizer(engine: Any, model: nn.Module, folder: Path) -> None:
    engine.save_checkpoint(folder)
    engine.destroy()
    model[1].requires_grad_(False)
    engine_of(model, optimizer={"type": "Lion"}).load_checkpoint(folder)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (
            thawed,
            r"frozen when the engine was made.*call save_checkpoint\(\), engine.destroy\(\) and initialize\(\) again",
        ),
        (unscaled, r'"fp16.enabled": true needs engine.backward\(loss\) instead of loss.backward'),
        (of_another_optimizer, r"load only the weights with load_optimizer_states=False"),
    ],
)
def test_a_refusal_names_the_engines_way(refused: Callable[..., None], words: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    engine = engine_of(model)
    with pytest.raises((RuntimeError, ValueError), match=words) as told:
        refused(engine, model, *([tmp_path] if refused is of_another_optimizer else []))
    assert not FOREIGN_WORDS.search(str(told.value))
    for each in zcomm.zero.registry.open_optimizers():
        each.close()


def literals(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module, without docstrings."""
    inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside.update(map(id, node.values))
            parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
            yield "7".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def test_no_message_of_the_optimizer_keeps_its_own_words() -> None:
    found = [
        text
        for file in Path(zcomm.zero.__file__).parent.rglob("*.py")
        for text in literals(ast.parse(file.read_text()))
        if FOREIGN_WORDS.search(text)
    ]
    assert len(found) > 30
    assert [text for text in found if FOREIGN_WORDS.search(in_engines_words(text))] == []


def test_errors_of_the_program_stay_as_they_are() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self) -> torch.Tensor:
            raise ValueError("my ZeroOptimizer: close() it")

    engine = engine_of(Own())
    with pytest.raises(ValueError, match=r"^my ZeroOptimizer: close\(\) it$"):
        engine()
    engine.destroy()
    assert in_engines_words("clip_norm=0.5: ...") == '"gradient_clipping": 0.5: ...'
    assert in_engines_words("clip_norm is 1 on rank 0 and 2") == '"gradient_clipping" is 1 on rank 0 and 2'
    text = in_engines_words(
        f"compression={zcomm.Compression(weights='int8')}: the model is on a device: leave compression= out"
    )
    assert text == '"zero_optimization.zero_quantized_weights": true: the model is on a device: leave that out'
    assert in_engines_words("opt.memory() of opt.weight") == "engine.optimizer.memory() of opt.weight"
    assert speaks_of_the_engine(zcomm.initialize).__name__ == "initialize"

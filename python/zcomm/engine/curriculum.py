"""Arguments that a training forward gets by step: a curriculum's difficulty, and progressive layer drop's share.

Invariant: both depend on nothing but the number of optimizer steps, so that a loaded checkpoint continues them.
Sources: Li et al., "The Stability-Efficiency Dilemma" (2022), for lengths of sequences. Zhang and He, "Accelerating
Training of Transformer-Based Language Models with Progressive Layer Dropping" (2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from zcomm.config import Config

_NEEDED = {
    "fixed_discrete": ("difficulty", "max_step"),
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "custom": (),
}


class CurriculumScheduler:
    """Difficulty by step, from ``min_difficulty`` to ``max_difficulty``.

    config: min_difficulty, max_difficulty, schedule_type and schedule_config, as in the section "curriculum_learning".
    Steps count from 1. path: of the section. Raises: ValueError for a missing or wrong key, which it names.
    """

    def __init__(self, config: Mapping[str, Any], path: str = "curriculum_learning") -> None:
        for name in ("min_difficulty", "max_difficulty", "schedule_type"):
            if config.get(name) is None:
                raise ValueError(f'"{path}.{name}" is missing')
        kind, schedule = config["schedule_type"], dict(config.get("schedule_config") or {})
        if kind not in _NEEDED:
            raise ValueError(f'"{path}.schedule_type": {kind!r}: valid values are {", ".join(_NEEDED)}')
        for name in _NEEDED[kind]:
            if not schedule.get(name):
                raise ValueError(f'"{path}.schedule_config.{name}" is missing for {kind}')
        if kind == "fixed_discrete" and len(schedule["difficulty"]) != len(schedule["max_step"]) + 1:
            raise ValueError(
                f'"{path}.schedule_config": {len(schedule["difficulty"])} difficulties need one max_step '
                f"less, not {len(schedule['max_step'])}"
            )
        if config["min_difficulty"] > config["max_difficulty"]:
            raise ValueError(
                f'"{path}.min_difficulty": {config["min_difficulty"]} is above max_difficulty: '
                f"{config['max_difficulty']}"
            )
        self.state = {name: config[name] for name in ("min_difficulty", "max_difficulty", "schedule_type")}
        self.state |= {"schedule_config": schedule, "current_difficulty": config["min_difficulty"]}
        self._custom: Callable[[int], int] | None = None

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Take the difficulty of schedule_type "custom" from ``schedule_function(step)``."""
        self._custom = schedule_function

    def get_difficulty(self, global_steps: int) -> int:
        """Return the difficulty of a step. Raises: RuntimeError if a custom schedule has no function."""
        low, high, schedule = self.state["min_difficulty"], self.state["max_difficulty"], self.state["schedule_config"]
        kind = self.state["schedule_type"]
        if kind == "custom":
            if self._custom is None:
                raise RuntimeError('schedule_type "custom": call set_custom_get_difficulty(function) first')
            return self._custom(global_steps)
        if kind == "fixed_discrete":
            place = sum(global_steps > last for last in schedule["max_step"])
            return int(schedule["difficulty"][place])
        share = (global_steps / schedule["total_curriculum_step"]) ** (1 / schedule.get("root_degree", 1))
        if kind == "fixed_linear":
            share = global_steps / schedule["total_curriculum_step"]
        reached = math.floor(share * (high - low) + low)
        return int(max(low, min(reached - reached % schedule["difficulty_step"], high)))

    def update_difficulty(self, global_steps: int) -> int:
        """Set the current difficulty to the step's, and return it."""
        self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.get_current_difficulty()

    def get_current_difficulty(self) -> int:
        """Return the difficulty that was set last."""
        return int(self.state["current_difficulty"])

    def set_current_difficulty(self, difficulty: int) -> None:
        """Set the current difficulty until the next update."""
        self.state["current_difficulty"] = difficulty

    def get_state(self) -> dict[str, Any]:
        """Return the settings and the current difficulty."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over a result of ``get_state``."""
        self.state = state


class ProgressiveLayerDrop:
    """Share of layers to keep at a step: (1 - theta) exp(-gamma step) + theta. The model drops them itself."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta, self.gamma = theta, gamma
        self.current_theta = 1.0

    def get_theta(self) -> float:
        """Return the share of the step that was set last."""
        return self.current_theta

    def get_state(self) -> dict[str, Any]:
        """Return the arguments that the model's forward gets."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def update_state(self, global_step: int) -> None:
        """Set the share of a step; the first one is 0."""
        self.current_theta = (1.0 - self.theta) * math.exp(-self.gamma * global_step) + self.theta


class ForwardArguments:
    """An engine's schedules, and the arguments of its training forward."""

    def __init__(self, config: Config) -> None:
        pld, curriculum = config.progressive_layer_drop, config.curriculum_learning
        self.layer_drop = ProgressiveLayerDrop(pld.theta, pld.gamma) if pld.enabled else None
        self.curriculum: CurriculumScheduler | None = None
        if curriculum.enabled:
            schedule = {name: value for name, value in vars(curriculum.schedule_config).items() if value is not None}
            self.curriculum = CurriculumScheduler(vars(curriculum) | {"schedule_config": schedule})
        self._seqlen = curriculum.curriculum_type == "seqlen"

    def at(self, global_steps: int) -> dict[str, Any]:
        """Return the arguments after ``global_steps`` optimizer steps."""
        found: dict[str, Any] = {}
        if self.layer_drop is not None:
            self.layer_drop.update_state(max(global_steps - 1, 0))
            found |= self.layer_drop.get_state()
        if self.curriculum is not None:
            difficulty = self.curriculum.update_difficulty(global_steps + 1)
            found |= {"curriculum_seqlen": difficulty} if self._seqlen else {}
        return found

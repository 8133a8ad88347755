"""State of a ZeroOptimizer that a program reads, replaces or drops: torch's numbers, or an error."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
import torch
from torch import nn

import zcomm

Act = Callable[[Any, nn.Parameter], Any]


def assign(opt: Any, param: nn.Parameter) -> None:
    opt.state = defaultdict(dict)


def delete(opt: Any, param: nn.Parameter) -> None:
    del opt.state[param]


def merge(opt: Any, param: nn.Parameter) -> None:
    opt.state |= {param: {}}


CHANGES: dict[str, Act] = {
    "assign": assign,
    "__setstate__": lambda opt, _: opt.__setstate__({**opt.__getstate__(), "state": defaultdict(dict)}),
    "set": lambda opt, param: opt.state.__setitem__(param, {}),
    "del": delete,
    "|=": merge,
    "clear": lambda opt, _: opt.state.clear(),
    "pop": lambda opt, param: opt.state.pop(param, None),
    "popitem": lambda opt, _: opt.state.popitem(),
    "setdefault": lambda opt, param: opt.state.setdefault(param, {}),
    "update": lambda opt, param: opt.state.update({param: {}}),
    "another entry": lambda opt, param: opt.state.__setitem__(torch.ones(3), opt.state[param]),
    "a parameter's own copy": lambda opt, _: opt.state[torch.ones(3)],
}
# They return entries, which raise when the program reads or changes them.
ENTRIES: dict[str, Act] = {
    "get": lambda opt, param: [entry for entry in [opt.state.get(param)] if entry is not None],
    "items": lambda opt, _: [entry for _, entry in opt.state.items()],
    "values": lambda opt, _: list(opt.state.values()),
    "dict": lambda opt, _: list(dict(opt.state).values()),
    "**": lambda opt, _: list({**opt.state}.values()),
}
USES: dict[str, Callable[[Any], Any]] = {
    "[]": lambda entry: entry["exp_avg"],
    "set": lambda entry: entry.__setitem__("exp_avg", torch.zeros(3)),
    "in": lambda entry: "exp_avg" in entry,
    "len": len,
    "bool": bool,
    "list": list,
    "dict": dict,
    "get": lambda entry: entry.get("exp_avg"),
    "items": lambda entry: entry.items(),
    "clear": lambda entry: entry.clear(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
}
READS: dict[str, Act] = {
    "|": lambda opt, _: opt.state | {},
    "copy": lambda opt, _: copy.copy(opt.state),
    "copy()": lambda opt, _: opt.state.copy(),
    "deepcopy": lambda opt, _: copy.deepcopy(opt.state),
    "pickle": lambda opt, _: pickle.loads(pickle.dumps(opt.state)),
}


@pytest.fixture(autouse=True, scope="module")
def job() -> Iterator[None]:
    zcomm.init()
    yield
    zcomm.shutdown()


def made(optimizer: Any = "adam", **options: Any) -> tuple[nn.ParameterList, Any]:
    model = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))])
    kind = zcomm.ZeroOptimizer if options.pop("zero", True) else lambda model, kind, **o: kind(model.parameters(), **o)
    return model, kind(model, optimizer, **{"lr": 0.125, **options})


def step(model: nn.ParameterList, opt: Any, factor: float) -> None:
    opt.zero_grad()
    sum((param * factor).sum() for param in model).backward()
    opt.step()


@pytest.mark.parametrize("given", [False, True], ids=["named", "given"])
def test_each_access(given: bool) -> None:
    model, opt = made()
    if given:  # the program passes its own optimizer
        opt.close()
        model = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))])
        adam = torch.optim.Adam(model.parameters(), lr=0.125)
        opt = zcomm.ZeroOptimizer(model, adam)
    base: Any = opt.optimizer if given else opt
    for name, act in (READS | ENTRIES).items():
        assert not act(base, model[0]), f"{name}: nothing before the first step, as in torch"
    assert not base.state and model[0] not in base.state and list(base.state) == [] and base.state == {}
    step(model, opt, 1.0)
    assert base.state and len(base.state) == 2 and base.state != {}
    assert [id(param) for param in base.state] == [id(param) for param in base.state.keys()] == list(map(id, model))  # noqa: SIM118
    assert model[0] in base.state and torch.ones(3) not in base.state
    for name, act in ({} if given else CHANGES).items() | READS.items():
        with pytest.raises(RuntimeError, match=r"set_full_optim_state\(.*load_state_dict\("):
            raise AssertionError(f"{name} gave {act(base, model[0])}")
    for name, entries in ENTRIES.items():
        for entry in entries(base, model[0]) or [None]:
            for use, call in USES.items():
                with pytest.raises(RuntimeError, match=r"set_full_optim_state\(.*load_state_dict\("):
                    raise AssertionError(f"{use} of {name} gave {call(entry)}")
    opt.close()


def test_a_loop_that_moves_the_state_to_a_device_changes_nothing() -> None:
    """Run the loop at the end of a Lightning fit: it moves each value that is no mapping, and back."""
    model, opt = made()
    step(model, opt, 1.0)
    entries = list(opt.state.items())
    assert len(entries) == 2
    for param, value in entries:
        assert not isinstance(value, MutableMapping)
        opt.state[param] = value
    before = opt.state_dict()
    step(model, opt, 1.0)
    assert before["state"][0]["step"] == 1 and opt.state_dict()["state"][0]["step"] == 2
    opt.close()


@pytest.mark.parametrize("name", ["assign", "__setstate__"])
def test_state_of_the_given_optimizer_that_is_replaced(name: str) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(3))])
    adam = torch.optim.Adam(model.parameters(), lr=0.125)
    opt = zcomm.ZeroOptimizer(model, adam)
    step(model, opt, 1.0)
    CHANGES[name](adam, model[0])
    with pytest.raises(RuntimeError, match="state of the Adam that was given to this ZeroOptimizer was replaced"):
        step(model, opt, 1.0)
    opt.close()
    assert adam.state == {}
    step(model, adam, 1.0)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "rprop": (torch.optim.Rprop, {}),
    "nadam": (torch.optim.NAdam, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("forgotten", [(0, 1), (0,), (1,)], ids=["all", "first", "last"])
def test_a_state_dict_that_lacks_entries_begins_them_again(name: str, forgotten: tuple[int, ...]) -> None:
    kind, options = OPTIMIZERS[name]
    ends = []
    for zero in (False, True):
        model, opt = made(kind, zero=zero, **options)
        for factor in (1.0, -3.0):
            step(model, opt, factor)
        saved = opt.state_dict()
        opt.load_state_dict(saved | {"state": {n: e for n, e in saved["state"].items() if n not in forgotten}})
        for factor in (-3.0, 2.0, 0.5):
            step(model, opt, factor)
        ends.append([zcomm.zero.full_param(p) if zero else p.detach() for p in model])
        if zero:
            opt.close()
    for wanted, found in zip(*ends, strict=True):
        torch.testing.assert_close(found, wanted)


def test_an_accumulator_that_a_state_dict_lacks_has_its_initial_value() -> None:
    model, opt = made("adagrad", initial_accumulator_value=0.5)
    step(model, opt, 1.0)
    opt.load_state_dict(opt.state_dict() | {"state": {}})
    assert torch.equal(zcomm.zero.full_optim_state(model[1], "sum"), torch.full((5,), 0.5))
    opt.close()


@pytest.mark.parametrize("given", [False, True], ids=["named", "given"])
def test_hooks_of_state_dicts_run(given: bool) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(3))])
    adam = torch.optim.Adam(model.parameters(), lr=0.125)
    opt = zcomm.ZeroOptimizer(model, adam if given else "adam", **({} if given else {"lr": 0.125}))
    seen: list[str] = []
    base = adam if given else opt
    base.register_state_dict_pre_hook(lambda _: seen.append("before"))
    base.register_state_dict_post_hook(lambda _, found: found | {"epoch": 3})
    base.register_load_state_dict_pre_hook(lambda _, saved: {k: v for k, v in saved.items() if k != "epoch"})
    base.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    assert saved["epoch"] == 3 and seen == ["before", "loaded"]
    opt.close()

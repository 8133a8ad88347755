"""Engines without an optimizer, frozen models, and several engines in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zcomm
from tiers import slow
from zcomm.config import ConfigWarning

Run = Callable[..., list[Any]]
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}


@pytest.fixture
def job() -> Iterator[None]:
    """Leave the world of one that initialize() joins."""
    yield
    zcomm.shutdown()


def network(seed: int = 3, frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 3))
    return net.requires_grad_(not frozen)


def config(stage: int, device: str | None = None, folder: Path | str = "", **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if device is not None:
        zero["offload_param"] = {"device": device} | ({"nvme_path": str(folder)} if device == "nvme" else {})
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, **more}


def inputs(seed: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * seed + rank))


PLACES = [(0, None), (1, None), (2, None), (3, None), (3, "cpu"), (3, "nvme")]


def forward_and_save(folder: str) -> None:
    """Forward passes equal rank 0's plain model, with and without no_grad; checkpoints restore the weights."""
    rank = zcomm.init().rank
    want = network(3)
    for number, (stage, device) in enumerate(PLACES):
        for frozen in (False, True):
            net = network(3 + rank, frozen)
            engine, optimizer, loader, schedule = zcomm.initialize(model=net, config=config(stage, device, folder))
            assert (optimizer, engine.optimizer, loader, schedule) == (None, None, None, None)
            for step in range(2):
                with torch.no_grad():
                    assert torch.equal(engine(inputs(step, rank)), want(inputs(step, rank))), (stage, device)
            x = inputs(5, rank).requires_grad_()
            (grad,) = torch.autograd.grad(engine(x).sum(), x)
            assert torch.equal(grad, torch.autograd.grad(want(x).sum(), x)[0])
            assert [param.requires_grad for param in net.parameters()] == [not frozen] * 6
            for call in (lambda e=engine: e.backward(torch.ones(()).requires_grad_()), engine.step, engine.no_sync):
                with pytest.raises(RuntimeError, match="this engine has no optimizer"):
                    call()
            assert (engine.get_lr(), engine.get_mom(), engine.get_global_grad_norm()) == ([], [], None)
            state = engine.module_state_dict()
            assert all(torch.equal(state[name], value) for name, value in want.state_dict().items())
            engine.save_checkpoint(f"{folder}/{number}-{frozen}", client_state={"at": torch.ones(2)})
            other = network(8)
            second = zcomm.initialize(model=other, config=config(stage, device, folder))[0]
            _, client = second.load_checkpoint(f"{folder}/{number}-{frozen}")
            assert torch.equal(client["at"], torch.ones(2))
            with torch.no_grad():
                assert torch.equal(second(inputs(1, rank)), want(inputs(1, rank)))
            second.destroy()
            engine.destroy()


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_forward_and_checkpoints_without_an_optimizer(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(forward_and_save, world_size, str(tmp_path))


def test_a_trained_checkpoint_gives_its_weights(job: None, tmp_path: Path) -> None:
    trained = zcomm.initialize(model=network(), config=config(2, optimizer=ADAMW))[0]
    for step in range(2):
        trained.backward(trained(inputs(step)).square().mean())
        trained.step()
    trained.save_checkpoint(tmp_path)
    untrained = zcomm.initialize(model=network(9), config=config(3, "cpu"))[0]
    untrained.load_checkpoint(tmp_path)
    assert untrained.global_steps == 2
    assert torch.equal(untrained(inputs(7)), trained(inputs(7)))
    trained.destroy()
    untrained.destroy()


def test_a_gradient_that_nothing_would_use_is_an_error(job: None, run_ranks: Run) -> None:
    engine = zcomm.initialize(model=network(), config=config(3))[0]
    with pytest.raises(RuntimeError, match=r"reached the parameter 4\.\w+ of a model without an optimizer"):
        engine(inputs(0)).sum().backward()
    assert all(param.grad is None for param in engine.module.parameters())
    engine.destroy()
    engine.module(inputs(0)).sum().backward()  # an ordinary module again
    plain = zcomm.initialize(model=network(), config=config(1))[0]
    plain(inputs(0)).sum().backward()  # one rank has whole weights, as in torch
    plain.destroy()
    run_ranks(local_gradients, 2)


def local_gradients() -> None:
    engine = zcomm.initialize(model=network(), config=config(0))[0]
    with pytest.raises(RuntimeError, match="only this rank would have"):
        engine(inputs(0)).sum().backward()
    engine.destroy()


def train_what_another_engine_keeps() -> None:
    """TRL keeps the engine that computed a reference's log-probabilities, and trains its module by another engine."""
    x = inputs(0)
    for first_stage, stage in ((0, 0), (1, 1), (2, 2), (0, 3), (2, 0)):
        want, net = network(3), network(3)
        plain = torch.optim.AdamW(want.parameters(), lr=0.01, weight_decay=0.1)
        first = zcomm.initialize(model=net, config=config(first_stage))[0]
        engine = zcomm.initialize(model=net, config=config(stage, optimizer=ADAMW))[0]
        again = zcomm.initialize(model=net, config=config(0))[0] if stage < 3 else None
        for _ in range(3):
            loss, wanted = (engine(x) - 1).square().mean(), (want(x) - 1).square().mean()
            assert abs(loss.item() - wanted.item()) < 1e-6
            engine.backward(loss)
            engine.step()
            wanted.backward()
            torch.nn.utils.clip_grad_norm_(want.parameters(), 1.0)
            plain.step()
            plain.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(first(x), want(x), rtol=1e-5, atol=1e-6)
        engine.destroy()
        with pytest.raises(RuntimeError, match="reached the parameter"):
            first(x).sum().backward()
        for other in (first, again):
            if other is not None:
                other.destroy()


def test_another_engine_may_train_the_module_of_an_engine_without_an_optimizer(run_ranks: Run) -> None:
    run_ranks(train_what_another_engine_keeps, 2)


def test_a_frozen_model_leaves_the_section_optimizer_out(job: None) -> None:
    with pytest.warns(ConfigWarning, match='section "optimizer" .* is not used: nothing is trained'):
        engine, optimizer, *_ = zcomm.initialize(model=network(frozen=True), config=config(2, optimizer=ADAMW))
    assert optimizer is None
    engine.destroy()
    with pytest.raises(ValueError, match=r"no parameter .*requires a gradient"):
        net = network(frozen=True)
        zcomm.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config(2))
    with pytest.raises(ValueError, match="lr_scheduler= needs an optimizer, but nothing is trained"):
        zcomm.initialize(model=network(), lr_scheduler=lambda optimizer: None, config=config(2))


def cast_and_spread() -> None:
    rank = zcomm.init().rank
    for stage in (0, 3):
        settings = config(stage, bf16={"enabled": True})
        engine = zcomm.initialize(model=network(3 + rank), config=settings)[0]
        want = network(3).to(torch.bfloat16)
        x = inputs(0).to(torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(engine(x), want(x))
        engine.destroy()


def test_the_precision_is_that_of_the_configuration(run_ranks: Run) -> None:
    run_ranks(cast_and_spread, 2)


class Alone:
    """One policy and one critic trained only by torch, on the batches of all ranks."""

    def __init__(self, world_size: int) -> None:
        self.policy, self.critic, self.reference, self.reward = (network(seed) for seed in (3, 4, 5, 6))
        self.optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1) for net in self.trained]
        self.world_size = world_size

    @property
    def trained(self) -> tuple[nn.Module, nn.Module]:
        return self.policy, self.critic

    def step(self, number: int) -> list[float]:
        losses = []
        for rank in range(self.world_size):
            both = losses_of(self.policy, self.critic, self.reference, self.reward, inputs(number, rank))
            for loss in both:
                (loss / self.world_size).backward()
            losses.append([loss.item() for loss in both])
        for optimizer in self.optimizers:
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return losses


def losses_of(policy: Any, critic: Any, reference: Any, reward: Any, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        behind, target = F.log_softmax(reference(x), -1), reward(x)
    ahead = F.log_softmax(policy(x), -1)
    return [(ahead - behind).square().mean() + (ahead * target).mean(), F.mse_loss(critic(x), target)]


def four_engines(folder: str) -> list[list[list[float]]]:
    """Return losses of policy and critic trained next to a reference and a reward model, with interleaved calls."""
    rank, runs = zcomm.init().rank, []
    for stage, device in ((0, None), (2, None), (3, None), (3, "cpu"), (3, "nvme")):
        trained = config(stage, device, folder, optimizer=ADAMW)
        plain = config(stage if stage == 3 else 0, device, folder)
        policy, critic = (zcomm.initialize(model=network(seed), config=trained)[0] for seed in (3, 4))
        reference, reward = (zcomm.initialize(model=network(seed), config=plain)[0].eval() for seed in (5, 6))
        run = []
        for step in range(4):
            both = losses_of(policy, critic, reference, reward, inputs(step, rank))
            policy.backward(both[0])
            critic.backward(both[1])
            policy.step()
            critic.step()
            run.append([loss.item() for loss in both])
        runs.append(run)
        for engine in (reference, policy, reward, critic):
            engine.destroy()
    return runs


@pytest.mark.parametrize("world_size", [1, 2])
def test_policy_critic_reference_and_reward_in_one_process(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    alone = Alone(world_size)
    want = [alone.step(step) for step in range(4)]
    for rank, runs in enumerate(run_ranks(four_engines, world_size, str(tmp_path))):
        for run in runs:
            torch.testing.assert_close(
                torch.tensor(run), torch.tensor([step[rank] for step in want]), rtol=1e-5, atol=1e-6
            )

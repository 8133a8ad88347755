"""Eigenvalue: the largest eigenvalue, by its absolute value, of each block's part of the Hessian, by power iteration.

The Hessian is never made: a step multiplies it by a vector, as the gradient of (gradient times vector). Between ranks
the products are averaged, so the values are of the mean loss of all ranks' samples, and equal on all ranks.
Thread rule: one thread, the same calls on every rank. Source: Yao et al., "PyHessian" (arXiv:1912.07145).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zcomm.config import Config
from zcomm.engine.data_ranks import DataRanks

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator

_PATH = "eigenvalue"
Values = dict[int, tuple[float, int]]


class Eigenvalue:
    """Power iteration, block by block.

    verbose: log each value. max_iter: most products of a block. tol: relative change of the value that ends them.
    stability: added to norms before a division. gas_boundary_resolution: optimizer steps from one computation to the
    next. layer_name: dotted path, in the model, of a list of blocks. layer_num: how many of them. Raises: ValueError.
    """

    def __init__(
        self,
        verbose: bool = False,
        max_iter: int = 100,
        tol: float = 1e-2,
        stability: float = 0.0,
        gas_boundary_resolution: int = 1,
        layer_name: str = "",
        layer_num: int = 0,
    ) -> None:
        if not layer_name or layer_num < 1:
            raise ValueError(
                f'"{_PATH}.layer_name": "{layer_name}" and "{_PATH}.layer_num": {layer_num} must name a list of blocks '
                "in the model, and how many of them"
            )
        self.verbose, self.max_iter, self.tol, self.stability = verbose, max_iter, tol, stability
        self.gas_boundary_resolution = gas_boundary_resolution
        self.layer_name, self.layer_num = layer_name, layer_num

    def get_layers(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks. Raises: ValueError if the model does not have them."""
        found: Any = module
        for name in self.layer_name.split("."):
            found = getattr(found, name, None)
        count = len(found) if hasattr(found, "__len__") else None
        if count is None or count < self.layer_num:
            what = "is not a list of modules" if count is None else f"has {count} blocks, not {self.layer_num}"
            raise ValueError(f'"{_PATH}.layer_name": "{self.layer_name}" {what} of {type(module).__name__}')
        return [found[number] for number in range(self.layer_num)]

    def compute_eigenvalue(self, module: nn.Module, device: Any = None, scale: float = 1.0) -> Values:
        """Return by id() of each parameter its block's value, over the largest one, and the block's number.

        The gradients must have a graph: ``loss.backward(create_graph=True)``, with a loss multiplied by ``scale``.
        device: without effect. Empty, with a warning, if a block has none.
        """
        blocks = self.get_layers(module)
        found = []
        for number, block in enumerate(blocks):
            params = [p for p in block.parameters() if p.grad is not None and p.grad.grad_fn is not None]
            if not params:
                logging.getLogger("zcomm").warning(
                    "eigenvalue: block %d has no gradients with a graph: call backward(create_graph=True)", number
                )
                return {}
            grads = [param.grad for param in params if param.grad is not None]
            found.append(self._iterate(number, grads, params, scale, lambda flat: None))
        return self._by_param(blocks, found)

    def of_loss(self, loss: torch.Tensor, module: nn.Module, comm: Communicator | None = None) -> Values:
        """Return the values of a loss that has a graph, which remains. Collective if ``comm`` is given.

        comm: of the ranks with losses to average. Raises: RuntimeError if an operation of the model has no second
        derivative; ValueError for blocks that the model does not have.
        """

        def mean(flat: torch.Tensor) -> None:
            if comm is not None:
                host = flat.cpu()  # itself, on the CPU
                comm.all_reduce(host, op="avg", name="eigenvalue: product")
                flat.copy_(host)

        blocks = self.get_layers(module)
        found = []
        for number, block in enumerate(blocks):
            params = [param for param in block.parameters() if param.requires_grad]
            try:
                grads = torch.autograd.grad(loss, params, create_graph=True, retain_graph=True, allow_unused=True)
                _check_graph(grads)
                found.append(self._iterate(number, grads, params, 1.0, mean))
            except RuntimeError as error:
                if "derivative" not in str(error) and "differentiable" not in str(error):
                    raise
                raise RuntimeError(
                    f"eigenvalue: block {number} of {self.layer_name} has an operation without a second derivative: "
                    f"{error} (attention: use math, or eager, attention)"
                ) from error
        return self._by_param(blocks, found)

    def _iterate(
        self,
        number: int,
        grads: Sequence[torch.Tensor | None],
        params: Sequence[nn.Parameter],
        scale: float,
        mean: Callable[[torch.Tensor], None],
    ) -> float:
        """Return the value of one block. mean: averages a flat product over the ranks, in place."""
        curved = {place: grad for place, grad in enumerate(grads) if grad is not None and grad.requires_grad}
        generator = torch.Generator().manual_seed(number)
        wide = torch.float64 if any(param.dtype == torch.float64 for param in params) else torch.float32
        vector = self._unit([torch.randn(param.shape, generator=generator, dtype=wide) for param in params], params)
        value, before, turn = 1.0, 0.0, 0
        while turn < self.max_iter and value != 0.0 and abs((value - before) / value) >= self.tol:
            before = value
            products: Sequence[torch.Tensor | None] = [None] * len(params)
            if curved:
                given = [vector[place].to(grad.dtype) / scale for place, grad in curved.items()]
                every = list(curved.values())
                products = torch.autograd.grad(every, params, given, retain_graph=True, allow_unused=True)
            flat = torch.cat(
                [
                    torch.zeros(param.numel(), dtype=wide, device=param.device)
                    if product is None
                    else torch.nan_to_num(product.detach(), 0.0, 0.0, 0.0).to(wide).reshape(-1)
                    for product, param in zip(products, params, strict=True)
                ]
            )
            mean(flat)
            value = float(flat.double() @ torch.cat([part.reshape(-1) for part in vector]).double())
            parts = flat.split([param.numel() for param in params])
            vector = self._unit([part.view(param.shape) for part, param in zip(parts, params, strict=True)], params)
            turn += 1
        if self.verbose:
            logging.getLogger("zcomm").info("eigenvalue of block %d: %g, after %d products", number, value, turn)
        return value

    def _unit(self, parts: Sequence[torch.Tensor], params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        norm = float(sum(part.double().square().sum() for part in parts)) ** 0.5 + self.stability
        unit = [part.to(param.device) / norm if norm else part for part, param in zip(parts, params, strict=True)]
        return [torch.nan_to_num(part, 0.0, 0.0, 0.0) for part in unit]

    def _by_param(self, blocks: Sequence[nn.Module], values: list[float]) -> Values:
        found: Values = {}
        for number, (block, value) in enumerate(zip(blocks, self.post_process(values), strict=True)):
            found |= {id(param): (value, number) for param in block.parameters()}
        return found

    def post_process(self, value_list: Sequence[float]) -> list[float]:
        """Return absolute values over the largest one; 1 for a value of 0, which fp16 gives for a small one."""
        largest = max(map(abs, value_list), default=0.0)
        return [abs(value) / largest if value != 0.0 else 1.0 for value in value_list]


def _check_graph(grads: Sequence[torch.Tensor | None]) -> None:
    """Raise RuntimeError for a gradient of a function that is marked with once_differentiable.

    autograd.grad would take it for a constant: the node that raises leads to no parameter.
    """
    nodes = [grad.grad_fn for grad in grads if grad is not None and grad.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node.name() == "torch::autograd::Error":
            raise RuntimeError("a function of the model is not differentiable twice (once_differentiable)")
        new = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= new
        nodes += new


def make_eigenvalue(config: Config, ranks: DataRanks) -> Eigenvalue:
    """Return the computation that the section "eigenvalue" asks for. Raises: ValueError, NotImplementedError."""
    if config.zero_optimization.stage == 3:
        raise NotImplementedError(
            '"eigenvalue" with "zero_optimization.stage": 3 is not available: weights are gathered for one backward '
            "pass, and a product with the Hessian is a second one through the same graph; use stage 2"
        )
    if ranks.model_parallel > 1 or ranks.sequence > 1:
        raise NotImplementedError('"eigenvalue" with ranks that divide a model or samples is not available')
    section = dict(vars(config.eigenvalue))
    del section["enabled"]
    return Eigenvalue(**section)


def summary_events(block_eigenvalue: dict[Any, tuple[float, int]], global_samples: int) -> list[tuple[str, float, int]]:
    """Return the events of a monitor, one for each parameter."""
    return [
        (f"Train/Eigenvalues/ModelBlockParam_{number}", value, global_samples)
        for number, (value, _) in enumerate(block_eigenvalue.values())
    ]

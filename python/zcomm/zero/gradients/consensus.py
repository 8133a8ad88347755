"""GradConsensus: the ranks' agreement on their programs' changes of ``p.grad`` before a step.

Thread rule: as GradientReducer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zcomm.zero.gradients.accumulators import Accumulators
from zcomm.zero.gradients.unsynced import UnsyncedGradients
from zcomm.zero.gradients.user_grads import UserGrads
from zcomm.zero.gradients.values import GradientValues, Passes
from zcomm.zero.groups.mesh_comms import MeshComms
from zcomm.zero.layout.flat import Geometry


class GradConsensus:
    """The ranks' agreement on the gradients of a step.

    params: by number. absent: ``p.grad`` was None when this rank asked last. skipped: not changed by the step.

    taken_over: autograd left gradients of this step on tensors without hooks (``GradientReducer.take_over``).
    coalesces: all passes of this step, on all ranks, are from no_sync(), on purpose. It holds for one step.
    """

    def __init__(
        self,
        passes: Passes,
        params: Sequence[torch.nn.Parameter],
        geometry: Geometry,
        comms: MeshComms,
        grads: UserGrads,
        values: GradientValues,
        local: UnsyncedGradients,
        accumulators: Accumulators,
    ) -> None:
        self._passes = passes
        self._params, self._geometry, self._comms = params, geometry, comms
        self._grads, self._values, self._local, self._accumulators = grads, values, local, accumulators
        self.absent: list[int] = []
        self._assigned: list[int] = []
        self.skipped: frozenset[int] = frozenset()
        self.has_nothing = False  # no rank has a gradient, as ``agree`` has found
        self.taken_over = False
        self.coalesces = self._coalesced = False

    def ask(self) -> bool:
        """Look at each ``p.grad`` before a step. False: no rank has a gradient. Raises: RuntimeError."""
        self.absent, self._assigned = self._grads.held()
        self.skipped, self.has_nothing = frozenset(), False
        self._coalesced, self.coalesces = self.coalesces, False
        if self._passes.stays_local:
            self._coalesced = False
            return self._comms.world.world_size > 1 or len(self.absent) < len(self._params)
        if len(self.absent) == len(self._params):
            self._accumulators.fill()
            return self._comms.world.world_size > 1  # others may have some
        allowed = self._coalesced or self._assigned or self.taken_over
        if self._accumulators.fresh and self._local and not allowed:
            raise RuntimeError("step(): all gradients are from no_sync(); the last backward pass must be outside")
        self._accumulators.fill()
        return True

    @property
    def flag(self) -> bool:
        """Return True if the ranks must agree (``agree``) before a step: this rank has unreduced gradients, or the
        program has dropped or assigned some."""
        return (bool(self._local) and not self._passes.stays_local) or self.is_special

    @property
    def is_special(self) -> bool:
        """Return True if the program has dropped, assigned or coalesced gradients, as far as this rank has asked."""
        return bool(self.absent or self._assigned or self._coalesced)

    def agree(self) -> None:
        """Follow the programs of all ranks: skip dropped gradients, use assigned ones. Collective.

        Raises: RuntimeError naming a parameter that the ranks' programs have treated differently."""
        codes = torch.zeros(len(self._params) + 1, dtype=torch.uint8)  # 1: None, 2: the program's
        local = self._passes.stays_local
        codes[-1] = bool(self._local) and not local
        for code, numbers in enumerate((self.absent, self._assigned), 1):
            codes[numbers] = code
        data = self._comms.data
        every = data.all_gather(codes, name="p.grad of each parameter")
        assert isinstance(every, torch.Tensor)
        every = every.view(data.world_size, -1)
        reduced, assigned = (every[:, :-1] == 0).any(0), (every[:, :-1] == 2).any(0)
        dropped = (every[:, :-1] == 1).any(0)
        differs, text = reduced & (assigned | dropped), ""
        if bool(differs.any()):
            index = int(differs.nonzero()[0])
            words = ("the optimizer's", "None", "set by the program")
            found = ", ".join(f"{words[code]} on rank {rank}" for rank, code in enumerate(every[:, index].tolist()))
            text = (
                f"step(): p.grad of {self._values.names[index]} is {found}: drop, freeze or assign it on all ranks, or "
                "on none"
            )
        skipped = dropped & ~assigned
        told = self._comms.told([text, bool(skipped.all())], "gradients of ranks with other tensors")
        for each in (text, *(other for other, _ in told)):
            if each:
                raise RuntimeError(each)
        self.has_nothing = all(nothing for _, nothing in told)
        if bool(every[:, -1].any()):
            self._values.reduce_rest()
        self._accumulators.finish()
        self.skipped = frozenset(skipped.nonzero().flatten().tolist())
        taken = set(assigned.nonzero().flatten().tolist())
        for index in (*self.skipped, *taken):
            self._values.zero(index)
        if taken:
            self._take_assigned(taken, local)
        self._values.replaced()

    def _take_assigned(self, taken: set[int], local: bool) -> None:
        """Put the ranks' average of the program's own gradients into the accumulators. Collective.

        local: put this rank's own into its local sums ([Note: local gradients]).
        """
        factor = self._values.factor()

        def value_of(number: int) -> torch.Tensor | None:
            index, rows = self._geometry.param_of(number), self._geometry.rows_of(number)
            grad = self._params[index].grad
            if index not in taken or grad is None:
                return None
            value = self._values.dense(index, grad.detach())
            value = (value[rows] if value.dim() else value).to(torch.float32)
            own = self._grads.values_in(index)
            if own is None:
                return value * factor
            own = self._values.dense(index, own)
            return value + (own[rows] if own.dim() else own).to(torch.float32) * (factor - 1.0)

        numbers = {number for index in taken for number in self._geometry.numbers_of(index)}
        if local:
            found = {number: value_of(number) for number in numbers}
            self._local.sums |= {n: value.clone() for n, value in found.items() if value is not None}
            return
        buckets = [b for b in reversed(self._geometry.by_block.buckets) if not numbers.isdisjoint(b.params)]
        self._local.reduce(buckets, value_of)

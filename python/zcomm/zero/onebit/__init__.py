"""1-bit optimizers: whole copies of the state on each rank, which exchange moments with one bit per element."""

from __future__ import annotations

from zcomm.comm.communicator import Communicator
from zcomm.zero.layout.flat import Geometry
from zcomm.zero.onebit.adam import AdamReplicas
from zcomm.zero.onebit.lamb import LambReplicas
from zcomm.zero.onebit.replicas import NoReplicas
from zcomm.zero.onebit.zero_one import ZeroOneReplicas
from zcomm.zero.optim_state.state import OptimState
from zcomm.zero.params.stores import ParameterStore
from zcomm.zero.rules.onebit_rule import OnebitLambRule, ZeroOneAdamRule
from zcomm.zero.rules.rule import Rule


def make_replicas(
    rule: Rule, geometry: Geometry, comm: Communicator, store: ParameterStore, state: OptimState, names: list[str]
) -> NoReplicas:
    """Return the replicas of a rule, still empty. names: of the parameters."""
    if not rule.exchanges:
        return NoReplicas()
    if isinstance(rule, OnebitLambRule):
        return LambReplicas(geometry, comm, store, state, rule, names)
    return (ZeroOneReplicas if isinstance(rule, ZeroOneAdamRule) else AdamReplicas)(geometry, comm, store, state)

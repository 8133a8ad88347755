"""Hints in messages: the known word that is nearest to an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def did_you_mean(word: object, known: Iterable[str], also: Mapping[str, str] | None = None) -> str:
    """Return "; did you mean 'x'?" for the nearest of ``known``, or "" if none is near.

    also: words of other libraries, with their names in zcomm.
    """
    names, text = list(known), str(word)
    near = (also or {}).get(text.lower())
    if near is None:
        by_lower = {name.lower(): name for name in names}
        found = difflib.get_close_matches(text.lower(), by_lower, n=1, cutoff=0.65)
        near = by_lower[found[0]] if found else None
    return f"; did you mean {near!r}?" if near else ""


# Optimizers of torch, DeepSpeed and others that cannot update shards, and why.
_LAMB = "LAMB on shards is zcomm.optim.Lamb (type Lamb), of DeepSpeed's formula; others have formulas of their own"
_MUON = 'Muon on shards is torch.optim.Muon or "muon", and param groups of AdamW have "use_muon": False'
EIGHT_BIT = (
    "its 8-bit state is quantised in blocks of its own kernels, which need whole parameters on a GPU; "
    "zcomm.optim.CPUAdam(..., state_dtype=torch.uint8) has 8-bit state in shards"
)
REFUSED_OPTIMIZERS = {
    "Lamb": _LAMB,  # classes of that name in other libraries
    "FusedLamb": _LAMB,
    "Muon": _MUON,  # classes of these names in other libraries
    "MuonWithAuxAdam": _MUON,
    "SingleDeviceMuon": _MUON,
    "SingleDeviceMuonWithAuxAdam": _MUON,
    "MuSGD": "its rates follow from shapes that muP sets; use SGD with param groups",
    "MuAdam": "its rates follow from shapes that muP sets; use Adam with param groups",
    "MuAdamW": "its rates follow from shapes that muP sets; use AdamW with param groups",
    "Adafactor": "it factors the second moment by rows and columns of whole parameters; use AdamW, with smaller state "
    "zcomm.optim.CPUAdam(..., state_dtype=torch.uint8)",
    "LBFGS": "it searches along lines of all parameters together, and evaluates the model again; use AdamW",
    "SparseAdam": "it is for sparse gradients, which are reduced dense; use Adam",
    **dict.fromkeys(("Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW8bit", "Lion8bit", "SGD8bit"), EIGHT_BIT),
}

"""``deepspeed.compression.basic_layer``: DeepSpeed's classes of prepared layers, for isinstance() only.

``init_compression`` leaves layers their classes, with parametrizations; a layer with any of them is an instance.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from zcomm.compat.deepspeed.modules import names_of
from zcomm.compression import is_prepared


class _Prepared(type):
    """A class that has the prepared layers of ``kind`` as its instances, and makes none."""

    kind: type[nn.Module]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.kind) and is_prepared(instance)

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{cls.__name__}() is not available: init_compression() prepares each nn.{cls.kind.__name__} of a model"
        )


class LinearLayer_Compress(metaclass=_Prepared):
    """A prepared Linear."""

    kind = nn.Linear


class Conv2dLayer_Compress(metaclass=_Prepared):
    """A prepared Conv2d."""

    kind = nn.Conv2d


class Embedding_Compress(metaclass=_Prepared):
    """A prepared Embedding."""

    kind = nn.Embedding


class BNLayer_Compress(metaclass=_Prepared):
    """A prepared BatchNorm2d."""

    kind = nn.BatchNorm2d


__getattr__ = names_of(__name__)

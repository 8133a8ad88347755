"""CurriculumLoader: micro batches of the samples that a DeepSpeedDataSampler chooses.

Thread rule: as Loader. ``curriculum_loader`` is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from zcomm.config import BatchSizes, Config
from zcomm.data import Loader
from zcomm.engine.data_ranks import DataRanks
from zcomm.engine.data_sampling.sampler import DeepSpeedDataSampler

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator


class CurriculumLoader(Loader):
    """Iterable of micro batches. A new iteration continues behind the last one's batches.

    dataset: map-style. post_process_func: of a batch and the sampler's state; None: batches as they are.
    """

    def __init__(
        self, dataset: Any, sampler: DeepSpeedDataSampler, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> None:
        self.dataset = dataset
        self.batch_size = sampler.micro_batch_size
        self.sampler = None
        self.data_sampler = sampler
        self.post_process_func: Callable[[Any, dict[str, Any]], Any] | None = None
        self._collate = default_collate if collate_fn is None else collate_fn

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: samples follow the schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the samples that all ranks have yielded, and the sampler's state."""
        samples = self.data_sampler.consumed_samples
        return {"epoch": 0, "samples": samples, "curriculum": self.data_sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state`` at the next batch. Raises: ValueError for a state of a loader without a curriculum."""
        if "curriculum" not in state:
            raise ValueError(
                "the checkpoint was saved without a curriculum: its position in the data does not apply here"
            )
        self.data_sampler.load_state_dict(state["curriculum"])

    def __iter__(self) -> Iterator[Any]:
        for numbers in self.data_sampler:
            batch = self._collate([self.dataset[number] for number in numbers])
            if self.post_process_func is not None:
                batch = self.post_process_func(batch, self.data_sampler.state_dict())
            yield batch

    def __len__(self) -> int:
        """Return this rank's number of micro batches, of all epochs."""
        return self.data_sampler.total_samples // self.data_sampler.micro_batch_times_data_parallel_size


def curriculum_loader(
    dataset: Any,
    config: Config,
    batch: BatchSizes,
    ranks: DataRanks,
    comm: Communicator,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> CurriculumLoader:
    """Return the loader that the section "data_sampling" asks for. Collective.

    Raises: ValueError, OSError, on all ranks, as DeepSpeedDataSampler, or if the ranks' index files differ.
    """
    from zcomm.zero.agree import ErrorHolder, agree, all_values

    kept = ErrorHolder()
    with kept.errors():
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise ValueError(
                f"a curriculum needs training_data with a length and numbers, not {type(dataset).__name__}"
            )
        sampler = DeepSpeedDataSampler(
            config.data_efficiency,
            len(dataset),
            batch.micro,
            ranks.rank,
            ranks.size,
            None,
            batch.accumulation,
            comm.rank,
            config.dataloader_drop_last,
        )
    agree(comm, kept.error, "reading the index files of a curriculum", "curriculum: index files")
    digests = all_values(comm, sampler.digest(), "curriculum: digest")
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise ValueError(f"the curricula of rank 0 and rank {others[0]} differ: seed, data set or index files")
    return CurriculumLoader(dataset, sampler, collate_fn)

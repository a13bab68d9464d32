"""What several processes have of a module is the same on all of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from tests import processes
from tests.averaging.models import assert_equal, state
from tests.models import Regression, loader
from tests.trainers import pipeline


class Drawn(Regression):
    """One matrix at both ends; random features in a buffer that nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.register_buffer("features", torch.randn(8, 8))

    @staticmethod
    def example(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 8), torch.randn(size, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x @ self.features)))


def without_a_seed(rank: int) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    torch.manual_seed(5 + rank)
    model = Drawn()
    pipeline(2, 2, {"num_microbatches": 2, "split_points": ["between"]}, max_epochs=1).fit(model, loader(Drawn, 16, 8))
    return state(model)


def test_copies_and_buffers_begin_alike_though_each_process_draws_its_own(tmp_path: Path) -> None:
    one, other = processes.results(processes.run(2, without_a_seed, folder=tmp_path))
    assert_equal(one, other)

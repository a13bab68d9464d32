"""Graph networks: sparse matrices in buffers, in the batch and between submodules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_avgpipe.errors import CaptureError
from tests.comparing import assert_equal
from tests.trainers import pipeline, trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*is in beta state")

NODES = 6
RING = torch.eye(NODES) + torch.eye(NODES).roll(1, 0)


class Graphs(L.LightningModule):
    """Its nodes are the samples: no batch can be split."""

    def __init__(self, make: Callable[[Tensor], Tensor] = Tensor.to_sparse) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("ring", make(RING))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(torch.sparse.mm(matrix, x)))
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0], self.ring), batch[1])


class Given(Graphs):
    """The matrix comes with the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0], batch[2]), batch[1])


class Flagged(Graphs):
    """Each layer says of the matrix what it is, as torch_geometric does, which changes no number."""

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        for layer in self.layers:
            matrix = matrix._coalesced_(True)
            degrees = torch.zeros(NODES).index_add_(0, matrix.indices()[0], matrix.values())
            weighted = torch.sparse_coo_tensor(matrix.indices(), matrix.values() / degrees[matrix.indices()[1]])
            x = torch.relu(layer(torch.sparse.mm(weighted, x)))
        return x


class Learned(Graphs):
    """The first layer weighs the edges."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        edges = self.ring.coalesce().indices()
        x = self.layers[0](batch[0])
        weights = torch.sigmoid((x[edges[0]] * x[edges[1]]).sum(1))
        matrix = torch.sparse_coo_tensor(edges, weights, self.ring.shape)
        for layer in self.layers[1:3]:
            x = torch.relu(layer(torch.sparse.mm(matrix, x)))
        return F.mse_loss(self.layers[3](x), batch[1])


def batches(make: Callable[[Tensor], Tensor] = Tensor.to_sparse) -> list[tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(NODES, 8), torch.randn(NODES, 8), make(RING)) for _ in range(3)]


def fit(module: L.LightningModule, data: Any, num_stages: int) -> Any:
    runner = trainer(max_epochs=1) if num_stages == 1 else pipeline(num_stages, max_epochs=1)
    runner.fit(module, DataLoader(data, batch_size=None))
    return runner


@pytest.mark.parametrize(
    ("kind", "make"),
    [(Graphs, Tensor.to_sparse_csr), *((kind, Tensor.to_sparse) for kind in (Given, Flagged, Learned))],
)
def test_stages_compute_with_sparse_matrices_what_one_process_does(
    kind: type[Graphs], make: Callable[[Tensor], Tensor]
) -> None:
    found = []
    for stages in (1, 3):
        module = kind(make)
        fit(module, batches(make), stages)
        found.append({name: p.detach() for name, p in module.named_parameters()})
    assert_equal(*found)


def test_no_cut_separates_who_makes_a_sparse_value_from_who_uses_it() -> None:
    obstacles = fit(Learned(), batches(), 2).strategy.plan.graph.obstacles
    found = [reason for reason in obstacles if reason and "does not travel between stages" in reason]
    assert found and "'sparse_coo_tensor' is a sparse or nested tensor" in found[0]


def test_nested_batches_are_refused_with_what_to_do_instead() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    with pytest.raises(CaptureError, match=r"holds a nested tensor.*to_padded_tensor"):
        fit(Graphs(), [(nested, nested)], 2)

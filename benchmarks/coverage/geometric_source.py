"""Graph networks of torch_geometric, on batches of small graphs: objects, which the strategy does not split."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
import torch
import torch_geometric
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import conv, global_mean_pool
from torch_geometric.nn.models import basic_gnn

from benchmarks.coverage.case import STEPS, Case, Example, Source

GRAPHS, NODES, FEATURES, WIDTH = 6, 8, 5, 16


def _cases() -> Iterator[Case]:
    """All basic networks, and all convolutions that take sizes of inputs and outputs and edges."""
    for name in basic_gnn.__all__:
        yield Case(name, "network", True, [partial(made, name, basic_gnn)])
    for name in sorted(set(conv.__all__) - {"MessagePassing"}):
        yield Case(name, "convolution", True, [partial(made, name, conv)])


class Convolutions(nn.Module):
    """Four layers."""

    def __init__(self, cls: Any) -> None:
        super().__init__()
        sizes = (FEATURES, WIDTH, WIDTH, WIDTH, WIDTH)
        self.layers = nn.ModuleList(cls(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        """Features of nodes."""
        for layer in self.layers:
            x = layer(x, edge_index).relu()
        return x


class GraphClassifier(L.LightningModule):
    """As in the library's introduction."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.head = nn.Linear(WIDTH, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.net(batch.x, batch.edge_index)
        loss = nn.functional.cross_entropy(self.head(global_mean_pool(x, batch.batch)), batch.y)
        self.log("loss", loss, batch_size=batch.num_graphs)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def made(name: str, module: Any) -> Example:
    """A network and graphs."""
    cls = getattr(module, name)
    if module is conv:
        net: nn.Module = Convolutions(cls)
    else:
        special = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([0, 4, 8])}
        net = cls(FEATURES, WIDTH, num_layers=4, **(special if name == "PNA" else {}))
    graphs = [
        Data(torch.randn(NODES, FEATURES), torch.randint(NODES, (2, 20)), y=torch.randint(3, (1,)))
        for _ in range(GRAPHS)
    ]
    return Example(GraphClassifier(net), lambda size: DataLoader(graphs * STEPS, batch_size=size), GRAPHS, 1)


def of_geometric() -> Source:
    """All that is tried of geometric."""
    return Source("torch_geometric", torch_geometric.__version__, _cases())

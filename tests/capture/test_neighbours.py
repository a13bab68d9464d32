"""What a step did not call has a place beside something in the same container that it did."""

from __future__ import annotations

from torch import nn

from lightning_avgpipe.capture.units import neighbours


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.ModuleDict({"image": nn.Sequential(nn.Linear(2, 2)), "text": nn.Sequential(nn.Linear(2, 2))})
        self.layers = nn.ModuleList(nn.ReLU() for _ in range(4))
        self.spare = nn.Linear(2, 2)


def test_the_one_before_comes_first_and_attributes_have_no_neighbours() -> None:
    assert dict(neighbours(Net(), ["inputs.image", "inputs.image.0", "layers.1"])) == {
        "inputs.text": "inputs.image",
        "inputs.text.0": "inputs.image",
        "inputs.text.0.weight": "inputs.image",
        "inputs.text.0.bias": "inputs.image",
        "layers.0": "layers.1",  # there is none before
        "layers.2": "layers.1",
        "layers.3": "layers.1",
    }


def test_a_container_of_which_nothing_is_called_places_nothing() -> None:
    assert [*neighbours(Net(), ["spare"])] == []

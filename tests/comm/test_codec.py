"""Frames: what one end writes, the other reads, also compressed; once for each structure in full."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

from lightning_avgpipe.capture.graph import Value
from lightning_avgpipe.capture.wire_format import FORMATS, Format, wire_bytes
from lightning_avgpipe.comm.codec import (
    CAPACITY,
    Numbering,
    Packet,
    ReceivedStructures,
    TensorForm,
    bytes_after,
    frame_of,
    read_frame,
)
from lightning_avgpipe.comm.message import Message, compressed, decompressed
from lightning_avgpipe.comm.topology import Edge, Route
from lightning_avgpipe.utils.placeholder import Constant
from lightning_avgpipe.utils.random_streams import RandomKey


def received(frame: Tensor) -> Tensor:
    """What a receive gives that was posted for more bytes than came."""
    whole = torch.randint(256, (CAPACITY,), dtype=torch.uint8)
    whole[: frame.numel()] = frame
    return whole


ROUTE = Route(Edge(0, 0, "forward"), 0, 1)


class Line:
    """A writer, and the reader at the other end."""

    def __init__(self) -> None:
        self.numbering, self.known = Numbering(), ReceivedStructures()

    def passed(self, message: Message, route: Route = ROUTE) -> tuple[Message, int, list[Packet]]:
        """What arrives, bytes of the frame, and the packets after it."""
        head = self.numbering.head(route, message)
        frames, (_, packets) = frame_of(head, message), head.structure.packets
        frame = received(frames[0])
        assert bytes_after(frame) == sum(part.numel() for part in frames[1:])
        rest = frames[1] if len(frames) > 1 else None
        came_on, structure, partial = read_frame(frame, rest, self.known, torch.device("cpu"))
        assert (came_on, structure.packets[1], structure.tag) == (route, packets, head.structure.tag)
        flats = [packet.packed(message) for packet in packets]
        assert [flat.numel() for flat in flats] == [packet.nbytes for packet in packets]
        return structure.completed(partial, flats), sum(part.numel() for part in frames), list(packets)


TENSORS = (
    torch.randn(3, 5),
    None,
    torch.randn(4, 2, 3).permute(2, 0, 1),
    torch.empty(0, 3),
    torch.tensor(True),
    torch.randn(2, 6, dtype=torch.float64)[:, ::2],
    torch.randn(7).to(torch.bfloat16),
)


def assert_same(found: Message, wanted: Message) -> None:
    assert found._replace(tensors=()) == wanted._replace(tensors=())
    for tensor, sent in zip(found.tensors, wanted.tensors, strict=True):
        if tensor is None or sent is None:
            assert tensor is sent
        else:
            assert torch.equal(tensor, sent) and tensor.dtype == sent.dtype
            assert tensor.stride() == sent.stride() or not TensorForm.of(sent).order


def test_a_structure_is_sent_once_whichever_the_channel() -> None:
    line, sizes = Line(), []
    for i in range(3):
        for shape in ((2, 3), (4, 3)):
            message = Message(i, (torch.randn(shape),), (True,), (Constant(str(shape)),))
            found, nbytes, _ = line.passed(message)
            assert_same(found, message)
            sizes.append(nbytes)
    assert sizes[2:4] == sizes[4:] and max(sizes[2:]) < min(sizes[:2])
    other = Route(Edge(1, 0, "forward"), 0, 1)
    again = [line.passed(message, route)[1] for route in (other, ROUTE, other)]
    assert again[0] > again[1] == again[2] == sizes[-1]


def test_large_tensors_come_after_the_frame_each_by_itself_and_what_else_does_not_fit_together() -> None:
    small, medium, large = torch.randn(3), torch.randn(CAPACITY // 6).view(2, -1).T, torch.randn(2, 1024, 1024).mT
    message = Message(1, (large, medium, small, None, medium + 1, large + 1, medium + 2), (False,), ("x",))
    line = Line()
    found, nbytes, packets = line.passed(message)
    assert_same(found, message)
    assert [[number for number, *_ in packet.places] for packet in packets] == [[4, 6], [0], [5]]
    assert nbytes <= CAPACITY
    assert packets[1].packed(message).data_ptr() == large.data_ptr()
    for number in (4, 6):  # autograd may keep both, while one is written to
        tensor, version = found.tensors[number], found.tensors[10 - number]._version
        tensor.add_(1)
        assert found.tensors[10 - number]._version == version


def test_a_structure_may_be_longer_than_a_frame() -> None:
    line = Line()
    message = Message(2, (torch.ones(2),), (), ("x" * 3 * CAPACITY,))
    for _ in range(2):
        assert_same(line.passed(message)[0], message)


# -- compressed: near what was sent, right on average, the same each time; what is exact stays so --------------------


KEY = RandomKey(7, 3, 0, 1)
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def travelled(tensor: Tensor, wire: Format, key: RandomKey = KEY, name: str = "forward") -> Tensor:
    """A gradient as it arrives, after its message was pickled as that of another process is."""
    sent = compressed(Message(0, (tensor,)), wire, key, name)
    arrived = decompressed(pickle.loads(pickle.dumps(sent)))
    assert not arrived.decoded and len(arrived.tensors) == 1
    found = arrived.tensors[0]
    return found


def value_of(tensor: Tensor) -> Value:
    return Value(0, "v", tuple(tensor.shape), str(tensor.dtype), tensor.nbytes, True, 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_is_off_by_less_than_a_multiple_of_the_scale_of_its_row(dtype: torch.dtype) -> None:
    tensor = (torch.randn(5, 3, 64) * torch.logspace(-6, 3, 3)[:, None]).to(dtype)
    found = travelled(tensor, "int8")
    step = tensor.double().abs().amax(-1, keepdim=True) / 127
    rounded = step * 127 * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal
    assert found.dtype == dtype
    assert ((found.double() - tensor.double()).abs() <= step * 1.0001 + rounded).all()


def test_bf16_is_what_torch_rounds_to() -> None:
    tensor = torch.randn(8, 16)
    assert torch.equal(travelled(tensor, "bf16"), tensor.bfloat16().float())


def test_int8_is_right_on_average_even_far_below_the_scale() -> None:
    tensor = torch.full((1, 64), 1e-3)
    tensor[0, 0] = 1.0  # a step of the others is 8e-3
    found = torch.stack([travelled(tensor, "int8", RandomKey(0, i)) for i in range(1000)]).mean(0)
    assert found[0, 0] == 1.0
    assert (found[0, 1:].mean() - 1e-3).abs() < 1e-4


def test_rounding_depends_on_its_key_and_name_and_on_nothing_else() -> None:
    tensor = torch.randn(4, 32)
    state = torch.get_rng_state()
    first = travelled(tensor, "int8")
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(travelled(tensor.clone(), "int8"), first)
    assert not torch.equal(travelled(tensor, "int8", name="backward"), first)
    assert not torch.equal(travelled(tensor, "int8", RandomKey(7, 3, 0, 2)), first)


@pytest.mark.parametrize("wire", FORMATS)
def test_what_is_exact_stays_the_same_tensor(wire: Format) -> None:
    exact = [
        torch.arange(64).view(2, 32), torch.ones(2, 32, dtype=torch.bool), torch.tensor(0.3), torch.randn(32),
        torch.randn(2, 0), torch.randn(3, 32, dtype=torch.complex64),
    ]  # fmt: skip
    mask, value = torch.full((2, 32), -torch.inf), torch.randn(2, 32)
    message = Message(4, (*exact, mask, None, value), (True,) * len(exact) + (False, False, True))
    sent = compressed(message, wire, KEY, "forward")
    arrived = decompressed(sent)
    for before, after in zip((*exact, mask, None), arrived.tensors, strict=False):
        assert after is before
    assert not torch.equal(arrived.tensors[-1], value)  # type: ignore[arg-type]
    assert arrived.micro_batch == 4 and arrived.requires_grad == message.requires_grad


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_bytes_are_as_the_plan_counts_them(wire: Format, dtype: torch.dtype) -> None:
    for shape in ((4, 64), (2, 3, 5, 7), (6, 2), (3, 1)):
        tensor = torch.randn(shape).to(dtype)
        sent = compressed(Message(0, (tensor,), (True,)), wire, KEY, "forward")
        assert sum(t.nbytes for t in sent.tensors if t is not None) == wire_bytes(value_of(tensor), wire)
        assert wire_bytes(value_of(tensor), wire) <= tensor.nbytes


@pytest.mark.parametrize("wire", FORMATS)
def test_numbers_that_are_not_finite_do_not_get_lost(wire: Format) -> None:
    tensor = torch.randn(3, 16)
    tensor[0, 2], tensor[1, 5] = torch.inf, torch.nan
    found = travelled(tensor, wire)
    assert not found[0].isfinite().all() and not found[1].isfinite().all() and found[2].isfinite().all()


@pytest.mark.parametrize("wire", FORMATS)
def test_the_order_of_dimensions_in_memory_survives(wire: Format) -> None:
    for tensor in (torch.randn(2, 16, 5, 9).to(memory_format=torch.channels_last), torch.randn(16, 12).t()):
        assert travelled(tensor, wire).stride() == tensor.stride()

"""Frames: what one end writes, the other reads; once for each structure in full."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_avgpipe.comm.codec import CAPACITY, FrameReader, Numbering, Packet, TensorForm, frame_of
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.topology import Edge, Route
from lightning_avgpipe.utils.placeholder import Constant


def received(frame: Tensor) -> Tensor:
    """What a receive gives that was posted for more bytes than came."""
    whole = torch.randint(256, (CAPACITY,), dtype=torch.uint8)
    whole[: frame.numel()] = frame
    return whole


ROUTE = Route(Edge(0, 0, "forward"), 0, 1)


class Line:
    """A writer, and the reader at the other end."""

    def __init__(self) -> None:
        self.numbering, self.reader = Numbering(), FrameReader(torch.device("cpu"))

    def passed(self, message: Message, route: Route = ROUTE) -> tuple[Message, int, list[Packet]]:
        """What arrives, bytes of the frame, and the packets after it."""
        head = self.numbering.head(route, message)
        frames, (_, packets) = frame_of(head, message), head.structure.packets
        frame = received(frames[0])
        assert self.reader.missing(frame) == sum(part.numel() for part in frames[1:])
        opened = self.reader.read(frame, frames[1] if len(frames) > 1 else None)
        assert (opened.route, opened.structure.packets[1]) == (route, packets)
        assert opened.structure.tag == head.structure.tag
        flats = [packet.packed(message) for packet in packets]
        assert [flat.numel() for flat in flats] == [packet.nbytes for packet in packets]
        return opened.message(flats), sum(part.numel() for part in frames), list(packets)


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

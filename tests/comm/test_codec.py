"""Frames: what one end writes, the other reads; once for each structure in full."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_avgpipe.comm.codec import CAPACITY, FrameReader, FrameWriter, Opened, as_bytes
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.utils.placeholder import Constant, TensorMeta


def received(frame: Tensor) -> Tensor:
    """What a receive gives that was posted for more bytes than came."""
    whole = torch.randint(256, (CAPACITY,), dtype=torch.uint8)
    whole[: frame.numel()] = frame
    return whole


def passed(writer: FrameWriter, reader: FrameReader, message: Message, inner: bool = True) -> tuple[Opened, int, bool]:
    """Through both ends; also the bytes that were sent as long as the structure is, and whether that was all."""
    parts, _, tag = writer.write(message, inner)
    frame = received(parts[0])
    assert reader.missing(frame) == sum(part.numel() for part in parts[1:])
    opened = reader.read(frame, parts[1] if len(parts) > 1 else None)
    assert (opened.tensors is not None) == (tag is None) or not any(message.tensors)
    assert tag in (None, opened.tag)
    return opened, sum(part.numel() for part in parts), tag is None


TENSORS = (
    torch.randn(3, 5),
    None,
    torch.randn(4, 2, 3).permute(2, 0, 1),
    torch.empty(0, 3),
    torch.tensor(True),
    torch.randn(2, 6, dtype=torch.float64)[:, ::2],
    torch.randn(7).to(torch.bfloat16),
)


def test_small_messages_are_one_frame() -> None:
    entries = (TensorMeta((3, 5), torch.float32, True, True), Constant("text"))
    message = Message(5, TENSORS, (True, False), entries)
    opened, _, complete = passed(FrameWriter(), FrameReader(), message)
    assert complete and opened.micro_batch == 5
    assert opened.requires_grad == (True, False) and opened.entries == entries
    sent = [t for t in TENSORS if t is not None and t.numel()]
    assert opened.tensors is not None and len(opened.tensors) == len(sent)
    forms = [form for form in opened.forms if form is not None and not form.is_empty]
    for form, tensor, wanted in zip(forms, opened.tensors, sent, strict=True):
        found = form.from_wire(tensor)
        assert torch.equal(found, wanted) and found.dtype == wanted.dtype
        assert tensor.untyped_storage().nbytes() == wanted.numel() * wanted.element_size()
    transposed = forms[1].from_wire(opened.tensors[1])
    assert transposed.stride() == sent[1].stride()


def test_a_structure_is_sent_once() -> None:
    writer, reader = FrameWriter(), FrameReader()
    sizes = []
    for i in range(3):
        for shape in ((2, 3), (4, 3)):
            tensor = torch.randn(shape)
            opened, nbytes, _ = passed(writer, reader, Message(i, (tensor,), (True,), (Constant(str(shape)),)))
            assert opened.micro_batch == i and opened.tensors is not None
            assert torch.equal(opened.tensors[0], tensor)
            sizes.append(nbytes)
    assert sizes[2:4] == sizes[4:] and max(sizes[2:]) < min(sizes[:2])


def test_what_cannot_be_a_key_is_sent_every_time() -> None:
    writer, reader = FrameWriter(), FrameReader()
    for value in (1.5, 2.5, [3]):
        opened, _, _ = passed(writer, reader, Message(0, (), (), (Constant(value),)))
        assert opened.entries[0].value == value


@pytest.mark.parametrize("size", [CAPACITY, CAPACITY // 4])
def test_large_tensors_and_those_on_a_device_come_after_the_frame(size: int) -> None:
    message = Message(1, (torch.randn(size),), (False,), ("x",))
    opened, nbytes, complete = passed(FrameWriter(), FrameReader(), message, inner=size == CAPACITY)
    assert not complete and opened.tensors is None and nbytes < size
    assert opened.forms[0] is not None and opened.forms[0].shape == (size,)


def test_a_structure_that_repeats_has_a_tag_of_its_own_for_what_follows() -> None:
    writer, reader = FrameWriter(), FrameReader()
    for shape in ((3,), (4,), (3,), (4,), (4,)):
        opened, _, complete = passed(writer, reader, Message(0, (torch.ones(shape),)), inner=False)
        assert not complete
        found = None if reader.usual is None else (reader.usual[0], [form.shape for form in reader.usual[1] if form])
        assert found == (None if not opened.tag else (opened.tag, [shape]))
    assert passed(writer, reader, Message(0, (torch.ones(3),)), inner=False)[0].tag != opened.tag > 0


def test_a_structure_may_be_longer_than_a_frame() -> None:
    writer, reader = FrameWriter(), FrameReader()
    message = Message(2, (torch.ones(2),), (), ("x" * 3 * CAPACITY,))
    for _ in range(2):
        opened, _, _ = passed(writer, reader, message)
        assert opened.entries == message.entries and opened.micro_batch == 2


def test_bytes_are_those_of_the_tensor() -> None:
    assert as_bytes(torch.tensor([1, 256], dtype=torch.int16)).tolist() == [1, 0, 0, 1]

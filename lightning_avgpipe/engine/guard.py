"""End an iteration that runs out of memory on all processes, so that another setting can be tried.

::

    stage 0 | F0 F1 F2 B0 .. ..       F1 of stage 1 does not fit: from then on it computes nothing, and says so in what
    stage 1 | F0 !! .. .. .. ..       it sends; who hears of it does the same. Every message comes, and nobody waits.

Only trials use the guard. In training a process that runs out of memory ends all of them, as after any other error.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.errors import MemoryShortage
from lightning_avgpipe.utils.device import is_out_of_memory


class MemoryGuard(Observer):
    """An observer that catches a lack of memory in the actions of one iteration in this process."""

    def __init__(self) -> None:
        self._spoilt = False
        self._account: str | None = None

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        """Run an action, unless an action on this or another process has run out of memory."""
        self._spoilt = self._spoilt or (work.received is not None and work.received.abandoned)
        if not self._spoilt:
            try:
                return do()
            except (MemoryError, RuntimeError) as error:
                self._note(f"stage {work.stage} in {work.action}", error)
        return Message(work.action.micro_batch, (), abandoned=True)

    def run(self, do: Callable[[], None], what: str) -> None:
        """Run something that sends no messages, unless memory has run out."""
        if not self._spoilt:
            try:
                do()
            except (MemoryError, RuntimeError) as error:
                self._note(what, error)

    def _note(self, where: str, error: Exception) -> None:
        """Keep the text of a lack of memory only, since the traceback holds tensors; raise any other error again."""
        if not is_out_of_memory(error):
            raise error
        self._spoilt = True
        self._account = f"{where}: {str(error) or type(error).__name__}"

    def agree(self, processes: Collectives) -> None:
        """Check on all processes that the iteration fitted the memory. Every process must call this.

        Raises:
            MemoryShortage: it did not; the message says where, and what the allocator said.
        """
        accounts = processes.exchange_objects(self._account)
        short = [f"rank {rank}, {account}" for rank, account in enumerate(accounts) if account is not None]
        if short:
            raise MemoryShortage("; ".join(short))

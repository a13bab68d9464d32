"""A simulated accelerator, the device ``sim``: the project's test device where there is no other.

It has devices, streams from pools of 32, events, an allocator that uses memory again at once, pinned memory,
generators, and communicators between processes or threads. What it finds is a
:class:`~tests.simulated.device.Report`:

- races: a kernel that reads or writes what another stream writes or reads, when no event, stream or wait of the host
  puts them in order; the reader gets nonsense, so that a wait that is missing gives wrong numbers as well;
- memory freed early: another stream may still use it when its own stream next needs memory. It is used again at once,
  so this gives wrong numbers too;
- waits of the host, by thread, file and line;
- deadlocks: sends and receives meet, and hold up all that is behind them on their stream, which lets nobody pass.

Limits. Kernels run when they are called, so the host never runs ahead, and nothing is learned about time. Whole blocks
of memory are watched, not parts of them. What one thread of the host has waited for all threads know. There are no
graphs, no autocast and no half-done kernels; what torch's kernels do on several streams of their own is not seen.

So it cannot show: memory that an allocator loses between blocks; how long the host takes beside a kernel; whether a
graph's addresses stay; how often autocast casts a weight. Memory that is freed while another stream has it recorded is
counted until the host knows that stream to be done, and used again before.

The device cannot be taken from a process again, nor does autograd survive a fork beside it: tests run it in processes
of their own (``tests/simulated/process.py``).
"""

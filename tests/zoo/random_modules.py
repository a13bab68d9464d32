"""LightningModules put together at random from a grammar of effects, trained plainly and by stages.

A module is Python source: cells of state, events that read or write them, and odd statements, each at a random place.

::

    cell       where the state is: an attribute, an argparse.Namespace, a closure, a buffer, a generator, ...
    event      use (h = h * f(cell)), count, decay, note (a number of a value or the loss), branch, some only late
    place      before or in a unit, between units, after the loss, in a module's hook, in a hook of Lightning,
               at the end of a context
    oddity     in-place changes, metadata, try and except, checkpoints, tensors kept for the next micro-batch, ...
"""

from __future__ import annotations

import os
import random
import sys
import textwrap
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.errors import AvgPipeError
from tests import processes
from tests.trainers import trainer

WIDTH, ROWS, STEPS = 4, 2, 2

PREAMBLE = """
import argparse, array, collections, contextlib, contextvars, ctypes, dataclasses, io, itertools, math, os, queue
import random, threading, types, weakref
import lightning as L, numpy as np, torch, torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
class Box:
    def __init__(self, v): self.v = v
@dataclasses.dataclass(slots=True)
class Slots: v: float
@dataclasses.dataclass
class Data: v: float
class Keeper(L.Callback): v = 1.0
def keeper(net): return next(one for one in net.trainer.callbacks if type(one) is Keeper)
class Holder(nn.Module):
    def __init__(self): super().__init__(); self.v = 1.0; self.register_buffer("b", torch.ones(()))
class Unit(nn.Module):
    def __init__(self, net): super().__init__(); self.l, self.ref, self.root = nn.Linear(4, 4), weakref.ref(net), [net]
    def forward(self, x): return torch.sin(self.l(x))
class Gives(Unit):
    def forward(self, x): h = super().forward(x); return h, Box(h.detach().mean().item())
class Raises(Unit):
    n = 0
    def forward(self, x):
        self.n += 1
        if self.n % 2: raise ValueError("odd")
        return super().forward(x)
class Norm(Unit):
    def __init__(self, net): super().__init__(net); self.n = nn.BatchNorm1d(4)
    def forward(self, x): return torch.sin(self.n(self.l(x)))
class Scaled(torch.autograd.Function):
    scale = 1.0
    @staticmethod
    def forward(ctx, x): return x * Scaled.scale
    @staticmethod
    def backward(ctx, g): return g * Scaled.scale
"""


class Cell(NamedTuple):
    """A kind of state; ``{s}`` stands for the LightningModule, ``{c}`` for the cell's name, ``{v}`` for a number."""

    made: str  # in the constructor
    get: str
    put: str = ""  # empty: reading it changes it
    top: str = ""  # at the top of the file
    body: str = ""  # in the class


def _held(value: str, get: str, put: str = "") -> Cell:
    """A cell in an attribute: ``get`` and ``put`` follow the attribute's name."""
    return Cell(f"{{s}}.{{c}} = {value}", get if "{c}" in get else f"{{s}}.{{c}}{get}", put and f"{{s}}.{{c}}{put}")


def _buffer(put: str) -> Cell:
    return Cell("{s}.register_buffer('{c}', torch.ones(()))", "{s}.{c}.item()", put)


CELLS = {
    "attribute": _held("1.0", "", " = {v}"),
    "late attribute": Cell("pass", "getattr({s}, '{c}', 1.0)", "{s}.{c} = {v}"),
    "dict": _held("{{'v': 1.0}}", "['v']", "['v'] = {v}"),
    "cache": _held("{{}}", ".setdefault('v', 1.0)", ".update(v={v})"),
    "list": _held("[1.0]", "[-1]", ".append({v})"),
    "deque": _held("collections.deque([1.0], maxlen=2)", "(sum({s}.{c}) / len({s}.{c}))", ".append({v})"),
    "defaultdict": _held("collections.defaultdict(lambda: 1.0)", "['v']", "['v'] = {v}"),
    "Counter": _held("collections.Counter(v=1)", "['v']", ".update(v=1)"),
    "object": _held("Box(1.0)", ".v", ".v = {v}"),
    "nested object": _held("Box(Box([1.0]))", ".v.v[0]", ".v.v[0] = {v}"),
    "object in a tuple": _held("(Box(1.0), 2)", "[0].v", "[0].v = {v}"),
    "slots": _held("Slots(1.0)", ".v", ".v = {v}"),
    "dataclass": _held("Data(1.0)", ".v", ".v = {v}"),
    "argparse.Namespace": _held("argparse.Namespace(v=1.0)", ".v", ".v = {v}"),
    "SimpleNamespace": _held("types.SimpleNamespace(v=1.0)", ".v", ".v = {v}"),
    "array": _held("array.array('d', [1.0])", "[0]", "[0] = {v}"),
    "numpy": _held("np.ones(2)", "[0]", "[0] = {v}"),
    "ctypes": _held("ctypes.c_double(1.0)", ".value", ".value = {v}"),
    "queue": _held("queue.Queue()", "(len({s}.{c}.queue) + 1)", ".put({v})"),
    "StringIO": _held("io.StringIO()", "len({s}.{c}.getvalue())", ".write(str({v})[:1])"),
    "thread local": Cell("{c}.v = 1.0", "getattr({c}, 'v', 1.0)", "{c}.v = {v}", "{c} = threading.local()"),
    "context variable": Cell("pass", "{c}.get()", "{c}.set({v})", "{c} = contextvars.ContextVar('{c}', default=1.0)"),
    "environment": Cell("os.environ.pop('{c}', 0)", "float(os.environ.get('{c}', 1))", "os.environ['{c}'] = str({v})"),
    "global": Cell("pass", "{c}", "{c} = {v}", "{c} = 1.0"),
    "global list": Cell("pass", "{c}[-1]", "{c}.append({v})", "{c} = [1.0]"),
    "class attribute": Cell("pass", "{s}.{c}", "type({s}).{c} = {v}", body="{c} = 1.0"),
    "property": Cell(
        "{s}.h{c} = 1.0", "{s}.{c}", "{s}.{c} = {v}",
        body="@property\ndef {c}(self): return self.h{c}\n@{c}.setter\ndef {c}(self, v): self.h{c} = v",
    ),
    "closure": Cell(
        "pass", "{c}[0]()", "{c}[1]({v})",
        "def make_{c}():\n    v = 1.0\n    def get(): return v\n    def put(w):\n        nonlocal v\n        v = w\n"
        "    return get, put\n{c} = make_{c}()",
    ),
    "function attribute": Cell("pass", "{c}()", "{c}.v = {v}", "def {c}(): return {c}.v\n{c}.v = 1.0"),
    "weak dict": Cell("pass", "{c}.get({s}, 1.0)", "{c}[{s}] = {v}", "{c} = weakref.WeakKeyDictionary()"),
    "buffer": _buffer("{s}.{c}.fill_({v})"),
    "buffer under no_grad": _buffer("with torch.no_grad(): {s}.{c}.mul_(0).add_({v})"),
    "reassigned buffer": _buffer("{s}.{c} = torch.tensor({v})"),
    "buffer's data": _buffer("{s}.{c}.data = torch.tensor({v}).float()"),
    "unit's buffer": Cell("{s}.u1.register_buffer('{c}', torch.ones(()))", "{s}.u1.{c}.item()", "{s}.u1.{c}.add_(1)"),
    "attribute of a unit": Cell("{s}.u1.{c} = 1.0", "{s}.u1.{c}", "{s}.u1.{c} = {v}"),
    "dict of a unit": Cell("{s}.u1.{c} = {{'v': 1.0}}", "{s}.u1.{c}['v']", "{s}.u1.{c}['v'] = {v}"),
    "tensor": _held("torch.ones(())", ".item()", " = torch.tensor({v})"),
    "tensor in place": _held("torch.ones(())", ".item()", ".fill_({v})"),
    "tensor in a dict": _held("{{'v': torch.ones(())}}", "['v'].item()", "['v'] = torch.tensor({v})"),
    "frozen parameter": _held("nn.Parameter(torch.ones(()), requires_grad=False)", ".item()", ".data.fill_({v})"),
    "hidden module": _held("[Holder()]", "[0].v", "[0].v = {v}"),
    "hidden buffer": _held("[Holder()]", "[0].b.item()", "[0].b.fill_({v})"),
    "submodule": _held("Holder()", ".v", ".v = {v}"),
    "dropout": _held("nn.Dropout(0.0)", ".p", ".p = float({v} > 1)"),
    "callback": Cell("pass", "keeper({s}).v", "keeper({s}).v = {v}"),
    "trainer": Cell("pass", "getattr({s}.trainer, '{c}', 1.0)", "{s}.trainer.{c} = {v}"),
    "optimizer": Cell(
        "pass", "{s}.optimizers().param_groups[0]['lr']", "{s}.optimizers().param_groups[0]['lr'] = 0.1 / (1 + {v})",
    ),
    # reading these changes them
    "generator": _held("(1 + 0.1 * k for k in range(99))", "next({s}.{c})"),
    "count": _held("itertools.count(1)", "next({s}.{c})"),
    "cycle": _held("itertools.cycle([1.0, 1.1, 1.2])", "next({s}.{c})"),
    "list iterator": _held("iter([1 + 0.1 * k for k in range(99)])", "next({s}.{c})"),
    "map": _held("map(float, range(1, 99))", "next({s}.{c})"),
    "popped list": _held("[0.1 * k for k in range(99)]", ".pop()"),
    "global count": Cell("pass", "next({c})", top="{c} = itertools.count(1)"),
    "Random": _held("random.Random(0)", ".random()"),
    "RandomState": _held("np.random.RandomState(0)", ".rand()"),
    "default_rng": _held("np.random.default_rng(0)", ".random()"),
    "torch.Generator": _held("torch.Generator().manual_seed(0)", "torch.rand((), generator={s}.{c}).item()"),
}  # fmt: skip

# Only the comparison with plain training sees what docs/your_step.md says each process has of its own, and effects on
# objects that begin after the first micro-batch.
OUTSIDE = frozenset(
    ("callback", "trainer", "environment", "thread local", "queue", "StringIO", "hidden module", "hidden buffer")
)

# Statements between units; {k} is a unit's number.
ODDITIES = (
    "h += 0.1", "h = h.mul_(1.1)", "h[:, 0] *= 0.5", "h.view(-1)[0] = 0.0", "h = h.t().contiguous().t()",
    "h = h.t().contiguous().t()\nif not h.is_contiguous(): h = h * 0.9", "h = h * (1 + 0.01 * h.stride()[0])",
    "if h.requires_grad: h = h * 0.9", "if h.is_leaf: h = h * 0.9", "if h.grad_fn is not None: h = h * 0.9",
    "h = h * (1 + 0.01 * h._version)", "h.tag = 2.0", "h = h * getattr(h, 'tag', 1.0)", "h = h * (1 + 0.1 * len(h))",
    "h = h * (1 + 0.1 * h.storage_offset())", "h = h[1:]\ny = y[1:]\nif len(h) == 0: return None",
    "h.register_hook(lambda g: g * 0.5)", "h = checkpoint(self.extra, h, use_reentrant=False)",
    "h = checkpoint(self.norm, h, use_reentrant=False)", "h = checkpoint(self.extra, h, use_reentrant=True)",
    "with torch.no_grad(): h = h + self.extra(h)", "if h.mean().item() > 0: h = self.extra(h)",
    "h = self.extra(h) if h.abs().max() > 0.5 else h",
    "h, box = self.gives(h)\nh = h * (1 + box.v)\nbox.v = 3.0\nh = h * (1 + box.v)",
    "try: h = self.raises(h)\nexcept ValueError: h = h * 0.9", "try: h = self.raises(h)\nexcept Exception: pass",
    "h = self.norm(h)", "h = self.drop(h)", "self.drop.p = float(self.global_step >= 1)",
    "h = h + 0.1 * self.prev\nself.prev = h.detach().mean(0)", "self.prev = h.detach().mean(0)",
    "if hasattr(self, 'kept'): h = h + 0.1 * self.kept.mean()\nself.kept = h.detach()", "self.kept = h",
    "random.random(); np.random.rand(); torch.rand(1)", "h = h + 0 * random.random()", "random.seed(1)",
    "torch.manual_seed(1)", "self.u{k}.requires_grad_(self.global_step < 1)", "self.u{k}.eval()",
    "self.norm.train(self.global_step < 1)",
    "self.u{k}.l.weight.requires_grad_(False)\nh = h * 0.9\nself.u{k}.l.weight.requires_grad_(True)",
    "h = h * self.u{k}.l.weight.mean()", "h = h * (1 + 0.1 * self.u{k}.l.weight.detach().norm().item())",
    "h = F.linear(h, self.u{k}.l.weight)", "h = Scaled.apply(h)\nScaled.scale *= 0.9",
    "h = h * sum(p.sum() for p in self.extra.parameters())", "h = h.detach() + h", "h = h * (1 + 0.1 * i)",
    "h = h * (1 + 0.1 * self.trainer.global_step)", "batch[1].mul_(0.9)", "batch[0].add_(0.1)",
    "with torch.autograd.set_detect_anomaly(True): h = h * 1.1", "self.units.reverse()", "self.u{k} = self.extra",
    "if self.global_step >= 1: h = self.extra(h)", "if self.global_step >= 1: return None",
    "if i >= 1: h = self.norm(h)", "h = torch.stack([self.extra(one[None])[0] for one in h])",
    "h = torch.vmap(torch.sin)(h)",
)  # fmt: skip
IN_UNITS = (
    "h += 0.1", "x = x.mul_(1.1)", "self.n = getattr(self, 'n', 0) + 1\nh = h / self.n", "h.tag = 2.0",
    "h = h.t().contiguous().t()",
)  # fmt: skip


class Made:
    """The lines of one module, by place, as a random generator chooses them."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.num_units = rng.choice((3, 4))
        self.places: dict[str, list[str]] = {}
        self.top, self.body, self.made = list[str](), list[str](), list[str]()
        self.globals: list[str] = []
        self.kinds: set[str] = set()
        self.reach = rng.choice(("self.ref()", "self.root[0]"))
        for number in range(rng.choice((1, 1, 2, 3))):
            self._cell(rng.choice(list(CELLS)), f"c{number}")
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            lines = rng.choice(ODDITIES).replace("{k}", str(rng.randrange(self.num_units)))
            self._at(f"step {rng.randrange(self.num_units + 1)}", lines)
        if rng.random() < 0.2:
            self._at(f"unit {rng.randrange(self.num_units)}", rng.choice(IN_UNITS))

    def _at(self, place: str, lines: str) -> None:
        self.places.setdefault(place, []).append(lines)

    def _cell(self, kind: str, name: str) -> None:
        cell, rng = CELLS[kind], self.rng
        self.kinds.add(kind)
        self.top.append(cell.top.replace("{c}", name))
        self.body.append(cell.body.replace("{c}", name))
        self.made.append(cell.made.format(s="self", c=name, v="") + f"  # {kind}")
        if kind == "global":
            self.globals.append(name)
        for event in ["use", "write", *rng.choices(("use", "write"), k=rng.choice((0, 0, 1, 2)))]:
            place = self._place(event == "use")
            s = self.reach if place.startswith("unit") else "self"
            get = cell.get.format(s=s, c=name)
            if event == "use":
                factor = f"h = h * (1 + 0.1 * math.tanh({get}))"
                lines = rng.choice((factor, factor, f"if {get} % 2 > 0.9: h = h * 0.9"))
            elif not cell.put:
                lines = get
            else:
                has = "loss.item()" if place == "end" else "h.detach().abs().mean().item()"
                sees = not place.startswith("on_") and place != "finally"
                values = [f"({get}) + 1", f"({get}) * 0.9"] + [has] * sees
                lines = cell.put.format(s=s, c=name, v=rng.choice(values))
            if rng.random() < 0.15:
                late = rng.choice((f"{s}.trainer.global_step >= 1", "i >= 1" if "step" in place else "True"))
                lines = f"if {late}:\n{textwrap.indent(lines, '    ')}"
            self._at(place, lines)

    def _place(self, uses: bool) -> str:
        k = self.rng.randrange(self.num_units)
        places = [f"step {k}", f"unit {k}", f"step {self.num_units}", f"hook {k}", f"pre-hook {k}"]
        others = ["end", "end", "on_train_batch_start", "on_train_batch_end", "finally", f"step {k}", f"unit {k}"]
        return self.rng.choice(places if uses else [*places, *others])

    def lines(self, place: str, indent: int) -> str:
        """The lines at a place, or one that does nothing."""
        return textwrap.indent("\n".join(self.places.get(place, ["pass"])), " " * indent)

    def source(self) -> str:
        """The file."""
        begin = f"        global {', '.join(self.globals)}\n" if self.globals else ""
        units, hooks, steps = "", "", ""
        for k in range(self.num_units):
            units += f"class Unit{k}(Unit):\n    def forward(self, x):\n{begin}        h = torch.sin(self.l(x))\n"
            units += f"{self.lines(f'unit {k}', 8)}\n        return h\n"
            for kind, takes, gives in (("hook", "m, args, h", "h"), ("pre-hook", "m, args", "(h,)")):
                if f"{kind} {k}" in self.places:
                    name = f"hook_{k}_{len(takes)}"
                    register = "register_forward_pre_hook" if kind == "pre-hook" else "register_forward_hook"
                    hooks += f"        def {name}({takes}):\n{begin and '    ' + begin}"
                    hooks += "            h = args[0]\n" * (kind == "pre-hook")
                    hooks += f"{self.lines(f'{kind} {k}', 12)}\n            return {gives}\n"
                    hooks += f"        self.u{k}.{register}({name})\n"
            steps += f"{self.lines(f'step {k}', 8)}\n"
            scope = "finally" in self.places and k == 0
            steps += f"        with self.scope(): h = self.u{k}(h)\n" if scope else f"        h = self.u{k}(h)\n"
        own = "\n".join(f"        self.u{k} = Unit{k}(self)" for k in range(self.num_units))
        return f"""{PREAMBLE}
{chr(10).join(self.top)}
{units}
class Net(L.LightningModule):
{textwrap.indent(chr(10).join(filter(None, self.body)), "    ")}
    def __init__(self):
        super().__init__()
{own}
        self.extra, self.gives, self.raises, self.norm = Unit(self), Gives(self), Raises(self), Norm(self)
        self.drop, self.prev, self.units = nn.Dropout(0.0), torch.zeros(4), [self.u0, self.u1]
{textwrap.indent(chr(10).join(self.made), "        ")}
{hooks}
    @contextlib.contextmanager
    def scope(self):
{begin}        try: yield
        finally:
{self.lines("finally", 12)}
    def on_train_batch_start(self, batch, i):
{begin}{self.lines("on_train_batch_start", 8)}
    def on_train_batch_end(self, outputs, batch, i):
{begin}{self.lines("on_train_batch_end", 8)}
    def training_step(self, batch, i):
{begin}        h, y = batch
{steps}
{self.lines(f"step {self.num_units}", 8)}
        loss = F.mse_loss(h, y)
{self.lines("end", 8)}
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


# -- training --------------------------------------------------------------------------------------------------------


class Fitted(NamedTuple):
    """What training left behind: weights and buffers, how it failed, and how many optimizer steps it made."""

    state: dict[str, torch.Tensor]
    error: str = ""
    is_named: bool = True  # whether the error is one of the package
    steps: int = STEPS


class Verdict(NamedTuple):
    """What training by stages came to: right, refused, caught, wrong, unclear; or invalid: it does not train at all."""

    kind: str
    text: str
    source: str


def judge(seed: int, folder: Path | None = None, **options: Any) -> Verdict:
    """Train a module plainly and by stages, and compare; in two processes if there is a folder for their files."""
    made, rng = Made(seed), random.Random(~seed)
    source = made.source()
    compared = not OUTSIDE.isdisjoint(made.kinds) or ">= 1:" in source or "global_step < 1" in source
    num_stages, num_microbatches = (rng.choice((2, 3)) if folder is None else 2), rng.choice((2, 3))
    expected = fit(source, num_microbatches)
    if expected.error:
        return Verdict("invalid", expected.error, source)
    given = {"num_stages": num_stages, "num_microbatches": num_microbatches, "verify": "auto" if compared else False}
    given |= options
    if folder is None:
        found = fit(source, num_microbatches, given)
    else:
        ranks = processes.everywhere(2, fit, source, num_microbatches, given, folder=folder)
        found = max(ranks, key=lambda rank: (bool(rank.error), not rank.error.startswith("PeerError")))
    how = f"seed {seed}, {num_stages} stages, {num_microbatches} micro-batches: "
    if found.error:
        late = "wrong" if found.steps >= STEPS else "caught" if found.steps else "refused"
        text = f"{how}{found.error} (after {found.steps} steps)"
        return Verdict(late if found.is_named else "unclear", text, source)
    others = [n for n, t in expected.state.items() if not torch.allclose(t, found.state[n], rtol=1e-6, atol=1e-9)]
    return Verdict("wrong" if others else "right", how + ", ".join(others), source)


def fit(source: str, num_microbatches: int, options: Mapping[str, Any] | None = None) -> Fitted:
    """Train two batches, with the options of a strategy; None: plainly."""
    torch.set_num_threads(1)
    name = "random_module"
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, f"{name}.py", "exec"), vars(module))
    torch.manual_seed(0)
    net = (_plain(module.Net, num_microbatches) if options is None else module.Net)().double()
    strategy = None if options is None else AvgPipeStrategy(costs="flops", costs_cache=None, timeout=20, **options)
    given = torch.Generator().manual_seed(1)
    rows = num_microbatches * ROWS
    batches: Any = [list(torch.randn(2, rows, WIDTH, generator=given, dtype=torch.double)) for _ in range(STEPS)]
    running = trainer(
        max_epochs=1, callbacks=[module.Keeper()], strategy=strategy or "auto",
        devices=int(os.environ.get("WORLD_SIZE", 1)) if strategy else 1,
    )  # fmt: skip
    try:
        running.fit(net, DataLoader(batches, batch_size=None))
    except Exception as error:
        return Fitted({}, f"{type(error).__name__}: {error}", isinstance(error, AvgPipeError), running.global_step)
    return Fitted({n: t.detach().clone() for n, t in net.state_dict().items()})


def _plain(cls: type[L.LightningModule], num_microbatches: int) -> type[L.LightningModule]:
    """Return a class that accumulates the gradients of micro-batches, with the hooks once for each batch."""

    def training_step(self: Any, batch: Any, i: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for parts in zip(*(tensor.chunk(num_microbatches) for tensor in batch), strict=True):
            loss = cls.training_step(self, list(parts), i)
            if loss is not None:
                self.manual_backward(loss / num_microbatches)
        optimizer.step()

    plain = type(cls.__name__, (cls,), {"training_step": training_step, "__module__": cls.__module__})
    plain.automatic_optimization = False  # type: ignore[attr-defined]
    return plain

from dataclasses import dataclass
from typing import Any
import torch
from lightning_avgpipe import tree
@dataclass(frozen=True)
class MicroBatch:
    index: int; data: Any; size: int; weight: float
def split(batch, m):
    ts=tree.tensors(batch); n=ts[0].shape[0]; m=min(m,n)
    leaves,spec=tree.flatten(batch)
    out=[[] for _ in range(m)]
    for l in leaves:
        for o,c in zip(out, torch.tensor_split(l,m) if isinstance(l,torch.Tensor) else [l]*m): o.append(c)
    r=[]
    for i,o in enumerate(out):
        d=tree.unflatten(o,spec); s=tree.tensors(d)[0].shape[0]
        r.append(MicroBatch(i,d,s,s/n))
    return r
def split_with(f,b,m): raise NotImplementedError
def merge(outs,sizes):
    if all(o is None for o in outs): return None
    if len(outs)==1: return outs[0]
    def one(*xs):
        if isinstance(xs[0],torch.Tensor):
            if xs[0].ndim==0: return sum(x*(s/sum(sizes)) for x,s in zip(xs,sizes))
            return torch.cat(xs)
        return xs[0]
    fl=[tree.flatten(o) for o in outs]
    return tree.unflatten([one(*xs) for xs in zip(*[f[0] for f in fl])], fl[0][1])

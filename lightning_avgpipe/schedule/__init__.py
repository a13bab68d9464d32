from dataclasses import dataclass
from typing import NamedTuple
class Action(NamedTuple):
    kind: str; micro_batch: int
    def __str__(self): return f"{self.kind}{self.micro_batch}"
@dataclass(frozen=True)
class Schedule:
    name: str; num_stages: int; num_microbatches: int; rows: tuple
def build(name,K,M,advance=0):
    rows=[]
    for k in range(K):
        if name=="forward": rows.append(tuple(Action("F",i) for i in range(M))); continue
        w=M if name=="afab" else min(M,(K-1-k)*(1+(advance if name=="advance_forward" else 0)))
        r=[Action("F",i) for i in range(w)]
        for i in range(M):
            if w+i<M: r.append(Action("F",w+i))
            r.append(Action("B",i))
        rows.append(tuple(r))
    return Schedule(name,K,M,tuple(rows))

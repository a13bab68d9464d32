from torch.utils import _pytree as p
from torch import Tensor
def flatten(o): return p.tree_flatten(o)
def unflatten(l, s): return p.tree_unflatten(l, s)
def tensors(o): return [x for x in p.tree_leaves(o) if isinstance(x, Tensor)]
def map_tensors(f, o): return p.tree_map_only(Tensor, f, o)

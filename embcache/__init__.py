"""Embedding tables larger than memory, trained exactly.

>>> import torch, embcache as ec
>>> model = ec.EmbeddingBagCollection([ec.TableConfig("user", num_embeddings=1000, embedding_dim=16)])
>>> optimizer = ec.optim.SparseOptimizer(model)
>>> batch = ec.KeyedJaggedTensor(["user"], torch.tensor([7, 8, 9]), lengths=torch.tensor([2, 1]))
>>> model(batch)["user"].sum().backward()
>>> optimizer.step()
"""

from . import errors, init, optim, tiers, transfer
from .config import Admission, Expiry, TableConfig
from .jagged import JaggedTensor, KeyedJaggedTensor
from .keyed_tensor import KeyedTensor
from .nn import Embedding, EmbeddingBag, EmbeddingBagCollection, EmbeddingCollection
from .optim import SparseOptimizer
from .planning import MemoryPlan, plan
from .sharded.plan import Placement, ShardingPlan
from .sharded.shard import shard
from .staged import Handle
from .store import EmbeddingStore

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "EmbeddingStore",
    "Expiry",
    "Handle",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "MemoryPlan",
    "Placement",
    "ShardingPlan",
    "SparseOptimizer",
    "TableConfig",
    "__version__",
    "errors",
    "init",
    "optim",
    "plan",
    "shard",
    "tiers",
    "transfer",
]

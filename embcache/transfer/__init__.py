"""Rows out of a store and into another as Parquet files by hash bucket, keyed by id: any number of processes, any
division of tables among them, and any other tool can read them.

``export_store`` writes everything, or what changed since an earlier export; ``import_exports`` reads a full export and
a chain of deltas. Both stream.

>>> import tempfile, torch, embcache as ec
>>> def make():
...     return ec.EmbeddingStore([ec.TableConfig("user", num_embeddings=100, embedding_dim=2)])
>>> store, other = make(), make()
>>> store.load_rows("user", torch.tensor([7]), torch.tensor([[1.0, 2.0]]))
>>> with tempfile.TemporaryDirectory() as folder:
...     manifest = export_store(store, folder)
...     _ = import_exports(other, folder)
>>> manifest.tables[0].rows, other.read_rows("user", torch.tensor([7]))[0]
(1, tensor([[1., 2.]]))
"""

from .export import export_store
from .importing import import_exports
from .manifest import ExportFile, Manifest, State, TableFiles, is_export, verify

__all__ = [
    "ExportFile",
    "Manifest",
    "State",
    "TableFiles",
    "export_store",
    "import_exports",
    "is_export",
    "verify",
]

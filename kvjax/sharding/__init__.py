"""One model on several devices: who holds which part, and what crosses between them.

Tensor parallel devices hold some of the KV heads each, with their queries, their pages, and the
matching parts of the matrices; ``per_shard`` runs a program of one device on each of them, and
``across`` has all that they tell each other. Data parallel groups of them decode rows of their own.
"""

from kvjax.sharding.mesh import (
    check_mesh,
    copies,
    data_groups,
    device_bytes,
    device_mesh,
    groups,
    of_device,
    on,
    shards,
    widened,
)
from kvjax.sharding.program import per_shard, specs

__all__ = [
    "check_mesh",
    "copies",
    "data_groups",
    "device_bytes",
    "device_mesh",
    "groups",
    "of_device",
    "on",
    "per_shard",
    "shards",
    "specs",
    "widened",
]

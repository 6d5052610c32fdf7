"""Addresses of Ray objects as plain bytes, for metadata that travels outside Ray (torch.distributed, pickle).

An `ObjectRef` pickled by Ray outside a task argument pins its object for the rest of the process's life, and pickled
by Python it forgets its owner. An address does neither: it keeps nothing alive. The process that put an object keeps
it, until the dock's controller says that it is free. This is the only place that uses Ray's internal interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray._private import worker as ray_worker


@dataclass(frozen=True)
class Address:
    """Where a Ray object is: its id, the process that owns it, and the owner's last word on it."""

    binary: bytes
    owner: bytes
    status: bytes


def to_address(ref: ray.ObjectRef) -> Address:
    """Address of a referenced object."""
    _, owner, status = _core().serialize_object_ref(ref)
    return Address(ref.binary(), owner, status)


def to_ref(address: Address) -> ray.ObjectRef:
    """A reference to the object at an address, which this process borrows from the owner."""
    object_ref: Any = ray.ObjectRef  # Ray's stub states other argument types than the class takes
    ref = object_ref(address.binary, address.owner)
    _core().deserialize_and_register_object_ref(ref.binary(), ray.ObjectRef.nil(), address.owner, address.status)
    return ref


def _core() -> Any:
    worker: Any = ray_worker.global_worker
    worker.check_connected()
    return worker.core_worker

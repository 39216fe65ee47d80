"""A part of torchrun's store in which nothing is left of ranks that ran before.

After a restart torchrun's agents hand out the store of the first start, with the addresses of ranks that are dead now:
a rank that reads one before its new owner has replaced it waits for a dead rank. So the ranks first agree on a name
that has never been used, and make their group below it.

    rank r   writes a nonce of its own as its greeting, waits for the answer to that nonce: the name; confirms it
    rank 0   answers every greeting, old ones as well, until every rank has confirmed the new name

Answers and confirmations have nonce and name in their keys, so that old ones are never mistaken for new.

One key of torch has no such name: a watchdog of NCCL that gives a collective up sets ``exception_dump`` outside of all
prefixes, to have every rank write down what it did. A rank that is started later would obey it too, and not end before
its monitor does, which takes minutes more than the training. So the first rank deletes it before anyone has a name.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store

_POLL_SECONDS = 0.02
_DUMP_SIGNAL = "exception_dump"


def fresh_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """``store`` below a name on which all ranks of this start have agreed.

    Raises:
        TimeoutError: on the first rank, naming the ranks that did not answer in time; the others get the store's error.
    """
    if rank:
        nonce = uuid.uuid4().hex
        store.set(_greeting(rank), nonce)
        store.wait([_answer(nonce)], timeout)
        name = store.get(_answer(nonce)).decode()
        store.set(_confirmation(name, rank), "")
        return PrefixStore(name, store)
    _without_prefixes(store).delete_key(_DUMP_SIGNAL)
    name = uuid.uuid4().hex
    missing = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([_confirmation(name, other)]):
                missing.remove(other)
            elif store.check([_greeting(other)]):
                store.set(_answer(store.get(_greeting(other)).decode()), name)
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} of {world_size} did not start within {timeout}")
        time.sleep(_POLL_SECONDS if missing else 0)
    return PrefixStore(name, store)


def _without_prefixes(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _greeting(rank: int) -> str:
    return f"optim_dist/greeting/{rank}"


def _answer(nonce: str) -> str:
    return f"optim_dist/answer/{nonce}"


def _confirmation(name: str, rank: int) -> str:
    return f"optim_dist/confirmation/{name}/{rank}"

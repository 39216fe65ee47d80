"""The caches of plans and programs: what they keep, and threads that use one together."""

from __future__ import annotations

import random
import sys
from threading import Thread

from optim_redist._tools.recent import Recent


def test_what_was_used_last_is_kept() -> None:
    recent: Recent[int] = Recent(8)
    for number in range(100):
        recent.put((number,), number)
        assert len(recent) <= 8
        # the first, which is asked for all the time, and the last but one
        assert recent.find((0,)) == 0
        assert recent.find((max(0, number - 1),)) == max(0, number - 1)
    assert recent.find((100 - 9,)) is None
    recent.clear()
    assert (len(recent), recent.find((0,))) == (0, None)


def test_threads_share_a_cache() -> None:
    recent: Recent[int] = Recent(4)
    wrong: list[object] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for turn in range(4000):
                number = draw.randrange(1, 9)
                found = recent.find((number,))
                if found is None:
                    recent.put((number,), number)
                elif found != number:
                    wrong.append((number, found))
                if turn % 100 == 0:
                    recent.clear()
        except Exception as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []

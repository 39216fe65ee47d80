"""A GPU other than the one that tests run on, for what tiles are chosen by."""

from __future__ import annotations

import pytest

from optim_kernels._newton_schulz import tile_choice


def on_an_h200(monkeypatch: pytest.MonkeyPatch, **others: object) -> None:
    """Tiles are chosen as on that GPU, or as on one that is like it but for ``others``."""
    an_h200 = {"is_interpreted": False, "has_gluon": True, "num_multiprocessors": 132, "shared_bytes": 227 << 10}
    for name, value in {**an_h200, **others}.items():
        monkeypatch.setattr(tile_choice, name, lambda *_, value=value: value)

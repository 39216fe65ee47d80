"""The contract of a ``torch.optim`` optimizer, as one table of named checks that every optimizer goes through.

    @pytest.mark.parametrize(("case", "check"), contract([OptimizerCase("AdamW", AdamW, {"lr": 0.01})]), ids=str)
    def test_contract(case, check):
        run_check(case, check)

`CHECKS` maps a name to a check, a function of an `OptimizerCase`; its docstring says what has to hold. Updates are
compared to the last bit. No test framework is needed: a check raises, and `run_check` names the optimizer and the
check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.distributed as dist

from optim_utils.testing._contract_case import OptimizerCase
from optim_utils.testing._contract_state import STATE_CHECKS
from optim_utils.testing._contract_training import TRAINING_CHECKS
from optim_utils.testing.ranks import run_ranks

__all__ = ["CHECKS", "ContractFailure", "OptimizerCase", "contract", "run_check"]

CHECKS: dict[str, Callable[[OptimizerCase], None]] = {**TRAINING_CHECKS, **STATE_CHECKS}


class ContractFailure(AssertionError):
    """An optimizer does not keep the contract; the text says which optimizer, which check, and what was found."""


def contract(cases: Iterable[OptimizerCase]) -> list[tuple[OptimizerCase, str]]:
    """Every (case, check) that applies, for a parametrised test.

    Raises:
        ValueError: if a case skips a check that does not exist, or gives no reason.
    """
    pairs = []
    for case in cases:
        for check, reason in case.skip.items():
            if check not in CHECKS or not reason:
                raise ValueError(f"{case.name} skips {check!r} because {reason!r}: name a check of CHECKS and a reason")
        pairs += [(case, check) for check in CHECKS if check not in case.skip]
    return pairs


def run_check(case: OptimizerCase, check: str) -> None:
    """Run one check, in ranks of its own if the case needs a process group and there is none.

    Raises:
        ContractFailure: if the check does not hold, or the optimizer raises.
        RuntimeError: under ``python -O``, which leaves out the statements that checks are made of.
    """
    if not __debug__:
        raise RuntimeError("the contract's checks are assert statements, which python -O leaves out; run it without -O")
    if case.world_size is None or dist.is_initialized():
        _run_here(case, check)
        return
    backend = "gloo" if case.device == "cpu" else "nccl"
    run_ranks(_run_on_rank, case.world_size, case, check, backend=backend)


def _run_on_rank(rank: int, world_size: int, case: OptimizerCase, check: str) -> None:
    _run_here(case, check)


def _run_here(case: OptimizerCase, check: str) -> None:
    try:
        CHECKS[check](case)
    except Exception as error:
        promise = (CHECKS[check].__doc__ or "").strip()
        raise ContractFailure(
            f"{case.name} fails the check {check!r}\n  promised: {promise}\n  found: {type(error).__name__}: {error}"
        ) from error

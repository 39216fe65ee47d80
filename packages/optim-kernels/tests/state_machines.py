"""State machines of hypothesis, tried with few sequences in every run of the tests and with many in the night."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def try_sequences(machine: type[RuleBasedStateMachine], *, examples: int, steps: int) -> None:
    """Run so many sequences of at most so many steps, the same ones each time."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)  # type: ignore[no-untyped-call]

"""What the optimizer classes are made of: construction, options, the phases of a step, state in and out.

What is where:

    live → planned → stateful → base          the classes, one layer each: interface, plan, state, step; ``_connect``,
                                              ``_extend``, ``_replace`` and ``close`` go from right to left by super()
    options group_checks construction         what comes in,
    parameter_checks agreement                whether it can be distributed, and ranks agree on it,
    before_building                           and what they tell each other first
    entries shards kept_items multipliers     a parameter, this rank's part of it, the items of a step
    bucketed pending_sums                     where parameters lie: in buckets; DTensors' gradients
    messages                                  what ranks tell each other at every step
    layouts                                   which rank holds which elements of a DTensor
    norm step_checks repeated_adamw           inside a step
    states loaded_state whole_state           forms of the state: of this rank, to be loaded, of all ranks,
    state_part interchange consolidation      for torch's checkpoint functions, on one rank,
    moved_state followed_masters              under another plan, beside parameters that others write
    explain remarks                           what is said about all of it
    gradient_dtype planned_views places       the rest
"""

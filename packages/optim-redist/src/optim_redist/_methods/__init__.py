"""The ways to redistribute a tensor: each makes a candidate that ``planners`` costs and ``planning`` chooses from.

What is where:

    candidates                       candidates of a method, or of a way through layouts, with their time and memory
    direct relay forward hierarchical    the methods: their phases, transfer by transfer
    own                              one rank's transfers, without those of others
    exchanges relay_volumes node_volumes borders    what methods move, without transfers
    chunked packed                   under a memory limit: rounds, and a source that is freed before the target is there
    dividing                         layouts divided further, as the layouts on the way of
    spread scatter reduce_inside stopover    plans of several exchanges
    collective_states collective_moves collective_search    sequences of plain collectives
    library in_place                 what a library's collective does, and which messages take no copy
    least_seconds                    what planners take at least
    buckets                          which of many tensors travel together, and in how many rounds
    flow relabel                     maximum flow; which rank gets which part so that most stays
"""

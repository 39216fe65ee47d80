"""What cost models know of a machine, behind ``cost``.

What is where:

    topology        groups of ranks, and the bandwidths of ranks and of the borders of groups
    curves          measured seconds over bytes
"""

"""What ``torch.compile`` sees of this package: an operator for moves of local parts, breaks of its graphs elsewhere.

What is where:

    traced move_operator    functions that become an operator of the graph, and the operator
    call_order              moves of a graph run in the order of their calls
    uncompiled              functions that break the graph
"""

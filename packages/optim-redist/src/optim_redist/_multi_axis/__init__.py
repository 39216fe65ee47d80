"""Searches and bounds behind ``multi_axis`` and ``redistributors``, on plain tuples and integers.

What is where:

    moves names                      moves, what they do to axes and blocks, and how they are printed
    parts steps                      the moves out of a distribution, with blocks left open as long as they cost alike
    codes floor estimate moves_left  what a search knows of a distribution, and the least cost and moves from there
    straight search                  sequences that cost no more than the bound; all others, by A*
    layout notebook                  general layouts, and the planner "notebook"
"""

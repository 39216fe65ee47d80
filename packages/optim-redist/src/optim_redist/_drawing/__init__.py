"""Pictures behind ``pictures``.

What is where:

    grids           which ranks own which cell
    svg figures     the cells and the traffic as SVG, and as figures of matplotlib
"""

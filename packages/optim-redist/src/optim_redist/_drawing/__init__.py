"""Pictures behind ``pictures``: cells, SVG, figures of matplotlib."""

"""What the optimizer classes are made of: construction, options, the phases of a step, state in and out."""

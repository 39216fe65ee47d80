"""Moving gradients and parameters between ranks: the collectives, and what they reduce and gather when."""

"""The parts of ``checkpoint``: what its files hold, how they describe it, and how it gets to other ranks."""

"""Products of Newton–Schulz for Hopper, in Gluon: device code alone, launched from ``_newton_schulz``."""

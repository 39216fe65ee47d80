"""Muon on matrices that are cut over ranks: the way to an owner, the owner's work, and the way back."""

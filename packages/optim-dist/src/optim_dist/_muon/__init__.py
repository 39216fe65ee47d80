"""Muon on matrices that nobody holds whole: travel to an owner, its work there, and the way back."""

"""Muon on matrices that are cut over ranks: the way to an owner, the owner's work, and the way back.

What is where:

    sharded                   who owns which matrix, the exchanges, and the order of a step
    launches plain_torch      the elementwise parts on shards, before and after the owner's work
    owner                     the owner's work: Newton–Schulz on whole matrices
"""

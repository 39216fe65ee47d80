"""Plans at work on tensors: what a rank packs, sends, receives and adds."""

"""What ``torch.compile`` sees of this package: an operator for moves of local parts, breaks of its graphs elsewhere."""

"""A linear layer whose weight and bias are one matrix, so that an optimizer treats them jointly.

    combined_weight = [ weight | bias ]     (out, in + 1), or (out, in) without a bias
    forward(x)      = x @ weight.T + bias

Shampoo's factors of the joined matrix see how weight and bias correlate; a separate bias would be preconditioned as a
vector of its own. Either the layer replaces ``torch.nn.Linear`` in a model (`combine_linears`), or an optimizer joins
each pair only while it works on it (`join_weight_bias`).
"""

from __future__ import annotations

from optim_utils._combined_linear import CombinedLinear, join_weight_bias, split_weight_bias
from optim_utils._linear_swaps import combine_linears, uncombine_linears

__all__ = ["CombinedLinear", "combine_linears", "join_weight_bias", "split_weight_bias", "uncombine_linears"]

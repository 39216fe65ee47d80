"""Where a parameter goes if no rule decides: a list of questions is asked in order, and the first answer decides.

A parameter that no question claims is a hidden matrix, for Muon. If nothing tells which matrices it holds, it is
refused with rules to paste, because a guess that trains badly would be found only weeks later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from optim_utils._combined_linear import CombinedLinear
from optim_utils._routing.fused_weights import is_row_or_column, matrix_view
from optim_utils._routing.leaf import CONVOLUTIONS, Leaf, Refusal, matcher
from optim_utils._routing.matrix_view import MatrixView
from optim_utils._routing.rules import Kind, Role, Rule

__all__ = ["Decision", "decide"]

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_is_norm_class = re.compile(r"norm(\dd)?$", re.IGNORECASE).search
_is_norm_name = matcher("*norm", "*norm[0-9]", "ln_*")
# Biases of more dimensions are vectors too: one per expert, those of queries in relative attention (pos_bias_u), and
# those of positions (attention_biases of LeViT).
_is_bias_name = matcher("bias", "bias_*", "*_bias", "*_bias_?", "*biases")
# Two-dimensional, but no matrices: the decays and skips of state space models (Mamba's A_log and D, A_b_log of Vision
# Mamba, A_logs of VMamba, log_A_real and A_imag of S4D), decays and bonuses of RWKV's heads, relative position biases
# (Swin), scales of heads, and what diffusion transformers add to scales and shifts (scale_shift_table of PixArt).
_is_elementwise_name = matcher(
    *("A_log*", "A_*_log", "log_A_*", "A_imag", "D", "time_decay", "time_first", "time_faaaa", "r_k"),
    *("scale", "*_scale", "*_bias_table", "*_shift_table", "modulation"),
)
_is_embedding_class = re.compile(r"embedding(bag)?$", re.IGNORECASE).search
_is_embedding_name = matcher("wte", "wpe", "emb", "*_emb", "*embed*", "trainable_tokens*")
# Learned tables that no embedding module holds: positions (rel_pos_h of SAM, temporal_pos of MViT), registers, latents,
# and the vectors that others are compared with (codebooks, wav2vec's codevectors, the centroids of NetVLAD).
# Only a parameter's own name says so, since modules with such names may map tokens or positions. W_queries is none: the
# queries of a layer are computed with it.
_is_table_name = matcher(
    *("rel_pos*", "pos", "*_pos", "pos_enc", "pos_encoding", "position*", "*_position*", "*_token", "*_tokens"),
    # in full, since matrices are called after what they map as well (codebook_proj, pos_encoder)
    *("codebook", "codebooks", "codebook_[0-9]", "codevectors", "centroid", "centroids"),
    *("prototype", "prototypes", "prototype_vectors"),
    *("latents", "latents_*", "latent_query", "queries", "??*_queries"),
)
# lm_heads of MusicGen, lm_head_w of modded-nanogpt
_is_lm_head_name = matcher("lm_head*")
# also those of diffusers' transformers (proj_out), of Megatron's models (output_layer) and of XLNet (lm_loss)
_is_head_name = matcher(
    *("output", "output_layer", "output_projection", "proj_out", "head", "head_*", "*_head"),
    *("classifier", "score", "fc", "qa_outputs", "*logits", "lm_loss", "vocab_projector"),
)
# A convolution of at most this many input channels (colours): its (out, in k k) matrix does not map hidden features.
_STEM_CHANNELS = 4


@dataclass(frozen=True)
class Decision:
    """Where a parameter goes and why; ``view`` says which matrices Muon sees in it."""

    kind: Kind
    role: Role
    reason: str
    view: MatrixView | None = None


Question = Callable[[Leaf], Decision | None]


def decide(leaf: Leaf, rule: Rule | None) -> Decision:
    """The decision of the rule if it makes one, else of the first question that has an answer.

    Raises:
        Refusal: if nothing decides, or the tensor does not hold the matrices that were asked for.
    """
    if is_lazy(leaf.param):
        raise Refusal("not initialised yet: run the lazy module once, then route")
    if rule is None or (kind := rule.kind) is None:
        return _first_answer(leaf, _QUESTIONS) or _hidden_matrix(leaf)
    is_explicit = rule.to is not None or rule.role is not None
    if not is_explicit and (frozen := _frozen(leaf)) is not None:
        return frozen
    reason = "rule" if leaf.param.requires_grad else "rule; needs no gradient now"
    if kind == "frozen":
        return Decision("frozen", "frozen", reason)
    if kind == "adamw":
        # without a role in the rule, that which the defaults would choose
        by_default = _first_answer(leaf, _QUESTIONS_OF_ROLE)
        return Decision("adamw", rule.role or (by_default.role if by_default else "matrix"), reason)
    if not leaf.param.is_floating_point():
        raise Refusal(f"Muon takes real floating-point matrices, got {leaf.param.dtype}", "to='adamw'")
    return Decision("muon", "matrix", reason, matrix_view(leaf, rule))


def _first_answer(leaf: Leaf, questions: Iterable[Question]) -> Decision | None:
    return next((decision for question in questions if (decision := question(leaf)) is not None), None)


def _frozen(leaf: Leaf) -> Decision | None:
    return None if leaf.param.requires_grad else Decision("frozen", "frozen", "requires_grad=False")


def _refuse_unsupported(leaf: Leaf) -> None:
    if not leaf.param.is_floating_point():
        raise Refusal(f"dtype {leaf.param.dtype} is not real floating point", "to='adamw'")
    if any(getattr(module, "sparse", False) for module in leaf.modules if isinstance(module, _EMBEDDINGS)):
        raise Refusal("an embedding with sparse gradients, for which neither optimizer is made", "to='frozen'")


def _refuse_flat_shards(leaf: Leaf) -> None:
    """Refuse FSDP1's flat shards: even matrices are one-dimensional there, and to treat them as vectors is a guess."""
    is_part = getattr(leaf.param, "_fsdp_flattened", False) and len(leaf.shape) <= 1
    if is_part or getattr(leaf.param, "_is_flat_param", False):
        raise Refusal(
            "flattened by FullyShardedDataParallel, so that its matrices are gone: use fully_shard in its place",
            "to='adamw'",
        )


def _vector(leaf: Leaf) -> Decision | None:
    return Decision("adamw", "vector", f"{len(leaf.shape)}-D") if len(leaf.shape) <= 1 else None


def _magnitude(leaf: Leaf) -> Decision | None:
    return Decision("adamw", "vector", "magnitudes of a weight norm") if leaf.is_magnitude else None


def _if_called(matches: Callable[[str], object], role: Role, reason: str) -> Question:
    """The question whether the parameter itself has a matching name."""
    decision = Decision("adamw", role, reason)
    return lambda leaf: decision if any(map(matches, leaf.own_names)) else None


def _norm(leaf: Leaf) -> Decision | None:
    is_norm = any(_is_norm_class(base.__name__) for module in leaf.modules for base in type(module).__mro__)
    if not leaf.modules:
        is_norm = leaf.is_called(_is_norm_name)
    return Decision("adamw", "vector", "norm module") if is_norm else None


def _embedding(leaf: Leaf) -> Decision | None:
    # by the class's name: the embeddings of other libraries need not derive from torch's
    if any(_is_embedding_class(base.__name__) for module in leaf.modules for base in type(module).__mro__):
        return Decision("adamw", "embedding", "embedding module")
    return Decision("adamw", "embedding", "embedding by name") if leaf.is_called(_is_embedding_name) else None


def _head(leaf: Leaf) -> Decision | None:
    """An adaptive softmax's, ``lm_head*`` and BERT's ``predictions.decoder`` anywhere; else a top-level linear layer.

    So not BERT's ``output.dense``. A convolution over single elements is a linear layer, too.
    """
    if leaf.is_softmax_output:
        return Decision("adamw", "head", "output layer of an adaptive softmax")
    is_pointwise = leaf.is_in(*CONVOLUTIONS) and set(leaf.shape[2:]) == {1}
    is_linear = is_pointwise or leaf.is_in(nn.Linear, CombinedLinear) or (not leaf.modules and len(leaf.shape) == 2)
    for path in leaf.paths:
        if any(map(_is_lm_head_name, path)):
            return Decision("adamw", "head", "lm_head")
        if path[-3:-1] == ("predictions", "decoder") and is_linear:
            return Decision("adamw", "head", "output layer by name")
        if len(path) == 2 and _is_head_name(path[0]) and is_linear:
            return Decision("adamw", "head", "top-level output layer")
    return None


def _first_convolution(leaf: Leaf) -> Decision | None:
    for module in leaf.modules:
        if isinstance(module, CONVOLUTIONS):
            if module.groups > 1 and module.groups == module.in_channels:
                return Decision("adamw", "matrix", "depthwise convolution")
            if module.in_channels <= _STEM_CHANNELS:
                return Decision("adamw", "matrix", f"convolution of {module.in_channels} input channels")
    return None


def _row_or_column(leaf: Leaf) -> Decision | None:
    """A gate with one output, a one-channel filter, a learned token: one row or column has nothing to orthogonalize."""
    return Decision("adamw", "vector", "one row or column") if is_row_or_column(leaf) else None


def _hidden_matrix(leaf: Leaf) -> Decision:
    view = matrix_view(leaf)
    if leaf.is_in(*CONVOLUTIONS):
        reason = "hidden convolution"
    else:
        reason = "experts" if len(leaf.shape) == 3 else "hidden matrix"
    if view.split:
        reason += ", fused gates" if leaf.is_in(nn.RNNBase, nn.RNNCellBase) else ", fused by name"
    return Decision("muon", "matrix", reason, view)


_QUESTIONS_OF_ROLE: tuple[Question, ...] = (
    _vector,
    _magnitude,
    _if_called(_is_bias_name, "vector", "bias by name"),
    _if_called(_is_elementwise_name, "vector", "elementwise by name"),
    _norm,
    _embedding,
    _head,
    _first_convolution,
    _row_or_column,
    _if_called(_is_table_name, "embedding", "learned table by name"),
)
_QUESTIONS = (_frozen, _refuse_unsupported, _refuse_flat_shards, *_QUESTIONS_OF_ROLE)

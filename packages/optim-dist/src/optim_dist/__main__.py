"""``python -m optim_dist plan --model d32 --world 64``: who would own what, and what a step would send."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from optim_dist._optimizers.explain import describe_plan, plan_text
from optim_dist.plan import Plan
from optim_dist.planning import make_plan

Shapes = dict[str, tuple[int, ...]]


def gpt2(layers: int, width: int, vocabulary: int = 50304, context: int = 1024) -> Shapes:
    """GPT-2 with biases and a tied head."""
    shapes: Shapes = {"wte": (vocabulary, width), "wpe": (context, width)}
    for number in range(layers):
        prefix = f"h.{number}."
        shapes |= {f"{prefix}ln_1.{part}": (width,) for part in ("weight", "bias")}
        for name, out, into in (("c_attn", 3 * width, width), ("c_proj", width, width)):
            shapes |= {f"{prefix}{name}.weight": (out, into), f"{prefix}{name}.bias": (out,)}
        shapes |= {f"{prefix}ln_2.{part}": (width,) for part in ("weight", "bias")}
        for name, out, into in (("c_fc", 4 * width, width), ("m_proj", width, 4 * width)):
            shapes |= {f"{prefix}{name}.weight": (out, into), f"{prefix}{name}.bias": (out,)}
    return shapes | {f"ln_f.{part}": (width,) for part in ("weight", "bias")}


def nanochat(layers: int, width: int, vocabulary: int = 65536) -> Shapes:
    """nanochat's GPT: no biases, no norm weights, an untied head."""
    shapes: Shapes = {"wte": (vocabulary, width)}
    for number in range(layers):
        shapes |= {f"h.{number}.attn.{name}": (width, width) for name in ("c_q", "c_k", "c_v", "c_proj")}
        shapes |= {f"h.{number}.mlp.c_fc": (4 * width, width), f"h.{number}.mlp.c_proj": (width, 4 * width)}
    return shapes | {"lm_head": (vocabulary, width)}


def llama(layers: int, width: int, hidden: int, vocabulary: int = 32000) -> Shapes:
    """Llama: gated MLPs, two norms a layer."""
    shapes: Shapes = {"tok_embeddings": (vocabulary, width)}
    for number in range(layers):
        shapes |= {f"layers.{number}.attention.{name}": (width, width) for name in ("wq", "wk", "wv", "wo")}
        shapes |= {f"layers.{number}.mlp.{name}": (hidden, width) for name in ("gate", "up")}
        shapes[f"layers.{number}.mlp.down"] = (width, hidden)
        shapes |= {f"layers.{number}.{name}": (width,) for name in ("attention_norm", "mlp_norm")}
    return shapes | {"norm": (width,), "output": (vocabulary, width)}


MODELS = {
    "gpt2": lambda: gpt2(12, 768),
    "d20": lambda: nanochat(20, 1280),
    "d32": lambda: nanochat(32, 2048),
    "llama-7b": lambda: llama(32, 4096, 11008),
}


def plan_of(
    model: str, world_size: int, mode: str, dtype: torch.dtype, state_dtype: str | None = None, **options: Any
) -> Plan:
    """The plan of a model in ``MODELS``; with ``mode="muon"`` the matrices of its layers go to Muon.

    ``state_dtype`` is that of AdamW's moments; ``options`` are those of ``make_plan``.
    """
    shapes = MODELS[model]()
    inside = [name for name, shape in shapes.items() if len(shape) == 2 and name.startswith(("h.", "layers."))]
    matrices = inside if mode == "muon" else []
    groups: list[dict[str, Any]] = [
        {"kind": "muon", "params": matrices},
        {"kind": "adamw", "params": [name for name in shapes if name not in set(matrices)], "state_dtype": state_dtype},
    ]
    return make_plan(shapes, groups, world_size, dtype=dtype, **options)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m optim_dist", description="Plans of optim-dist, without ranks.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("plan", help="who owns what, and what a step sends")
    command.add_argument("--model", choices=list(MODELS), required=True, help="d20 and d32 are nanochat's GPTs")
    command.add_argument("--world", type=int, required=True, help="number of ranks")
    mode = "muon: matrices of the layers by Muon, the rest by AdamW (default); adamw: all by AdamW"
    command.add_argument("--mode", choices=["muon", "adamw"], default="muon", help=mode)
    dtypes = ["bfloat16", "float16", "float32"]
    command.add_argument("--dtype", choices=dtypes, default="bfloat16", help="of parameters (default: bfloat16)")
    command.add_argument("--grad-dtype", choices=dtypes, help="of gradients (default: the parameters')")
    command.add_argument("--reduce-dtype", choices=dtypes, help="of gradients on the wire (default: their own)")
    state_dtype = "of AdamW's moments: int8 cuts parameters between blocks of 256 elements; others change no plan"
    command.add_argument("--state-dtype", choices=["int8"], help=state_dtype)
    command.add_argument("--bucket-mb", type=float, help="2^20 bytes of a bucket, roughly (default: chosen)")
    command.add_argument("--json", action="store_true", help="print JSON for machines")
    options = parser.parse_args(arguments)
    dtype, grad_dtype, reduce_dtype = (
        name and getattr(torch, name) for name in (options.dtype, options.grad_dtype, options.reduce_dtype)
    )
    sizes: dict[str, Any] = {"bucket_mb": options.bucket_mb, "grad_dtype": grad_dtype, "reduce_dtype": reduce_dtype}
    try:
        plan = plan_of(options.model, options.world, options.mode, dtype, options.state_dtype, **sizes)
    except ValueError as error:
        command.error(str(error))
    data = describe_plan(plan)
    try:
        print(json.dumps(data) if options.json else plan_text(plan, data), flush=True)
    except BrokenPipeError:
        # the reader, `head` for example, has closed the pipe: what Python still flushes at its end goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

"""Train a small GPT on real text with this project's optimizers, beside ``torch.optim.AdamW``.

    uv run benchmarks/train_gpt.py                                            # CPU, or the GPU if there is one
    uv run torchrun --nproc-per-node 2 benchmarks/train_gpt.py                # ZeRO-2 on two ranks
    uv run benchmarks/train_gpt.py --model d12 --steps 200                    # nanochat's sizes, in bf16, on a GPU
    uv run benchmarks/train_gpt.py --resume                                   # go on after an interruption

It ends with a table and leaves ``curves.png``, ``results.json`` and a checkpoint an arm in ``--out``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

# Run as a script, Python's path starts at this folder; the modules are named from the one above.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arguments import RequestError, count
from benchmarks.gpt.arms import SWEEP, TUNED, newest_checkpoint
from benchmarks.gpt.data import Corpus, load_corpus
from benchmarks.gpt.display import Display
from benchmarks.gpt.model import MODELS
from benchmarks.gpt.results import HEADER, Result, draw_curves, write_json
from benchmarks.gpt.training import Settings, train
from benchmarks.ranks import end_ranks
from benchmarks.report import command, machine, versions
from optim_dist.checkpoint import CheckpointError

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

TITLES = {"muon": "Muon + AdamW (this project)", "adamw": "AdamW (torch.optim)"}


def main(arguments: list[str] | None = None) -> list[Result]:
    options = _parse(arguments)
    with _sole_run_in(options.out):
        return _main(options)


def _main(options: argparse.Namespace) -> list[Result]:
    device = _start_ranks(options.device)
    is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
    settings = _settings(options, device)
    corpus = load_corpus(options.data, context=options.context)
    display = Display(enabled=is_first_rank)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    display.note(
        f"{options.model} on {device.type} x {world_size}, {settings.steps} steps of "
        f"{settings.batch_size} x {settings.context} bytes; text: {corpus.source}, "
        f"{len(corpus.train):,} training and {len(corpus.validation):,} validation bytes"
    )
    runs = [(arm, lr) for arm in options.arms for lr in _learning_rates(arm, options)]
    folders = [_checkpoints(arm, lr, options) for arm, lr in runs]
    if not options.resume:
        _remove_earlier_run(folders, is_first_rank)
    elif missing := [folder.name for (arm, _), folder in zip(runs, folders) if not newest_checkpoint(arm, folder)]:
        display.note(f"--resume found no {' and no '.join(missing)} in {options.out}: begins at step 0 there")
    results = [_run(arm, lr, settings, corpus, options, display) for arm, lr in runs]
    if is_first_rank and all(r.history.validation for r in results):
        display.table(HEADER, [r.row() for r in results])
        about = {
            "command": command(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "world_size": world_size,
            "model": {"name": options.model} | asdict(settings.config),
            "settings": {k: str(v) for k, v in vars(settings).items() if k != "config"},
        }
        write_json(options.out / "results.json", results, about)
        title = f"GPT {options.model} on {corpus.source}, {world_size} rank(s)"
        draw_curves(options.out / "curves.png", results, title)
        display.note(f"wrote {options.out / 'curves.png'} and {options.out / 'results.json'}")
    done = min(r.history.step for r in results)
    if done < settings.steps:
        display.note(f"stopped after step {done} of {settings.steps}; --resume goes on from there")
    if dist.is_initialized():
        end_ranks()
    return results


def _learning_rates(arm: str, options: argparse.Namespace) -> list[float]:
    lr = options.lr or getattr(TUNED[options.model], arm)
    return [factor * lr for factor in SWEEP] if options.sweep else [lr]


def _checkpoints(arm: str, lr: float, options: argparse.Namespace) -> Path:
    return options.out / f"checkpoints-{f'{arm}-{lr:g}' if options.sweep else arm}"


@contextmanager
def _sole_run_in(folder: Path) -> Iterator[None]:
    """Refuse a folder in which another run is under way: each would remove and replace what the other one writes.

    Windows has no such lock; there nothing is refused.
    """
    if fcntl is None or int(os.environ.get("RANK", "0")):  # the first rank does so for all
        yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another run is under way in --out {folder}; wait for it, or give another --out"
            raise RequestError(message) from None
        yield
    finally:
        os.close(opened)


def _remove_earlier_run(folders: list[Path], is_first_rank: bool) -> None:
    """Of all arms before the first one starts: what a run that is interrupted resumes from is its own."""
    if is_first_rank:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    if dist.is_initialized():
        dist.barrier()


def _run(
    arm: str, lr: float, settings: Settings, corpus: Corpus, options: argparse.Namespace, display: Display
) -> Result:
    with display.progress(TITLES[arm], settings.steps) as progress:
        history = train(
            arm,
            lr,
            settings,
            corpus,
            checkpoints=_checkpoints(arm, lr, options),
            resume=options.resume,
            stop_at=options.stop_at,
            progress=progress,
        )
    return Result(arm, TITLES[arm], lr, history)


def _settings(options: argparse.Namespace, device: torch.device) -> Settings:
    large = options.model in ("d12", "d20")
    dtype = {"auto": "bfloat16" if large else "float32"}.get(options.dtype, options.dtype)
    return Settings(
        config=MODELS[options.model],
        steps=options.steps,
        batch_size=options.batch_size,
        context=options.context,
        seed=options.seed,
        warmup_steps=max(1, options.steps // 30),
        max_norm=options.max_norm,
        beside_muon=TUNED[options.model].beside_muon,
        device=device,
        dtype=getattr(torch, dtype),
        eval_every=max(1, options.steps // 10),
        eval_batches=options.eval_batches,
        save_every=options.save_every,
    )


def _start_ranks(requested: str) -> torch.device:
    """The device of this process; joins the process group that torchrun prepared, if it did."""
    kind = requested if requested != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if "WORLD_SIZE" not in os.environ:
        return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timedelta(minutes=5))
        return device
    # torchrun gives every rank one thread unless told otherwise; share the cores instead
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    return torch.device(kind)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="small", help="size of the GPT (default: %(default)s)")
    parser.add_argument("--arms", nargs="+", choices=list(TITLES), default=list(TITLES), help="what to train")
    parser.add_argument("--lr", type=float, help="learning rate of the arms (default: the tuned one of each)")
    parser.add_argument("--sweep", action="store_true", help="train every arm at half, once and twice its rate")
    parser.add_argument("--steps", type=count, default=300, help="default: %(default)s")
    parser.add_argument(
        "--batch-size", type=count, default=16, help="sequences a step, over all ranks (default: %(default)s)"
    )
    parser.add_argument("--context", type=count, default=128, help="bytes a sequence (default: %(default)s)")
    parser.add_argument(
        "--max-norm", type=float, default=1.0, help="of all gradients; clipped to it (default: %(default)s)"
    )
    parser.add_argument("--data", type=Path, help="a text file or folder (default: the standard library's sources)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/train_gpt"),
        help="folder of results and checkpoints (default: %(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in --out")
    parser.add_argument(
        "--save-every", type=count, default=100, help="steps between checkpoints (default: %(default)s)"
    )
    parser.add_argument("--stop-at", type=count, help="stop after this step, leaving a checkpoint to --resume from")
    parser.add_argument("--eval-batches", type=count, default=8, help="of a validation (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the activations")
    options = parser.parse_args(arguments)
    for name in ("lr", "max_norm"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    if not 0 <= options.seed < 2**32:
        parser.error(f"--seed must be between 0 and {2**32 - 1}, got {options.seed}")
    if len(set(options.arms)) < len(options.arms):
        parser.error(f"--arms must differ, got {' '.join(options.arms)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    if options.batch_size % _world_size():
        parser.error(
            f"--batch-size must be a multiple of the number of ranks, {_world_size()}, got {options.batch_size}"
        )
    # before anything is trained, or removed
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.out):
            pass
    except OSError as error:
        parser.error(f"--out {options.out} cannot be written to: {error.strerror}")
    if find_spec("matplotlib") is None:
        parser.error("the curves are drawn by matplotlib, which is not installed: pip install matplotlib")
    return options


def _world_size() -> int:
    """The number of ranks that torchrun starts."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _run_command() -> None:
    """``main`` as a command, which says what a user can do something about in a line or two."""
    try:
        main()
    except RequestError as error:
        sys.exit(f"{Path(__file__).name}: error: {error}")
    except CheckpointError as error:
        sys.exit(
            f"{Path(__file__).name}: error: {error}\ngive the options of the run that was interrupted; or remove "
            f"{error.path}, to go on from the checkpoint before it; or leave out --resume"
        )
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    _run_command()

"""`prefixrank calibrate`: measures the attention launches of this machine's GPU and writes what AUTO chooses by."""

from __future__ import annotations

import argparse
import json

from rich.progress import Progress

from attention.plans import HeadShape
from attention.timing import TimeModel
from scorer.console import plain_console
from scorer.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    """Calibrates and writes the file."""
    import torch

    if not torch.cuda.is_available():  # before FlashInfer, which no one need install to hear this
        raise ConfigError("calibrate needs an NVIDIA GPU; on a CPU the choice is by document length")
    try:
        from attention.calibration import calibrate
    except ImportError as error:
        raise ConfigError(f"calibrate needs FlashInfer ({error}): pip install 'prefixrank[gpu]'") from None
    heads, kv_heads, head_dim = _heads(args)
    shape = HeadShape(heads, kv_heads, head_dim, head_dim**-0.5, getattr(torch, args.dtype))
    with Progress(console=plain_console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=1.0)
        model = calibrate(shape, args.seconds, tell=lambda share: progress.update(task, completed=share))
    require_whole(model, args.seconds)
    model.write(args.output)
    print(f"wrote {args.output}: {len(model.fits)} fits for {heads}/{kv_heads} heads on {model.machine.name}")
    return 0


def require_whole(model: TimeModel, seconds: float) -> None:
    """Raises ConfigError where no service would take what was measured: too few launches in too short a time."""
    try:
        TimeModel.read(model.text())
    except ValueError as error:
        raise ConfigError(f"--seconds {seconds:g} measured too little: {error}") from None


def _heads(args: argparse.Namespace) -> tuple[int, int, int]:
    if args.model is None:
        return args.heads, args.kv_heads, args.head_dim
    try:
        config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        return heads, int(config.get("num_key_value_heads", heads)), head_dim
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"--model {args.model}: no config.json that names its heads ({error!r})") from None

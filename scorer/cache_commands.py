"""The commands that measure the prefix cache and its tiers: arguments here, the rest when one runs."""

from __future__ import annotations

import argparse
import sys
from multiprocessing import get_context

from scorer.config import cache_dir
from scorer.errors import StartError
from scorer.flags import MODEL_SETTINGS, POSITIVE, add_settings, config_of, file_to_write, listed, number, whole

CACHE_EXAMPLE = """example:
  prefixrank bench cache --size 0.6B --size 4B --output cache.jsonl     (random weights of a true shape, on a GPU)
  prefixrank bench cache --shape 256,32,4 --seconds 5                   (the embedded model on a CPU)

In process, requests as token ids of one shape (prefix, tokens of an item, items): a prefix that is cached against one
that is not, one call at a time and 32 at a time; two requests in one pass that share a prefix against two that do not;
new prefixes only, with the cache against without, in turns. Exit codes: 0; 2."""

TIERS_EXAMPLE = """example:
  prefixrank bench tiers --kv-host-bytes 2000000000 --kv-file /mnt/nvme/kv --kv-remote redis://localhost:6379
  prefixrank bench tiers --size 4B --kv-host-bytes 40000000000 --lengths 1024,4096,16384 --output tiers.jsonl

For each tier that is set, and as if it were slower (--rates, bytes/s), and each length: seconds of a request whose
prefix is computed, whose prefix is fetched, and where the service chooses by what it measured before.
Exit codes: 0; 2."""

SIZES = ("0.6B", "4B", "8B")


def add_bench_cache(parser: argparse.ArgumentParser) -> None:
    told = "random weights of this shape instead of --model; may be repeated"
    parser.add_argument("--size", action="append", choices=SIZES, help=told)
    told = "prefix, tokens of an item, items (default: 2048,64,32)"
    parser.add_argument("--shape", type=listed(whole(1), 3), default=(2048, 64, 32), metavar="P,S,M", help=told)
    parser.add_argument("--seconds", type=POSITIVE, default=2.0, metavar="X", help="of each run (default: 2)")
    parser.add_argument("--output", type=file_to_write, metavar="FILE", help="append JSON lines")
    add_settings(parser, MODEL_SETTINGS)


def bench_cache(args: argparse.Namespace) -> int:
    sizes = args.size or [None]
    if len(sizes) == 1:
        return _bench_cache(args, sizes[0])
    plain = argparse.Namespace(**{name: value for name, value in vars(args).items() if name not in ("parser", "run")})
    for size in sizes:  # each in a process of its own: a service gives its device's memory back when its process ends
        child = get_context("spawn").Process(target=_exit_with, args=(plain, size))
        child.start()
        child.join()
        if child.exitcode:
            return child.exitcode
    return 0


def _exit_with(args: argparse.Namespace, size: str | None) -> None:
    try:
        sys.exit(_bench_cache(args, size))
    except StartError as error:
        print(f"prefixrank: {error}", file=sys.stderr)
        sys.exit(2)


def _bench_cache(args: argparse.Namespace, size: str | None) -> int:
    from loadtest.bench_cache import run

    _sized(args, size)
    run(config_of(args), size or args.model or "embedded", args.shape, args.seconds, args.output)
    return 0


def add_bench_tiers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, help="random weights of this shape instead of --model")
    told = "of prefixes, in tokens (default: 64,256,1024,2048)"
    parser.add_argument("--lengths", type=listed(whole(1)), default=(64, 256, 1024, 2048), metavar="N,N", help=told)
    told = "bytes/s that the last tier is slowed to, one after the other (default: none)"
    parser.add_argument("--rates", type=listed(number(1, 1e15)), default=(), metavar="X,X", help=told)
    parser.add_argument("--repeats", type=whole(1), default=5, metavar="N", help="of each measurement (default: 5)")
    parser.add_argument("--output", type=file_to_write, metavar="FILE", help="append JSON lines")
    add_settings(parser, MODEL_SETTINGS)


def bench_tiers(args: argparse.Namespace) -> int:
    _sized(args, args.size)
    config = config_of(args)
    if not (config.kv_host_bytes or config.kv_file or config.kv_remote):
        args.parser.error("no tier is set: --kv-host-bytes, --kv-file, --kv-remote")
    from loadtest.bench_tiers import run

    name = args.size or config.model
    return run(config, name, args.lengths, args.rates, args.repeats, args.output)


def _sized(args: argparse.Namespace, size: str | None) -> None:
    """The settings name a checkpoint with random weights."""
    if size is None:
        return
    from loadtest.random_checkpoint import write_checkpoint
    from loadtest.shapes import SIZES as SHAPES

    directory = cache_dir() / f"random-{size}"
    args.model, args.profile = str(directory), str(write_checkpoint(SHAPES[size], directory))

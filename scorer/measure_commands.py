"""The commands that measure and explain: their arguments, and their modules only when one runs, so help is instant."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from scorer import remote
from scorer.flags import POSITIVE, file_to_write, listed, number, whole

LOAD_PROFILES = ("web-rerank", "jobs", "feed", "titles", "long", "adversarial", "laptop")
MOST_CALLS = 100_000  # of one rate of bench load
SHAPE = listed(whole(1), 3)

EXPLAIN_EXAMPLE = """example:
  prefixrank explain --prefix 96 --items 4,4 --q-tile 8
  prefixrank explain --prefix 2048 --items 64x32 --cached 2048 --json
  prefixrank explain --lengths requests.jsonl
  prefixrank explain --map choices.png

Lengths are in tokens, times in milliseconds of one layer on the calibrated machine. A line of --lengths is
{"prefix": 120, "items": [90, 75, 130]}, with "cached" if some of the prefix is. --items takes lengths and LENGTHxCOUNT.
A strategy that the service would refuse for such lengths has "-" for a time, and the reason below the table.
Exit codes: 0; 2 what was given cannot be explained."""

CALIBRATE_EXAMPLE = """example:
  prefixrank calibrate --output h200.json
  prefixrank calibrate --model ./Qwen3-Reranker-4B --output calibration.json
  prefixrank serve --calibration calibration.json ...

Measures for --seconds on log-random lengths (prefix 64-8,192 tokens, 1-512 items of 4-512), fits, and writes a small
JSON file. Without one, the service uses the built-in calibration of an H200. Exit codes: 0; 2 no GPU, no FlashInfer."""

BENCH_ATTENTION_EXAMPLE = """example:
  prefixrank bench attention --output results            (measure, then write results/attention.md and .png)
  prefixrank bench attention --output results --report   (only write the report again)

One layer, heads 16/8, head_dim 128, page 16. Times in milliseconds: `event` between CUDA events around single calls,
host launch time included; `gpu` of calls captured in a CUDA graph, without it. Writing a new row's K/V to its page is
not attention and left out; what a strategy writes again (tail pages) or gathers is in. Exit codes: 0; 2."""


BENCH_LOAD_EXAMPLE = """example:
  prefixrank bench load                                         (a server of its own with the embedded model)
  prefixrank bench load --target localhost:50051 --profile web-rerank --rates 10,20,40 --seconds 30

Open loop: calls arrive at random, --rates of them a second in the mean, whether or not earlier ones are answered.
goodput: documents/s of calls answered within the profile's SLO. Times in milliseconds; queue and compute are p99.
Exit codes: 0; 1 a call timed out, failed for another reason than load, or there was none; 2 no server."""


BENCH_MODEL_EXAMPLE = """example:
  prefixrank bench model --size 0.6B --size 4B --output model.jsonl
  prefixrank bench model --size 0.6B --profile profiles        (time by kernel, from a Torch profiler trace)

The engine alone on a GPU: Qwen3's shapes with seeded random weights in bf16, requests as token ids. `alone`: one
request at a time; items/s: requests batched into passes of --pass-tokens, two in flight. Floors are an H200's: dense
FLOPs / 790 TFLOP/s + attention FLOPs / 600 TFLOP/s. Exit codes: 0; 2 no GPU."""

BENCH_DECODE_EXAMPLE = """example:
  prefixrank bench decode --output results --size 0.6B   (measure, then write results/decode.md)
  prefixrank bench decode --output results --only search (whole searches alone)
  prefixrank bench decode --output results --report      (only write the report again)

Attention: one layer, heads 16/8, head_dim 128, bf16, GPU-only milliseconds; a step and a search: a Qwen3's shape with
random weights, until their continuations and sequences are on the host. The floor: every key read once at 4.3 TB/s, or
600 TFLOP/s. FlashInfer's decode kernels are compiled when first used. Exit codes: 0; 2."""

BENCH_SERVE_EXAMPLE = """example:
  prefixrank bench serve                                        (a server of its own, random weights, 0.6B's shape)
  prefixrank bench serve --target localhost:50051 --size 4B --output serve.jsonl

Token ids through gRPC from this process to another: closed loops of 1, 8 and 32 calls at once, every prefix new or one
of four, and Poisson arrivals. Exit codes: 0; 2."""


def add_bench_model(parser: argparse.ArgumentParser) -> None:
    told = "shape of the model; may be repeated (default: 0.6B)"
    parser.add_argument("--size", action="append", choices=["0.6B", "4B", "8B"], help=told)
    parser.add_argument("--pass-tokens", type=whole(1), default=16_384, metavar="N", help="of a pass (default: 16384)")
    parser.add_argument("--quantization", choices=["none", "fp8"], default="none", help="of weights (default: none)")
    parser.add_argument("--output", type=file_to_write, metavar="FILE", help="append JSON lines")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write the time by kernel of two shapes there")
    which = parser.add_mutually_exclusive_group()
    told = "prefix tokens, tokens of an item, items (default: eight of its own); may be given several times"
    which.add_argument("--shape", type=SHAPE, action="append", default=[], metavar="P,S,M", help=told)
    told = "measure 32 to 1000 items of 64 tokens behind a prefix of 512, instead of the shapes"
    which.add_argument("--scaling", action="store_true", help=told)
    told = "measure each shape again in the invariant mode, and tell what it costs"
    parser.add_argument("--invariant", action="store_true", help=told)


def bench_model(args: argparse.Namespace) -> int:
    from loadtest.bench_model import run

    modes = (args.quantization, args.scaling, args.invariant)
    return run(args.size or ["0.6B"], args.output, args.pass_tokens, args.profile, *modes, args.shape)


def add_bench_decode(parser: argparse.ArgumentParser) -> None:
    told = "shape of the model; may be repeated (default: 0.6B)"
    parser.add_argument("--size", action="append", choices=["0.6B", "4B", "8B"], help=told)
    parser.add_argument("--output", type=Path, default=Path("bench-decode"), metavar="DIR", help="where rows go")
    parser.add_argument("--quick", action="store_true", help="a part of the attention's grid")
    kinds = ["attention", "step", "search"]
    parser.add_argument("--only", action="append", choices=kinds, help="may be repeated (default: all of them)")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the report from the rows")


def bench_decode(args: argparse.Namespace) -> int:
    from loadtest.bench_decode import run

    return run(args)


def add_bench_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=["0.6B", "4B", "8B"], default="0.6B", help="shape (default: 0.6B)")
    parser.add_argument("--target", type=remote.target, metavar="HOST:PORT", help="a running server of that shape")
    told = "prefix tokens, tokens of an item, items (default: all of its own); may be given several times"
    parser.add_argument("--shape", type=SHAPE, action="append", default=[], metavar="P,S,M", help=told)
    parser.add_argument("--seconds", type=POSITIVE, default=2.0, metavar="X", help="of each run (default: 2)")
    parser.add_argument("--output", type=file_to_write, metavar="FILE", help="append JSON lines")
    parser.add_argument("--server-args", default="", metavar="ARGS", help="further settings of the server")


def bench_serve(args: argparse.Namespace) -> int:
    from loadtest.bench_serve import run

    return run(args)


def add_bench_load(parser: argparse.ArgumentParser) -> None:
    remote.add_target(parser, "one of its own with the embedded model")
    parser.add_argument("--profile", choices=LOAD_PROFILES, default="laptop", help="of the traffic (default: laptop)")
    parser.add_argument(
        "--rates", type=listed(POSITIVE), default=(1.0,), metavar="X,X", help="calls a second (default: 1)"
    )
    parser.add_argument("--seconds", type=POSITIVE, default=15.0, metavar="X", help="of each rate (default: 15)")
    told = "times the mean rate in one second of ten, 1 to 10 (default: 1)"
    parser.add_argument("--burst", type=number(1, 10), default=1.0, metavar="X", help=told)
    parser.add_argument("--scale", type=POSITIVE, default=1.0, metavar="X", help="of all lengths (default: 1)")
    parser.add_argument("--timeout", type=POSITIVE, default=60.0, metavar="SECONDS", help="of a call (default: 60)")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of the traffic (default: 0)")
    parser.add_argument(
        "--parameters", type=number(0, 1e15), default=0.0, metavar="N", help="of the model, to tell FLOP/s"
    )
    parser.add_argument("--output", type=file_to_write, metavar="FILE", help="write the figures, a JSON object a rate")


def bench_load(args: argparse.Namespace) -> int:
    if (calls := max(args.rates) * args.seconds) > MOST_CALLS:
        told = f"--rates {max(args.rates):g} for --seconds {args.seconds:g} makes {calls:.0f} calls"
        args.parser.error(f"{told}: at most {MOST_CALLS}, as they are built beforehand")
    from loadtest.open_loop import run

    return run(args)


def _whole(text: str) -> int:
    """Raises argparse.ArgumentTypeError."""
    if re.fullmatch(r"[+-]?[0-9]{1,30}", text, re.ASCII) is None:
        raise argparse.ArgumentTypeError(f"a whole number, got {text[:40]!r}")
    return int(text)


def add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefix", type=_whole, default=96, metavar="N", help="tokens of the prefix (default: 96)")
    parser.add_argument("--items", default="4,4", metavar="N,N", help="tokens of each item (default: 4,4)")
    parser.add_argument("--cached", type=_whole, default=0, metavar="N", help="prefix tokens in cache (default: 0)")
    parser.add_argument("--q-tile", type=_whole, default=8, metavar="N", help="query tokens of a tile (default: 8)")
    parser.add_argument("--policy", choices=["measured", "threshold"], default="measured", help="how to choose")
    parser.add_argument("--multi-item-max-tokens", type=_whole, default=64, metavar="N", help="threshold (default: 64)")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="what prefixrank calibrate wrote")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--lengths", type=Path, metavar="FILE", help="JSON lines of real requests' lengths")
    which.add_argument("--map", type=file_to_write, metavar="PNG", help="draw the choice over prefix and item lengths")
    parser.add_argument("--json", action="store_true", help="write JSON")


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=file_to_write, default=Path("calibration.json"), metavar="FILE", help="what to write"
    )
    parser.add_argument("--seconds", type=POSITIVE, default=50.0, metavar="X", help="how long to measure (default: 50)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="take the heads from this checkpoint's config.json")
    parser.add_argument("--heads", type=whole(1), default=16, metavar="N", help="query heads of a layer (default: 16)")
    parser.add_argument("--kv-heads", type=whole(1), default=8, metavar="N", help="key/value heads (default: 8)")
    parser.add_argument("--head-dim", type=whole(1), default=128, metavar="N", help="default: 128")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="default: bfloat16")


def add_bench_attention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=Path("bench-attention"), metavar="DIR", help="where rows go")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the report from the rows")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="what prefixrank calibrate wrote")


def explain(args: argparse.Namespace) -> int:
    from scorer.explain import run

    return run(args)


def calibrate(args: argparse.Namespace) -> int:
    from scorer.calibrate import run

    return run(args)


def bench_attention(args: argparse.Namespace) -> int:
    from loadtest.bench_attention import run

    return run(args)

"""The command line, `prefixrank serve | score | health | eval | ...`: settings are flags.

Exit codes: 0 all is well; 1 something asked for failed, and standard error says what; 2 wrong usage, a wrong setting or
a model that cannot be served; 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from scorer import cache_commands, eval_command, measure_commands, remote, score_command, top
from scorer.bulk import command as bulk
from scorer.errors import StartError
from scorer.flags import MODEL_SETTINGS, SETTINGS, add_settings, as_arguments, config_of, file_to_write, given_flags

Command = Callable[[argparse.Namespace], int]

SERVE_EXAMPLE = """example:
  prefixrank serve --model ./Qwen3-Reranker-0.6B --profile qwen3-reranker --port 50051
  PREFIXRANK_PORT=50051 prefixrank serve --config prefixrank.toml

Flags win over PREFIXRANK_* in the environment, and those over the file. Lengths are in tokens, times in seconds.
Exit codes: 0 stopped by SIGTERM or SIGINT, all accepted calls answered; 1 start or device failed, or drain_seconds were
too short for the accepted calls; 2 a wrong setting."""

DEMO_EXAMPLE = """example:
  prefixrank demo

Starts a server of its own on a free loopback port, ranks the documents of a few queries, compares documents/s with
transformers one document at a time, and stops the server. Lengths are in tokens, times in milliseconds."""

VERIFY_EXAMPLE = """example:
  prefixrank verify --model ./Qwen3-Reranker-0.6B --profile qwen3-reranker
  prefixrank verify --model ./my-model --profile my-profile.toml --record my-profile.toml

Prints the largest difference, in natural-log odds, between every strategy and transformers' own forward of one document
at a time. Exit codes: 0 within the tolerance; 1 beyond it; 2 the model cannot be served."""

BENCH_CPU_EXAMPLE = """example:
  prefixrank bench cpu

Prints documents/s packed and one document at a time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    # Before torch is loaded: OpenMP's threads otherwise spin while they wait, and where another process has one of the
    # cores, a pass takes up to thirty times as long. Sleeping costs nothing measurable on idle cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Before the first port or channel: gRPC's own lines, one a failed handshake, are no JSON; its errors stay.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        return code
    except StartError as error:
        print(f"prefixrank: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prefixrank", description="Scores documents that share one prefix.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Command, told: str, example: str, group: Any = None) -> argparse.ArgumentParser:
        made = (commands if group is None else group).add_parser(
            name,
            help=told,
            description=told,
            epilog=example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        made.set_defaults(run=run, parser=made)
        return made

    add_settings(command("serve", _serve, "serve scores over gRPC", SERVE_EXAMPLE), SETTINGS)
    score_command.add_arguments(
        command("score", score_command.run, "score documents, here or on a server", score_command.EXAMPLE)
    )
    told = "score the rows of a parquet file, resumable"
    bulk.add_arguments(command("score-file", bulk.run, told, bulk.EXAMPLE))
    told = "ask a server whether it serves"
    remote.add_health(command("health", remote.health, told, remote.HEALTH_EXAMPLE))
    top.add_arguments(command("top", top.run, "what a server does right now", top.EXAMPLE))
    add_settings(command("demo", _demo, "see it work on the embedded model", DEMO_EXAMPLE), MODEL_SETTINGS)

    verify = command("verify", _verify, "prove that packed scores equal those of one document alone", VERIFY_EXAMPLE)
    verify.add_argument("--record", type=file_to_write, metavar="FILE", help="write the profile with golden scores")
    add_settings(verify, MODEL_SETTINGS)

    told = "rerank a test collection's candidates and measure the ranking"
    eval_command.add_arguments(command("eval", eval_command.run, told, eval_command.EXAMPLE))

    told = "what each strategy costs for given lengths, which is chosen, and why"
    measure_commands.add_explain(command("explain", measure_commands.explain, told, measure_commands.EXPLAIN_EXAMPLE))
    told = "measure this machine's GPU, so that AUTO chooses by it"
    measure_commands.add_calibrate(
        command("calibrate", measure_commands.calibrate, told, measure_commands.CALIBRATE_EXAMPLE)
    )

    bench = commands.add_parser("bench", help="measure", description="Measures; see each one's --help.")
    benches = bench.add_subparsers(required=True, metavar="WHAT")
    add_settings(command("cpu", _bench_cpu, "documents/s on a CPU", BENCH_CPU_EXAMPLE, benches), MODEL_SETTINGS)
    told = "every strategy's attention on a GPU, beside the article's figures"
    example = measure_commands.BENCH_ATTENTION_EXAMPLE
    measure_commands.add_bench_attention(command("attention", measure_commands.bench_attention, told, example, benches))
    told = "the engine alone on a GPU, beside its floor"
    model = command("model", measure_commands.bench_model, told, measure_commands.BENCH_MODEL_EXAMPLE, benches)
    measure_commands.add_bench_model(model)
    told = "a decode step's attention by every way, and whole beam searches, on a GPU"
    decode = command("decode", measure_commands.bench_decode, told, measure_commands.BENCH_DECODE_EXAMPLE, benches)
    measure_commands.add_bench_decode(decode)
    told = "the service through gRPC, requests as token ids"
    serve = command("serve", measure_commands.bench_serve, told, measure_commands.BENCH_SERVE_EXAMPLE, benches)
    measure_commands.add_bench_serve(serve)
    told = "open-loop load: goodput within the SLO, refusals, where the time goes"
    measure_commands.add_bench_load(
        command("load", measure_commands.bench_load, told, measure_commands.BENCH_LOAD_EXAMPLE, benches)
    )
    told = "what the prefix cache saves, and what it costs where nothing is found in it"
    cache = command("cache", cache_commands.bench_cache, told, cache_commands.CACHE_EXAMPLE, benches)
    cache_commands.add_bench_cache(cache)
    told = "fetch or recompute: prefixes of all lengths in each tier, and what was chosen"
    tiers = command("tiers", cache_commands.bench_tiers, told, cache_commands.TIERS_EXAMPLE, benches)
    cache_commands.add_bench_tiers(tiers)
    return parser


def _serve(args: argparse.Namespace) -> int:
    config = config_of(args)
    from scorer import logs, wakeful
    from scorer.server import serve

    logs.configure(config.log_format)
    if config.tensor_parallel > 1:
        from scorer.ranks import run

        return _ended(run(config, serve), at_once=True)
    return _ended(wakeful.run(serve(config)))


def _ended(code: int, at_once: bool = False) -> int:
    """Ends the process at once where a pass outlives the grace, as the interpreter would wait for its thread, and where
    a model is still being loaded, as a compiler's threads would abort the process under it. at_once: in any case, as
    the end of a group of ranks waits for whatever has a part in it."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if at_once or any(not thread.daemon or thread.name == "load" for thread in others):
        logging.shutdown()
        os._exit(code)
    return code


def _demo(args: argparse.Namespace) -> int:
    config = config_of(args)
    from scorer.demo import run

    return run(config, as_arguments(given_flags(args), args.config))


def _verify(args: argparse.Namespace) -> int:
    config = config_of(args)
    from scorer.verify import run

    return run(config, args.record)


def _bench_cpu(args: argparse.Namespace) -> int:
    config = config_of(args)
    from loadtest.bench_cpu import run

    return run(config)


if __name__ == "__main__":
    sys.exit(main())

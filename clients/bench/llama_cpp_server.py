"""llama.cpp's own HTTP server as a process: ``python -m clients.bench.llama_cpp_server --model FILE.gguf``.

Runs the server that comes in the package xllamacpp (any ``llama-server`` takes the same options). Read
against xllamacpp 2026.10.11549, llama.cpp build 11549.
"""

from __future__ import annotations

import argparse
import signal

from xllamacpp import CommonParams, Server, common_speculative_type

NGRAM = common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE
EAGLE3 = common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3


def parameters(args: argparse.Namespace) -> CommonParams:
    params = CommonParams()
    params.model.path = args.model
    params.hostnames, params.port = ["127.0.0.1"], args.port
    params.n_parallel = args.slots
    params.n_ctx = args.slots * args.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.cache_ram_mib = 0  # no prompt is sent twice
    params.endpoint_metrics = True
    if args.draft_model is not None:
        params.speculative.types = [EAGLE3]
        params.speculative.draft.mparams.path = args.draft_model
        params.speculative.draft.n_max = args.draft_tokens
    elif args.ngram:
        params.speculative.types = [NGRAM]
    return params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=1, help="requests at a time")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a slot")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--ngram", action="store_true", help="drafts looked up in the context")
    parser.add_argument("--draft-model", help="EAGLE-3 head as a GGUF file")
    parser.add_argument("--draft-tokens", type=int, default=3)
    server = Server(parameters(parser.parse_args()))
    print("serving on", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    # Before llama.cpp starts its threads: they inherit it, and the signal waits for sigwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()

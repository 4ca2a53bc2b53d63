"""`python -m asyncrl.engine.embedded --model-path DIR`: serve a small model on one CPU core."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.engine.embedded.budget import SHARE
from asyncrl.telemetry.output import print_lossy

if TYPE_CHECKING:
    from asyncrl.engine.embedded.scheduler import Engine


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; names are SGLang's where SGLang has the option."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.engine.embedded", description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True, help="directory in Hugging Face format")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free one")
    parser.add_argument("--port-file", type=Path, help="write the address here when the server answers")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--context-length", type=int, help="tokens of prompt and answer; default: the model's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--incremental-streaming-output", action="store_true", help="events carry only new tokens")
    parser.add_argument(
        "--mem-fraction-static", type=float, default=SHARE, help="part of the free memory for keys and values"
    )
    parser.add_argument("--seed", type=int, help="for requests that bring none; default: another one at each start")
    parser.add_argument(
        "--api-key-file", type=Path, help="ask for the bearer token in this file everywhere but /health and /metrics"
    )
    return parser.parse_args(arguments)


def main() -> int:
    """Serve until SIGTERM or SIGINT; 1 when the port or the model cannot be had."""
    options = parse()
    try:
        listener = socket.create_server((options.host, options.port), backlog=1024)
    except OSError as fault:
        print(
            f"engine: cannot listen on {options.host}:{options.port}: {os.strerror(fault.errno or 0)}", file=sys.stderr
        )
        return 1
    # Only now the slow imports: a taken port is reported at once. The garbage collector would take a fifth of their
    # time.
    gc.disable()
    import torch
    import uvloop

    from asyncrl.engine.embedded.scheduler import Engine
    from asyncrl.engine.errors import EngineError

    gc.freeze()  # imported objects stay
    gc.enable()
    torch.set_num_threads(1)
    try:
        engine = Engine(
            options.model_path,
            max_running=options.max_running_requests,
            context_length=options.context_length,
            dtype=getattr(torch, options.dtype),
            seed=options.seed,
            memory_share=options.mem_fraction_static,
        )
    except EngineError as fault:
        print(f"engine: {fault}", file=sys.stderr)
        return 1
    engine.weight_version = options.weight_version
    return uvloop.run(serve(engine, listener, options))


async def serve(engine: Engine, listener: socket.socket, options: argparse.Namespace) -> int:
    """Answer requests and step the engine in one loop until a signal comes."""
    from asyncrl.engine.embedded.server import EngineServer
    from asyncrl.engine.errors import EngineError

    loop = asyncio.get_running_loop()
    key = options.api_key_file.read_text().strip() if options.api_key_file is not None else None
    server = EngineServer(engine, incremental=options.incremental_streaming_output, api_key=key)
    protocol = server.protocol()
    sockets = await loop.create_server(protocol, sock=listener)
    stop = asyncio.Event()
    stepping = asyncio.create_task(engine.run())
    stepping.add_done_callback(lambda _: stop.set())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    host, port = listener.getsockname()[:2]
    if options.port_file is not None:
        aside = options.port_file.with_name(f".{options.port_file.name}.{os.getpid()}")
        aside.write_text(f"http://{host}:{port}\n")
        aside.replace(options.port_file)
    print(f"engine: serving {options.model_path} on http://{host}:{port}", file=sys.stderr, flush=True)
    await stop.wait()
    sockets.close()
    if stepping.done():
        try:
            stepping.result()  # a step that failed is the end of the process, with its trace
        except EngineError as fault:
            print(f"engine: {fault}", file=sys.stderr)
            return 1
    stepping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stepping
    engine.abort_all()
    await protocol.shutdown(1.0)
    return 0


if __name__ == "__main__":
    print_lossy()
    sys.exit(main())

"""`asyncrl sandboxes`: serve the sandboxes of this machine to workers elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import os

from aiohttp import web

from asyncrl.cli.options import add_option
from asyncrl.config.load import load_config
from asyncrl.config.sandbox_settings import sandbox_kind
from asyncrl.errors import WrongUsage
from asyncrl.ports import LOOPBACK
from asyncrl.sandboxes.http import API_KEY
from asyncrl.sandboxes.http_server import SandboxServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="config whose [sandbox] gives the kind and the greatest limits")
    add_option(parser, "--host ADDRESS", LOOPBACK, f"address to listen at; others than loopback need {API_KEY}")
    add_option(parser, "--port NUMBER", 8900, "port to listen at")
    add_option(parser, "--most NUMBER", 64, "sandboxes at once; further workers wait")


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted."""
    settings, key = load_config(arguments.config).config.sandbox, os.environ.get(API_KEY, "")
    if arguments.host != LOOPBACK and not key:
        raise WrongUsage(
            f"--host {arguments.host}: each client that reaches it runs programs here; set {API_KEY} to a key"
        )
    if problem := sandbox_kind(settings.kind).problem(settings):
        raise WrongUsage(f"sandbox.kind = {settings.kind}: {problem}")
    asyncio.run(_serve(SandboxServer(settings, key=key, most=arguments.most), arguments.host, arguments.port))
    return 0


async def _serve(server: SandboxServer, host: str, port: int) -> None:
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        print(f"sandboxes at http://{host}:{port}", flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()

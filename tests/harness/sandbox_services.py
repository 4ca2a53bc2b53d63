"""Small fakes of the services of E2B and Daytona, on sandboxes of this machine."""

import asyncio
import base64
import itertools
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.ports import LOOPBACK, free_port
from asyncrl.sandboxes.remote import sandbox_of
from asyncrl.sandboxes.sandbox import Sandbox

_PLACE = "/tmp/"  # a workspace of a service is at a fixed path, which the fakes replace by a folder of a sandbox


class Services:
    """Sandboxes by their ids, with the folder that stands for `/tmp` in each."""

    def __init__(self) -> None:
        self.open: dict[str, Sandbox] = {}
        self.created: list[dict] = []
        self.refuses = 0  # requests for a sandbox
        self._numbers = itertools.count()

    async def create(self, asked: dict) -> str:
        """Open a sandbox, or refuse it."""
        self.created.append(asked)
        if self.refuses:
            self.refuses -= 1
            raise web.HTTPTooManyRequests(text='{"code": 429, "message": "too many"}', content_type="application/json")
        name = f"box{next(self._numbers)}"
        sandbox = sandbox_of(SandboxSettings(kind="none", trusted=True, output_mb=16))
        await sandbox.start()
        self.open[name] = sandbox
        return name

    async def run(self, name: str, command: str) -> tuple[int, bytes, bytes]:
        """Run a shell command; returns its exit code and both streams."""
        streams = {"stdout": b"", "stderr": b""}

        def on_output(stream: str, piece: bytes) -> None:
            streams[stream] += piece

        moved = command.replace(_PLACE, "$HOME/")
        result = await self.open[name].exec(["sh", "-c", moved], on_output=on_output)
        return result.code, streams["stdout"], streams["stderr"]

    async def write(self, name: str, path: str, data: bytes) -> None:
        """Write a file."""
        await self.open[name].put(path.removeprefix(_PLACE), data)

    async def end(self, name: str) -> None:
        """End a sandbox."""
        await self.open.pop(name).destroy()


def e2b(services: Services) -> web.Application:
    """Make the part of E2B's API that its SDK needs."""

    async def create(http: web.Request) -> web.Response:
        name = await services.create(await http.json())
        given = {"sandboxID": name, "templateID": "t", "clientID": "c", "envdVersion": "0.4.0", "envdAccessToken": "x"}
        return web.json_response(given, status=201)

    async def start(http: web.Request) -> web.StreamResponse:
        body = await http.read()
        asked = json.loads(body[5:])
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await response.prepare(http)

        async def event(flag: int, value: dict) -> None:
            data = json.dumps(value).encode()
            await response.write(struct.pack(">BI", flag, len(data)) + data)

        await event(0, {"event": {"start": {"pid": 1}}})
        command = asked["process"]["args"][-1]
        code, out, err = await services.run([*services.open][-1], command)
        for name, data in (("stdout", out), ("stderr", err)):
            if data:
                await event(0, {"event": {"data": {name: base64.b64encode(data).decode()}}})
        await event(0, {"event": {"end": {"exitCode": code, "exited": True, "status": f"exit status {code}"}}})
        await event(2, {})
        return response

    async def write(http: web.Request) -> web.Response:
        path = http.query.get("path", "")
        if http.content_type.startswith("multipart"):
            part = await (await http.multipart()).next()
            path, data = path or part.filename, bytes(await part.read())
        else:
            data = await http.read()
        await services.write([*services.open][-1], path, data)
        return web.json_response([{"name": path.rpartition("/")[2], "path": path, "type": "file"}])

    async def end(http: web.Request) -> web.Response:
        await services.end(http.match_info["id"])
        return web.Response(status=204)

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v2/sandboxes", create)
    app.router.add_post("/sandboxes", create)
    app.router.add_post("/process.Process/Start", start)
    app.router.add_post("/files", write)
    app.router.add_delete("/sandboxes/{id}", end)
    return app


def daytona(services: Services) -> web.Application:
    """Make the part of Daytona's API that its SDK needs."""

    async def create(http: web.Request) -> web.Response:
        name = await services.create(await http.json())
        return described(http, name)

    def described(http: web.Request, name: str) -> web.Response:
        host = f"http://{http.host}"
        texts = {"id": name, "organizationId": "o", "name": name, "user": "u", "target": "t", "state": "started"}
        counts = {"cpu": 1, "gpu": 0, "memory": 1, "disk": 1}
        flags = {"public": False, "networkBlockAll": True, "kvm": False}
        return web.json_response({**texts, **counts, **flags, "env": {}, "labels": {}, "toolboxProxyUrl": host})

    async def execute(http: web.Request) -> web.Response:
        code, out, _ = await services.run(http.match_info["id"], (await http.json())["command"])
        return web.json_response({"exitCode": code, "result": out.decode()})

    async def upload(http: web.Request) -> web.Response:
        parts, path = await http.multipart(), ""
        async for part in parts:
            if part.name.endswith(".path"):
                path = await part.text()
            else:
                await services.write(http.match_info["id"], path, bytes(await part.read()))
        return web.json_response({})

    async def end(http: web.Request) -> web.Response:
        await services.end(http.match_info["id"])
        return described(http, http.match_info["id"])

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/sandbox", create)
    app.router.add_post("/{id}/process/execute", execute)
    app.router.add_post("/{id}/files/bulk-upload", upload)
    app.router.add_delete("/sandbox/{id}", end)
    return app


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """Serve an application; yields its address."""
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    port = free_port()
    try:
        await web.TCPSite(runner, LOOPBACK, port).start()
        yield f"http://{LOOPBACK}:{port}"
    finally:
        await runner.cleanup()
        await asyncio.sleep(0)

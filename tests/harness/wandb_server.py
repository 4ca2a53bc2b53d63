"""A server that takes what the package `wandb` sends, over the part of its protocol that uploads a run."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

_ME, _PROJECT = "me", "asyncrl"
LOGIN = {"WANDB_API_KEY": "0" * 40, "WANDB_SILENT": "true"}


class WandbServer:
    """Rows of history of each run, by the offsets at which they were sent."""

    def __init__(self) -> None:
        self.url = ""
        self.history: dict[str, list[dict[str, float]]] = {}
        self.queries: list[str] = []

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which the package reaches this server."""
        return LOGIN | {"WANDB_BASE_URL": self.url}

    async def answer(self, http: web.Request) -> web.StreamResponse:
        """Answer one request."""
        if http.path == "/graphql":
            return web.json_response({"data": self._data(await http.json())})
        if "file_stream" in http.path:
            self._take(http.path.split("/")[-2], await http.json())
        return web.json_response({})

    def _data(self, asked: dict) -> dict:
        query, variables = asked["query"], asked.get("variables") or {}
        self.queries.append(query)
        project = {"id": "p", "name": _PROJECT, "entity": {"id": "e", "name": _ME}}
        if "UpsertBucket" in query:
            name = variables["name"]
            is_new = name not in self.history
            self.history.setdefault(name, [])
            return {"upsertBucket": {"bucket": self._bucket(name) | {"project": project}, "inserted": is_new}}
        if "RunResumeStatus" in query:
            known = variables.get("name") in self.history
            return {"model": project | {"bucket": self._bucket(variables["name"]) if known else None}}
        if "CreateRunFiles" in query:
            return {"createRunFiles": {"runID": "id", "uploadHeaders": [], "files": []}}
        return {"viewer": {"id": "v", "entity": _ME, "username": _ME, "teams": {"edges": []}}, "serverInfo": None}

    def _bucket(self, name: str) -> dict:
        rows = self.history[name]
        last = {"_runtime": 1.0, "_timestamp": 1.0, **(rows[-1] if rows else {})}
        tail, config = json.dumps([json.dumps(last)]), json.dumps({"t": {"1": [1]}})
        counts = {"historyLineCount": len(rows), "eventsLineCount": 1, "logLineCount": 1}
        tails = {"historyTail": tail, "eventsTail": tail, "summaryMetrics": json.dumps(last)}
        words = {"id": f"id-{name}", "name": name, "displayName": name, "notes": "", "config": "{}", "tags": []}
        return {**words, "sweepName": None, "wandbConfig": config, **counts, **tails}

    def _take(self, name: str, sent: dict) -> None:
        part = (sent.get("files") or {}).get("wandb-history.jsonl")
        if part:
            rows = self.history.setdefault(name, [])
            rows[part["offset"] :] = [json.loads(line) for line in part["content"]]


@asynccontextmanager
async def wandb_server(port: int = 0) -> AsyncIterator[WandbServer]:
    """Serve on a port; 0 for a free one."""
    server = WandbServer()
    app = web.Application(client_max_size=2**28)
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()

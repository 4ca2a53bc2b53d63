"""NATS servers with logins and TLS of their own."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from asyncrl.bus.server import find_server
from asyncrl.ports import free_port
from asyncrl.process import with_parent


@asynccontextmanager
async def serving(folder: Path, config: str, *, domain: str = "") -> AsyncIterator[int]:
    """A `nats-server` with a configuration of the test's own; gives its port."""
    port = free_port()
    stored = f'store_dir: "{folder}/js"' + (f", domain: {domain}" if domain else "")
    (folder / "own.conf").write_text(f'listen: "127.0.0.1:{port}"\njetstream {{ {stored} }}\n{config}')
    process = await asyncio.create_subprocess_exec(
        *(find_server(), "-c", str(folder / "own.conf")),
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=with_parent(),
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(120):
            while b"Server is ready" not in (line := await process.stderr.readline()):
                assert line, "the server ended before it was ready"
        reading = asyncio.create_task(process.stderr.read())
        yield port
    finally:
        process.kill()
        await process.wait()
    await reading


class Authority:
    """A private certificate authority, made by the `openssl` program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.ca = self._make("ca", "-x509", "-days", "2")

    def _make(self, name: str, *words: str) -> Path:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        self._run("req", *curve, *files, "-subj", f"/CN={name}", *words)
        return self.folder / f"{name}.pem"

    def sign(self, name: str, host: str, days: int = 2) -> Path:
        """A certificate for a host; its key lies beside it."""
        (self.folder / "names").write_text(f"subjectAltName=DNS:{host}")
        request = self._make(name)
        words = ("-CAkey", "ca.key", "-CAcreateserial", "-days", str(days), "-extfile", "names", "-out", f"{name}.pem")
        self._run("x509", "-req", "-in", request.name, "-CA", "ca.pem", *words)
        return self.folder / f"{name}.pem"

    def _run(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)


def tls(certificate: Path, further: str = "") -> str:
    return f'tls {{ cert_file: "{certificate}", key_file: "{certificate.with_suffix(".key")}"{further} }}\n'

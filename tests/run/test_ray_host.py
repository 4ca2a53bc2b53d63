"""A host of a Ray cluster without Ray: real folders and real processes; and how a process there is seen from here."""

import asyncio
import os
import signal
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.bus.address import BusAddress
from asyncrl.config.settings import Config
from asyncrl.process import living_processes
from asyncrl.run.directory import RunFiles
from asyncrl.run.host_files import Parcel, send_model
from asyncrl.run.placement import LOST, actor_job
from asyncrl.run.placements.ray.cluster import HostLost
from asyncrl.run.placements.ray.host import Host
from asyncrl.run.placements.ray.placement import RayPlacement, RayProcess
from harness.disks import small_disk
from harness.stage import until

SERVER = ("http.server", ("0", "--bind", "127.0.0.1"), {})


class SeatHere:
    """A seat whose host is in this process, and can be cut off."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.cut = asyncio.Event()
        self.released = False

    async def call(self, method: str, *arguments: Any) -> Any:
        answer, cut = (asyncio.create_task(work) for work in (getattr(self.host, method)(*arguments), self.cut.wait()))
        await asyncio.wait({answer, cut}, return_when="FIRST_COMPLETED")
        cut.cancel()
        if self.cut.is_set():
            answer.cancel()
            raise HostLost("ActorUnavailableError: its node is away")
        return await answer

    def send(self, method: str, *arguments: Any) -> None:
        if not self.cut.is_set():
            self.task = asyncio.ensure_future(getattr(self.host, method)(*arguments))

    def release(self) -> None:
        self.released = True


async def placed(folder: Path, *what: Any) -> tuple[RayProcess, SeatHere, list[RayProcess]]:
    (folder / "logs").mkdir(exist_ok=True)
    seat = SeatHere(Host(str(folder / "host"), "demo-1", "node", "reward-1", "127.0.0.1"))
    await seat.call("prepare")
    over: list[RayProcess] = []
    pid = await seat.call("start", *what)
    return RayProcess(seat, pid, folder / "logs" / "reward-1.log", over.append), seat, over  # type: ignore[arg-type]


async def test_output_and_end_of_a_process_come_from_its_host(tmp_path: Path):
    process, _, over = await placed(tmp_path, "no_such_module", (), {})

    assert await asyncio.wait_for(process.wait(), 120) == process.returncode == 1
    assert process.end_text.startswith("exit code 1: ")
    assert "No module named no_such_module" in process.end_text
    log = tmp_path / "logs" / "reward-1.log"
    assert "no_such_module" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert over == [process]
    assert not process.asked  # so its bundle is kept for the next start


@pytest.mark.parametrize(("ask", "number"), [("terminate", signal.SIGTERM), ("kill", signal.SIGKILL)])
async def test_a_process_is_asked_to_leave_or_killed_also_where_it_is_stopped(tmp_path: Path, ask: str, number: int):
    process, _, over = await placed(tmp_path, *SERVER)
    if ask == "kill":
        os.kill(process.pid, signal.SIGSTOP)

    getattr(process, ask)()

    assert await asyncio.wait_for(process.wait(), 120) == -number
    assert process.end_text == f"exit code -{int(number)}"
    assert over[0].asked
    process.kill()  # once more is no error


async def test_a_host_that_is_away_counts_as_lost_though_its_process_lives(tmp_path: Path):
    process, seat, over = await placed(tmp_path, *SERVER)

    seat.cut.set()

    assert await asyncio.wait_for(process.wait(), 120) == LOST
    assert process.end_text == "its host is lost: ActorUnavailableError: its node is away"
    assert over == [process]
    assert process.pid in living_processes()
    await seat.host.signal(signal.SIGKILL)


async def test_a_host_that_does_not_answer_a_kill_in_time_counts_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("asyncrl.run.placements.ray.placement._KILL_S", 0.05)
    process, seat, _ = await placed(tmp_path, *SERVER)
    monkeypatch.setattr(seat, "send", lambda *_: None)

    process.kill()

    assert await asyncio.wait_for(process.wait(), 120) == LOST
    assert process.end_text == "its host is lost: no answer within 0.05 s"
    await seat.host.signal(signal.SIGKILL)


class ClusterHere:
    """A cluster whose bundles are all here."""

    here = "127.0.0.1"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seats: list[SeatHere] = []

    async def answers(self) -> bool:
        return True

    async def reserve(self, _folder: str, run: str, actor_id: str, _bundle: Any, _within_s: float) -> SeatHere:
        self.seats.append(SeatHere(Host(str(self.folder), run, "node", actor_id, self.here)))
        return self.seats[-1]


async def test_the_bundle_of_a_process_that_died_is_taken_again_or_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cluster = ClusterHere(tmp_path / "hosts")
    monkeypatch.setattr("asyncrl.run.placements.ray.placement.RayCluster", lambda _address: cluster)
    monkeypatch.setattr("asyncrl.run.placements.ray.placement._KEPT_S", 0.0)
    files, login = RunFiles(tmp_path / "run", tmp_path), tmp_path / "reward.json"
    files.logs.mkdir(parents=True)
    BusAddress("nats://127.0.0.1:9").save(login)
    placement = RayPlacement(msgspec.convert({"supervision": {"restart_pause_s": 3.0}}, Config), files)
    job = actor_job(tmp_path, "demo", "reward", "reward-1")

    first = await placement.start(job)
    await cluster.seats[0].host.signal(signal.SIGKILL)  # as a crash there would
    assert await asyncio.wait_for(first.wait(), 120) == -signal.SIGKILL
    second = await placement.start(job)
    assert len(cluster.seats) == 1

    await cluster.seats[0].host.signal(signal.SIGKILL)
    await asyncio.wait_for(second.wait(), 120)
    login.unlink()
    with pytest.raises(OSError, match=r"reward\.json"):
        await placement.start(job)
    await until(lambda: cluster.seats[0].released, "a bundle where it cannot be started is given back")

    BusAddress("nats://127.0.0.1:9").save(login)
    third = await placement.start(job)
    await cluster.seats[1].host.signal(signal.SIGKILL)
    await asyncio.wait_for(third.wait(), 120)
    await until(lambda: cluster.seats[1].released, "a bundle of an actor that is not wanted any more, too")


async def test_a_copy_of_a_model_that_nobody_makes_any_more_is_removed(tmp_path: Path):
    with small_disk(tmp_path / "host", 4):
        first, second = (
            Host(str(tmp_path / "host"), "demo-1", "node", f"engine-{number}", "127.0.0.1") for number in (1, 2)
        )
        models = tmp_path / "host" / "models"
        await first.prepare()
        await first.write("abc-1", "config.json", b"{}")
        await second.prepare()
        assert (models / ".abc-1" / "config.json").exists(), "the first one makes it"

        with pytest.raises(OSError, match="No space left on device"):
            await second.write("abc-2", "model.safetensors", bytes(8 << 20))
        assert {path.name for path in models.iterdir()} == {".abc-1", ".abc-1.lock"}

        first.close()  # as its end does
        await second.prepare()
        assert not list(models.iterdir())
        second.close()


async def test_a_model_is_sent_once_to_a_machine_and_is_the_same_there(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    for name, size in (("config.json", 0), ("tokenizer.json", 10), ("model.safetensors", 40 << 20)):
        (model / name).write_bytes(os.urandom(size))
    calls: list[str] = []

    async def call(method: str, *arguments: Any) -> Any:
        calls.append(method)
        return await getattr(host, method)(*arguments)

    for actor_id, whole in (("engine-1", True), ("engine-2", True), ("rollout-1", False)):
        calls.clear()
        host = Host(str(tmp_path / "host"), "demo-1", "node", actor_id, "127.0.0.1")
        await host.prepare()
        await send_model(call, model, whole=whole)
        assert ("write" in calls) == (actor_id != "engine-2")
        found = {path.name: path.read_bytes() for path in (host.home / "model").iterdir()}
        assert found == {
            path.name: path.read_bytes() for path in model.iterdir() if whole or path.suffix != ".safetensors"
        }
    assert not list((tmp_path / "host" / "models").glob(".*"))


async def test_a_folder_that_no_host_uses_any_more_is_removed(tmp_path: Path):
    first = Host(str(tmp_path), "demo-1", "node-a", "engine-1", "127.0.0.1")
    await first.prepare()
    await first.keep("engine.key", b"secret")
    second = Host(str(tmp_path), "demo-1", "node-b", "engine-1", "127.0.0.1")
    await second.prepare()
    assert first.home.exists()
    assert stat.S_IMODE((first.home / "engine.key").stat().st_mode) == 0o600

    first.close()
    await Host(str(tmp_path), "demo-1", "node-c", "engine-1", "127.0.0.1").prepare()

    assert not first.home.exists()
    assert second.home.exists()


def parcel(folder: Path, here: str, **login: str) -> tuple[Parcel, Path]:
    files = RunFiles(folder, folder)
    (folder / "own").mkdir()
    (folder / "own" / "reward.py").write_text("def grade(): ...")
    files.make_engine_key()
    credentials = folder / "rollout.json"
    BusAddress(**{"url": "nats://127.0.0.1:4222,nats://10.0.0.9:4222", **login}).save(credentials)
    config = msgspec.convert({"placement": {"kind": "ray", "files": ["own"]}}, Config)
    return Parcel(config, files, Path("/far"), here), credentials


def test_a_host_is_sent_the_login_of_one_role_and_the_key_of_engines_only_where_it_samples(tmp_path: Path):
    sent, credentials = parcel(tmp_path, "10.0.0.1")

    assert set(sent.files("rollout", credentials)) == {"credentials/rollout.json", "engine.key", "base/own/reward.py"}
    assert set(sent.files("reward", credentials)) == {"credentials/rollout.json", "base/own/reward.py"}
    login = msgspec.json.decode(sent.files("reward", credentials)["credentials/rollout.json"], type=BusAddress)
    assert login.url == "nats://10.0.0.1:4222,nats://10.0.0.9:4222"  # its own loopback is another machine there


def test_what_a_login_names_goes_with_it(tmp_path: Path):
    (tmp_path / "seed").write_text("SU...")
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    given = {"url": "tls://nats:4222", "nkey_file": str(tmp_path / "seed"), "tls_ca": str(tmp_path / "ca.pem")}
    sent, credentials = parcel(tmp_path, "", **given)

    found = sent.files("reward", credentials)

    login = msgspec.json.decode(found["credentials/rollout.json"], type=BusAddress)
    assert login.nkey_file == "/far/credentials/rollout.nkey_file"
    assert found["credentials/rollout.nkey_file"] == b"SU..."
    assert login.tls_ca == "-----BEGIN CERTIFICATE-----\n"


async def test_an_output_that_grows_is_sent_on_while_the_process_lives(tmp_path: Path):
    process, seat, _ = await placed(tmp_path, *SERVER)
    beside = seat.host.home / "logs" / "reward-1.server.log"
    beside.write_text("of a process of its own\n")

    here = tmp_path / "logs" / "reward-1.server.log"
    await until(lambda: here.exists() and here.read_text() == beside.read_text(), "it is here, too")
    process.kill()
    await process.wait()

"""Checks of configs that place actors by Ray, and of the cluster, before a start."""

import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from asyncrl.config.settings import Config
from asyncrl.process import python
from asyncrl.run.placements.ray.cluster import Node
from asyncrl.run.placements.ray.host import Installed, installed
from asyncrl.run.placements.ray.placement import bundle_of
from asyncrl.run.placements.ray.preflight import (
    address_problems,
    check_cluster,
    install_problems,
    placed_actors,
    room_problems,
    unfilled,
)
from asyncrl.run.preflight_model import check_machine
from benchmarks.ray_nodes import ray_nodes
from harness.configs import from_settings, problems

NO_CLUSTER = "127.0.0.1:9"
RAY = ("placement.kind=ray", 'weights.store="stream"')


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("weights.store=files",),
            'found "files", a folder that other hosts do not have; set weights.store = "stream"',
        ),
        (('placement.roles=["learner"]',), "holds learner, whose checkpoints would lie only on its host"),
        (("weights.transport=gloo",), "needs learner and engines on one host"),
        (('placement.files=["nowhere.py"]',), "nowhere.py is not there"),
        (("placement.address=head:x",), 'found "head:x", expected HOST:PORT of the head'),
        (("placement.address=head",), 'found "head", expected HOST:PORT of the head'),
        (("placement.address=ray://head:10001",), 'found "ray://head:10001", expected HOST:PORT of the head'),
        (("placement.address=local",), 'found "local", expected HOST:PORT of the head'),  # Ray would start one
        (("placement.bundles.rolout.CPU=2",), "expected one of engine, rollout, reward, groupreward"),
        (("placement.bundles.learner.GPU=2",), "nothing of this name is placed on hosts; expected one of engine"),
    ],
)
def test_settings_that_need_one_machine_are_refused(settings: tuple[str, ...], message: str):
    found = check_cluster(from_settings(*RAY, *settings).config, Path())

    assert any(message in finding.message for finding in found)


def test_a_cluster_that_does_not_answer_is_named_with_what_to_do(tmp_path: Path):
    placed = {"kind": "ray", "address": NO_CLUSTER}
    (found,) = check_cluster(config(placement=placed, weights={"store": "stream"}), tmp_path)

    assert found.keys == ("placement.address",)
    assert f"no Ray cluster at {NO_CLUSTER} answers: [Errno 111] Connection refused; start it with" in found.message


def test_what_listens_at_the_address_of_a_cluster_and_does_not_speak_as_ray_does_is_told_before_ray_gives_up(
    tmp_path: Path,
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        placed = {"kind": "ray", "address": address}
        (found,) = check_cluster(config(placement=placed, weights={"store": "stream"}), tmp_path)

    assert f"no Ray cluster at {address} answers: what listens there does not answer; start it with" in found.message


def test_ray_that_is_not_installed_is_named_with_what_to_install():
    code = "import sys; sys.modules['ray'] = None; from asyncrl.run.placements.ray.cluster import main; main()"
    done = subprocess.run([*python(), "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert f"ray is not installed for {sys.executable}" in done.stderr
    assert "pip install 'asyncrl[ray]'" in done.stderr


def config(**tables: object) -> Config:
    return msgspec.convert({"placement": {"kind": "ray"}, **tables}, Config)


def node(*, here: bool = True, **resources: float) -> Node:
    return Node("a", "10.0.0.1", resources, head=False, here=here)


def test_a_bundle_is_what_the_settings_say_or_follows_from_the_server():
    servers = {"groups": {"big": {"kind": "sglang", "arguments": ["--tp-size", "4"]}, "small": {}}}
    placed = {"kind": "ray", "bundles": {"rollout": {"CPU": 2}, "engine-small": {"CPU": 3, "fast": 1}}}
    settings = config(engine=servers, placement=placed)

    assert bundle_of(settings, "engine-big-1") == {"CPU": 1, "GPU": 4}
    assert bundle_of(settings, "engine-small-2") == {"CPU": 3, "fast": 1}
    assert bundle_of(settings, "rollout-7") == {"CPU": 2}


def test_actors_without_room_are_named():
    settings = config(engine={"kind": "sglang", "count": 2, "arguments": ["--tp-size", "2"]}, rollout={"workers": 2})

    assert placed_actors(settings) == ["engine-1", "engine-2", "rollout-1", "rollout-2", "reward-1"]
    assert unfilled(settings, [node(CPU=5, GPU=4)]) == []
    assert unfilled(settings, [node(CPU=8, GPU=3), node(CPU=8, GPU=1)]) == ["engine-2"]  # a tensor group has one host
    assert unfilled(settings, [node(CPU=4, GPU=4)]) == ["reward-1"]
    settings.placement.lent = ["engine", "rollout"]  # other runs may have them
    assert placed_actors(settings) == ["reward-1"]


def test_too_few_cards_are_refused_by_the_bundles_that_find_no_room():
    settings = config(engine={"kind": "sglang", "count": 2, "arguments": ["--tp-size", "2"]})

    (found,) = room_problems(settings, [node(CPU=8, GPU=3, memory=1e9)])

    assert found.keys == ("placement.bundles",)
    assert found.message == (
        "no node has room for the bundle of engine-2 {CPU: 1, GPU: 2}, in addition to the others; "
        "the nodes have 10.0.0.1 {CPU: 8, GPU: 3}"
    )
    assert not list(room_problems(settings, [node(CPU=8, GPU=4)]))


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (Installed("3.12.1", installed().asyncrl), f"has asyncrl {installed().asyncrl} on Python 3.12.1, this machine"),
        (Installed(installed().python, ""), f"has no asyncrl on Python {installed().python}, this machine"),
        (None, "did not report the installed packages"),
    ],
)
def test_a_node_that_would_run_other_code_is_refused(there: Installed | None, words: str):
    (found,) = install_problems([msgspec.structs.replace(node(), installed=there)])

    assert words in found.message
    assert not list(install_problems([msgspec.structs.replace(node(), installed=installed())]))


OLD = """
import importlib.metadata
own = importlib.metadata.version
importlib.metadata.version = lambda name: "0.0.1" if name == "asyncrl" else own(name)
"""
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "asyncrl":
            raise ModuleNotFoundError("No module named 'asyncrl'", name=name)
sys.meta_path.insert(0, Absent())
"""
OTHER_RAY = """
import ray, runpy
ray.__version__ = '2.0'
runpy.run_module('asyncrl.run.placements.ray.cluster', run_name='__main__')
"""
HOSTS = """
import asyncio, sys
from asyncrl.run.placements.ray.cluster import HostFailed, RayCluster
async def main():
    cluster = RayCluster(sys.argv[1])
    for name in ("one", "two"):
        seat = await cluster.reserve(sys.argv[2], "run", name, {"CPU": 2}, 60)
        try:
            print((await seat.call("prepare"))[2])
        except HostFailed as error:
            print(error)
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_nodes_and_clusters_of_other_versions_are_one_clear_error_each(tmp_path: Path):
    for name, text in (("old", OLD), ("without", WITHOUT)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(text)
    with ray_nodes() as nodes:
        nodes.add(2, PYTHONPATH=str(tmp_path / "old"))
        nodes.add(2, PYTHONPATH=str(tmp_path / "without"))
        nodes.wait()
        placed = {"kind": "ray", "address": nodes.address, "folder": str(tmp_path / "hosts")}
        settings = config(placement=placed, weights={"store": "stream"})
        found = [one.message for one in check_cluster(settings, tmp_path)]
        other = subprocess.run([*python(), "-c", OTHER_RAY, nodes.address], capture_output=True, text=True, check=False)
        words = [*python(), "-c", HOSTS, nodes.address, str(tmp_path / "hosts")]
        hosts = subprocess.run(words, capture_output=True, text=True, check=False)

    here = f"this machine asyncrl {installed().asyncrl} on Python {installed().python}; install the same there"
    assert sum(f"has asyncrl 0.0.1 on Python {installed().python}, {here}" in one for one in found) == 1, found
    assert sum(f"has no asyncrl on Python {installed().python}, {here}" in one for one in found) == 1, found
    assert other.returncode == 1
    assert f"the Ray cluster at {nodes.address} cannot be joined: Version mismatch" in other.stderr
    assert set(hosts.stdout.splitlines()) == {
        f"asyncrl 0.0.1 on Python {installed().python}",
        "its host has no asyncrl; install there what this machine has",
    }, hosts.stderr


@pytest.mark.parametrize(
    ("nats", "message"),
    [
        ({}, "nodes on other machines, such as 10.0.0.1, do not reach a server on 127.0.0.1"),
        ({"host": "0.0.0.0"}, "the server of the run would be unencrypted"),
        ({"url": "tls://localhost:4222"}, "is this machine's loopback, which 10.0.0.1 does not reach"),
        ({"url": "nats://10.0.0.7:4222"}, "sends logins and tokens to 10.0.0.1 unencrypted; expected tls://HOST:PORT"),
    ],
)
def test_another_machine_must_reach_the_topics_by_tls(nats: dict[str, str], message: str):
    (found,) = address_problems(config(nats=nats).nats, [node(here=False)])
    assert message in found.message
    assert not list(address_problems(config(nats=nats).nats, [node()]))  # simulated nodes of this machine
    assert not list(address_problems(config(nats={"url": "tls://10.0.0.7:4222"}).nats, [node(here=False)]))


def test_cards_and_packages_of_engines_are_not_looked_for_here_where_ray_chooses_their_hosts(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        "asyncrl.engine.sglang.kind.last_line_of", lambda *_: "False"
    )  # as a head without SGLang answers
    engines = config(engine={"kind": "sglang"}, learner={"trainer": "scripted"})
    assert not list(check_machine(engines))
    engines.placement.roles = ["rollout"]
    assert [one.keys for one in check_machine(engines)] == [("engine.kind",)]


def test_a_bundle_below_zero_is_refused_by_what_is_expected():
    (found,) = problems("demo", "placement.bundles.engine.CPU=-1")
    assert found.message.endswith("expected table of tables of numbers > 0")


def test_roles_that_stay_beside_up_are_refused():
    found = problems("demo", 'placement.roles=["buffer"]')

    assert "buffer" in found[0].message

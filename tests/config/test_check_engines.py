"""Settings of engines that `check` refuses: GPUs that do not suffice, ports and roles that meet, shared GPUs."""

from pathlib import Path

import pytest

from asyncrl.config.devices import memory_fraction, shares_with_learner
from asyncrl.config.engine_settings import EngineGroup
from asyncrl.config.hints import hints
from asyncrl.config.load import load_config
from asyncrl.engine.control import ServerSpec
from asyncrl.engine.sglang.control import SGLangControl
from asyncrl.engine.starting import EngineFailed
from asyncrl.run.preflight import check_surroundings
from harness.configs import SOUND, from_settings, problems, the_problem

PREFILL = ["--disaggregation-mode", "prefill"]
ANOTHER_PORT = "--disaggregation-bootstrap-port="
DECODE = ["--disaggregation-mode=decode"]


def sglang(**settings: object) -> list[str]:
    """Settings of one group of SGLang servers."""
    return ['engine.kind="sglang"', *(f"engine.{key}={value}" for key, value in settings.items())]


def apart(*first: str, **groups: list[str]) -> list[str]:
    """Settings of prefill and decode servers behind a router."""
    named = {"decode": DECODE, **groups}
    kinds = [f'engine.groups.{name}.kind="sglang"' for name in named]
    arguments = [f"engine.groups.{name}.arguments={arguments}" for name, arguments in named.items()]
    return [*kinds, *arguments, "engine.router.count=1", *first]


@pytest.mark.parametrize(
    ("arguments", "ranks", "gpus"),
    [
        ([], 1, 1),
        (["--tp-size", "4"], 4, 4),
        (["--tp=1", "--tensor-parallel-size", "2"], 2, 2),  # the last of two alike counts
        (["--tp", "2", "--pp-size", "2"], 2, 4),
        (["--tp-size=2", "--dp-size=4"], 2, 8),
        (["--tp-size=8", "--dp-size=4", "--enable-dp-attention"], 8, 8),
    ],
)
def test_the_gpus_of_a_server_follow_from_its_arguments(arguments: list[str], ranks: int, gpus: int):
    group = EngineGroup(kind="sglang", arguments=arguments)

    assert (group.ranks, group.gpus_needed) == (ranks, gpus)


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        (sglang(gpus=[0, 1], arguments=["--tp-size", "4"]), "engine.gpus engine.count engine.arguments"),
        (sglang(gpus=[0, 1, 2, 3], count=2), "engine.gpus engine.count engine.arguments"),
        (sglang(gpus=[0], count=2), "engine.gpus engine.count"),
        (sglang(arguments=["--tokenizer-worker-num", "2"]), "engine.arguments"),
        (sglang(gpus=[0], environment="{CUDA_VISIBLE_DEVICES='1'}"), "engine.environment engine.gpus"),
        (apart("weights.update=in_place", first=PREFILL), "engine.groups.first.arguments weights.update"),
        (
            apart("engine.groups.first.count=3", first=PREFILL, other=[*PREFILL, ANOTHER_PORT + "9000"]),
            "engine.groups.first.arguments engine.groups.other.arguments",
        ),
        (apart(), "engine.groups.decode.arguments engine.router.count"),
        (
            apart("engine.router.count=0", first=PREFILL),
            "engine.groups.decode.arguments engine.groups.first.arguments engine.router.count",
        ),
    ],
)
def test_servers_that_could_not_start_or_answer_are_refused(settings: list[str], keys: str):
    problem, overridden = the_problem("demo", *settings), {setting.partition("=")[0] for setting in settings}

    assert problem.key == f"--set {next(key for key in keys.split() if key in overridden)}"


def test_prefill_groups_with_ports_of_their_own_are_taken():
    from_settings(*apart(first=PREFILL, other=[*PREFILL, ANOTHER_PORT + "8999"]))


def test_weights_go_directly_to_the_ranks_of_one_model_alone():
    settings = ["weights.transport=nccl", "learner.device=cuda:0", *sglang(gpus=[1, 2], arguments=["--dp-size=2"])]
    problem = the_problem("demo", *settings)

    assert problem.key == "--set engine.arguments"
    drafting = the_problem("demo", *settings[:-1], "engine.arguments=['--tp=2', '--speculative-algorithm', 'EAGLE']")
    assert "would draft with those of its start" in drafting.message
    from_settings(*settings[:-1], "engine.arguments=['--dp-size=2', '--tp=2', '--enable-dp-attention']")
    settings = ["weights.transport=nccl", "learner.device=cuda", "learner.ranks=2", *sglang(gpus=[1])]
    assert the_problem("demo", *settings).message.startswith(
        "found [1], expected GPUs other than the learner's, [0, 1]"
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (sglang(count=2), "2 processes share GPU 0"),
        (["learner.device=cuda:1", *sglang(gpus=[1])], "2 processes share GPU 1"),
        (sglang(count=2, arguments=["--mem-fraction-static=0.4"]), ""),
        (sglang(count=2, arguments=["--device", "cpu"]), ""),
        (sglang(count=2, gpus=[0, 1]), ""),
    ],
)
def test_servers_that_meet_on_one_gpu_are_a_hint(settings: list[str], words: str):
    found = [hint for hint in hints(from_settings(*settings).config) if "share GPU" in hint]

    assert [hint[: len(words)] for hint in found] == ([words] if words else [])


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (sglang(), 1),
        (sglang(arguments=["--skip-server-warmup"]), 0),
        (sglang(arguments=["--skip-tokenizer-init"]), 0),
        (["model.path=/models/qwen", *sglang()], 0),
        ([], 0),
    ],
)
def test_a_server_whose_warm_up_a_made_model_refuses_is_a_hint(settings: list[str], found: int):
    assert len([hint for hint in hints(from_settings(*settings).config) if "--skip-server-warmup" in hint]) == found


def test_more_gpus_than_there_are_here_are_refused(tmp_path: Path):
    (tmp_path / "sglang.py").touch()
    (tmp_path / "torch.py").write_text("__version__ = '2.11.0'\nclass cuda:\n    device_count = lambda: 2\n")
    environment = f"{{PYTHONPATH='{tmp_path}'}}"
    problem = the_problem("demo", *sglang(gpus=[1, 2, 3], count=3, environment=environment), files=True)

    assert problem.key == "--set engine.gpus"
    assert problem.message == "found [2, 3], expected numbers of GPUs that are here, from 0 up; torch 2.11.0 finds 2"


def test_gpus_are_numbered_among_those_that_the_run_sees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    config = from_settings(*sglang(count=2, gpus=[0, 1, 2, 3], arguments=["--tp-size=2"])).config
    servers = [SGLangControl(ServerSpec(f"engine-{n}", config.engine, tmp_path, tmp_path, None)) for n in (1, 2)]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,GPU-a,GPU-b")
    assert [server.environment()["CUDA_VISIBLE_DEVICES"] for server in servers] == ["4,5", "GPU-a,GPU-b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(EngineFailed, match=r"engine.gpus names GPU 2, but CUDA_VISIBLE_DEVICES = '4,5' shows 2 to"):
        servers[1].environment()


SGLANG = ("engine.kind=sglang", "learner.device=cuda")
TURNS, MEMORY = "placement.colocate=time_slice", "placement.colocate=memory"


def part(fraction: float, *further: str) -> str:
    words = ["--mem-fraction-static", str(fraction), *further]
    return "engine.arguments=[" + ",".join(f'"{word}"' for word in words) + "]"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([TURNS, "weights.transport=ipc"], "the learner has left the GPU when engines load"),
        ([TURNS, "engine.router.count=1"], "a router does not follow turns"),
        ([TURNS, "engine.kind=sglang"], 'SGLang frees memory only with "--enable-memory-saver"'),
        ([TURNS, "engine.kind=external", 'engine.addresses=["http://a:1"]'], '"external" servers are not this run'),
        ([TURNS, "learner.trainer=scripted"], 'the trainer "scripted" has nothing on a GPU'),
        ([TURNS, 'only=["engine"]'], "no learner runs here"),
        ([TURNS, 'placement.lent=["engine"]'], "an engine on the learner's GPU cannot go to another run"),
        (
            ['placement.lent=["rollout"]', "autoscale.pools.rollout={}"],
            "both change how many processes rollout has",
        ),
        (
            [TURNS, "placement.learner_fraction=0.4"],
            'has no effect: it is of placement.colocate = "memory", found "time_slice"',
        ),
        ([MEMORY], 'found "cpu", expected cuda'),
        ([MEMORY, *SGLANG], "state the part of the memory that a server takes"),
        ([MEMORY, *SGLANG, part(1.5)], "state the part of the memory that a server takes"),
        ([MEMORY, *SGLANG, part(0.6)], "take 1.1 of the memory of GPU 0 together"),
        ([MEMORY, *SGLANG, part(0.3), "engine.count=2"], "take 1.1 of the memory of GPU 0 together"),
    ],
)
def test_cards_that_cannot_be_shared_so_are_refused(settings, words):
    assert words in " ".join(problem.message for problem in problems("demo", *settings))


def test_cards_that_can_be_shared_are_not():
    from_settings(TURNS)
    from_settings(TURNS, "engine.kind=sglang", 'engine.arguments=["--enable-memory-saver"]')
    from_settings(MEMORY, *SGLANG, part(0.5))
    # Servers beyond the learner's GPU have a GPU of their own.
    from_settings(MEMORY, *SGLANG, part(0.9), "engine.gpus=[1]", "placement.learner_fraction=0.95")
    assert "GPU 1" in the_problem("demo", MEMORY, *SGLANG, part(0.9), "engine.gpus=[1]", "learner.ranks=2").message


def test_a_key_of_sglang_that_reads_like_an_option_is_refused(written, tmp_path):
    (tmp_path / "key").write_text("-key\n")
    plain = SOUND + 'engine.api_key_file = "key"\n'

    load_config(written(plain), further=check_surroundings)
    found = [one.message for one in problems(written(plain + 'engine.kind = "sglang"\n'), files=True)]
    assert sum("may not begin with '-'" in message for message in found) == 1


TWO_GPUS = ("engine.kind=sglang", "learner.device=cuda:0", "engine.count=2", "engine.gpus=[0,1]")


def test_a_server_on_the_learners_gpu_has_less_memory_than_one_with_a_gpu_to_itself(tmp_path):
    config = from_settings(MEMORY, *TWO_GPUS, part(0.85), "placement.engine_fraction=0.4").config

    assert [shares_with_learner(config, name) for name in ("engine-1", "engine-2")] == [True, False]
    assert [memory_fraction(config, name) for name in ("engine-1", "engine-2")] == [0.4, 0.0]
    homes = [
        ServerSpec(name, config.engine, tmp_path, tmp_path / "log", None, memory=memory_fraction(config, name))
        for name in ("engine-1", "engine-2")
    ]
    commands = [SGLangControl(home).arguments() for home in homes]
    assert [" ".join(words).rpartition("--mem-fraction-static ")[2].split()[0] for words in commands] == ["0.4", "0.85"]


def test_parts_of_the_learners_gpu_are_added_up_and_those_of_other_gpus_are_not():
    from_settings(MEMORY, *TWO_GPUS, "placement.engine_fraction=0.5")
    message = the_problem("demo", MEMORY, *TWO_GPUS, "placement.engine_fraction=0.6").message
    assert "learner and servers take 1.1 of the memory of GPU 0 together" in message


def test_only_engines_on_the_learners_gpu_take_turns_with_it():
    saver = 'engine.arguments=["--enable-memory-saver"]'
    config = from_settings(TURNS, *TWO_GPUS, saver).config

    assert [shares_with_learner(config, name) for name in ("engine-1", "engine-2")] == [True, False]
    assert shares_with_learner(from_settings(TURNS).config, "engine-1")  # on a CPU

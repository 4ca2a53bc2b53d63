"""Each kind of inference servers is described by its folder, and what it claims has an implementation."""

from pathlib import Path
from pkgutil import resolve_name
from typing import get_args, get_type_hints

import pytest

from asyncrl.config.engine_settings import KINDS, Capability, EngineGroup, EngineSettings, kind_of
from asyncrl.engine.control import EngineControl

ROOT = Path(__file__).parents[2] / "asyncrl" / "engine"


def test_the_kinds_that_settings_take_are_the_folders_with_a_description():
    assert get_args(get_type_hints(EngineSettings)["kind"]) == KINDS
    assert {path.parent.name for path in ROOT.glob("*/kind.py")} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_has_a_control_a_client_and_a_name_for_messages(name: str):
    kind = kind_of(name)

    assert kind.title
    assert EngineControl in resolve_name(kind.control).__mro__
    assert callable(resolve_name(kind.client))


@pytest.mark.parametrize("name", KINDS)
def test_what_a_kind_claims_its_control_does(name: str):
    kind, control = kind_of(name), resolve_name(kind_of(name).control)

    assert control.own == (Capability.PROCESSES in kind.capabilities)
    assert not kind.capabilities >= {Capability.PROCESSES, Capability.ADDRESSES}
    assert kind.switches.keys() <= kind.capabilities
    for capability, method in {
        Capability.SLEEP: "release_memory",
        Capability.STAGED: "update_from_memory",
        Capability.IPC: "update_from_memory",
        Capability.NCCL: "join_group",
        Capability.GLOO: "join_group",
    }.items():
        if capability in kind.capabilities:
            assert getattr(control, method) is not getattr(EngineControl, method, None), capability


@pytest.mark.parametrize("name", KINDS)
def test_a_group_without_arguments_passes_the_hooks_of_its_kind(name: str, tmp_path: Path):
    kind, group = kind_of(name), EngineGroup(kind=name)

    assert not [*kind.checks({"engine": group}, "in_place"), *kind.transport_checks("engine", group, "ipc")]
    assert not [*kind.hints("engine", group, "model")]
    assert kind.adapter_problem(group, ["q_proj", "v_proj"]) == kind.form_problem("plain") == ""
    assert kind.key_problem("a key") == ""
    assert (group.role, group.ranks, group.copies, group.gpus_needed) == ("regular", 1, 1, 1)
    assert group.on_gpus == group.can(Capability.PROCESSES, Capability.GPU)
    assert {one for one in Capability if group.missing_switch(one)} == set(kind.switches)

"""Settings of sandboxes, and what `asyncrl check` finds about them."""

from asyncrl.api.check import check
from asyncrl.config.sandbox_settings import SandboxSettings, sandbox_kind
from asyncrl.sandboxes import bubblewrap, control_groups
from asyncrl.sandboxes.control_groups import group_parents

HARNESS = {"task.rollout": "harness:mini", "model.create.template": "{{ messages }}"}


def test_a_config_without_isolation_must_trust_its_programs():
    problems = check("demo", {**HARNESS, "sandbox.kind": "none"}).problems

    assert "sandbox.trusted = true" in " ".join(problem.message for problem in problems)


def test_check_names_the_limits_that_hold_only_in_part(monkeypatch, tmp_path):
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path)
    group_parents.cache_clear()
    try:
        found = check("coder", {"sandbox.kind": "none", "sandbox.trusted": True})
    finally:
        group_parents.cache_clear()

    words = [hint.partition(" ")[0] for hint in found.hints if hint.startswith("sandbox.")]
    assert found.ok
    assert words == ["sandbox.memory_mb", "sandbox.processes", "sandbox.cores", "sandbox.disk_mb"]


def test_a_machine_without_bubblewrap_is_told_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    bubblewrap._fault_of_bubblewrap.cache_clear()
    try:
        problem = bubblewrap._fault_of_bubblewrap()
    finally:
        bubblewrap._fault_of_bubblewrap.cache_clear()

    assert "apt-get install bubblewrap" in problem


def test_paths_that_programs_may_read_are_absolute_and_exist():
    kind = sandbox_kind("bubblewrap")
    [finding] = kind.checks(SandboxSettings(readable=["modules"]))

    assert "absolute" in finding.message
    assert "/no/such" in kind.problem(SandboxSettings(readable=["/no/such"]))

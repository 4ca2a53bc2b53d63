"""Settings of harnesses: programs that work on rows with the policy as their model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, TypeAlias, get_args

import msgspec

from asyncrl.config.setting_types import Positive, Seconds, Settings

Address: TypeAlias = Literal["sandbox", "worker", "none"]


class HarnessSettings(Settings, tag_field="kind"):
    """Settings of every harness."""

    address: ClassVar[Address] = "sandbox"
    """Where its program reaches the endpoint: inside the sandbox, in the worker, or not over HTTP."""
    sessions: ClassVar[bool] = False
    """Whether its program continues a session from files of the workspace."""

    # Seconds of an attempt, without those in which it waits for the policy.
    time_limit_s: Seconds = 600.0
    # What follows when the program crashes or takes too long. `grade`: the tests run on its files; `drop`: the
    # trajectory has no result; `reward`: it gets `failure_reward`.
    at_failure: Literal["grade", "drop", "reward"] = "grade"
    failure_reward: float = 0.0  # Reward of a failed attempt with `at_failure = "reward"`.
    # How a trajectory continues on another worker. `rerun`: the program starts again, and equal calls get the recorded
    # answers; `abandon`: all is sampled again; `snapshot`: the program continues its session by its own flag, in the
    # workspace as it was before its newest call (`command`, `claude-code`).
    resume: Literal["rerun", "abandon", "snapshot"] = "rerun"
    # Tables `[tools.NAME]` whose tools the policy may call. `mini` declares them in the prompt; a program gets an MCP
    # server with them, `python` the argument `tools`.
    tools: list[str] = msgspec.field(default_factory=list)

    def problem(self) -> str:
        """Return why these settings cannot work, or ""."""
        if self.resume == "snapshot" and not self.sessions:
            return 'its program continues no session from files; expected resume = "rerun" or "abandon"'
        return self.own_problem()

    def own_problem(self) -> str:
        """Return why settings of this kind alone cannot work, or ""."""
        return ""


class MiniSettings(HarnessSettings, tag="mini"):
    """A small agent loop of asyncrl: reply, run, read the output, up to `turns` replies."""

    address: ClassVar[Address] = "none"

    # File that each reply becomes. Empty: the commands of each ```sh block run, and a reply without one ends the work.
    file: str = ""
    # Program that runs after each reply that became a file. Its output is the next message; exit code 0 ends the work.
    check: list[str] = msgspec.field(default_factory=list)
    turns: Positive = 8  # Replies at most.
    system: str = ""  # First message of the conversation; empty: none.


class CommandSettings(HarnessSettings, tag="command"):
    """A program in the sandbox. `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_AUTH_TOKEN`
    name the policy. Standard input is the prompt of the row.
    """

    sessions: ClassVar[bool] = True

    # Program and arguments; `{prompt}` in an argument is the prompt of the row.
    command: list[str] = msgspec.field(default_factory=list)
    # Program and arguments that continue a session, with `resume = "snapshot"`; standard input is then empty.
    resume_command: list[str] = msgspec.field(default_factory=list)
    environment: dict[str, str] = msgspec.field(default_factory=dict)  # Further variables of the program.
    files: dict[str, str] = msgspec.field(default_factory=dict)  # Further files of the workspace: texts by their paths.

    def own_problem(self) -> str:
        if not self.command:
            return "command is empty; expected a program and its arguments"
        if self.resume == "snapshot" and not self.resume_command:
            return 'resume = "snapshot" needs resume_command, by which the program continues its session'
        return ""


class ClaudeCodeSettings(HarnessSettings, tag="claude-code"):
    """Claude Code, as npm installs it (`npm install @anthropic-ai/claude-code`)."""

    sessions: ClassVar[bool] = True

    program: str = "claude"  # Path of the program.
    arguments: list[str] = msgspec.field(default_factory=list)  # Further arguments.


class CodexSettings(HarnessSettings, tag="codex"):
    """Codex, as npm installs it (`npm install @openai/codex`). It takes no `tools`: it declares tools of MCP servers as
    namespaces, which the endpoint leaves out.
    """

    program: str = "codex"  # Path of the program.
    arguments: list[str] = msgspec.field(default_factory=list)  # Further arguments.

    def own_problem(self) -> str:
        return (
            "codex gives the policy no tools of MCP servers; leave out `tools`, or take another harness"
            if self.tools
            else ""
        )


class OpencodeSettings(HarnessSettings, tag="opencode"):
    """OpenCode, as npm installs it (`npm install opencode-ai`)."""

    program: str = "opencode"  # Path of the program.
    arguments: list[str] = msgspec.field(default_factory=list)  # Further arguments.


class PiSettings(HarnessSettings, tag="pi"):
    """Pi, as npm installs it (`npm install @mariozechner/pi-coding-agent`). It knows no MCP, so it takes no `tools`."""

    program: str = "pi"  # Path of the program.
    arguments: list[str] = msgspec.field(default_factory=list)  # Further arguments.

    def own_problem(self) -> str:
        return "pi knows no MCP servers; leave out `tools`, or take another harness" if self.tools else ""


class PythonSettings(HarnessSettings, tag="python"):
    """An async function. It names those of `row`, `base_url`, `api_key` and `sandbox` that it takes, and may return the
    final text. It runs in the rollout worker, outside the sandbox.
    """

    address: ClassVar[Address] = "worker"

    function: str = ""  # `path/to/file.py:function` or `package.module:function`.

    def own_problem(self) -> str:
        return "" if ":" in self.function else f"found function = {self.function!r}; expected path/to/file.py:function"


AnyHarness: TypeAlias = (
    ClaudeCodeSettings | CodexSettings | CommandSettings | MiniSettings | OpencodeSettings | PiSettings | PythonSettings
)
KINDS: dict[str, type[HarnessSettings]] = {str(kind.__struct_config__.tag): kind for kind in get_args(AnyHarness)}
"""By the names in configs."""

_PREFIX = "harness:"


def harness_name(rollout: str) -> str:
    """Return the harness that `task.rollout` names; "" if it names a function."""
    return rollout.removeprefix(_PREFIX) if rollout.startswith(_PREFIX) else ""


def harness_settings(name: str, given: Mapping[str, HarnessSettings]) -> HarnessSettings | None:
    """Return the settings of `[harnesses.NAME]`, or the defaults of a kind; None for an unknown name."""
    kind = KINDS.get(name)
    return given.get(name) or (kind() if kind is not None else None)

"""What users and policies wrote reaches a terminal as text: no escape sequence of theirs is obeyed."""

import io
import sys

import msgspec
import pytest
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from asyncrl.cli.logs import line_text
from asyncrl.cli.main import main
from asyncrl.cli.output import Terminal
from asyncrl.cli.samples import sample_text
from asyncrl.state.format_message import FormattedMessage, as_line
from asyncrl.state.samples import Sample
from asyncrl.telemetry.logs import Line
from asyncrl.telemetry.printable import PrintableOutput, printable

TITLE, CLEAR, CLIPBOARD = "\x1b]0;owned\x07", "\x1b[2J", "\x1b]52;c;Y3VybCBldmlsfHNo\x07"
ATTACK = f"a{TITLE}b{CLEAR}c{CLIPBOARD}\x9b31m\r\u202e\nnext\tline é 漢"
SHOWN = r"a\x1b]0;owned\x07b\x1b[2Jc\x1b]52;c;Y3VybCBldmlsfHNo\x07\u009b31m\x0d\u202e" + "\nnext\tline é 漢"


def printed(renderable: object) -> str:
    out = io.StringIO()
    Console(file=out, force_terminal=True, highlight=False, soft_wrap=True).print(renderable)
    return out.getvalue()


def obeyed(text: str) -> bool:
    return any(attack in text for attack in (TITLE, CLEAR, CLIPBOARD, "\x07", "\x9b", "\u202e"))


def test_control_characters_are_shown_and_newlines_tabs_and_letters_stay():
    assert printable(ATTACK) == SHOWN
    assert printable(SHOWN) == SHOWN


def test_json_stays_json_and_keeps_its_values():
    assert msgspec.json.decode(printable(msgspec.json.encode(ATTACK).decode())) == ATTACK


def test_samples_show_what_users_and_policies_wrote():
    texts = dict.fromkeys(("prompt", "completion", "label"), ATTACK)
    sample = Sample(name="l000001-0", reward=1.0, artefacts={ATTACK: ATTACK}, **texts)

    shown = printed(sample_text(sample))

    assert not obeyed(shown) and r"\x1b]0;owned" in shown


def test_logs_show_what_actors_wrote():
    line = Line("2026-11-28T18:00:00+00:00", "reward-1", "warning", ATTACK, {"detail": ATTACK, "exception": ATTACK})

    assert not obeyed(printed(line_text(line)))


def test_a_subject_that_was_listened_in_on_is_shown():
    message = FormattedMessage(f"asyncrl.mine.said.{CLEAR}.{CLEAR}", {}, b"", 0)

    assert not obeyed(as_line(message))


def test_every_command_writes_to_printable_streams(monkeypatch: pytest.MonkeyPatch):
    out, error = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", error)
    monkeypatch.setattr(sys, "argv", ["asyncrl", "status", CLEAR])

    assert main() == 1

    error.seek(0)
    said = error.read()
    assert not obeyed(said) and r"\x1b[2J" in said


def test_a_terminal_keeps_the_styles_of_its_caller_alone(monkeypatch: pytest.MonkeyPatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", PrintableOutput(out))

    Terminal(force_terminal=True).print(Panel(Text(ATTACK, "bold")))

    assert not obeyed(out.getvalue()) and "\x1b[1m" in out.getvalue()

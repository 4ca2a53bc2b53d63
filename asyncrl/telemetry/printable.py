"""Text of users, policies and remote servers on a terminal: its control characters are shown and not obeyed."""

from __future__ import annotations

from typing import Any, TextIO

_ASCII = {code: f"\\x{code:02x}" for code in range(0x20) if chr(code) not in "\n\t"}
# Other controls, and marks that reorder displayed text. JSON may hold them, so they are written as JSON writes them.
_OTHERS = (*range(0x7F, 0xA0), 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SHOWN = _ASCII | {code: f"\\u{code:04x}" for code in _OTHERS}


def printable(text: str) -> str:
    r"""Return text with its control characters as `\x1b` or `\u009b`; newlines and tabs stay."""
    return text.translate(_SHOWN)


class PrintableOutput:
    """A text stream that writes control characters as text; it is otherwise the stream that it wraps."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write text; returns the number of characters given."""
        self.stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

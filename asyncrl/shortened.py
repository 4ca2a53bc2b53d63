"""Long texts without their middle."""

from __future__ import annotations

OUTPUT_CHARACTERS = 4_000
"""Characters of a program's output that the policy or an artefact gets: the first and the last half."""


def shortened(text: str, most: int = OUTPUT_CHARACTERS) -> str:
    """Return a text without its middle if it has more characters than `most`."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"

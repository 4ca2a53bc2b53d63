"""Telling a frozen process from a busy one: every actor takes its vital signs every two seconds, so silence is death.

A silence counts only while the server answers and this process itself runs: whoever cannot hear does not judge.
"""

from __future__ import annotations

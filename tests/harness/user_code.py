"""Code of a user that several tests give to their runs."""

# A tool that a test holds up: it tells that it was called, and ends when there is an answer.
HOLD = """
import asyncio
from pathlib import Path

async def hold(folder, number):
    Path(folder, f"called-{number}").touch()
    while not Path(folder, "answer").exists():
        await asyncio.sleep(0.01)
"""

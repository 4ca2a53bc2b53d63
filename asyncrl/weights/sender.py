"""A process that brings weights to a server: by NCCL or gloo out of a learner rank's memory, or into its own.

It is a process of its own because a transfer to a server that dies cannot be ended in any other way than with its
process, and because an engine actor has no GPU. `python -m asyncrl.weights.sender FD` answers commands on a socket, one
after the other, until that closes.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import msgspec
import torch
import zstandard

from asyncrl.errors import AsyncRLError
from asyncrl.framing import Frames, pack
from asyncrl.weights.described import Described
from asyncrl.weights.sender_calls import Answer, Command, Join, Open, Stage
from asyncrl.weights.shared import NotShared, unpack_tensors
from asyncrl.weights.staging_memory import StagingMemory
from asyncrl.weights.transfer import TransferGroup


class _Sender:
    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._calls: list[list[tuple[str, torch.Tensor]]] = []
        self._group: TransferGroup | None = None
        self._device = torch.device("cpu")  # of the group
        self._staged = StagingMemory()

    def do(self, command: Command) -> Answer:
        """Obey a command."""
        if isinstance(command, Open):
            self._open(command.tensors)
            return Answer(calls=[[_described(*one) for one in call] for call in self._calls])
        if isinstance(command, Stage):
            device = torch.device(command.device)
            return Answer(packed=self._staged.fill(Path(command.directory), device, command.spare))
        if isinstance(command, Join):
            self._device = self._calls[0][0][1].device
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._group = TransferGroup(command.place, 0, timeout_s=command.timeout_s)
        elif self._group is not None:
            self._group.broadcast([tensor for _, tensor in self._calls[command.call]])
        return Answer()

    def _open(self, packed: list[bytes]) -> None:
        """Map tensors, which lie on one device; those of a learner that is gone are let go before."""
        if packed == self._packed:
            return
        self._packed, self._calls = [], []
        self._calls = [unpack_tensors(zstandard.ZstdDecompressor().decompress(call)) for call in packed]
        device = self._calls[0][0][1].device
        if self._group is not None and device != self._device:
            raise NotShared(f"the rank has its tensors on {device} by now, and the group is of {self._device}")
        self._packed = packed


def _described(name: str, tensor: torch.Tensor) -> Described:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Described(name, dtype, list(tensor.shape), tensor.numel() * tensor.element_size())


def main() -> None:
    """Answer until the socket closes."""
    sender, frames, decoder = _Sender(), Frames(), msgspec.msgpack.Decoder(Command)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        channel.sendall(pack(Answer()))  # it has imported what it needs
        while data := channel.recv(1 << 20):
            for frame in frames.feed(data):
                try:
                    answer = sender.do(decoder.decode(frame))
                except (AsyncRLError, OSError, RuntimeError, ValueError, KeyError, zstandard.ZstdError) as error:
                    answer = Answer(f"{type(error).__name__}: {error}"[:2000])
                channel.sendall(pack(answer))
    os._exit(0)  # a library's thread may still wait


if __name__ == "__main__":
    main()

"""A process that brings weights to a server: by NCCL or gloo out of a learner rank's memory, or into its own.

It is a separate process because only the end of a process can end a transfer to a dead server, and because an engine
actor has no GPU. `python -m asyncrl.weights.sender FD` answers commands on a socket, one after the other, until that
closes.
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
from asyncrl.weights.sender_calls import Answer, Command, Join, Open, Stage
from asyncrl.weights.shared import View, keep_for_reader, pack_tensors, shared_memory, unpack_tensors
from asyncrl.weights.shared_names import NotShared
from asyncrl.weights.tensors import HostTensor, tensors_in
from asyncrl.weights.transfer import TransferGroup
from asyncrl.weights.transfer_manifest import Described

_ALIGNED = 256
_AT_ONCE = 1 << 26  # bytes


class StagingMemory:
    """Holds one version after the other, in the same place: a GPU's memory, or shared memory of the host."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._views: list[View] = []
        self._packed = b""
        self._bounce = torch.empty(0, dtype=torch.uint8)

    def fill(self, directory: Path, device: torch.device, spare: int) -> bytes:
        """Copy all tensors of a directory; returns them as a server can map them.

        Args:
            spare: bytes that must stay free on a GPU.

        Raises:
            NotShared: there is no room for them.
            OSError, ValueError: they cannot be read.
        """
        tensors = [tensor for path in sorted(directory.glob("*.safetensors")) for tensor in tensors_in(path)]
        views, end = list[View](), 0
        for tensor in tensors:
            views.append(View(tensor.name, getattr(torch, tensor.dtype), tuple(tensor.shape), end))
            end += -(-len(tensor.content) // _ALIGNED) * _ALIGNED
        if len(self._memory) < end:
            if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < end + spare:
                raise NotShared(f"{free} bytes of the GPU are free, expected {end} of a version and {spare} more")
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees the earlier group first
            self._memory, self._packed = shared_memory(end, device), b""
        for tensor, view in zip(tensors, views, strict=True):
            self._copy(tensor, view.start)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if views != self._views or not self._packed:
            self._views, [self._packed] = views, pack_tensors(self._memory, [views])
        keep_for_reader(self._memory)
        return self._packed

    def _copy(self, tensor: HostTensor, start: int) -> None:
        """Copy a tensor, through pinned memory where a GPU reads it."""
        if not len(self._bounce):
            self._bounce = torch.empty(_AT_ONCE, dtype=torch.uint8, pin_memory=self._memory.is_cuda)
        for begin in range(0, len(tensor.content), _AT_ONCE):
            part = tensor.content[begin : begin + _AT_ONCE]
            self._bounce.numpy()[: len(part)] = part
            self._memory[start + begin : start + begin + len(part)].copy_(self._bounce[: len(part)])


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
        channel.sendall(pack(Answer()))  # its imports are complete
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

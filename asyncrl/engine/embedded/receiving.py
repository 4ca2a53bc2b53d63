"""Weights that reach the embedded engine from another process, by calls of SGLang: over a group or shared memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import torch

from asyncrl.engine.embedded.scheduler import Engine
from asyncrl.engine.embedded.schema import FromGroupBody, FromMemoryBody, GroupBody, UpdateOptions
from asyncrl.engine.errors import EngineRefused
from asyncrl.weights.shared import unpack_tensors
from asyncrl.weights.shared_names import NotShared
from asyncrl.weights.tensors import HostTensor, digest_of, manifest_of, tensors_in
from asyncrl.weights.transfer import TransferFailed, TransferGroup
from asyncrl.weights.transfer_manifest import GroupPlace

_GROUP_S = 60.0  # to join, and for one transfer
_KEY = re.compile(r"\d+:\d+:([0-9a-f]{32})\Z")


class Receiver:
    """Weights on their way into an engine, which changes once all tensors of its model have come.

    Raises, from every method:
        EngineRefused: they cannot be had, or are others than `weight_version` names.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._groups: dict[str, TransferGroup] = {}
        self._come: dict[str, torch.Tensor] = {}
        paths = sorted(engine.model_path.glob("*.safetensors"))
        names = {tensor.name for path in paths for tensor in tensors_in(path)}
        self._names = names - {"lm_head.weight"} if engine.config.tied else names  # tied ones come once

    async def join(self, body: GroupBody) -> None:
        """Join a group of a sender and this engine; several senders have parts of one version."""
        if body.backend != "gloo":
            raise EngineRefused(f"backend {body.backend!r}: this engine runs on the CPU, expected gloo")
        self._groups = {name: group for name, group in self._groups.items() if group.has_sender()}
        self.forget()
        place = GroupPlace(body.backend, body.master_address, body.master_port, body.group_name, body.world_size)
        try:
            self._groups[body.group_name] = await asyncio.to_thread(
                TransferGroup, place, body.rank_offset, timeout_s=_GROUP_S
            )
        except TransferFailed as error:
            raise EngineRefused(str(error)) from error

    async def leave(self, name: str) -> None:
        """Leave a group."""
        if self._groups.pop(name, None) is None:
            raise EngineRefused("The group to be destroyed does not exist.")

    def forget(self) -> None:
        """Let go of tensors whose version will not come whole."""
        self._come.clear()

    async def from_group(self, body: FromGroupBody) -> None:
        """Receive tensors over a group."""
        group = self._groups.get(body.group_name)
        if group is None:
            raise EngineRefused(
                f"Group {body.group_name} not in {[*self._groups]}; call init_weights_update_group first"
            )
        if not len(body.names) == len(body.dtypes) == len(body.shapes):
            raise EngineRefused("names, dtypes and shapes have different lengths")
        types = [getattr(torch, dtype, None) for dtype in body.dtypes]
        if not all(isinstance(dtype, torch.dtype) for dtype in types):
            raise EngineRefused(f"dtypes {sorted({*body.dtypes})}: expected those of torch")
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(body.shapes, types, strict=True)]
        try:
            await asyncio.to_thread(group.broadcast, tensors)
        except TransferFailed as error:
            del self._groups[body.group_name]  # nothing comes over it any more
            raise EngineRefused(f"Failed to update parameter online: {error}") from error
        await self._take(dict(zip(body.names, tensors, strict=True)), body)

    async def from_memory(self, body: FromMemoryBody) -> None:
        """Copy tensors out of the memory of another process."""
        if len(body.serialized_named_tensors) != 1 or body.load_format is not None:
            raise EngineRefused(
                "expected one entry of serialized_named_tensors, as there is one rank, and no load_format"
            )
        try:
            tensors = dict(unpack_tensors(body.serialized_named_tensors[0]))
        except NotShared as error:
            raise EngineRefused(str(error)) from error
        # They are copied: the other process writes the next version there.
        await self._take({name: tensor.clone() for name, tensor in tensors.items()}, body)

    async def _take(self, tensors: Mapping[str, torch.Tensor], options: UpdateOptions) -> None:
        """Hold tensors until all are there, then check and load them."""
        unknown = sorted({*tensors} - self._names)
        if unknown:
            raise EngineRefused(f"the served model has no tensor {unknown[0]}")
        self._come.update(tensors)
        missing, wanted = self._names - self._come.keys(), _KEY.match(options.weight_version or "")
        if missing and wanted is None:
            return
        come, self._come = self._come, {}
        if missing:  # the call that names a version is its last one
            raise EngineRefused(f"{len(missing)} of {len(self._names)} tensors have not come, as {min(missing)}")
        if wanted is not None and (found := await asyncio.to_thread(_digest, come)) != wanted[1]:
            raise EngineRefused(f"the tensors have digest {found}, weight_version names {wanted[1]}")
        if options.abort_all_requests:
            self._engine.abort_all()
        await self._engine.update_weights(come, options.weight_version, flush=options.flush_cache)


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the identity of tensors, as the learner made it."""
    held = [
        HostTensor(
            name,
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            tensor.contiguous().reshape(-1).view(torch.uint8).numpy(),
        )
        for name, tensor in tensors.items()
    ]
    return digest_of(manifest_of({"model": held}))

"""All that is set around megatron-core 0.16.1, with the reason of each.

Nothing else of asyncrl changes it, but that `trainers` imports it without Transformer Engine.

Without a GPU the library runs on gloo in float32, but names the device "cuda" in its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel import random as random_states
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.overrides import TorchFunctionMode

from asyncrl.training.context_parallel.exchange import use_group
from asyncrl.training.megatron.linear_precision import Multiply
from asyncrl.training.megatron.parallel_config import Layout

OPTIONS: Mapping[str, Any] = {
    "use_cpu_initialization": True,  # else weights are allocated on the current GPU, also of a model on no device
    "perform_initialization": False,  # all weights are read from files
    "hidden_dropout": 0.0,  # the trainer's probabilities must be those of the policy that sampled
    "attention_dropout": 0.0,
    "add_bias_linear": False,  # no family has biases but those of queries, keys and values
    "gradient_accumulation_fusion": False,  # a kernel of Apex
    "masked_softmax_fusion": False,  # a kernel of Apex
    "bias_dropout_fusion": False,  # compiled at the first pass, for no gain without biases and dropout
    "bias_activation_fusion": False,
    "persist_layer_norm": False,  # a kernel of Apex
    "calculate_per_token_loss": True,  # else losses are divided by the micro-batches and gradients by the replicas
    "variable_seq_lengths": True,  # packed rows have another length in each micro-batch
    "moe_token_dispatcher_type": "alltoall",  # the default is refused with variable lengths, with or without experts
    "moe_router_load_balancing_type": "none",  # the gradient is that of the objective alone
}
"""Of every `TransformerConfig`."""

REPLICAS = DistributedDataParallelConfig(
    grad_reduce_in_fp32=True,
    overlap_grad_reduce=False,  # the gradients of single rows, which name culprits, come from passes of any number
    use_distributed_optimizer=True,  # each replica holds its share of the moments
    check_for_nan_in_grad=False,  # the trainer finds and names values that are not finite
)


def optimizer_config(*, eps: float, dtype: torch.dtype) -> OptimizerConfig:
    """AdamW with decoupled weight decay; rate, betas, decay and the norm to clip at are given at each update."""
    return OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        adam_eps=eps,
        use_distributed_optimizer=True,
        clip_grad=1.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,  # then the masters are float32
    )


class _OnCpu(TorchFunctionMode):
    """Turn what the library asks of a GPU into the same on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = kwargs or {}  # few calls have any
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = kwargs | {"device": "cpu"}  # norms, clipping and schedules make scalars on "cuda"
        if "pin_memory" in kwargs:
            kwargs = kwargs | {"pin_memory": False}  # of positions, which no GPU fetches
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")  # clipping and optimiser compare it to torch.cuda.FloatTensor
        return found


def around(device: torch.device) -> AbstractContextManager[object]:
    """Return the context of every library call; a mode belongs to one thread, so each thread enters it."""
    return _OnCpu() if device.type == "cpu" else torch.cuda.device(device)  # which is each thread's own, too


def prepare(device: torch.device) -> None:
    """Set the torch attributes that the library requires without a GPU."""
    if device.type == "cpu":
        cuda: Any = torch.cuda
        cuda.current_device = lambda: torch.device("cpu")  # buffers and rotary tables are made there
        cuda.synchronize = lambda *_: None  # the exchange between stages waits for a stream
        # Recomputation keeps the state of a GPU's generator; without dropout nothing is drawn.
        random_states._get_cuda_rng_state = lambda *_, **__: None
        random_states._set_cuda_rng_state = lambda *_, **__: None
    router: Any = moe_utils
    router.te_general_gemm = None  # named without Transformer Engine, but not defined
    latent: Any = multi_latent_attention
    latent.HAVE_TE = False  # of the modules that it looks for then, one is not there


def multiply_by(multiply: Multiply, model: nn.Module) -> None:
    """Let the linear layers of a model multiply so; embeddings, head, routers and routed experts do not."""

    def of_library(
        input: torch.Tensor,  # as the library names it
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        sequence_parallel: bool,
        tp_group: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        whole = all_gather_tensor_autograd(input, 0, tp_group) if sequence_parallel else input
        return multiply(whole, weight, bias)

    for module in model.modules():
        if hasattr(module, "multiply"):
            module.multiply = multiply  # type: ignore[assignment]
        elif isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module._forward_impl = of_library


def join(layout: Layout) -> None:
    """Form the groups of a layout out of all ranks, or out of this process alone; those that are there stay."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if parallel_state.model_parallel_is_initialized():
        if layout._replace(head=0) == _joined():
            use_group(parallel_state.get_context_parallel_group())
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=False,  # they are for the library's own checkpoints
    )
    use_group(parallel_state.get_context_parallel_group())
    # Without dropout nothing is drawn; this tracker asks no GPU for the state of its generator.
    model_parallel_cuda_manual_seed(0, inference_rng_tracker=True, force_reset_rng=True)


def _joined() -> Layout:
    """Return the layout whose groups are formed."""
    return Layout(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        virtual=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        expert=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
    )

"""A family that a test invents: GLM-4 under other names, with gate and up projection apart, and this file for it."""

import json

from safetensors.torch import load_file, save_file

from asyncrl.training.megatron.families import FAMILIES
from asyncrl.training.megatron.weight_map import NORMS, Family, attention, gated, intermediate, norm


def _adapt(layer, config):
    from asyncrl.training.megatron.norms import normed_addition

    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = normed_addition(config)


def _layer(shape, _number):
    added = {
        "attention_out_norm.weight": norm("self_attn_bda.norm.weight"),
        "ffn_out_norm.weight": norm("mlp_bda.norm.weight"),
    }
    return {**NORMS, **attention(shape), **added, **gated("ffn", "mlp", intermediate)}


FAMILY = Family(
    "InventedForCausalLM",
    layer=_layer,
    read=FAMILIES["Glm4ForCausalLM"].read,
    options={"rotary_interleaved": True},
    adapt=_adapt,
    rotates_part=True,
)

_NAMES = {"post_self_attn_layernorm": "attention_out_norm", "post_mlp_layernorm": "ffn_out_norm", ".mlp.": ".ffn."}


def renamed(tensors):
    """Tensors of GLM-4, whatever stands before their names, as this family has them."""
    found = {}
    for known, tensor in tensors.items():
        name = known
        for old, new in _NAMES.items():
            name = name.replace(old, new)
        if "gate_up_proj" in name:
            for one, part in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                found[name.replace("gate_up_proj", one)] = part.contiguous()
        else:
            found[name] = tensor
    return found


def write_renamed(source, directory):
    """Write a model of GLM-4 as one of this family."""
    directory.mkdir()
    config = json.loads((source / "config.json").read_text()) | {"architectures": [FAMILY.architecture]}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(renamed(load_file(source / "model.safetensors")), directory / "model.safetensors")

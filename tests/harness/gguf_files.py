"""A small GGUF file, its tensors in 8 bits, and a package that holds it."""

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

from asyncrl.models.known import Package

HIDDEN, HEADS, FFN = 64, 2, 96
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_gguf(file: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Write a Llama of one layer whose tokens are bytes; returns its tensors by their Hugging Face names."""
    tokens = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    matrix, vector, layer = (HIDDEN, HIDDEN), (HIDDEN,), "model.layers.0"
    names = {
        "token_embd": ("model.embed_tokens", (len(tokens), HIDDEN)),
        "output_norm": ("model.norm", vector),
        "blk.0.attn_norm": (f"{layer}.input_layernorm", vector),
        "blk.0.ffn_norm": (f"{layer}.post_attention_layernorm", vector),
        "blk.0.attn_q": (f"{layer}.self_attn.q_proj", matrix),
        "blk.0.attn_k": (f"{layer}.self_attn.k_proj", matrix),
        "blk.0.attn_v": (f"{layer}.self_attn.v_proj", matrix),
        "blk.0.attn_output": (f"{layer}.self_attn.o_proj", matrix),
        "blk.0.ffn_gate": (f"{layer}.mlp.gate_proj", (FFN, HIDDEN)),
        "blk.0.ffn_up": (f"{layer}.mlp.up_proj", (FFN, HIDDEN)),
        "blk.0.ffn_down": (f"{layer}.mlp.down_proj", (HIDDEN, FFN)),
    }
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    random, values = np.random.default_rng(5), dict[str, npt.NDArray[np.float32]]()
    for name, (known, shape) in names.items():
        value = values[f"{known}.weight"] = random.standard_normal(shape).astype(np.float32)
        if name.endswith(("attn_q", "attn_k")):  # GGUF has the two halves of each rotated pair next to each other
            value = value.reshape(HEADS, 2, -1, HIDDEN).swapaxes(1, 2).reshape(shape)
        kind = gguf.GGMLQuantizationType.F32 if shape == vector else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def write_wheel(folder: Path, file: Path) -> Package:
    """Write a wheel that holds a file; returns its description as a known model."""
    content, about = file.read_bytes(), "small_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "small_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"small_model/{file.name}", content)
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256(content).hexdigest()
    return Package("Small", "MIT", "small-model==1.0", 1, f"small_model/{file.name}", len(content), digest)

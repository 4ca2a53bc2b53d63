"""Load the newest adapter of a run with peft, and compare the merged model with the run's exported model.

    .venv/bin/python recipes/lora/check_adapter.py runs/lora smollm2

prints the greatest difference of the logits for one question.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION = [{"role": "user", "content": "What is 12 + 34? Answer with a number only."}]


def newest_adapter(run: Path) -> Path:
    """Return the directory of the newest version in the run's weight store."""
    return max((file.parent for file in run.rglob("adapter_config.json")), key=lambda folder: folder.stat().st_mtime)


def main(run: Path, model: str) -> None:
    """Print the difference and what the adapted model answers."""
    adapter = newest_adapter(run)
    tokenizer = AutoTokenizer.from_pretrained(run / "exported")
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    adapted = merged.to(torch.bfloat16).to(torch.float32).eval()  # rounded as the exported model is
    exported = AutoModelForCausalLM.from_pretrained(run / "exported", dtype=torch.float32).eval()
    with torch.no_grad():
        difference = (adapted(**ids).logits - exported(**ids).logits).abs().max().item()
        answer = adapted.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    print(f"{adapter.name}: logits of peft and of the exported model differ by {difference:.4f} at most")
    print(f"answer: {tokenizer.decode(answer, skip_special_tokens=True)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

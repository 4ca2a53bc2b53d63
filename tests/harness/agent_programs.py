"""A model for command-line agents, and the calls of tools that their tests make."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.training.init_model import ModelShape, create_model
from harness.live_runs import WITH_TOOLS

CONTEXT = 2_000_000  # a token of this model is a byte
SAID, DONE = "made by a tool", "all is done"
CALLS = (  # of the first tool that a client declares
    ("Bash", '{"command": "echo made by a tool > made.txt && cat made.txt", "description": "writes"}'),
    ("exec_command", '{"cmd": "echo made by a tool > made.txt && cat made.txt"}'),
    ("shell", '{"command": ["bash", "-c", "echo made by a tool > made.txt && cat made.txt"]}'),
    ("bash", '{"command": "echo made by a tool > made.txt && cat made.txt", "description": "writes"}'),
)


def model_of_bytes(folder: Path) -> Path:
    """Write a model whose tokens are bytes, so that it takes whatever agents send."""
    letters = [chr(0x4E00 + number) for number in range(256)]
    create_model(folder, alphabet="".join(letters), seed=1, shape=ModelShape(context=CONTEXT), template=WITH_TOOLS)
    names = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {token: number for number, token in enumerate([*names, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class Policy:
    """Calls the client's shell, and ends once it sees what that said."""

    def __init__(self, tokenizer: TaskTokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, ids) -> list[int]:
        text = self._tokenizer.decode_all(ids)
        found = next((call for call in CALLS if call[0] in text[:20_000]), None)
        reply = DONE
        if found is not None and SAID not in text.replace(f"{SAID} >", ""):  # which is in the call itself
            reply = f'<tool_call>{{"name": "{found[0]}", "arguments": {found[1]}}}</tool_call>'
        return [*self._tokenizer.encode(reply).tolist(), self._tokenizer.eos_ids[0]]

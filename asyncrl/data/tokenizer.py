"""Text to tokens and back, from a model directory, without loading transformers or torch.

Importing `AutoTokenizer` takes 1.4 s and 239 MB in each worker (it imports torch); `tokenizers` and `jinja2` together
take 0.04 s and 16 MB. Chat templates are rendered as transformers renders them; a test compares the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from tokenizers import Encoding, Tokenizer

from asyncrl.data.messages import has_answer, message_problem
from asyncrl.data.model_dir import named_eos_ids, read_json
from asyncrl.data.templates import ChatTemplate, Span
from asyncrl.errors import AsyncRLError
from topics.prompts import PromptRow
from topics.wire import Int32Array, UInt8Array


class TokenizerError(AsyncRLError):
    """A tokenizer that cannot be loaded, or a row that it cannot turn into tokens."""

    fatal = True


class TaskTokenizer:
    """The tokenizer and the chat template of a model directory."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, eos_ids: list[int], name: str) -> None:
        self.eos_ids = eos_ids  # tokens that end a completion; the first is the one that supervised rows end with
        self._tokenizer = tokenizer
        self._template = template
        self._name = name

    @classmethod
    def load(cls, model_dir: Path) -> TaskTokenizer:
        """Read `tokenizer.json` and the files beside it.

        Args:
            model_dir: Hugging Face model directory.

        Raises:
            TokenizerError: when the directory has no `tokenizer.json`, or one of the files is broken.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            found = ", ".join(sorted(file.name for file in model_dir.glob("*"))[:20]) or "nothing"
            raise TokenizerError(
                f"{model_dir} has no tokenizer.json (it has {found}); "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one for every fast tokenizer"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"{path} is no tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = {
            **_read_json(model_dir / "special_tokens_map.json"),
            **_read_json(model_dir / "tokenizer_config.json"),
        }
        special = {name: text for name, value in config.items() if name.endswith("_token") and (text := _text(value))}
        try:
            source = _template_source(model_dir, config)
            template = ChatTemplate(source, special) if source else None
        except TemplateError as error:
            raise TokenizerError(f"{model_dir}: the chat template is broken: {error}") from error
        return cls(tokenizer, template, _read_eos_ids(model_dir, tokenizer, special.get("eos_token")), model_dir.name)

    @property
    def greatest(self) -> tuple[int, str]:
        """The greatest of its token ids, and that token."""
        return max((number, token) for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items())

    def encode_prompt(self, row: PromptRow, *, max_tokens: int | None) -> Int32Array:
        """Tokens of a prompt: text as it is, chat messages through the template, ready for an answer.

        Text gets those special tokens that the tokenizer itself puts around it, and no others.

        Returns:
            [T] int32, T >= 1.

        Raises:
            TokenizerError: no chat template, no token, or more than `max_tokens`.
        """
        if isinstance(row.prompt, str):
            tokens = _array(self._encode(row.prompt, special=True).ids)
        else:
            text = self._render(row, row.prompt, add_generation_prompt=True)[0]
            tokens = _array(self._encode(text).ids)
        return self._checked(tokens, max_tokens, f"prompt {_shown(row)}")

    def encode_answer(self, row: PromptRow) -> Int32Array:
        """Tokens of the row's label as text, ended by the end-of-sequence token.

        Returns:
            [T] int32, T >= 1.

        Raises:
            TokenizerError: the row has no label, or the model no end-of-sequence token.
        """
        if row.label is None:
            raise TokenizerError(f"prompt {_shown(row)} has no label; a supervised row needs one")
        if not self.eos_ids:
            raise TokenizerError(f"{self._name} names no eos_token; a supervised answer must end with one")
        return np.append(self.encode(str(row.label)), np.int32(self.eos_ids[0]))

    def encode_supervised(self, row: PromptRow, *, max_tokens: int | None = None) -> tuple[Int32Array, UInt8Array]:
        """Tokens of a row to imitate: a chat with assistant messages, or else a prompt and its label.

        Returns:
            tokens: [T] int32.
            mask: [T] uint8, 1 on the assistant's tokens, its end-of-sequence token included; 0 on the first token,
                which nothing predicts: no count of trainable tokens may hold what is never trained.

        Raises:
            TokenizerError: as `encode_prompt` and `encode_answer`, or a template that hides which text is the
                assistant's.
        """
        if isinstance(row.prompt, str) or not has_answer(row.prompt):
            prompt, answer = self.encode_prompt(row, max_tokens=max_tokens), self.encode_answer(row)
            tokens = np.concatenate([prompt, answer])
            mask = (np.arange(len(tokens)) >= len(prompt)).astype(np.uint8)
        else:
            text, spans = self._render(row, row.prompt, add_generation_prompt=False)
            encoding = self._encode(text)
            tokens = _array(encoding.ids)
            starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            mask = np.zeros(len(tokens), np.uint8)
            for first, last in spans or self._spans_by_prefix(row, row.prompt, text):
                mask[(starts < last) & (ends > first)] = 1
        mask[:1] = 0
        return self._checked(tokens, max_tokens, f"supervised row {_shown(row)}"), mask

    def encode(self, text: str) -> Int32Array:
        """Return the tokens of text that joins a conversation (a tool's answer): [T] int32, no special tokens."""
        return _array(self._encode(text).ids)

    def decode(self, ids: Int32Array | list[int]) -> str:
        """Text of tokens, special tokens left out."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)

    def decode_all(self, ids: list[int]) -> str:
        """Text of tokens with the special ones, as engines look for stop strings in it."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _encode(self, text: str, *, special: bool = False) -> Encoding:
        try:
            return self._tokenizer.encode(text, add_special_tokens=special)
        except Exception as error:  # the library raises nothing narrower for a word that its vocabulary lacks
            raise TokenizerError(f"{self._name} cannot encode {text[:80]!r}: {error}") from error

    def _render(
        self, row: PromptRow, messages: list[dict[str, Any]], *, add_generation_prompt: bool
    ) -> tuple[str, list[Span]]:
        if self._template is None:
            raise TokenizerError(
                f"prompt {_shown(row)} is a chat and {self._name} has no chat template; "
                "put chat_template.jinja into the model directory, or give prompts as text"
            )
        problem = message_problem(messages)
        if problem:
            raise TokenizerError(f"prompt {_shown(row)}: {problem}")
        try:
            return self._template.render(
                messages, tools=row.metadata.get("tools"), add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise TokenizerError(f"prompt {_shown(row)}: the chat template of {self._name} fails: {error}") from error

    def _spans_by_prefix(self, row: PromptRow, messages: list[dict[str, Any]], text: str) -> list[Span]:
        """Return the assistant's spans for a template that does not mark them with `{% generation %}`.

        A message's span is what it adds to the text before it, up to the last end-of-sequence token in it.
        """
        ends = [end for token in self.eos_ids if (end := self._tokenizer.id_to_token(token))]
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(row, messages[:number], add_generation_prompt=True)[0]
            after = self._render(row, messages[: number + 1], add_generation_prompt=False)[0]
            if not (text.startswith(after) and after.startswith(before)):
                raise TokenizerError(
                    f"prompt {_shown(row)}: the chat template of {self._name} writes message {number} differently when "
                    "others follow; mark the assistant's text with {% generation %} in the template"
                )
            reply = after[len(before) :]
            cut = max((reply.rfind(end) + len(end) for end in ends if end in reply), default=len(reply))
            spans.append((len(before), len(before) + cut))
        return spans

    def _checked(self, tokens: Int32Array, max_tokens: int | None, what: str) -> Int32Array:
        if len(tokens) == 0:
            raise TokenizerError(f"{what} has no token; at least one is needed to sample from")
        if max_tokens is not None and len(tokens) > max_tokens:
            raise TokenizerError(f"{what} has {len(tokens)} tokens and at most {max_tokens} fit; shorten or remove it")
        return tokens


def _array(ids: list[int]) -> Int32Array:
    return np.array(ids, np.int32)


def _shown(row: PromptRow) -> str:
    last: Any = row.prompt if isinstance(row.prompt, str) or not row.prompt else row.prompt[-1]
    text = str(last.get("content") if isinstance(last, dict) else last)
    return repr(text if len(text) <= 60 else text[:60] + "...")


def _text(value: Any) -> str:
    """A special token, which is written as its text or as an object with its text and flags."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, TokenizerError) if path.is_file() else {}


def _template_source(model_dir: Path, config: dict[str, Any]) -> str | None:
    """The template: a file of its own comes before the configuration; of several, the one called default."""
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return source


def _read_eos_ids(model_dir: Path, tokenizer: Tokenizer, eos_token: str | None) -> list[int]:
    """The tokenizer's own end first, then those that the generation or the model configuration adds."""
    ids = [] if eos_token is None else [tokenizer.token_to_id(eos_token)]
    ids += named_eos_ids(model_dir, TokenizerError) or []
    return list(dict.fromkeys(token for token in ids if token is not None))

"""Text to tokens and back, from a model directory, without loading transformers or torch.

Importing `AutoTokenizer` takes 1.4 s and 239 MB in each worker (it imports torch); `tokenizers` and `jinja2` together
take 0.04 s and 16 MB. Chat templates are rendered as transformers renders them; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from tokenizers import Encoding, Tokenizer
from tokenizers.decoders import DecodeStream

from asyncrl.data.least_tokens import LeastTokens
from asyncrl.data.messages import TRAIN, has_answer, message_problem
from asyncrl.data.model_dir import named_eos_ids, read_json
from asyncrl.data.plain_text import Finder, finder, pieces
from asyncrl.data.templates import NO_VARIABLES, ChatTemplate, Span, Variables
from asyncrl.data.turn_end import find_turn_end
from asyncrl.data.turns import Text, TurnError, Turns, texts_of
from asyncrl.errors import AsyncRLError
from topics.prompts import PromptRow
from topics.wire import Int32Array, UInt8Array

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
"""Tokens 0, 1 and 2 of a made model: padding, begin and end; its alphabet follows."""

_ALL_TURNS = Turns()
_LONG = 4096  # characters that take some milliseconds to encode
_KEPT_PROMPTS = 64  # whose tokens are remembered
_Places: TypeAlias = npt.NDArray[np.int64]


class TokenizerError(AsyncRLError):
    """A tokenizer that cannot be loaded, or a row that it cannot turn into tokens."""

    fatal = True


class TooLong(TokenizerError):
    """A text with more tokens than may be, which is known without encoding it."""

    def __init__(self, least: int) -> None:
        """
        Args:
            least: tokens that it has at least.
        """
        super().__init__(f"it has at least {least} tokens")
        self.least = least


class TaskTokenizer:
    """The tokenizer and the chat template of a model directory."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        eos_ids: list[int],
        name: str,
        *,
        skip_special: bool = False,
    ) -> None:
        """
        Args:
            eos_ids: tokens that end an answer, as the files of the model name them.
            name: of the model directory.
            skip_special: `decode` leaves all special tokens out.
        """
        self.name = name
        self.turn_end = find_turn_end(template, tokenizer) if template is not None else None
        # Tokens that end an answer, and that engines know from requests alone.
        self.stop_ids = [token for token in (self.turn_end,) if token is not None and token not in eos_ids]
        self.eos_ids = eos_ids + self.stop_ids  # tokens that end an answer; the first one ends a label as text
        self._tokenizer = tokenizer
        self._template = template
        self._skip_special = skip_special
        self._prompt_tokens = lru_cache(_KEPT_PROMPTS)(self._tokens_of)  # members of a group have one prompt

    @classmethod
    def load(cls, model_dir: Path, *, skip_special: bool = False) -> TaskTokenizer:
        """Read `tokenizer.json` and its companion files.

        Args:
            model_dir: Hugging Face model directory.
            skip_special: `decode` leaves all special tokens out (`rollout.skip_special_tokens`).

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
        eos_ids = _read_eos_ids(model_dir, tokenizer, special.get("eos_token"))
        return cls(tokenizer, template, eos_ids, model_dir.name, skip_special=skip_special)

    @property
    def vocabulary(self) -> dict[int, str]:
        """Its tokens by their ids."""
        return {number: token for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    @property
    def special(self) -> list[str]:
        """Texts that are always read as separate tokens."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    @property
    def control(self) -> list[str]:
        """The special texts that never belong to a message: ends and beginnings of turns, padding."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]

    @property
    def has_template(self) -> bool:
        """Return whether there is a chat template."""
        return self._template is not None

    @property
    def written(self) -> list[str]:
        """Those of the special texts that the chat template itself writes, or looks for."""
        source = self._template.source if self._template is not None else ""
        return [text for text in self.special if text.strip() and text in source]

    def mentions(self, text: str) -> bool:
        """Return whether the source of the chat template has a text."""
        return self._template is not None and text in self._template.source

    @property
    def format(self) -> list[str]:
        """Texts whose tokens make up the format of a conversation.

        Templates also write tokens that are not flagged as special: `<tool_response>`, or all of DeepSeek's roles.
        """
        return [*self.control, *self.written]

    @property
    def greatest(self) -> tuple[int, str]:
        """The greatest of its token ids, and that token."""
        return max(self.vocabulary.items())

    def encode_prompt(self, row: PromptRow, *, max_tokens: int | None) -> Int32Array:
        """Tokens of a prompt: text unchanged, chat messages through the template, ready for an answer.

        Text gets those special tokens that the tokenizer itself puts around it, and no others.

        Returns:
            [T] int32, T >= 1.

        Raises:
            TokenizerError: no chat template, no token, or more than `max_tokens`.
        """
        if isinstance(row.prompt, str):
            text, special = row.prompt, True
        else:
            text, special = self._render(row, row.prompt, add_generation_prompt=True)[0], False
        return self._checked(self._prompt_tokens(text, special).copy(), max_tokens, "prompt", row)

    def encode_answer(self, row: PromptRow) -> Int32Array:
        """Tokens of the row's label as text; then the end of a turn if the prompt is a chat whose template writes one,
        else the end-of-sequence token.

        Returns:
            [T] int32, T >= 1.

        Raises:
            TokenizerError: the row has no label, or the model no end-of-sequence token.
        """
        if row.label is None:
            raise TokenizerError(f"prompt {shown(row)} has no label; a supervised row needs one")
        if not self.eos_ids:
            raise TokenizerError(f"{self.name} names no eos_token; a supervised answer must end with one")
        end = self.eos_ids[0] if isinstance(row.prompt, str) or self.turn_end is None else self.turn_end
        return np.append(self.encode(str(row.label)), np.int32(end))

    def encode_supervised(
        self, row: PromptRow, turns: Turns = _ALL_TURNS, *, max_tokens: int | None = None
    ) -> list[tuple[Int32Array, UInt8Array]]:
        """Tokens of a supervised row: a chat with trained messages, or else a prompt and its label.

        Args:
            turns: the messages of a chat that are trained.

        Returns:
            One pair for each text of the row (`asyncrl/data/turns.py`): tokens [T] int32; and a mask [T] uint8, 1 on
            trained tokens, the end-of-sequence token included, and 0 on the first token, which no token
            predicts: no count of trainable tokens may hold what is never trained.

        Raises:
            TokenizerError: as `encode_prompt` and `encode_answer`, or a chat that cannot be trained on under the
                template.
        """
        if isinstance(row.prompt, str) or not has_answer(row.prompt):
            prompt, answer = self.encode_prompt(row, max_tokens=max_tokens), self.encode_answer(row)
            tokens = np.concatenate([prompt, answer])
            found = [(tokens, (np.arange(len(tokens)) >= len(prompt)).astype(np.uint8))]
        else:
            found = [self._encode_spans(*one) for one in self._texts(row, row.prompt, turns)]
        for tokens, mask in found:
            mask[:1] = 0
            self._checked(tokens, max_tokens, "supervised row", row)
        return found

    def encode(self, text: str) -> Int32Array:
        """Return the tokens of text that the task itself writes: [T] int32, none added around it.

        The text of a special token in it becomes that token, as markers of a chat shall.
        """
        return self._tokens_of(text)

    def least(self, text: str) -> int:
        """Return a number of tokens than which a text has no less, in a small part of the time of encoding it; 0 where
        nothing is known.
        """
        return 0 if self._least is None else self._least(text)

    @cached_property
    def _least(self) -> LeastTokens | None:
        return LeastTokens.of(self._tokenizer)

    def encode_plain(self, text: str) -> Int32Array:
        """Return the tokens of text from elsewhere (a tool's answer): [T] int32.

        What reads like a token of the conversation's format (`<|im_end|>`) is encoded as those characters, and the ids
        decode to the text as it came: no answer of a tool ends its message and begins another role's.
        """
        return np.concatenate([self.encode(piece) for piece in pieces(text, self._finder)])

    @cached_property
    def _finder(self) -> Finder | None:
        return finder(self.format)

    def decode(self, ids: Int32Array | list[int]) -> str:
        """Text of tokens as rewards and judges read it, without the tokens that end a turn."""
        said = np.asarray(ids)
        for token in self.eos_ids:  # some numpy passes: a Python loop over the tokens is five times slower
            said = said[said != token]
        return self._tokenizer.decode(said.tolist(), skip_special_tokens=self._skip_special)

    def decode_all(self, ids: list[int]) -> str:
        """Text of tokens with the special ones, as engines look for stop strings in it."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def chat_text(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), variables: Variables = NO_VARIABLES
    ) -> str:
        """Text of chat messages under the template, ready for an answer.

        Args:
            tools: declarations of those that the answer may call.
            variables: further variables of the template, such as `enable_thinking`.

        Raises:
            TokenizerError: there is no template, or it refuses them.
        """
        row = PromptRow(messages, metadata={"tools": list(tools)} if tools else {})
        return self._render(row, messages, add_generation_prompt=True, variables=variables)[0]

    def decoder(self, *, special: bool = False) -> Callable[[int], str]:
        """Return a function that takes the ids of one text in turn and returns what each adds.

        The result is that of `decode`, or with `special` that of `decode_all`; the bytes of half a character are held
        until the other half comes.
        """
        stream, left_out = DecodeStream(skip_special_tokens=self._skip_special and not special), set(self.eos_ids)
        return lambda token: "" if token in left_out and not special else stream.step(self._tokenizer, token) or ""

    def _tokens_of(self, text: str, special: bool = False) -> Int32Array:
        return _array(self._encode(text, special=special).ids)

    def _encode(self, text: str, *, special: bool = False) -> Encoding:
        try:
            if len(text) < _LONG:
                return self._tokenizer.encode(text, add_special_tokens=special)
            # Unlike the call above, this one lets other threads of the process run.
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=special)
            return encoding
        except Exception as error:  # the library raises nothing narrower for a word that its vocabulary lacks
            absent = [repr(one) for one in dict.fromkeys(text) if self._tokenizer.token_to_id(one) is None]
            reason = f"the vocabulary of its tokenizer has no {', '.join(absent)}" if absent else str(error)
            raise TokenizerError(f"{self.name} cannot encode {text[:80]!r}: {reason}") from error

    def _render(self, row: PromptRow, messages: list[dict[str, Any]], **options: Any) -> tuple[str, list[Span]]:
        if self._template is None:
            raise TokenizerError(
                f"prompt {shown(row)} is a chat and {self.name} has no chat template; "
                "put chat_template.jinja into the model directory, or give prompts as text"
            )
        problem = message_problem(messages)
        if problem:
            raise TokenizerError(f"prompt {shown(row)}: {problem}")
        try:
            plain = [{key: value for key, value in message.items() if key != TRAIN} for message in messages]
            return self._template.render(plain, tools=row.metadata.get("tools"), **options)
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise TokenizerError(f"prompt {shown(row)}: the chat template of {self.name} fails: {error}") from error

    def _texts(self, row: PromptRow, messages: list[dict[str, Any]], turns: Turns) -> list[Text]:
        ends = [end for token in self.eos_ids if (end := self._tokenizer.id_to_token(token))]
        try:
            return texts_of(
                messages, turns, lambda some, answer: self._render(row, some, add_generation_prompt=answer), ends
            )
        except TurnError as error:
            raise TokenizerError(f"prompt {shown(row)} and the chat template of {self.name}: {error}") from error

    def _encode_spans(self, text: str, spans: list[Span]) -> tuple[Int32Array, UInt8Array]:
        """Tokens of text, and a mask of those in the spans."""
        bounds = np.array(sorted({place for span in spans for place in span}), np.int64)
        tokens, starts, ends = self._placed(text, [0, len(text)])
        if ((starts[:, None] < bounds) & (bounds < ends[:, None])).any():
            # A policy is prompted with tokens that end where its answer begins.
            tokens, starts, ends = self._placed(text, sorted({0, *bounds.tolist(), len(text)}))
        mask = np.zeros(len(tokens), np.uint8)
        for first, last in spans:
            mask[(starts < last) & (ends > first)] = 1
        return tokens, mask

    def _placed(self, text: str, cuts: list[int]) -> tuple[Int32Array, _Places, _Places]:
        """Tokens of text that is cut at some places, and the places where each begins and ends."""
        found = [(cut, self._encode(text[cut:end])) for cut, end in pairwise(cuts)]
        places = np.array([(first + cut, last + cut) for cut, one in found for first, last in one.offsets], np.int64)
        starts, ends = places.reshape(-1, 2).T
        return _array([token for _, one in found for token in one.ids]), starts, ends

    def _checked(self, tokens: Int32Array, max_tokens: int | None, what: str, row: PromptRow) -> Int32Array:
        count, most = len(tokens), max_tokens
        if count == 0:
            raise TokenizerError(f"{what} {shown(row)} has no token; at least one is needed to sample from")
        if most is not None and count > most:
            found = f"has {count} tokens and at most {most} fit"
            raise TokenizerError(f"{what} {shown(row)} {found}; shorten or remove it")
        return tokens


def _array(ids: list[int]) -> Int32Array:
    return np.array(ids, np.int32)


def shown(row: PromptRow) -> str:
    """Return a prompt, or the last message of one, as an error shows it: its first 60 characters."""
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
    """The template: a separate file comes before the configuration; of several, the one called default."""
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

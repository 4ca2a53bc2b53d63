"""The wire format: MessagePack structs, arrays as raw little-endian bytes.

Any language's MessagePack reader can read a message: fields are map keys, token arrays are `bin` values whose type is
in the field's description (`<i4`, `<f4`, `u1`).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from topics.errors import AsyncRLError

if TYPE_CHECKING:
    import numpy.typing as npt

    Int32Array: TypeAlias = npt.NDArray[np.int32]
    Float32Array: TypeAlias = npt.NDArray[np.float32]
    UInt8Array: TypeAlias = npt.NDArray[np.uint8]
else:

    class _ArrayMeta(type):
        """Lets msgspec accept a plain numpy array where a field names one of the array types."""

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, np.ndarray) and value.dtype == cls.dtype

    class Int32Array(metaclass=_ArrayMeta):
        """[T] int32, little-endian on the wire."""

        dtype = np.dtype("<i4")

    class Float32Array(metaclass=_ArrayMeta):
        """[T] float32, little-endian on the wire."""

        dtype = np.dtype("<f4")

    class UInt8Array(metaclass=_ArrayMeta):
        """[T] uint8 on the wire."""

        dtype = np.dtype("u1")


SEALED = "secret"  # header, and field, of a message whose body is encrypted under these data keys
INLINE_BYTES = 768 * 1024  # body of one message; a larger one travels in chunks of the blob stream
ID_PATTERN = r"^[A-Za-z0-9_-]{1,128}\Z"

# Values are checked on arrival: no later code meets a NaN or a count below 0.
Id: TypeAlias = Annotated[str, Meta(pattern=ID_PATTERN)]  # part of a subject
MaybeId: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,128}\Z")]
SecretIds: TypeAlias = Annotated[str, Meta(pattern=r"^([A-Za-z0-9_-]{1,128}(,|\Z)){0,64}\Z")]  # of data keys; "": none
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Width: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]  # bytes of a row
Version: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # -1: supervised
Step: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]  # the warm-up ends with 0
Sequence: TypeAlias = Annotated[int, Meta(ge=1, le=2**63 - 1)]  # of a message in its stream
GREATEST = 1e30  # of all numbers: its square is finite, too
Real: TypeAlias = Annotated[float, Meta(ge=-GREATEST, le=GREATEST)]  # no NaN, no infinity
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, le=GREATEST)]


class WireError(AsyncRLError, ValueError):
    """A message cannot be encoded or decoded as its type requires."""


class Headers(msgspec.Struct, omit_defaults=True, rename=lambda name: name.removesuffix("_id").replace("_", "-")):
    """Values that a message repeats as text in its headers, for those who fold it without its body.

    Each field has the name of a field or property of the message: `trajectory_id` becomes the header `trajectory`.
    """

    @classmethod
    def of(cls, message: msgspec.Struct) -> Self:
        """Return those of a message."""
        return cls(**{name: getattr(message, name) for name in cls.__struct_fields__})

    @classmethod
    def read(cls, headers: dict[str, str]) -> Self:
        """Return those of a record.

        Raises:
            WireError: a field is missing or invalid."""
        try:
            return msgspec.convert(headers, cls, strict=False)
        except (msgspec.ValidationError, ValueError) as error:
            raise WireError(f"its headers: {error}") from error


class Message(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Base of all messages. Readers accept `v` and `v - 1` and ignore unknown fields."""

    V: ClassVar[int] = 1
    HEADERS: ClassVar[type[Headers]] = Headers

    v: int = 0  # version of its type, filled in when it is encoded


M = TypeVar("M", bound=msgspec.Struct)


def headers_of(message: Message) -> dict[str, str]:
    """Return the headers of a message as stored."""
    found = {}
    for field, name, default in _fields(message.HEADERS):
        value = getattr(message, field)
        if value is not default:
            found[name] = value if type(value) is str else _text(value)
    return found


@cache
def _fields(kind: type[Headers]) -> list[tuple[str, str, Any]]:
    """Return the fields of headers: of the message, of the record, and the value that is left out."""
    return [(field.name, field.encode_name, field.default) for field in msgspec.structs.fields(kind)]


def _text(value: str | float) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(int(value))
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise WireError(f"an array field holds one dimension, got shape {value.shape}")
        return np.ascontiguousarray(value).data
    if isinstance(value, np.generic):
        return value.item()
    raise WireError(f"{type(value).__name__} cannot travel on a topic")


def _decode_array(kind: Any, value: Any) -> Any:
    if not isinstance(value, bytes | memoryview):
        raise ValueError(f"expected raw bytes for {kind.__name__}, got {type(value).__name__}")
    if len(value) % kind.dtype.itemsize:
        raise ValueError(f"{len(value)} bytes are no whole number of {kind.dtype} elements")
    return np.frombuffer(value, dtype=kind.dtype)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def encode(message: msgspec.Struct) -> bytes:
    """Write a struct as MessagePack; a `Message` gets its version number."""
    if isinstance(message, Message):
        message.v = message.V
    return _ENCODER.encode(message)


def prepare(kind: type[msgspec.Struct]) -> msgspec.msgpack.Decoder[Any]:
    """Build a type's decoder, which takes a millisecond: better before the first message than with it."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
    return decoder


def decode(kind: type[M], data: bytes | memoryview) -> M:
    """Read a struct.

    Raises:
        WireError: when the bytes are not such a message, or of a version not understood.
    """
    try:
        message: M = (_DECODERS.get(kind) or prepare(kind)).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"not a {kind.__name__}: {error}") from error
    if isinstance(message, Message) and message.v not in (message.V, message.V - 1):
        raise WireError(f"{kind.__name__} v{message.v}; this program reads v{message.V - 1} and v{message.V}")
    return message

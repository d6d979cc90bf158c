"""Checksums of the public service at a server's edge: answers get one, and requests that have one are checked.

Methods are recognised by their messages: a message of the Inference service with the field `checksum`.
Workers' streams have their own, in `step_wire`.
"""

from collections.abc import Callable
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from common.bounds_check import OutOfBoundsError
from quire.checksum import has_seal, is_intact, tag_of
from quire.errors import DataLossError, InvalidRequestError

_SERVICE = "quire.v1.Inference."


def checksum_tags_of_method(method: str) -> tuple[int | None, int | None]:
    """The tags of the checksums of request and answer, by the path "/package.Service/Method"; None: there is none."""
    name = method.strip("/").replace("/", ".")
    if not name.startswith(_SERVICE):
        return None, None
    try:
        found = descriptor_pool.Default().FindMethodByName(name)
    except KeyError:
        return None, None
    return _tag(found.input_type), _tag(found.output_type)


def checking_deserializer(deserialize: Callable[[bytes], Any], tag: int) -> Callable[[bytes], Any]:
    """Deserialiser of a request with an optional checksum, which must match if it is there.

    What else is wrong with damaged bytes is not said: who sent them has not. Bytes that only look as if they ended with
    a checksum are recognised by the field.
    """

    def parse(data: bytes) -> Any:
        is_intact_ = is_intact(data, tag)
        try:
            message = deserialize(data)
        except OutOfBoundsError as error:
            if error.numbers["checksum"] and not is_intact_:
                raise _damaged(data) from None
            raise
        except (DecodeError, InvalidRequestError):
            if has_seal(data, tag) and not is_intact_:
                raise _damaged(data) from None
            raise
        if message.checksum and not is_intact_:
            raise _damaged(data)
        return message

    return parse


def _tag(descriptor: Descriptor) -> int | None:
    return tag_of(descriptor) if "checksum" in descriptor.fields_by_name else None


def _damaged(data: bytes) -> DataLossError:
    return DataLossError(f"a message of {len(data):,} bytes does not match its checksum; send it again")

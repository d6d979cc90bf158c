"""A client's end of one `Session`, message by message, so that tests may also misbehave."""

import asyncio
from typing import Any

import grpc

from quire.v1 import inference_pb2 as pb
from tests.patience import patient
from tests.scheduler.sample_outputs import RequestSeen
from tests.scheduler.serving_site import Site

SESSION = "/quire.v1.Inference/Session"


class RawSession:
    """A client's end of one stream, message by message."""

    def __init__(self, site: Site) -> None:
        self._channel = grpc.aio.insecure_channel(site.address)
        self.call: Any = self._channel.stream_stream(
            SESSION,
            request_serializer=lambda each: each if isinstance(each, bytes) else each.SerializeToString(),
            response_deserializer=pb.SessionResponse.FromString,
        )()
        self.events: list[pb.SessionEvent] = []

    async def say(self, handle: int, **action: Any) -> None:
        await self.call.write(pb.SessionRequest(handle=handle, **action))

    async def read(self) -> bool:
        """Takes one message; False at the end of the stream."""
        response = await self.call.read()
        if response is grpc.aio.EOF:
            return False
        chunks = [(each.handle, each.chunk.index) for each in response.events if each.HasField("chunk")]
        assert len(set(chunks)) == len(chunks), "two chunks of a sample in one message"
        self.events.extend(response.events)
        return True

    async def read_until(self, kind: str, handle: int) -> pb.SessionEvent:
        async with asyncio.timeout(patient(20)):
            while True:
                for event in self.events:
                    if event.handle == handle and event.WhichOneof("event") == kind:
                        return event
                assert await self.read(), f"the stream ended without {kind}"

    def tokens(self, handle: int) -> list[int]:
        """Output under a handle of a request with one sample, each position once and in order."""
        samples = self.seen(handle).samples
        assert len(samples) <= 1
        return samples[0].token_ids if samples else []

    def seen(self, handle: int) -> RequestSeen:
        """Collect everything received under a handle."""
        seen = RequestSeen()
        for event in self.events:
            if event.handle == handle and event.HasField("chunk"):
                seen.add_chunk(event.chunk)
            elif event.handle == handle and event.HasField("finished"):
                seen.finish(event.finished)
        return seen

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()

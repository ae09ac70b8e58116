"""A worker in a process of its own: connects, counts up, and says what became of the channel.

``python worker_process.py ENDPOINT SECRET NAME DEAD_AFTER_S``
"""

from __future__ import annotations

import sys

import anyio
import msgspec

from rlbridge.transport.config import TransportConfig
from rlbridge.transport.control.channel import connect
from rlbridge.transport.errors import RlbridgeError


class Number(msgspec.Struct, frozen=True, tag=True):
    """To the worker and back."""

    value: int


async def main(endpoint: str, secret: str, name: str, dead_after_s: float) -> None:
    config = TransportConfig(heartbeat_s=0.1, dead_after_s=dead_after_s, connect_timeout_s=10)
    try:
        async with connect(
            endpoint, bytes.fromhex(secret), name=name, send=Number, receive=Number, config=config
        ) as channel:
            while True:
                number = await channel.receive()
                await channel.send(Number(number.value + 1))
    except RlbridgeError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:4], float(sys.argv[4]))

"""A transport in a process of its own, commanded by JSON lines: ``python peer_process.py NAME SHARED_MEMORY``.

Each command is a task of its own, so that several can be under way; each is answered under its number.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import anyio
import msgspec
import torch

from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import RlbridgeError
from rlbridge.transport.protocol import Transport, TransportAddress
from rlbridge.transport.ucxx_transport import UcxxTransport


def pattern(seed: int, nbytes: int) -> torch.Tensor:
    """Bytes that both sides can make: no zero among them, and no two seeds alike."""
    period = torch.tensor([i * (31 * seed + 7) % 251 + 1 for i in range(251)], dtype=torch.uint8)
    return period.repeat(nbytes // 251 + 1)[:nbytes]


async def obey(transport: Transport, command: dict[str, Any]) -> Any:
    """Carry out one command; returns what JSON can carry."""
    match command["do"]:
        case "address":
            return msgspec.json.encode(transport.address).decode()
        case "connect":
            await transport.connect(command["peer"], msgspec.json.decode(command["address"], type=TransportAddress))
        case "disconnect":
            await transport.disconnect(command["peer"])
        case "send":
            await transport.send(command["peer"], command["tag"], pattern(command["seed"], command["nbytes"]))
        case "recv":
            buffer = torch.zeros(command["nbytes"], dtype=torch.uint8)
            await transport.recv(command["peer"], command["tag"], buffer)
            return [seed for seed in range(8) if torch.equal(buffer, pattern(seed, command["nbytes"]))]
    return None


async def main(name: str, shared_memory: bool) -> None:
    torch.set_num_threads(1)
    async with (
        UcxxTransport.open(TransportConfig(shared_memory=shared_memory), name) as transport,
        anyio.create_task_group() as tasks,
        await anyio.open_file(sys.stdin.fileno(), closefd=False) as commands,
    ):

        async def answer(command: dict[str, Any]) -> None:
            try:
                reply = {"result": await obey(transport, command)}
            except RlbridgeError as error:
                reply = {"error": type(error).__name__, "text": str(error)}
            os.write(sys.stdout.fileno(), json.dumps({"number": command["number"], **reply}).encode() + b"\n")

        async for line in commands:
            tasks.start_soon(answer, json.loads(line))
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2] == "shared_memory")

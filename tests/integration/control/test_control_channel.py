"""Control channels over real sockets, and between real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio.abc import SocketAttribute, SocketStream, TaskGroup
from anyio.from_thread import start_blocking_portal

from rlbridge.transport.config import TransportConfig
from rlbridge.transport.control.channel import ControlChannel, connect, serve
from rlbridge.transport.control.framing import FrameKind, encode_frame
from rlbridge.transport.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceededError,
    PeerDiedError,
    ProtocolError,
    RlbridgeError,
    TransportError,
)

pytestmark = pytest.mark.anyio

SECRET = bytes(range(32))
CONFIG = TransportConfig(heartbeat_s=0.1, dead_after_s=1.0, connect_timeout_s=5.0)
WORKER = Path(__file__).with_name("worker_process.py")


class Number(msgspec.Struct, frozen=True, tag=True):
    value: int


class Text(msgspec.Struct, frozen=True, tag=True):
    value: str


async def echo(channel: ControlChannel[Any, Any]) -> None:
    """Send back what comes until the peer is gone."""
    try:
        while True:
            await channel.send(await channel.receive())
    except PeerDiedError:
        return


async def start(
    tasks: TaskGroup,
    handler: Callable[[ControlChannel[Any, Any]], Awaitable[None]] = echo,
    endpoint: str = "tcp://127.0.0.1:0",
    config: TransportConfig = CONFIG,
) -> str:
    """A server in ``tasks``; returns its endpoint."""
    server = partial(serve, name="controller", send=Number | Text, receive=Number | Text, config=config)
    return await tasks.start(server, endpoint, SECRET, handler)


def dial(
    endpoint: str, secret: bytes = SECRET, name: str = "w0", config: TransportConfig = CONFIG, receive=Number | Text
):
    return connect(endpoint, secret, name=name, send=Number | Text, receive=receive, config=config)


@asynccontextmanager
async def server(handler=echo, endpoint="tcp://127.0.0.1:0", config=CONFIG) -> AsyncIterator[str]:
    async with anyio.create_task_group() as tasks:
        yield await start(tasks, handler, endpoint, config)
        tasks.cancel_scope.cancel()


@pytest.fixture(params=["tcp", "unix"])
def endpoint(request, tmp_path) -> str:
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"unix://{tmp_path}/s"


async def test_messages_go_both_ways_in_order_under_proved_names(endpoint):
    names = []

    async def handler(channel):
        names.append(channel.peer)
        await echo(channel)

    async with server(handler, endpoint) as bound, dial(bound, name="worker 7") as channel:
        for value in range(100):
            await channel.send(Number(value))
        await channel.send(Text("end"))
        assert [await channel.receive() for _ in range(101)] == [*map(Number, range(100)), Text("end")]
        assert channel.peer == "controller"
    assert names == ["worker 7"]


async def test_a_large_message_arrives(endpoint):
    async with server(endpoint=endpoint) as bound, dial(bound) as channel:
        await channel.send(Text("x" * 20_000_000))
        assert await channel.receive() == Text("x" * 20_000_000)


async def test_what_was_sent_before_closing_is_received_before_the_end_is_seen():
    got = []

    async def handler(channel):
        await anyio.sleep(0.1)
        with pytest.raises(PeerDiedError, match="w0 closed its connection"):
            while True:
                got.append(await channel.receive())

    async with server(handler) as bound:
        async with dial(bound) as channel:
            for value in range(100):
                await channel.send(Number(value))
        await anyio.sleep(0.3)
    assert got == list(map(Number, range(100)))


async def test_a_server_that_hangs_up_is_a_dead_peer_and_does_not_cancel_the_block():
    async def handler(channel):
        await channel.send(Text("bye"))

    async with server(handler) as bound, dial(bound) as channel:
        assert await channel.receive() == Text("bye")
        for _ in range(2):
            with pytest.raises(PeerDiedError, match="controller closed its connection"):
                await channel.receive()
        await anyio.sleep(0.05)
        with pytest.raises(PeerDiedError, match="controller"):
            await channel.send(Number(1))


async def test_an_exception_of_the_block_leaves_it_as_it_is():
    async with server() as bound:
        with pytest.raises(KeyError, match="mine"):
            async with dial(bound):
                raise KeyError("mine")


async def test_an_exception_of_the_handler_belongs_to_the_host():
    async def handler(channel):
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        async with server(handler) as bound, dial(bound) as channel:
            with pytest.raises(PeerDiedError):
                await channel.receive()
            await anyio.sleep(5)
    assert caught.group_contains(ZeroDivisionError)


async def test_a_wrong_secret_is_refused_on_both_sides_and_harms_nobody(caplog):
    async with server() as bound, dial(bound) as good:
        with pytest.raises(AuthenticationError, match="controller could not prove"):
            async with dial(bound, secret=bytes(32)):
                pytest.fail("connected")
        await good.send(Number(1))
        assert await good.receive() == Number(1)
    assert "dropped a stranger" in caplog.text


@asynccontextmanager
async def raw_connection(endpoint: str) -> AsyncIterator[SocketStream]:
    host, port = endpoint.removeprefix("tcp://").split(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:
        yield stream


def framed(step: dict[str, Any]) -> bytes:
    return encode_frame(FrameKind.MESSAGE, msgspec.msgpack.encode(step))


async def expect_hang_up(stream: SocketStream) -> None:
    with anyio.fail_after(5), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
        await stream.receive()


@pytest.mark.parametrize("reflected", [False, True], ids=["made up", "the server's own, reflected"])
async def test_a_client_with_a_false_proof_is_refused(reflected, caplog):
    async with server() as bound, raw_connection(bound) as stream:
        await stream.send(framed({"type": "Hello", "name": "w0", "nonce": bytes(32)}))
        challenge = msgspec.msgpack.decode((await stream.receive())[5:])
        await stream.send(framed({"type": "Proof", "proof": challenge["proof"] if reflected else bytes(32)}))
        await expect_hang_up(stream)
    assert "w0 could not prove" in caplog.text


async def test_a_server_that_relays_the_true_one_under_its_own_name_is_refused():
    async with server() as bound:

        async def relay(stream: SocketStream) -> None:
            async with stream, raw_connection(bound) as true_server:
                await true_server.send(await stream.receive())
                challenge = msgspec.msgpack.decode((await true_server.receive())[5:])
                await stream.send(framed({**challenge, "name": "impostor"}))
                with anyio.move_on_after(1):
                    await expect_hang_up(stream)

        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, relay)
            port = listener.extra(SocketAttribute.local_port)
            with pytest.raises(AuthenticationError, match="impostor"):
                async with dial(f"tcp://127.0.0.1:{port}"):
                    pytest.fail("connected")
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        encode_frame(FrameKind.HEARTBEAT),
        encode_frame(FrameKind.MESSAGE, b"?"),
        b"",
    ],
    ids=["http", "ones", "heartbeat", "no hello", "nothing"],
)
async def test_garbage_before_authentication_is_logged_and_dropped(garbage, caplog):
    async with server() as bound:
        async with raw_connection(bound) as stranger:
            if garbage:
                await stranger.send(garbage)
            else:
                await stranger.send_eof()
            await expect_hang_up(stranger)
        async with dial(bound) as good:
            await good.send(Number(1))
            assert await good.receive() == Number(1)
    assert "dropped a stranger" in caplog.text


async def test_a_stranger_that_says_nothing_is_dropped_at_the_deadline(caplog):
    config = TransportConfig(connect_timeout_s=0.3)
    async with server(config=config) as bound, raw_connection(bound) as stranger:
        await expect_hang_up(stranger)
    assert "no end of the handshake after 0.3 s" in caplog.text


async def test_a_frame_over_the_limit_is_a_protocol_error(monkeypatch):
    monkeypatch.setattr("rlbridge.transport.control.handshake.MAX_FRAME_BYTES", 1000)
    raised = []

    async def handler(channel):
        with pytest.raises(ProtocolError, match="over the limit of 1000") as error:
            await channel.receive()
        raised.append(error)

    async with server(handler) as bound, dial(bound) as channel:
        await channel.send(Text("x" * 2000))
        with pytest.raises(PeerDiedError, match="controller"):
            await channel.receive()
    assert raised


async def test_a_message_of_the_wrong_type_is_a_protocol_error():
    async def handler(channel):
        await channel.send(Text("not a number"))
        await echo(channel)

    async with server(handler) as bound, dial(bound, receive=Number) as channel:
        with pytest.raises(ProtocolError, match="controller sent a message that is not of the agreed type"):
            await channel.receive()
        with pytest.raises(ProtocolError):
            await channel.send(Number(1))


async def test_heartbeats_keep_an_idle_channel_alive():
    async with server() as bound, dial(bound) as channel:
        await anyio.sleep(2.5 * CONFIG.dead_after_s)
        await channel.send(Number(1))
        assert await channel.receive() == Number(1)


async def test_a_slow_consumer_does_not_look_dead_and_slows_its_sender_down():
    accepted = []

    async def handler(channel):
        await anyio.sleep(2.5 * CONFIG.dead_after_s)
        await echo(channel)

    async with server(handler) as bound, dial(bound) as channel, anyio.create_task_group() as tasks:

        async def send() -> None:
            for value in range(2000):
                await channel.send(Text(f"{value}" + "x" * 20_000))
                accepted.append(value)

        tasks.start_soon(send)
        await anyio.sleep(1.5 * CONFIG.dead_after_s)
        assert 0 < len(accepted) < 1500
        for value in range(2000):
            message = await channel.receive()
            assert message.value.startswith(f"{value}x")


async def test_a_connection_is_retried_until_somebody_listens(tmp_path):
    endpoint = f"unix://{tmp_path}/late"
    answered = anyio.Event()

    async def client() -> None:
        async with dial(endpoint) as channel:
            await channel.send(Number(4))
            assert await channel.receive() == Number(4)
        answered.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client)
        await anyio.sleep(0.3)
        async with server(endpoint=endpoint):
            await answered.wait()


async def test_nobody_listening_ends_at_the_deadline():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError, match=r"no connection after 0\.5 s"):
            async with dial(endpoint, config=TransportConfig(connect_timeout_s=0.5)):
                pytest.fail("connected")
        assert time.monotonic() - began < 3


async def test_only_the_configured_address_is_bound():
    with pytest.raises(ConfigError, match=r"bind_host='127\.0\.0\.1'"):
        await serve("tcp://0.0.0.0:0", SECRET, echo, name="c", send=Number, receive=Number, config=CONFIG)


async def test_a_port_in_use_is_named():
    async with server() as bound:
        with pytest.raises(TransportError, match=bound):
            await serve(bound, SECRET, echo, name="c", send=Number, receive=Number, config=CONFIG)


async def test_ipv6_endpoints_are_bracketed():
    config = TransportConfig(bind_host="::1")
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    async with server(endpoint="tcp://[::1]:0", config=config) as bound, dial(bound) as channel:
        assert bound.startswith("tcp://[::1]:")
        await channel.send(Number(1))
        assert await channel.receive() == Number(1)


async def test_a_unix_socket_is_removed_and_private(tmp_path):
    path = tmp_path / "s"
    async with server(endpoint=f"unix://{path}"):
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


def test_a_channel_lives_on_a_portal():
    """As in a worker: the loop runs in a thread, and the main thread calls in."""
    with start_blocking_portal("asyncio") as portal, portal.wrap_async_context_manager(server()) as bound:
        with portal.wrap_async_context_manager(dial(bound)) as channel:
            portal.call(channel.send, Number(1))
            assert portal.call(channel.receive) == Number(1)
        with pytest.raises(PeerDiedError):
            portal.call(channel.receive)


@asynccontextmanager
async def worker_process(endpoint: str, dead_after_s: float = 1.0) -> AsyncIterator[anyio.abc.Process]:
    command = [sys.executable, str(WORKER), endpoint, SECRET.hex(), "w1", str(dead_after_s)]
    async with await anyio.open_process(command, stdin=None, stdout=subprocess.PIPE, stderr=None) as process:
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def meet(handler_ready: anyio.Event, outcome: list, channel: ControlChannel[Any, Any]) -> None:
    """Exchange one message with the process, then wait for what becomes of it."""
    await channel.send(Number(1))
    assert await channel.receive() == Number(2)
    handler_ready.set()
    began = time.monotonic()
    try:
        await channel.receive()
    except RlbridgeError as error:
        outcome.extend([error, time.monotonic() - began])


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_process_that_dies_or_stands_still_is_noticed(sent):
    ready, outcome = anyio.Event(), []
    async with server(partial(meet, ready, outcome)) as bound, worker_process(bound) as process:
        with anyio.fail_after(30):
            await ready.wait()
            os.kill(process.pid, sent)
            while not outcome:
                await anyio.sleep(0.01)
    error, after_s = outcome
    assert isinstance(error, PeerDiedError)
    assert "w1" in str(error)
    if sent == signal.SIGKILL:
        assert after_s < 0.9
    else:
        assert "silent for 1.0 s" in str(error)
        assert 0.9 < after_s < 5


async def test_a_process_notices_that_its_server_stands_still(tmp_path):
    """The server's loop is blocked: it neither reads nor beats."""

    async def block(channel):
        await channel.send(Number(1))
        await channel.receive()
        time.sleep(2)  # noqa: ASYNC251

    async with server(block) as bound, worker_process(bound) as process:
        with anyio.fail_after(30):
            assert process.stdout is not None
            assert b"PeerDiedError: controller has been silent for 1.0 s" in await process.stdout.receive()

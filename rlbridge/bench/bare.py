"""UCXX's core API with nothing around it: how fast a machine could move the same buckets."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlbridge.sync.plan.program import Program
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import DeadlineExceededError, TransportError
from rlbridge.transport.ucx_driver import LOCAL_SETTINGS, remote_settings
from rlbridge.transport.ucx_library import Array, ucx

_TURN_MS = 100


class BareUcx:
    """One context and worker of UCX with the transport's own settings, progressed until all is done."""

    def __init__(self, config: TransportConfig) -> None:
        settings = LOCAL_SETTINGS if config.shared_memory else remote_settings(config.net_devices)
        self._context = ucx.UCXContext(dict(settings), (ucx.Feature.TAG, ucx.Feature.WAKEUP))
        self._worker = ucx.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._deadline_s = config.update_timeout_s
        self._endpoints: dict[str, Any] = {}

    @property
    def address(self) -> bytes:
        """Where the other worker reaches this one."""
        return bytes(self._worker.address)

    def connect(self, peers: Mapping[str, bytes]) -> None:
        """Open an endpoint to every peer."""
        for peer, address in peers.items():
            parsed = ucx.UCXAddress.create_from_buffer(address)
            self._endpoints[peer] = ucx.UCXEndpoint.create_from_worker_address(self._worker, parsed, True)

    def run(self, program: Program, messages: Sequence[torch.Tensor]) -> None:
        """Send or receive every bucket of ``program``, all posted at once.

        Raises:
            DeadlineExceededError: the peer does not take part. TransportError: UCX failed.
        """
        requests = []
        for bucket, buffer in zip(program.buckets, messages, strict=True):
            array, tag = Array(buffer.numpy()), ucx.UCXXTag(bucket.bucket)
            if bucket.recv_from is not None:
                requests.append(self._worker.tag_recv(array, tag, ucx.UCXXTagMaskFull))
            requests += [self._endpoints[peer].tag_send(array, tag) for peer in bucket.send_to]
        begin_s = time.monotonic()
        while not all(request.completed for request in requests):
            self._worker.progress_worker_event(_TURN_MS)
            if time.monotonic() - begin_s > self._deadline_s:
                raise DeadlineExceededError("the other end", "end of the bare transfer", self._deadline_s)
        try:
            for request in requests:
                request.check_error()
        except ucx.UCXError as error:
            raise TransportError(f"bare UCX transfer: {error}") from error

    def close(self) -> None:
        """Close the endpoints and free the worker."""
        for endpoint in self._endpoints.values():
            endpoint.close_blocking()
        self._endpoints.clear()
        del self._worker, self._context

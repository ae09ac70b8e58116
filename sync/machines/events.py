"""Events and instructions of the worker machines. Messages of ``sync.messages`` are events as they come."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlbridge.sync import messages as m


class Treatment(Enum):
    """What a worker does with the payloads of a program."""

    SEND = "send"
    """Pack from its tensors."""
    UNPACK = "unpack"
    """Write each bucket into live weights once its digest matched."""
    KEEP = "keep"
    """Hold the payloads; the main thread applies them later."""
    RELAY = "relay"
    """Only check and forward: the worker holds this version already (the update is repeated for others)."""


# --- events: what the shell saw -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinksClosed:
    """``CloseLinks`` is carried out."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LinksOpened:
    """``ConnectPeers`` is carried out."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Executed:
    """The program ran to its end."""

    epoch: int
    version: int
    stats: m.TransferStats


@dataclass(frozen=True, slots=True)
class LinkFailed:
    """Linking or the program ended because the link to ``peer`` broke."""

    epoch: int
    peer: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Trouble:
    """This worker failed: packing, a digest, a loader."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Want:
    """Sender's main thread: ``send_weights(version)`` was called."""

    version: int


@dataclass(frozen=True, slots=True)
class Filled:
    """Sender's main thread: slot ``slot`` holds ``version``."""

    version: int
    slot: int


@dataclass(frozen=True, slots=True)
class Quiesced:
    """Unstaged receiver's main thread: it stands still and the live weights may be written."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The main thread goes on after ``stall_s`` seconds; a receiver computes with ``version`` from now on."""

    version: int
    stall_s: float


# --- instructions: what the shell does ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send a message to the coordinator."""

    message: m.FromWorker


@dataclass(frozen=True, slots=True)
class CloseLinks:
    """Cancel what runs, close every link, take the new program; then report ``LinksClosed``."""

    new: m.NewEpoch


@dataclass(frozen=True, slots=True)
class ConnectPeers:
    """Open the links of the epoch; then report ``LinksOpened`` or ``LinkFailed``."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Execute:
    """Run the program; then report ``Executed``, ``LinkFailed`` or ``Trouble``. ``slot`` only for ``SEND``."""

    epoch: int
    version: int
    treatment: Treatment
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """``send_weights(version)`` may fill ``slot`` now."""

    version: int
    slot: int


@dataclass(frozen=True, slots=True)
class Settle:
    """The fate of ``version`` is known: delivered everywhere, or superseded."""

    version: int
    delivered: bool


@dataclass(frozen=True, slots=True)
class Wake:
    """``poll_requests`` has something to do: quiesce (unstaged) or apply ``version`` (staged)."""

    version: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Unstaged ``poll_requests`` may return: the live weights are ``version``, whole."""

    version: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nothing more can work here: fail every wait, now and later, with ``error``."""

    error: Exception


WorkerEvent = (
    m.ToWorker | LinksClosed | LinksOpened | Executed | LinkFailed | Trouble | Want | Filled | Quiesced | Resumed
)
Instruction = Transmit | CloseLinks | ConnectPeers | Execute | Grant | Settle | Wake | Resume | Abandon

"""Small promises of the library's front: what it imports, what it says, what it refuses."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

import rlbridge.sync
from rlbridge.sync import messages as m
from rlbridge.sync.config import OnBusy
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.sync.machines.membership import Membership
from rlbridge.sync.machines.sender import SenderMachine
from rlbridge.transport.errors import (
    ConfigError,
    DeadlineExceededError,
    DigestMismatchError,
    LayoutError,
    PeerDiedError,
    ProtocolError,
    SyncError,
)
from rlbridge.transport.protocol import TransportAddress


def test_using_the_library_loads_no_front_door() -> None:
    code = (
        "import sys, rlbridge.sync as s\n"
        "loaded = [getattr(s, name) for name in s.__all__]\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'hydra', 'wandb', 'transformers', 'omegaconf'}))\n"
        "print(sorted(m for m in sys.modules if m.startswith(('rlbridge.trainer', 'rlbridge.rollout'))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]


def test_public_names_are_there_and_others_are_not() -> None:
    assert set(rlbridge.sync.__all__) <= set(dir(rlbridge.sync))
    with pytest.raises(AttributeError, match="has no attribute 'Sender'"):
        _ = rlbridge.sync.Sender


@pytest.mark.parametrize(
    "error", [PeerDiedError("gone"), DigestMismatchError("bucket 3"), LayoutError("names"), SyncError("text")]
)
def test_known_errors_cross_processes_as_themselves(error: Exception) -> None:
    report = msgspec.msgpack.decode(msgspec.msgpack.encode(m.ErrorReport.of(error)), type=m.ErrorReport)
    assert type(report.rebuild()) is type(error)
    assert str(report.rebuild()) == str(error)


def test_deadlines_cross_processes_with_their_parts() -> None:
    rebuilt = m.ErrorReport.of(DeadlineExceededError("rollout-1", "Ready", 2.5)).rebuild()
    assert isinstance(rebuilt, DeadlineExceededError)
    assert (rebuilt.who, rebuilt.what, rebuilt.after_s) == ("rollout-1", "Ready", 2.5)


def test_foreign_errors_arrive_as_sync_errors_with_their_words() -> None:
    rebuilt = m.ErrorReport.of(KeyError("lm_head")).rebuild()
    assert type(rebuilt) is SyncError
    assert "KeyError" in str(rebuilt)
    assert "lm_head" in str(rebuilt)


def test_every_message_survives_the_wire() -> None:
    join = a_join("sender", 0, 2, spec=CheckpointSpec({}))
    for message, union in ((join, m.FromWorker), (m.Unblocked(3, 0.5), m.FromWorker), (m.Commit(3), m.ToWorker)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union) == message


def a_join(role: m.Role, rank: int, world: int, replica: int = 0, spec_hash: str = "h", spec=None) -> m.Join:
    return m.Join(role, replica, rank, world, TransportAddress("none", "n", ()), SourceMap({}, []), spec_hash, spec)


@pytest.mark.parametrize(
    ("join", "error", "words"),
    [
        (a_join("sender", 0, 3), ProtocolError, "trainer-0 says rank 0 of 3, expected 2"),
        (a_join("sender", 0, 2), ProtocolError, "trainer-0 did not send the checkpoint's spec"),
        (a_join("receiver", 2, 2, replica=1), ProtocolError, "rollout-1.2 says rank 2 of 2"),
        (a_join("sender", 0, 2, spec_hash="x", spec=CheckpointSpec({})), LayoutError, "trainer-0 and trainer-1 see"),
        (a_join("sender", 1, 2), ProtocolError, "trainer-1 joined twice"),
    ],
)
def test_membership_refuses_strange_joins(join: m.Join, error: type[Exception], words: str) -> None:
    members = Membership(2, {0: 1, 1: 2})
    members.add(a_join("sender", 1, 2))
    with pytest.raises(error, match=words):
        members.add(join)


def test_membership_names_tensors_that_trainer_and_rollout_see_differently() -> None:
    fused = CheckpointSpec({"qkv": TensorSpec((24, 8), "bfloat16"), "norm": TensorSpec((8,), "float32")})
    apart = CheckpointSpec({"q": TensorSpec((8, 8), "bfloat16"), "norm": TensorSpec((8,), "bfloat16")})
    members = Membership(2, {0: 2})
    members.add(a_join("sender", 1, 2, spec_hash="fused"))
    members.add(a_join("receiver", 1, 2, spec_hash="apart"))  # it has no names; those that have will be compared
    members.add(a_join("receiver", 0, 2, spec_hash="apart", spec=apart))
    with pytest.raises(LayoutError, match="trainer-0 and rollout-0 see different checkpoints") as caught:
        members.add(a_join("sender", 0, 2, spec_hash="fused", spec=fused))
    assert "qkv: [24, 8] bfloat16 at trainer-0, not at rollout-0" in str(caught.value)
    assert "q: [8, 8] bfloat16 at rollout-0, not at trainer-0" in str(caught.value)
    assert "norm: [8] float32 at trainer-0, [8] bfloat16 at rollout-0" in str(caught.value)


def test_membership_says_who_is_missing() -> None:
    members = Membership(2, {0: 1, 1: 2})
    members.add(a_join("receiver", 0, 2, replica=1))
    assert members.missing() == ["trainer-0", "trainer-1", "rollout-0", "rollout-1.1"]
    with pytest.raises(ConfigError, match="at least one sender"):
        Membership(0, {0: 1})


def test_versions_only_grow() -> None:
    machine = SenderMachine(staging=True, on_busy=OnBusy.QUEUE)
    machine.check(5)
    machine.handle(rlbridge.sync.machines.events.Want(5))
    with pytest.raises(SyncError, match=r"send_weights\(5\) after version 5"):
        machine.check(5)

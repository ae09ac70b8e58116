"""Trainers that change under the bridge, or have nothing of their own to send."""

from __future__ import annotations

import pytest
import torch
from one_process_bridge import Job

from rlbridge.sync import SyncMode
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.transport.errors import LayoutError

MODES = list(SyncMode)
NAMES = ("up", "down")
SPEC = CheckpointSpec({name: TensorSpec((16, 32), "bfloat16") for name in NAMES})


class Engine:
    def __init__(self) -> None:
        self.live = {name: torch.zeros(16, 32, dtype=torch.bfloat16) for name in NAMES}

    def load_weights(self, weights):
        for name, tensor in weights:
            self.live[name].copy_(tensor)

    def live_tensors(self):
        return self.live

    def after_load(self):
        """Nothing to do."""


class Plain(Engine):
    """A trainer of the same format; values of a version are its number plus one."""

    @property
    def weights(self):
        return self.live

    def train(self, version):
        for tensor in self.live.values():
            tensor.fill_(version + 1)

    def export(self, name):
        return self.live[name]


class Doubled(Plain):
    """Keeps twice the checkpoint, so that all it sends is exported."""

    def load_weights(self, weights):
        for name, tensor in weights:
            self.live[name].copy_(tensor * 2)

    def export(self, name):
        return self.live[name] / 2


class Reusing(Doubled):
    def __init__(self):
        super().__init__()
        self.buffer = torch.empty(16, 32, dtype=torch.bfloat16)

    def export(self, name):
        return torch.div(self.live[name], 2, out=self.buffer)


class Empty(Plain):
    """A rank without any weights, such as that of a small model on many ranks."""

    def __init__(self):
        self.live = {}

    def load_weights(self, weights):
        for _ in weights:
            pass


def run(mode, trainers):
    seen: list[float] = []

    def applied(engine, version):
        values = {tensor.float().unique().tolist()[0] for tensor in engine.live.values()}
        seen.append(values.pop() if len(values) == 1 else float("nan"))

    outcome = Job(mode=mode, trainers=trainers, replicas=[[Engine()]], applied=applied, spec=SPEC).run()
    return outcome, seen


@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_that_only_exports(mode):
    outcome, seen = run(mode, [Doubled()])
    assert outcome.errors == {}
    assert seen == [0.5, 1.0, 1.5]


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_without_weights(mode):
    outcome, seen = run(mode, [Plain(), Empty()])
    assert outcome.errors == {}
    assert seen == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("mode", MODES)
def test_a_reused_export_buffer_is_copied_or_refused(mode):
    trainer = Reusing()
    trainer.train = lambda version: [t.fill_(v) for t, v in zip(trainer.live.values(), (2.0, 2.0), strict=True)]
    outcome, seen = run(mode, [trainer])
    if mode.sender_staging:
        assert outcome.errors == {}
        assert seen == [1.0, 1.0, 1.0]
    else:
        assert isinstance(outcome.errors["trainer-0"], LayoutError)
        assert "returned the memory of export('up')" in str(outcome.errors["trainer-0"])
        assert seen == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "change",
    [lambda t: t.t().contiguous(), lambda t: t[:1].clone(), lambda t: t.to(torch.int32)],
    ids=["transposed", "cut", "cast"],
)
def test_live_tensors_that_change_after_connect_are_named(mode, change):
    trainer = Plain()
    healthy = trainer.train

    def train(version):
        if version == 1:
            trainer.live["down"] = change(trainer.live["down"])
        healthy(version)

    trainer.train = train
    outcome, seen = run(mode, [trainer])
    assert "live tensors changed their shape or dtype since connect(): down [" in str(outcome.errors["trainer-0"])
    assert seen in ([], [1.0])

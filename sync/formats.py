"""How two workers' views of the checkpoint differ, in words. Pure."""

from __future__ import annotations

from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec

_LISTED = 20


def differences(one: str, its: CheckpointSpec, other: str, others: CheckpointSpec) -> str:
    """Indented lines that name the tensors which ``one`` and ``other`` see differently; empty if there are none."""
    lines: list[str] = []
    for name, tensor in its.tensors.items():
        there = others.tensors.get(name)
        if there is None:
            lines.append(f"{name}: {_described(tensor)} at {one}, not at {other}")
        elif there != tensor:
            lines.append(f"{name}: {_described(tensor)} at {one}, {_described(there)} at {other}")
    missing = [(name, tensor) for name, tensor in others.tensors.items() if name not in its.tensors]
    lines += [f"{name}: {_described(tensor)} at {other}, not at {one}" for name, tensor in missing]
    more = [f"... and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return "".join(f"\n  {line}" for line in [*lines[:_LISTED], *more])


def _described(tensor: TensorSpec) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"

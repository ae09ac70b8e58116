"""The arguments of ``rlbridge bench`` and what they do."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlbridge.bench.transfer import Bench
    from rlbridge.transport.config import TransportConfig

EPILOG = """\
examples:
  rlbridge bench transfer                                three kinds of transfer between processes of this host
  rlbridge bench transfer --loopback                     what each step of a bucket's way costs, beside bare UCXX
  sudo rlbridge bench transfer --hosts 6 --trainers 2    2 trainer and 4 rollout hosts, as network namespaces
  rlbridge bench transfer --json result.json             every round's figures, for programs
"""

_HOSTS_BUCKET_BYTES = 1_000_000
_BYTES_OF_MB = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line. Imports nothing heavy: ``rlbridge --help`` comes by here."""
    benches = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    transfer = benches.add_parser(
        "transfer",
        help="planned transfer, broadcast and p2p side by side",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    transfer.add_argument("--trainers", type=int, metavar="N", help="trainer hosts (default: 2)")
    transfer.add_argument("--rollouts", type=int, metavar="N", help="rollout hosts, each a replica (default: 2)")
    transfer.add_argument("--workers-per-host", type=int, default=2, metavar="N", help="default: 2")
    transfer.add_argument("--mb", type=float, default=256.0, metavar="MB", help="size of the model (default: 256)")
    transfer.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each kind (default: 5)")
    transfer.add_argument(
        "--hosts",
        type=int,
        metavar="N",
        help="make N network namespaces with limited links (root): trainers + rollouts",
    )
    transfer.add_argument("--link-mbps", type=float, default=200.0, metavar="RATE", help="of --hosts (default: 200)")
    transfer.add_argument(
        "--bucket-bytes", type=int, metavar="BYTES", help="upper size of a bucket (default: 8 MiB; with --hosts 1 MB)"
    )
    transfer.add_argument("--loopback", action="store_true", help="one sender, one receiver, beside bare UCXX")
    transfer.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")


def bench_command(arguments: argparse.Namespace) -> int:
    """Measure, print tables, write JSON; returns the exit status.

    Raises:
        ConfigError: the arguments contradict each other, or this machine cannot do it.
    """
    import anyio
    import msgspec
    from rich.console import Console

    from rlbridge.bench.loopback import LoopbackResult, bench_loopback
    from rlbridge.bench.show import show_loopback, show_transfer
    from rlbridge.bench.transfer import TransferResult, bench_transfer
    from rlbridge.transport.errors import ConfigError

    def tell(line: str) -> None:
        sys.stderr.write(line + "\n")

    async def measure() -> LoopbackResult | TransferResult:
        if arguments.loopback:
            config = config_of(arguments)
            return await bench_loopback(round(arguments.mb * _BYTES_OF_MB), config, arguments.rounds, tell)
        return await bench_transfer(bench_of(arguments), tell)

    check_arguments(arguments)
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise ConfigError(f"--json {arguments.json}: there is no folder {arguments.json.parent}")
    result = anyio.run(measure)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    if isinstance(result, LoopbackResult):
        show_loopback(console, result)
    else:
        show_transfer(console, result)
    return 0


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be measured.

    Raises:
        ConfigError: naming the option.
    """
    from rlbridge.transport.errors import ConfigError

    for option in ("rounds", "mb", "link_mbps"):
        if not getattr(arguments, option) > 0:
            raise ConfigError(f"--{option.replace('_', '-')} must be above 0, not {getattr(arguments, option)}")
    if arguments.loopback and (arguments.hosts or arguments.trainers or arguments.rollouts):
        raise ConfigError("--loopback measures one sender and one receiver: leave out --hosts, --trainers, --rollouts")


def bench_of(arguments: argparse.Namespace) -> Bench:
    """What the arguments ask for.

    Raises:
        ConfigError: they contradict each other.
    """
    from rlbridge.bench.transfer import Bench
    from rlbridge.bench.workload import Workload

    trainers, rollouts = _sides(arguments.hosts, arguments.trainers, arguments.rollouts)
    workload = Workload(
        trainers=trainers,
        rollouts=rollouts,
        workers_per_host=arguments.workers_per_host,
        model_bytes=round(arguments.mb * _BYTES_OF_MB),
    )
    return Bench(
        workload=workload,
        config=config_of(arguments),
        rounds=arguments.rounds,
        link_mbps=arguments.link_mbps if arguments.hosts is not None else None,
    )


def _sides(hosts: int | None, trainers: int | None, rollouts: int | None) -> tuple[int, int]:
    """Trainer and rollout hosts."""
    from rlbridge.transport.errors import ConfigError

    if hosts is None:
        return trainers if trainers is not None else 2, rollouts if rollouts is not None else 2
    if trainers is None:
        trainers = hosts - rollouts if rollouts is not None else min(2, hosts - 1)
    if rollouts is None:
        rollouts = hosts - trainers
    if trainers + rollouts != hosts or min(trainers, rollouts) < 1:
        raise ConfigError(f"--hosts {hosts} are not {trainers} trainer hosts and {rollouts} rollout hosts")
    return trainers, rollouts


def config_of(arguments: argparse.Namespace) -> TransportConfig:
    """The transport's settings: the defaults, but for the device and the size of buckets."""
    from rlbridge.bench.hosts import DEVICE
    from rlbridge.transport.config import TransportConfig

    config = TransportConfig()
    if arguments.hosts is not None:
        # Small beside what a slow link carries in a second, so that a bucket is soon passed on.
        config = dataclasses.replace(
            config, net_devices=DEVICE, bucket_bytes=_HOSTS_BUCKET_BYTES, update_timeout_s=600.0
        )
    if arguments.bucket_bytes is not None:
        config = dataclasses.replace(config, bucket_bytes=arguments.bucket_bytes)
    return config

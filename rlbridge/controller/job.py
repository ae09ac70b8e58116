"""One job, from its folder to its last process: put together in order, taken apart whatever happens."""

from __future__ import annotations

import logging
import secrets
import sys
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskStatus

from rlbridge.config import JobConfig
from rlbridge.controller.controller import Controller
from rlbridge.controller.record import RunRecord
from rlbridge.controller.scoring import Scorer
from rlbridge.controller.workers import LAST_WORDS_S, WorkerPool, open_pool
from rlbridge.exit_status import most_telling
from rlbridge.launcher.local import LocalLauncher
from rlbridge.model import open_tokenizer, prepare_model
from rlbridge.rollout.tasks.registry import make_task
from rlbridge.rollout.worker import RolloutSpec
from rlbridge.sync.coordinator import Coordinator
from rlbridge.tracking.run_folder import RunFolder
from rlbridge.trainer.worker import TrainerSpec
from rlbridge.transport.errors import RlbridgeError

logger = logging.getLogger(__name__)


def run_job(job: JobConfig) -> int:
    """Run one job to its end in this process.

    Returns:
        0. The run's folder holds everything else.

    Raises:
        RlbridgeError: what ended the run early; the summary in the run's folder says so too.
        KeyboardInterrupt: Ctrl-C, after every worker has been reaped.
    """
    folder = RunFolder.create(job)
    record = RunRecord(job, folder)
    try:
        anyio.run(_run, job, record)
    except BaseException as error:
        record.close(_exit_reason(most_telling(error)))
        raise
    record.close("completed")
    return 0


def _exit_reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"{type(error).__name__}: {error}"


async def _run(job: JobConfig, record: RunRecord) -> None:
    """Open everything in order, run the controller, close everything in reverse order."""
    folder = record.folder
    model_dir = await anyio.to_thread.run_sync(prepare_model, job.model, folder.path, job.seed)
    scorer = await anyio.to_thread.run_sync(_make_scorer, job, model_dir)
    secret = secrets.token_bytes(32)
    coordinator = Coordinator(
        secret=secret,
        senders=job.trainer.ranks,
        receivers=dict.fromkeys(range(job.rollout.replicas), 1),
        sync=job.sync,
        transport=job.transport,
    )
    async with LocalLauncher(job.launcher, folder.path) as launcher, anyio.create_task_group() as services:
        sync_endpoint = await services.start(_host, coordinator)
        async with open_pool(launcher, services, job.transport, secret) as pool:
            await _launch(job, pool, sync_endpoint, secret, model_dir, folder.path)
            await Controller(job, pool, coordinator, scorer, record).run()
            services.cancel_scope.cancel()


def _make_scorer(job: JobConfig, model_dir: Path) -> Scorer:
    tokenizer, vocabulary = open_tokenizer(model_dir)
    # A user's reward module lies where the command is run; last, so that no folder there shadows an installed package.
    sys.path.append(str(Path.cwd()))
    return Scorer(make_task(job.task, job.seed), tokenizer, vocabulary, job.task.reward_timeout_s)


async def _host(coordinator: Coordinator, *, task_status: TaskStatus[str]) -> None:
    """Host the coordinator. A worker that fails tells the job plane why; give that a moment to be the error shown."""
    try:
        await coordinator.run(task_status=task_status)
    except RlbridgeError:
        await anyio.sleep(LAST_WORDS_S + 1.0)
        raise


async def _launch(
    job: JobConfig, pool: WorkerPool, sync_endpoint: str, secret: bytes, model_dir: Path, run_dir: Path
) -> None:
    """Start every trainer rank and every rollout replica; they connect by themselves."""
    dump_dir = str(run_dir / "weights") if job.tracking.dump_weights else None
    for rank in range(job.trainer.ranks):
        trainer = TrainerSpec(
            rank=rank,
            world=job.trainer.ranks,
            job_endpoint=pool.endpoint,
            sync_endpoint=sync_endpoint,
            secret=secret,
            model_dir=str(model_dir),
            run_dir=str(run_dir),
            algorithm=job.algorithm,
            trainer=job.trainer,
            sync=job.sync,
            transport=job.transport,
            temperature=job.rollout.temperature,
            seed=job.seed,
            dump_dir=dump_dir,
            collective_timeout_s=job.launcher.worker_timeout_s,
        )
        await pool.launch(f"trainer-{rank}", msgspec.json.encode(trainer))
    for replica in range(job.rollout.replicas):
        rollout = RolloutSpec(
            replica=replica,
            job_endpoint=pool.endpoint,
            sync_endpoint=sync_endpoint,
            secret=secret,
            model_dir=str(model_dir),
            rollout=job.rollout,
            sync=job.sync,
            transport=job.transport,
            seed=job.seed,
            dump_dir=dump_dir,
        )
        await pool.launch(f"rollout-{replica}", msgspec.json.encode(rollout))

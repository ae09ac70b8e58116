"""Workers of the local launcher: started, fed, watched, and gone afterwards, whatever happened in between."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import anyio
import psutil
import pytest

from rlbridge.launcher.config import LauncherConfig
from rlbridge.launcher.local import LocalLauncher
from rlbridge.transport.errors import WorkerError

pytestmark = [pytest.mark.anyio, pytest.mark.integration]

Launch = Callable[[str], LocalLauncher]


@pytest.fixture
def launcher_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """A launcher whose workers run the given source instead of ``rlbridge.worker``."""

    def make(source: str) -> LocalLauncher:
        (tmp_path / "test_worker.py").write_text(textwrap.dedent(source))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return LocalLauncher(LauncherConfig(stop_timeout_s=1.0), tmp_path, module="test_worker")

    return make


async def _log_has(path: Path, text: str) -> None:
    with anyio.fail_after(20):
        while text not in path.read_text():
            await anyio.sleep(0.02)


async def test_a_worker_gets_its_specification_and_its_status_comes_back(launcher_of: Launch) -> None:
    async with launcher_of("import sys; print(sys.stdin.read()); sys.exit(7)") as launcher:
        worker = await launcher.start("w-0", b"hush-hush")
        assert await worker.wait() == 7
        assert worker.tail_of_log() == "hush-hush"


async def test_the_secret_shows_neither_in_arguments_nor_in_the_environment(launcher_of: Launch) -> None:
    async with launcher_of(
        "import sys, time; sys.stdin.read(); print('ready', flush=True); time.sleep(60)"
    ) as launcher:
        worker = await launcher.start("w-0", b"hush-hush")
        await _log_has(worker.log, "ready")
        process = psutil.Process(worker.pid)
        assert "hush-hush" not in " ".join(process.cmdline()) + " ".join(process.environ().values())
        assert os.getpgid(worker.pid) == worker.pid, "Ctrl-C must not reach it"


async def test_leaving_asks_politely(launcher_of: Launch) -> None:
    source = """
        import signal, sys, time
        def leave(*_):
            print("bye", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("ready", flush=True)
        time.sleep(60)
    """
    async with launcher_of(source) as launcher:
        worker = await launcher.start("w-0", b"")
        await _log_has(worker.log, "ready")
    assert worker.returncode == 0
    assert worker.tail_of_log(1) == "bye"


async def test_a_deaf_worker_and_its_children_are_killed_in_time(launcher_of: Launch) -> None:
    source = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print("child", child.pid, flush=True)
        time.sleep(60)
    """
    async with launcher_of(source) as launcher:
        worker = await launcher.start("w-0", b"")
        await _log_has(worker.log, "child")
        child = int(worker.tail_of_log(1).split()[1])
        started_s = anyio.current_time()
    assert anyio.current_time() - started_s < 5
    assert worker.returncode == -signal.SIGKILL
    with anyio.fail_after(5):
        while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            await anyio.sleep(0.02)


async def test_workers_are_gone_after_an_error_and_after_a_cancellation(launcher_of: Launch) -> None:
    launcher = launcher_of("import time; time.sleep(60)")
    with pytest.raises(RuntimeError, match="the run broke"):
        async with launcher:
            first = await launcher.start("w-0", b"")
            raise RuntimeError("the run broke")
    assert first.returncode is not None
    with anyio.move_on_after(1.0):
        async with launcher:
            second = await launcher.start("w-1", b"")
            await anyio.sleep_forever()
    assert second.returncode is not None


async def test_a_killed_worker_is_reaped_at_once(launcher_of: Launch) -> None:
    async with launcher_of("import time; time.sleep(60)") as launcher:
        worker = await launcher.start("w-0", b"")
        worker.kill()
        with anyio.fail_after(5):
            assert await worker.wait() == -signal.SIGKILL
        assert not psutil.pid_exists(worker.pid), "a zombie counts as alive for UCX"


async def test_a_worker_that_dies_while_starting_is_an_error_with_its_last_words(launcher_of: Launch) -> None:
    async with launcher_of("import sys; sys.stdin.close(); sys.exit('no such library')") as launcher:
        with pytest.raises(WorkerError, match=r"(?s)w-0.*no such library"):
            await launcher.start("w-0", b"x" * 10_000_000)


async def test_two_living_workers_cannot_share_a_name(launcher_of: Launch) -> None:
    async with launcher_of("import time; time.sleep(60)") as launcher:
        await launcher.start("w-0", b"")
        with pytest.raises(WorkerError, match="w-0"):
            await launcher.start("w-0", b"")


async def test_a_bad_specification_ends_the_real_worker_with_one_clear_line(tmp_path: Path) -> None:
    async with LocalLauncher(LauncherConfig(), tmp_path) as launcher:
        for spec, complaint in ((b'{"type": "Cook"}', "unknown worker specification 'Cook'"), (b"{", "unreadable")):
            worker = await launcher.start("w-0", spec)
            assert await worker.wait() == 1
            assert complaint in worker.tail_of_log(1)


async def test_a_worker_dies_with_its_controller(tmp_path: Path) -> None:
    """PDEATHSIG: the controller is killed while the worker waits for its specification."""
    source = textwrap.dedent("""
        import os, subprocess, sys, time
        worker = subprocess.Popen(
            [sys.executable, "-m", "rlbridge.worker", "w-0", str(os.getpid())],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        print(worker.pid, flush=True)
        time.sleep(60)
    """)
    async with await anyio.open_process([sys.executable, "-c", source], stderr=None) as controller:
        assert controller.stdout is not None
        worker = psutil.Process(int(await controller.stdout.receive()))
        await anyio.sleep(1.0)
        assert worker.is_running()
        controller.kill()
        with anyio.fail_after(10):
            while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
                await anyio.sleep(0.05)

"""Tests of this folder are for the environment of ``make test-engines``: without vLLM there are none."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

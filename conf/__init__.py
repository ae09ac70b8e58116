"""Hydra configuration, one YAML each, backed by the dataclasses that live beside the code they configure."""

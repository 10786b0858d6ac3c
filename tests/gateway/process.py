"""`fleet gateway` as a process in front of real stage processes; a test plays the coordinator (`PlanGiver`)."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import ssl
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from fleet.inventory.model import Timing
from tests.gateway.site import KEY, free_port
from tests.stage_runtime.site import SITE, StageSite

START_SECONDS = 300.0  # a safeguard, not a measure: shared machines may be slow


@dataclass
class GatewayProcess:
    """A gateway process on loopback.

    Attributes:
        directory: its files.
        stages: that compute; their giver tells the gateway where to go.
        model: name that clients ask for. model_directory: tokenizer and template.
        changes: of gateway.json.
    """

    directory: Path
    stages: StageSite
    model: str
    model_directory: Path
    changes: dict[str, Any] = field(default_factory=dict)
    https_port: int = field(default_factory=free_port)
    http_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        """Of the API, with TLS."""
        return f"https://localhost:{self.https_port}/v1"

    @property
    def log(self) -> str:
        """The end of what it wrote to stderr."""
        return (self.directory / "gateway.log").read_text()[-3000:]

    def context(self) -> ssl.SSLContext:
        """Trusts the site."""
        return ssl.create_default_context(cafile=str(self.stages.ca.path))

    def config(self) -> dict[str, Any]:
        """gateway.json."""
        keys = self.directory / "api_keys.json"
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        keys.write_text(json.dumps({"schema": 1, "keys": [{"name": "tester", "sha256": digest}]}))
        plan, tls = self.stages.plan.pipelines["main"], self.stages.gateway_tls
        return {
            "schema": 2,
            "site": SITE,
            "box": "control",
            "pipelines": {
                "main": {
                    "model": self.model,
                    "model_directory": str(self.model_directory),
                    "model_digest": plan.model_digest,
                    "policy": "exact",
                    "max_tokens_per_sequence": plan.max_tokens_per_sequence,
                    "max_sequences": plan.max_sequences,
                }
            },
            "coordinator": {"box": "control", "host": "127.0.0.1", "port": self.stages.coordinator_port},
            "listen": {"host": "127.0.0.1", "port": self.https_port},
            "loopback": {"host": "127.0.0.1", "port": self.http_port},
            "tls": {"ca": str(tls.ca), "certificate": str(tls.certificate), "key": str(tls.key)},
            "api_keys_file": str(keys),
            "journal_directory": str(self.directory / "journal"),
            "max_queued_requests": 8,
            "request_timeout_seconds": 300,
            "first_token_timeout_seconds": 200,
            "replan_wait_seconds": 120,
            "keep_alive_seconds": 5,
            "resume_max_seconds": 600,
            "resume_max_streams": 16,
            "timing": {name: value for name, value in Timing().model_dump().items() if name.startswith("ring_")},
            **self.changes,
        }

    def start(self) -> None:
        """Start it, or start it again."""
        config = self.directory / "gateway.json"
        config.write_text(json.dumps(self.config()))
        command = [sys.executable, "-m", "fleet.cli.main", "gateway", "--config", str(config)]
        with (self.directory / "gateway.log").open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=30)

    def health(self) -> dict[str, Any]:
        """The gateway's /health, whatever its status; OSError while it does not listen."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port)
        try:
            connection.request("GET", "/health", headers={"Authorization": f"Bearer {KEY}"})
            document: dict[str, Any] = json.load(connection.getresponse())
        finally:
            connection.close()
        return document

    def wait_ready(self) -> dict[str, Any]:
        """Wait until it takes requests; a process that ends, or a deadline, fails with the logs."""
        deadline = time.monotonic() + START_SECONDS
        last = "no answer"
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            try:
                document = self.health()
                if document["state"] == "ready":
                    return document
                last = document["reason"]
            except OSError as error:  # not listening yet
                last = str(error)
            time.sleep(0.05)
        logs = "\n".join(self.stages.log(box)[-2000:] for box in self.stages.processes)
        raise AssertionError(f"not ready: {last}\n{self.log}\n{logs}")

    def client(self) -> openai.OpenAI:
        """The official client, over TLS."""
        transport = openai.DefaultHttpxClient(verify=self.context())
        return openai.OpenAI(base_url=self.base_url, api_key=KEY, http_client=transport, max_retries=0)

    def async_client(self) -> openai.AsyncOpenAI:
        """The official client, over TLS."""
        transport = openai.DefaultAsyncHttpxClient(verify=self.context())
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=KEY, http_client=transport, max_retries=0)

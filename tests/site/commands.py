"""Running the real `fleet` as a user does, and reading its answers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from fleet.inventory.sitefile import SiteFile
from fleet.observe.site_access import api_key, client_context, load_endpoints

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND_DEADLINE_SECONDS = 900.0


@dataclass(frozen=True)
class Answer:
    """What a command said: exit code, data on stdout, progress and errors on stderr."""

    code: int
    stdout: str
    stderr: str

    @property
    def data(self) -> Any:
        """The `data` of `-o json` output."""
        return json.loads(self.stdout)["data"]


def fleet(*arguments: str | Path, expect: int | None = 0) -> Answer:
    """Run a verb in the repository's root.

    Args:
        arguments: after `fleet`.
        expect: the exit code that must come; None takes any.
    """
    argv = [sys.executable, "-m", "fleet.cli.main", *map(str, arguments)]
    done = subprocess.run(
        argv, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=COMMAND_DEADLINE_SECONDS
    )
    answer = Answer(done.returncode, done.stdout, done.stderr)
    assert expect is None or answer.code == expect, f"fleet {' '.join(map(str, arguments))} → {answer}"
    assert "Traceback" not in answer.stderr, answer.stderr
    return answer


def client_of(site: SiteFile) -> openai.OpenAI:
    """The official client, with the site's CA and key."""
    return openai.OpenAI(
        base_url=f"{gateway_url(site)}/v1",
        api_key=api_key(site),
        http_client=openai.DefaultHttpxClient(verify=client_context(site, with_certificate=False)),
        max_retries=0,
    )


def async_client_of(site: SiteFile) -> openai.AsyncOpenAI:
    """The same for many requests at once."""
    return openai.AsyncOpenAI(
        base_url=f"{gateway_url(site)}/v1",
        api_key=api_key(site),
        http_client=openai.DefaultAsyncHttpxClient(verify=client_context(site, with_certificate=False)),
        max_retries=0,
    )


def gateway_url(site: SiteFile) -> str:
    """Where provisioning wrote down that the gateway answers."""
    endpoint = load_endpoints(site).gateway
    assert endpoint is not None, "the site has a gateway"
    return endpoint.url

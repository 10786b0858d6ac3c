"""A gateway over TLS on loopback for tests: real certificates, real tokenizer, real HTTP; the pipeline behind it is
scripted, because what a model says must be known to test what the gateway makes of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fleet.gateway.app import Gateway
from fleet.gateway.config import GatewayConfig, parse_config
from fleet.gateway.healing import HealingPipeline, HealingTiming
from fleet.gateway.metrics import GatewayMetrics
from fleet.gateway.server import make_gateway, start_listening
from fleet.inventory.model import Timing
from fleet.provision.pki import ensure_authority, ensure_operator, sign_request
from stage_runtime.link.membership import Route
from stage_runtime.link.messages import (
    FinishedEvent,
    GenerateRequest,
    Pipeline,
    PipelineStatus,
    TokenEvent,
    TokenLogprob,
)

SITE, BOX, KEY, OTHER_KEY = "demo", "control", "test-key", "other-key"
MODEL = "tiny"
BOS, EOS, TURN = 0, 1, 2
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs", "one two three"]


def byte_level_tokenizer(*, merges: bool) -> Tokenizer:
    """A byte-level BPE tokenizer; without merges every token is one byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400 if merges else 259,
        special_tokens=["<s>", "<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS if merges else [], trainer)
    return tokenizer


def write_model(directory: Path, *, context: int = 512) -> Tokenizer:
    """A model directory without weights: the gateway reads tokenizer, template and model.json only."""
    directory.mkdir(parents=True)
    tokenizer = byte_level_tokenizer(merges=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    config = {"max_position_embeddings": context, "vocab_size": tokenizer.get_vocab_size()}
    model = {"schema": 1, "config": config, "bos_token_id": BOS, "eos_token_ids": [EOS]}
    (directory / "model.json").write_text(json.dumps(model))
    return tokenizer


Script = Iterable[TokenEvent | FinishedEvent | asyncio.Event]


@dataclass
class ScriptedPipeline:
    """A pipeline that says what the test wrote down for a request; an asyncio.Event in a script is waited for.

    Attributes:
        script: from a request to its events.
        status: what the gateway sees.
        requests: every request that came.
        closed: sequence ids whose events were not read to the end: cancelled.
    """

    script: Callable[[GenerateRequest], Script]
    status: PipelineStatus = field(
        default_factory=lambda: PipelineStatus(ready=True, reason="", epoch=3, policy="exact", tokens_per_second=5.0)
    )
    requests: list[GenerateRequest] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Nothing to connect to."""
        await asyncio.Event().wait()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | FinishedEvent, None]:
        """Play the script."""
        self.requests.append(request)
        finished = False
        try:
            for event in self.script(request):
                if isinstance(event, asyncio.Event):
                    await event.wait()
                    continue
                finished = isinstance(event, FinishedEvent)
                yield event
        finally:
            if not finished:
                self.closed.append(request.sequence_id)
                self.closing.set()


def says(tokenizer: Tokenizer, text: str, *, after: FinishedEvent | None = None) -> Callable[[GenerateRequest], Script]:
    """A script that generates a text and then stops by itself, or at max_tokens."""
    return lambda request: tokens_of(tokenizer.encode(text, add_special_tokens=False).ids, request, after=after)


def tokens_of(ids: Sequence[int], request: GenerateRequest, *, after: FinishedEvent | None = None) -> Script:
    """Events for token ids; log-probabilities are made up of the token's place, alternatives of its neighbours."""
    wanted = request.sampling.logprobs
    events: list[TokenEvent | FinishedEvent] = []
    for index, token in enumerate(ids[: request.max_tokens]):
        logprob = None if wanted is None else -0.5 * (index + 1)
        others = [TokenLogprob(token, logprob or 0.0), *(TokenLogprob(3 + n, -9.0 - n) for n in range(20))]
        events.append(TokenEvent(index, token, logprob, tuple(others[: wanted or 0])))
    reason = "length" if len(ids) >= request.max_tokens else "stop"
    events.append(after or FinishedEvent(reason, "", len(request.prompt), len(events)))  # type: ignore[arg-type]
    return events


def breaking(
    ids_of: Callable[[GenerateRequest], Sequence[int]], breaks: Iterable[int], reason: str = "unavailable"
) -> Callable[[GenerateRequest], Script]:
    """A model whose ring breaks, for each choice, before the tokens at these places; resubmissions go on behind what
    was generated, as on real stages."""
    left: dict[int, list[int]] = {}

    def script(request: GenerateRequest) -> Script:
        ids, start = ids_of(request), len(request.generated)
        assert list(request.generated) == list(ids[:start])
        choices_breaks = left.setdefault(request.sampling.choice, sorted(breaks))
        for event in list(tokens_of(ids, request))[start:]:
            place = event.index if isinstance(event, TokenEvent) else len(ids)
            if choices_breaks and choices_breaks[0] <= place:
                choices_breaks.pop(0)
                yield FinishedEvent(reason, "the ring broke", len(request.prompt))  # type: ignore[arg-type]
                return
            yield event

    return script


@dataclass(frozen=True)
class Pki:
    """Files of a site's CA, a box and the operator."""

    ca: Path
    certificate: Path
    key: Path
    operator_certificate: Path
    operator_key: Path


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_pki(directory: Path, *, site: str = SITE, box: str = BOX) -> Pki:
    """A site CA, a certificate for the box on loopback, and the operator's."""
    authority = ensure_authority(directory, site)
    ensure_operator(authority, directory)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, box)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    names = (f"DNS:{box}.{site}.fleet.internal", "DNS:localhost", "IP:127.0.0.1")
    pem = request.public_bytes(serialization.Encoding.PEM).decode()
    (directory / f"{box}.crt").write_text(sign_request(authority, pem, box, names))
    (directory / f"{box}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return Pki(
        directory / "ca" / "ca.crt",
        directory / f"{box}.crt",
        directory / f"{box}.key",
        directory / "operator.crt",
        directory / "operator.key",
    )


def config_data(directory: Path, pki: Pki, **changes: Any) -> dict[str, Any]:
    """gateway.json for one pipeline; port 0 takes a free one."""
    keys = directory / "api_keys.json"
    clients = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()}
        for name, key in (("tester", KEY), ("stranger", OTHER_KEY))
    ]
    keys.write_text(json.dumps({"schema": 1, "keys": clients}))
    pipeline = {
        "model": MODEL,
        "model_directory": str(directory / "model"),
        "model_digest": "ab" * 32,
        "policy": "exact",
        "max_tokens_per_sequence": 256,
        "max_sequences": 4,
    }
    return {
        "schema": 2,
        "site": SITE,
        "box": BOX,
        "pipelines": {"main": pipeline},
        "coordinator": {"box": "control", "host": "127.0.0.1", "port": 9},  # where nobody listens
        "listen": {"host": "127.0.0.1", "port": 0},
        "loopback": {"host": "127.0.0.1", "port": 0},
        "tls": {"ca": str(pki.ca), "certificate": str(pki.certificate), "key": str(pki.key)},
        "api_keys_file": str(keys),
        "journal_directory": str(directory / "journal"),
        "max_queued_requests": 2,
        "request_timeout_seconds": 30,
        "first_token_timeout_seconds": 20,
        "replan_wait_seconds": 20,
        "keep_alive_seconds": 10,
        "resume_max_seconds": 60,
        "resume_max_streams": 4,
        "timing": {name: value for name, value in Timing().model_dump().items() if name.startswith("ring_")},
        **changes,
    }


def route(epoch: int = 3, **changes: Any) -> Route:
    """A route to box1's ring port that serves, changed as the test wants."""
    return replace(
        Route(
            pipeline="main",
            epoch=epoch,
            state="serving",
            reason="",
            first_stage="box1",
            host="127.0.0.1",
            port=7401,
            max_sequences=4,
            max_tokens_per_sequence=256,
            retry_after_seconds=0.0,
            missing_mebibytes={},
            degraded="",
            planned=False,
        ),
        **changes,
    )


def heal(
    config: GatewayConfig, pipelines: Mapping[str, Pipeline], metrics: GatewayMetrics
) -> dict[str, HealingPipeline]:
    """The gateway's pipelines over scripted ones, which serve every epoch."""

    def over(name: str, pipeline: Pipeline) -> HealingPipeline:
        timing = HealingTiming(config.replan_wait_seconds, first_retry=0.001, longest_retry=0.01)
        return HealingPipeline(name, "exact", lambda route, changed: pipeline, timing, metrics)

    return {name: over(name, pipeline) for name, pipeline in pipelines.items()}


@dataclass(frozen=True)
class RunningGateway:
    """A gateway that listens. Ports are those of HTTPS and of plain HTTP."""

    https_port: int
    http_port: int
    pki: Pki
    gateway: Gateway

    @property
    def url(self) -> str:
        """HTTPS base URL."""
        return f"https://localhost:{self.https_port}"

    def apply(self, changed: Route) -> None:
        """Send the pipeline a route, as the coordinator's channel does."""
        for backend in self.gateway.backends:
            if backend.config.name == changed.pipeline:
                backend.pipeline.apply(changed)


@asynccontextmanager
async def running(
    directory: Path, pki: Pki, pipelines: Mapping[str, Pipeline], /, **changes: Any
) -> AsyncIterator[RunningGateway]:
    """Serve until the block ends; every pipeline has a route from the start."""
    config = parse_config(config_data(directory, pki, **changes))
    metrics = GatewayMetrics([each.name for each in config.pipelines])
    gateway = make_gateway(config, heal(config, pipelines, metrics), metrics)
    gateway.recover()
    listener = await start_listening(gateway)
    task = asyncio.ensure_future(gateway.run())
    try:
        running_gateway = RunningGateway(listener.port, listener.runner.addresses[0][1], pki, gateway)
        for name in pipelines:
            running_gateway.apply(route(pipeline=name))
        yield running_gateway
    finally:
        await listener.close()
        task.cancel()
        [ended] = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError), ended

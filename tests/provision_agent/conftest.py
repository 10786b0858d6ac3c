"""A small site of one local box: real agent, real supervisord, tiny programs, a hand-made wheel and the real uv."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fleet.inventory.model import Site
from fleet.inventory.sitefile import SiteFile
from fleet.provision.desired import (
    Content,
    DesiredState,
    DirectorySpec,
    EnvironmentSpec,
    FileSpec,
    IdentitySpec,
    LinkSpec,
    ProgramSpec,
    SupervisorSpec,
    TreeSpec,
)
from fleet.provision.diff import Changes, diff
from fleet.provision.facts import Facts
from fleet.provision.session import ApplyResult, BoxSession, open_session
from fleet.provision.step_lines import StepLines
from fleet.ssh.site import SshSite

ROOT = Path(__file__).parents[2]
PYTHON_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"

# serves {"op":"health"} with the state that its configuration names
PROGRAM = """
import json, os, socket, sys
config = json.load(open(sys.argv[1]))
print("program starts with state", config["state"], flush=True)
if config["state"] == "exits":
    sys.exit(9)
if os.path.exists(config["socket"]):
    os.unlink(config["socket"])
server = socket.socket(socket.AF_UNIX)
server.bind(config["socket"])
server.listen()
while True:
    connection, _ = server.accept()
    with connection:
        connection.recv(1000)
        connection.sendall(json.dumps({"state": config["state"], "pid": os.getpid()}).encode() + b"\\n")
"""


def content(data: bytes) -> Content:
    return Content(hashlib.sha256(data).hexdigest(), len(data), data=data)


def file_content(path: Path) -> Content:
    return Content(hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size, file=path)


def build_wheel(directory: Path) -> Path:
    """A wheel of one package with two modules, made from the wheel format's own rules."""
    import base64

    files = {
        "tinybox/__init__.py": b"ANSWER = 42\n",
        "tinybox/other.py": b"def double(value):\n    return 2 * value\n",
        "tinybox-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tinybox\nVersion: 1.0\n",
        "tinybox-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}\n")
    rows.append("tinybox-1.0.dist-info/RECORD,,\n")
    path = directory / "tinybox-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("tinybox-1.0.dist-info/RECORD", "".join(rows))
    return path


@pytest.fixture(scope="session")
def uv_wheel() -> Path:
    """The real uv, fetched once with pip as `fleet bundle` does."""
    directory = ROOT / "build" / "test-wheels"
    directory.mkdir(parents=True, exist_ok=True)
    if not list(directory.glob("uv-*.whl")):
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), "uv"],
            check=True,
        )
    return next(directory.glob("uv-*.whl"))


class Authority:
    """The smallest certificate authority."""

    def __init__(self) -> None:
        import datetime

        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test authority")])
        self.start = datetime.datetime(2020, 1, 1)
        self.end = datetime.datetime(2060, 1, 1)
        self.requests: list[str] = []

    def sign(self, request_pem: str) -> str:
        self.requests.append(request_pem)
        request = x509.load_pem_x509_csr(request_pem.encode())
        assert request.is_signature_valid
        builder = x509.CertificateBuilder().subject_name(request.subject).issuer_name(self.name)
        builder = builder.public_key(request.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(self.start).not_valid_after(self.end)
        certificate = builder.sign(self.key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM).decode()


@dataclass
class LocalBox:
    """One local box and what is wanted on it."""

    site_file: SiteFile
    prefix: Path
    run: Path
    authority: Authority = field(default_factory=Authority)
    lines: list[str] = field(default_factory=list)

    def session(self) -> BoxSession:
        ssh = SshSite.of(self.site_file, report=self.lines.append)
        return open_session(self.site_file, "one", ssh, StepLines(self.lines.append))

    def facts(self, desired: DesiredState, *, texts: bool = False) -> Facts:
        with self.session() as session:
            return session.facts(desired, texts=texts, hold_lock=False)

    def provision(self, desired: DesiredState) -> tuple[Changes, ApplyResult | None]:
        """One run: facts, diff, and apply if anything differs."""
        with self.session() as session:
            changes = diff(desired, session.facts(desired, texts=True))
            return changes, session.apply(desired, changes, sign=self.authority.sign) if changes else None

    def path(self, name: str) -> str:
        return str(self.prefix / name)

    def supervisord_conf(self, programs: dict[str, str]) -> bytes:
        lines = [
            "[unix_http_server]",
            f"file={self.run}/supervisor.sock",
            "[supervisord]",
            f"logfile={self.prefix}/log/supervisord.log",
            f"pidfile={self.run}/supervisord.pid",
            f"childlogdir={self.prefix}/log",
            "[rpcinterface:supervisor]",
            "supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface",
        ]
        for name, command in programs.items():
            lines += [f"[program:{name}]", f"command={command}", "startsecs=1", "startretries=1000", "stopasgroup=true"]
            lines += ["killasgroup=true", f"stdout_logfile={self.prefix}/log/{name}.log", "redirect_stderr=true"]
        return ("\n".join(lines) + "\n").encode()

    def desired(self, state: str = "ready", model: bytes = b"weights" * 100, marker: str = "") -> DesiredState:
        """A whole box: a model, a release with two programs, a secret, an identity. `state` is what program `answers`
        reports; `marker` changes its release and fingerprint and nothing else."""
        socket = f"{self.run}/answers.sock"
        config = json.dumps({"state": state, "socket": socket, "marker": marker}, indent=1).encode() + b"\n"
        programs = {
            "answers": f"{sys.executable} {self.prefix}/current/lib/program.py {self.prefix}/current/etc/answers.json",
            "sleeps": "/bin/sleep 100000",
        }
        release_files = {
            "etc/answers.json": config,
            "etc/supervisord.conf": self.supervisord_conf(programs),
            "lib/program.py": PROGRAM.encode(),
        }
        release = hashlib.sha256(b"".join(release_files.values())).hexdigest()[:16]
        model_path = self.path("models/" + hashlib.sha256(model).hexdigest()[:16])
        release_path = self.path(f"releases/{release}")
        return DesiredState(
            box="one",
            prefix=str(self.prefix),
            privileged=False,
            user=None,
            packages=(),
            directories=(
                DirectorySpec(str(self.prefix)),
                DirectorySpec(self.path("log")),
                DirectorySpec(self.path("secrets"), mode=0o700),
            ),
            files=(FileSpec(self.path("secrets/keys.json"), content(b'{"key":"hush"}'), mode=0o600, secret=True),),
            trees=(
                TreeSpec(
                    model_path,
                    (
                        FileSpec(f"{model_path}/model.json", content(model)),
                        FileSpec(f"{model_path}/parts/layer-000", content(model * 3)),
                    ),
                ),
                TreeSpec(
                    release_path,
                    tuple(FileSpec(f"{release_path}/{name}", content(data)) for name, data in release_files.items()),
                ),
            ),
            environments=(),
            links=(LinkSpec(self.path("current"), release_path),),
            identity=IdentitySpec(
                self.path("pki/box.key"),
                self.path("pki/box.crt"),
                "one",
                "test",
                ("DNS:one.test.fleet.internal", "IP:127.0.0.1"),
                "0" * 64,
            ),
            supervisor=SupervisorSpec(
                self.path("current/etc/supervisord.conf"), sys.executable, f"{self.run}/supervisor.sock", None, "one"
            ),
            programs=(
                ProgramSpec("answers", hashlib.sha256(config).hexdigest(), socket, ("loaded", "ready")),
                ProgramSpec("sleeps", "always the same"),
            ),
            health_gate_seconds=8.0,
        )

    def with_environment(self, desired: DesiredState, uv_wheel: Path, wheels: Path) -> DesiredState:
        wheel = build_wheel(wheels)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        environment = EnvironmentSpec(
            self.path("envs/" + digest[:16]),
            PYTHON_VERSION,
            file_content(uv_wheel),
            ((wheel.name, file_content(wheel)),),
            f"tinybox==1.0 --hash=sha256:{digest}\n",
        )
        return replace(desired, environments=(environment,))


@pytest.fixture
def box(tmp_path: Path) -> Iterator[LocalBox]:
    run = Path(tempfile.mkdtemp(prefix="fleet-test-", dir="/tmp"))
    file = tmp_path / "site.yaml"
    site = Site.model_validate(
        {
            "site": "test",
            "prefix": "site",
            "device_profiles": {"this": {"architecture": "x86_64"}},
            "boxes": {"one": {"address": "127.0.0.1", "connection": "local", "profile": "this"}},
            "models": {"tiny": {"source": {"path": "tiny.gguf"}, "licence": "none"}},
            "pipelines": {"main": {"model": "tiny", "boxes": ("one",)}},
        }
    )
    site_file = SiteFile(site, file, {})
    box = LocalBox(site_file, Path(site_file.prefix_of("one")), run)
    yield box
    with box.session() as session:
        session.stop(box.desired())
    shutil.rmtree(run)


Snapshot = dict[str, tuple[int, int, int, str]]


@pytest.fixture
def snapshot() -> Callable[[Path], Snapshot]:
    """Inode, ctime, mode and digest of everything below a directory that fleet manages (logs grow by themselves)."""

    def take(root: Path) -> Snapshot:
        found = {}
        for path in sorted(root.rglob("*")):
            if path.parent.name == "log":
                continue
            status = path.lstat()
            data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            found[str(path)] = (status.st_ino, status.st_ctime_ns, status.st_mode, hashlib.sha256(data).hexdigest())
        return found

    return take

"""Small sites and bundles for the tests of provisioning: the layout of the real thing with a few bytes in each file."""

from __future__ import annotations

import hashlib
import json
import platform
import zipfile
from pathlib import Path

from fleet.bundle.manifest import BundledModel, FileEntry, LockedWheel, Manifest, TargetWheels, make_lock
from fleet.inventory.loader import load_site
from fleet.inventory.sitefile import SiteFile
from fleet.planning.cost import ModelCost
from fleet.planning.spec import PipelineSpec
from fleet.planning.weights import WeightBytes
from fleet.provision.desired import DesiredState, FileSpec
from fleet.provision.ports import BoxPorts, choose_ports
from fleet.provision.release import read_library
from fleet.provision.render import RenderInputs
from fleet.provision.render_bundle import BundleView

PYTHON = ".".join(platform.python_version_tuple()[:2])
MODEL_DIGEST = hashlib.sha256(b"model").hexdigest()
SITE = """\
site: {site}
state_dir: state
bundle_dir: bundle
prefix: {prefix}
device_profiles:
  pc:
    architecture: {architecture}
    python: {python}
    torch: {{version: "2.13.0"}}
    {packages}
box_defaults: {{profile: pc, connection: {connection}}}
boxes:
  box1: {{address: {net}.11}}
  box2: {{address: {net}.12}}
  box3: {{address: {net}.13, threads: 3}}
  control: {{address: {net}.14, roles: [coordinator, gateway]}}
models:
  small: {{source: {{path: model}}, licence: none}}
pipelines:
  main: {{model: small, boxes: [box1, box2, box3], max_sequences: 4, max_tokens_per_sequence: 256}}
{more}"""


def write_site(directory: Path, *, connection: str = "ssh", more: str = "", prefix: str = "") -> SiteFile:
    """A site of three stage boxes and `control`."""
    local = connection == "local"
    text = SITE.format(
        site="small",
        prefix=prefix or ("boxes" if local else "/opt/fleet"),
        architecture="auto" if local else "x86_64",
        python="auto" if local else '"3.11"',
        packages="" if local else "packages: [openssl, python3-venv]",
        connection=connection,
        net="127.0.0" if local else "10.77.0",
        more=more,
    )
    file = directory / "site.yaml"
    file.write_text(text)
    return load_site(file)


def write_bundle(site_file: SiteFile, target: str = "") -> BundleView:
    """A bundle whose wheels and weights are a few bytes each."""
    root = site_file.bundle_directory
    local = site_file.site.boxes["box1"].connection == "local"
    target = target or (f"linux_{platform.machine()}-cp{PYTHON.replace('.', '')}" if local else "linux_x86_64-cp311")
    files: dict[str, FileEntry] = {}

    def put(name: str, data: bytes) -> LockedWheel:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        files[name] = FileEntry(hashlib.sha256(data).hexdigest(), len(data))
        return LockedWheel(path.name.split("-")[0], "1.0", name, files[name].sha256)

    wheel = root / "fleet" / "fleet_hardening-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("stage_runtime/__init__.py", "")
        archive.writestr("fleet/__init__.py", '__version__ = "0.1.0"\n')
    put("fleet/fleet_hardening-0.1.0-py3-none-any.whl", wheel.read_bytes())
    uv = put(f"wheels/{target}/uv-1.0-py3-none-any.whl", b"uv").file
    supervisor = put(f"wheels/{target}/supervisor-1.0-py3-none-any.whl", b"supervisor")
    torch = put(f"wheels/{target}/torch-1.0-py3-none-any.whl", b"torch")
    for name in (
        "model.json",
        "tokenizer.json",
        "chat_template.jinja",
        "embedding.safetensors",
        "layer-000.safetensors",
    ):
        put(f"models/{MODEL_DIGEST[:16]}/{name}", b"model" if name == "model.json" else name.encode())
    locks = {"stage": make_lock([supervisor, torch]), "control": make_lock([supervisor])}
    manifest = Manifest(
        directory=root,
        site=site_file.site.site,
        fleet_version="0.1.0",
        files=files,
        fleet_wheel="fleet/fleet_hardening-0.1.0-py3-none-any.whl",
        targets={target: TargetWheels(uv, locks)},
        models={"small": BundledModel(MODEL_DIGEST, f"models/{MODEL_DIGEST[:16]}", "none")},
    )
    manifest.write()
    return BundleView(site_file, manifest)


def make_specs(site_file: SiteFile, *, layers: int = 6) -> dict[str, PipelineSpec]:
    """What the pipelines of our engine are to the coordinator: a model of a few bytes a layer."""
    layer = WeightBytes(held=100, read=90, converting=50)
    cost = ModelCost((layer,) * layers, layer, tied=True, trial_bytes=200, kv_bytes_per_token=8, hidden_size=4)
    return {
        name: PipelineSpec(
            name=name,
            model=line.model,
            model_digest=MODEL_DIGEST,
            policy=line.policy,
            max_sequences=line.max_sequences,
            max_tokens_per_sequence=line.max_tokens_per_sequence,
            boxes=line.boxes,
            explicit=None,
            cost=cost,
        )
        for name, line in site_file.site.pipelines.items()
        if line.engine.kind == "stage-runtime"
    }


def make_inputs(site_file: SiteFile, bundle: BundleView, *, ports: dict[str, BoxPorts] | None = None) -> RenderInputs:
    """Inputs of `render`, every port free, cores known."""
    return RenderInputs(
        site_file=site_file,
        bundle=bundle,
        library=read_library(bundle.wheel_path),
        specs=make_specs(site_file),
        ports=ports or choose_ports(site_file, {}, lambda port: True),
        ca_pem=b"PEM\n",
        ca_sha256="c" * 64,
        api_keys=b'{"schema": 1, "keys": []}\n',
        cores={"box1": 8, "box2": 4},
        uid=1000,
    )


def release_file(state: DesiredState, name: str) -> FileSpec:
    """A file of the release's etc/."""
    link = next(link for link in state.links if link.path.endswith("/current"))
    tree = next(tree for tree in state.trees if tree.path == link.target)
    return next(file for file in tree.files if file.path == f"{tree.path}/etc/{name}")


def etc(state: DesiredState, name: str) -> dict[str, object]:
    """A configuration of the release, decoded."""
    data = release_file(state, name).content.data
    assert data is not None
    return json.loads(data)  # type: ignore[no-any-return]

"""`fleet inventory`, `fleet init` and `fleet docs`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from fleet.cli.main import cli, main
from fleet.inventory.loader import load_site
from tests.inventory.conftest import VALID

ROOT = Path(__file__).parents[2]
SITE = ROOT / "inventory" / "site.yaml"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_check_says_what_it_found() -> None:
    assert run("inventory", "check", str(SITE)) == (
        "ok: site plant-7, 5 boxes, 4 device profiles, 2 models, 2 pipelines\n"
    )


def test_check_names_every_error_and_exits_78(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(VALID.replace("10.0.0.2", "10.0.0.1").replace("apache-2.0", "2.0"))
    assert main(["inventory", "check", str(file)]) == 78
    assert capsys.readouterr().err.splitlines() == [
        f'fleet: {file}:14: models.tiny.licence: read the number 2.0: expected text: write "2.0"',
        f"  next: mend the file, then run: fleet inventory check {file}",
    ]
    file.write_text(file.read_text().replace(" 2.0", ' "2.0"'))
    assert main(["inventory", "check", str(file)]) == 78
    assert f"{file}:9: boxes.box2.address: 10.0.0.1 port 22 is also" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["missing", "directory", "locked name"])
def test_check_of_what_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    path = {"missing": tmp_path / "site.yml", "directory": tmp_path, "locked name": tmp_path / ("x" * 300)}[kind]
    assert main(["inventory", "check", str(path)]) == 78
    error = capsys.readouterr().err
    assert str(path)[:60] in error
    assert "Traceback" not in error
    assert "next: " in error


def test_the_inventory_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_INVENTORY", str(ROOT / "inventory" / "lab.yaml"))
    assert run("inventory", "check").startswith("ok: site lab, 4 boxes")


def test_the_console_script_reports_as_the_library_does(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("site: [\n")
    script = Path(sys.executable).with_name("fleet")
    result = subprocess.run([script, "inventory", "check", file], capture_output=True, text=True, check=False)
    assert result.returncode == 78
    assert result.stdout == ""
    assert result.stderr.startswith(f"fleet: {file}:2: not valid YAML: ")
    good = subprocess.run([script, "inventory", "check", SITE], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.startswith("ok: site plant-7")


def test_show_as_json_has_defaults_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANT_7_LINE_CONTROL_KEY", "correct-horse-battery-staple")
    output = run("inventory", "show", str(SITE), "-o", "json")
    assert "correct-horse" not in output
    document = json.loads(output)
    assert (document["schema"], document["kind"]) == (1, "inventory")
    data = document["data"]
    assert data["gateway"]["api_keys"][0] == {"name": "line-control", "key": "!env PLANT_7_LINE_CONTROL_KEY"}
    assert data["boxes"]["pi-1"]["memory_keep_free_mib"] == 1024
    assert data["boxes"]["rk-1"]["memory_keep_free_mib"] == 2048
    assert data["boxes"]["pi-1"]["roles"] == ["stage"]


def test_show_as_a_table_has_every_box_and_every_setting() -> None:
    rows = [line.split("\t") for line in run("inventory", "show", str(SITE)).splitlines()]
    assert ["pi-1", "192.168.10.22", "ssh", "raspberry-pi-5", "stage", "rack=a", "main"] in rows
    assert ["main", "tinyllama-1b", "jetson-1 → pi-1 → pi-2", "auto", "stage-runtime", "exact"] in rows
    assert ["ports.ring", "7401"] in rows
    assert ["gateway.api_keys[1].key", "!file secrets/quality-desk"] in rows


def test_init_writes_a_site_that_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = run("init")
    assert (
        output.splitlines()[-1] == "next: edit inventory/site.yaml, then run: fleet inventory check inventory/site.yaml"
    )
    assert (tmp_path / "inventory" / "site.yaml").read_bytes() == SITE.read_bytes()
    assert not (tmp_path / "inventory" / "site.yaml").is_symlink()
    assert ".fleet/" in (tmp_path / "inventory" / ".gitignore").read_text().splitlines()
    assert load_site(Path("inventory/site.yaml"), resolve_secrets=False).site.site == "plant-7"


def test_the_gitignore_covers_the_state_directory(tmp_path: Path) -> None:
    run("init", str(tmp_path / "new"))
    site = load_site(tmp_path / "new" / "site.yaml", resolve_secrets=False)
    ignored = (tmp_path / "new" / ".gitignore").read_text().splitlines()
    assert site.state_directory.parent == (tmp_path / "new" / ".fleet").resolve()
    assert f"{site.state_directory.parent.name}/" in ignored


@pytest.mark.parametrize("there", ["file", "dangling link"])
def test_init_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str], there: str) -> None:
    target = tmp_path / "site.yaml"
    if there == "file":
        target.write_text("mine\n")
    else:
        target.symlink_to(tmp_path / "nowhere")
    assert main(["init", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"{target} exists already and is not overwritten" in error
    assert f"next: check it with: fleet inventory check {target}" in error
    assert not (tmp_path / "nowhere").exists()
    assert there != "file" or target.read_text() == "mine\n"
    assert not (tmp_path / ".gitignore").exists()


def test_init_keeps_a_gitignore(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("mine\n")
    assert f"kept {tmp_path / '.gitignore'}" in run("init", str(tmp_path))
    assert (tmp_path / ".gitignore").read_text() == "mine\n"


def test_init_where_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["init", str(tmp_path / "file" / "below")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_docs_as_page_and_as_json() -> None:
    page = run("docs", "inventory")
    assert page.startswith("# Inventory reference\n")
    listed = json.loads(run("docs", "inventory", "-o", "json"))["data"]
    assert {(key["section"], key["name"]) for key in listed} >= {
        ("", "site"),
        ("boxes.NAME", "address"),
        ("ports", "ring"),
    }
    assert all(f"| `{key['name']}` | {key['type']} |" in page for key in listed)


@pytest.mark.parametrize("verb", [["inventory", "check"], ["inventory", "show"], ["init"], ["docs", "inventory"]])
def test_help_has_three_examples(verb: list[str]) -> None:
    examples = [line for line in run(*verb, "--help").splitlines() if line.strip().startswith("fleet ")]
    assert len(examples) >= 3


def test_a_built_wheel_carries_the_example(tmp_path: Path) -> None:
    """The package's example is a link into inventory/: a wheel must hold the bytes."""
    source = tmp_path / "source"
    for name in ("fleet", "inventory"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run(command, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("fleet/inventory/examples/site.yaml") == SITE.read_bytes()

"""The entry point: light, honest about errors, one exit code per outcome."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fleet.cli import main as entry
from fleet.errors import ExitCode, FleetError


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    heavy = "{'torch', 'fabric', 'paramiko', 'aiohttp', 'pydantic', 'rich', 'numpy'}"
    result = run_python(
        f"import sys; from fleet.cli.main import main; code = main({arguments!r}); print(); "
        f"print('loaded:', sorted({heavy} & set(sys.modules)), 'code:', code)"
    )
    assert result.stdout.splitlines()[-1] == "loaded: [] code: 0", result.stdout + result.stderr


def test_every_verb_has_help_with_three_examples() -> None:
    for verb in entry.VERBS:
        result = CliRunner().invoke(entry.cli, [verb, "--help"])
        assert result.exit_code == 0, (verb, result.output)
        examples = [line for line in result.output.splitlines() if line.strip().startswith("fleet ")]
        assert len(examples) >= 3, f"fleet {verb} --help shows {len(examples)} examples:\n{result.output}"


def test_console_script_is_installed() -> None:
    script = Path(sys.executable).with_name("fleet")
    result = subprocess.run([script, "--version"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.startswith("fleet, version")) == (0, True), result.stderr


def test_known_error_prints_cause_and_next_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise FleetError("box2: disk full", hint="free 2 GiB", exit_code=ExitCode.UNREACHABLE)

    monkeypatch.setattr(entry.cli, "main", fail)
    assert entry.main([]) == 3
    assert capsys.readouterr().err == "fleet: box2: disk full\n  next: free 2 GiB\n"


def test_bug_writes_its_traceback_to_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(entry.cli, "main", fail)
    assert entry.main([]) == 1
    message = capsys.readouterr().err
    assert "Traceback" not in message
    file = Path(message.split("send ")[1].split(" to the maintainers")[0])
    assert "ZeroDivisionError: of ours" in file.read_text()
    file.unlink()


def test_trouble_of_this_machine_is_no_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/full/disk")

    monkeypatch.setattr(entry.cli, "main", fail)
    assert entry.main([]) == 1
    assert capsys.readouterr().err.startswith("fleet: /full/disk: No space left on device\n  next: ")


def test_an_error_is_json_where_json_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none.yaml"
    assert entry.main(["provision", str(missing), "-o", "json"]) == 78
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["kind"], answer["data"]["exit_code"]) == (1, "error", 78)
    assert str(missing) in answer["data"]["message"]
    assert entry.main(["provision", str(missing)]) == 78
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("closing", ["| true", ">&-", "2>&-", "2>&1 | true"])
def test_nobody_reads_what_is_printed(closing: str) -> None:
    command = f"'{sys.executable}' -m fleet.cli.main docs inventory {closing}; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_usage_error_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["no-such-verb"]) == 2
    assert "No such command" in capsys.readouterr().err

"""supervisord.conf, read back by supervisor's own parser."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from supervisor.options import ServerOptions

from fleet.provision.supervisor_config import (
    PROGRAM_LOG_BACKUPS,
    PROGRAM_LOG_BYTES,
    Program,
    log_bytes,
    quote_environment,
    render_supervisor_config,
)

PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40)


def program(**changes: object) -> Program:
    values: dict[str, object] = {
        "name": "stage",
        "argv": ("/bin/true",),
        "environment": {},
        "log_file": "/tmp/stage.log",
        "user": None,
        "start_seconds": 5,
        "stop_seconds": 35,
    }
    return Program(**{**values, **changes})  # type: ignore[arg-type]


def read_back(text: str, directory: Path) -> ServerOptions:
    file = directory / "supervisord.conf"
    file.write_text(text)
    options = ServerOptions()
    options.realize(["-c", str(file), "--nodaemon"])
    return options


def render(*programs: Program, directory: Path) -> str:
    return render_supervisor_config(
        socket=f"{directory}/supervisor.sock",
        pid_file=f"{directory}/supervisord.pid",
        log_file=f"{directory}/supervisord.log",
        programs=programs,
    )


def expressible(value: str) -> bool:
    return value.strip("'\"") == value and not ("'" in value and '"' in value)


@given(argument=PRINTABLE, value=PRINTABLE.filter(expressible))
@settings(max_examples=150, deadline=None)
def test_supervisor_reads_back_what_was_meant(
    tmp_path_factory: pytest.TempPathFactory, argument: str, value: str
) -> None:
    directory = tmp_path_factory.getbasetemp()
    text = render(program(argv=("/bin/echo", argument), environment={"VALUE": value, "B": "2"}), directory=directory)
    config = read_back(text, directory).process_group_configs[0].process_configs[0]
    assert shlex.split(config.command) == ["/bin/echo", argument]
    assert config.environment == {"VALUE": value, "B": "2"}


@pytest.mark.parametrize("character", [chr(code) for code in range(32, 127)])
def test_every_printable_character_in_a_value_and_in_paths(tmp_path: Path, character: str) -> None:
    value = f"a {character} b{character}c"
    directory = tmp_path / f"a {character.replace('/', '_')} b"
    directory.mkdir()
    text = render(program(environment={"VALUE": value}, log_file=f"{directory}/stage.log"), directory=directory)
    options = read_back(text, tmp_path)
    config = options.process_group_configs[0].process_configs[0]
    assert config.environment["VALUE"] == value
    assert config.stdout_logfile == f"{directory}/stage.log"
    assert options.configroot.supervisord.logfile == f"{directory}/supervisord.log"
    assert options.server_configs[0]["file"] == f"{directory}/supervisor.sock"


@given(
    value=st.one_of(
        st.builds("{0}{1}".format, st.sampled_from("'\""), PRINTABLE),
        st.builds("{1}{0}".format, st.sampled_from("'\""), PRINTABLE),
        st.builds("a{0}'{1}\"b".format, PRINTABLE, PRINTABLE),
    )
)
def test_what_the_format_cannot_say_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="quotes"):
        quote_environment({"VALUE": value})


@pytest.mark.parametrize("bad", ["a\nb", "a\rb", "a\0b", "\x7f"])
def test_control_characters_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="control character"):
        quote_environment({"VALUE": bad})


@pytest.mark.parametrize("name", ["", "A B", "1A", "A=B", "É"])
def test_a_variable_that_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        quote_environment({name: "x"})


def test_what_the_programs_get(tmp_path: Path) -> None:
    options = read_back(render(program(), directory=tmp_path), tmp_path)
    config = options.process_group_configs[0].process_configs[0]
    assert (config.stopasgroup, config.killasgroup, config.stopwaitsecs, config.startsecs) == (True, True, 35, 5)
    assert config.autostart is True
    assert config.redirect_stderr is True
    assert config.stdout_logfile_maxbytes * (config.stdout_logfile_backups + 1) == (
        PROGRAM_LOG_BYTES * (PROGRAM_LOG_BACKUPS + 1)
    )
    socket = options.server_configs[0]
    assert (socket["file"], socket["chmod"]) == (f"{tmp_path}/supervisor.sock", 0o700)


def test_logs_are_bounded_by_what_log_bytes_says(tmp_path: Path) -> None:
    programs = (program(), program(name="gateway"))
    options = read_back(render(*programs, directory=tmp_path), tmp_path)
    total = (options.logfile_maxbytes or 0) * ((options.logfile_backups or 0) + 1)
    for group in options.process_group_configs:
        config = group.process_configs[0]
        total += config.stdout_logfile_maxbytes * (config.stdout_logfile_backups + 1)
    assert total == log_bytes(len(programs))


def test_startsecs_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"startsecs=0"):
        render(program(start_seconds=0), directory=tmp_path)


def test_the_same_program_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="twice"):
        render(program(), program(), directory=tmp_path)


def test_the_service_user_is_passed_on(tmp_path: Path) -> None:
    user = "root"
    config = read_back(render(program(user=user), directory=tmp_path), tmp_path).process_group_configs[0]
    assert config.process_configs[0].uid == 0
    assert os.path.lexists(tmp_path / "supervisord.conf")

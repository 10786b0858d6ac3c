"""The lab by hand: `python -m tests.lab up 3`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from tests.lab.errors import LabError
from tests.lab.lab import Lab, LabBox
from tests.lab.paths import LabPaths
from tests.lab.settings import DEFAULT_DISK_MIB, Shape

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
HOUR_SECONDS = 3600.0
MEGABYTE = 1e6
EXAMPLES = """examples (as root):
  python -m tests.lab up 3                     box1, box2, box3 and control
  python -m tests.lab ssh box1                 a shell; with words after it, one command
  python -m tests.lab off box2 --hard          cut the power quietly; unsynced writes are lost
  python -m tests.lab shape box3 --delay-ms 50 --loss 0.05
  python -m tests.lab skew box1 +3600          its wall clock an hour ahead; 0 ends it
  python -m tests.lab mem box1 512             cap at 512 MiB; 0 lifts the cap
  python -m tests.lab down
"""


def note(text: str) -> None:
    """Progress goes to stderr, data to stdout."""
    print(f"lab: {text}", file=sys.stderr, flush=True)


def existing(lab: Lab, options: argparse.Namespace) -> LabBox:
    """The box that a verb names.

    Raises:
        LabError: the lab has none of that name.
    """
    box = lab.box(options.box)
    names = [one.name for one in lab.boxes]
    if box.name not in names:
        raise LabError(
            f"the lab has no {box.name}; it has {', '.join(names) or 'no boxes'}", hint="run: python -m tests.lab up N"
        )
    return box


def up(lab: Lab, options: argparse.Namespace) -> int:
    """Start the boxes and say what to do next."""
    began = time.monotonic()
    boxes = lab.up(options.boxes, disk_mib=options.disk_mib)
    note(f"{len(boxes)} boxes up in {time.monotonic() - began:.1f} s: {', '.join(box.name for box in boxes)}")
    note(f"key: {LabPaths().private_key}, user root")
    note("next: fleet provision inventory/lab.yaml")
    note("  or: python -m tests.lab status | ssh box1 | off box2 --hard | down")
    return 0


def down(lab: Lab, options: argparse.Namespace) -> int:
    """End everything."""
    lab.down(keep_disks=options.keep_disks)
    note("down" + ("; disks are kept, `up` goes on with them" if options.keep_disks else ""))
    return 0


def status(lab: Lab, _options: argparse.Namespace) -> int:
    """A line a box."""
    if not lab.boxes:
        note("no boxes; next: python -m tests.lab up 3")
    for box in lab.boxes:
        print(box.summary())
    return 0


def on(lab: Lab, options: argparse.Namespace) -> int:
    """Switch one box on."""
    lab.up([existing(lab, options).name])
    note(f"{options.box} is on; next: python -m tests.lab ssh {options.box}")
    return 0


def off(lab: Lab, options: argparse.Namespace) -> int:
    """Switch one box off, in order or hard."""
    box = existing(lab, options)
    if options.hard:
        box.power_cut()
    else:
        box.off()
    note(f"{options.box} is off; next: python -m tests.lab on {options.box}")
    return 0


def ssh(lab: Lab, options: argparse.Namespace) -> int:
    """Become ssh."""
    argv = existing(lab, options).ssh_argv(options.command)
    os.execvp(argv[0], argv)  # noqa: S606 (a list of our own making)


def execute(lab: Lab, options: argparse.Namespace) -> int:
    """Become a command inside the box."""
    argv = existing(lab, options).exec_argv(options.command or ["bash"])
    os.execvp(argv[0], argv)  # noqa: S606


def _fault(act: Callable[[LabBox, argparse.Namespace], None]) -> Callable[[Lab, argparse.Namespace], int]:
    def run(lab: Lab, options: argparse.Namespace) -> int:
        box = existing(lab, options)
        act(box, options)
        note(box.summary())
        return 0

    return run


def _shape(box: LabBox, options: argparse.Namespace) -> None:
    shape = Shape(options.delay_ms, options.jitter_ms, options.loss, options.rate_mbit)
    box.unshape() if shape == Shape() else box.shape(shape)


def _leak(box: LabBox, options: argparse.Namespace) -> None:
    box.leak(options.mb_per_hour * MEGABYTE / HOUR_SECONDS)


def parser() -> argparse.ArgumentParser:
    """All verbs and their options."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="python -m tests.lab", description="Real boxes on this machine.", epilog=EXAMPLES, formatter_class=raw
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(
        name: str, text: str, act: Callable[[Lab, argparse.Namespace], int], *, box: bool = True
    ) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text, epilog=EXAMPLES, formatter_class=raw)
        made.set_defaults(act=act)
        if box:
            made.add_argument("box", metavar="BOX", help="box1, box2, … or control")
        return made

    starting = verb("up", "start N stage boxes and `control`", up, box=False)
    starting.add_argument("boxes", metavar="N", type=int, help="number of stage boxes")
    starting.add_argument("--disk-mib", type=int, default=DEFAULT_DISK_MIB, help="size of new disks (%(default)s MiB)")
    ending = verb("down", "end all boxes and remove the network", down, box=False)
    ending.add_argument("--keep-disks", action="store_true", help="the next `up` finds them as they are")
    verb("status", "list the boxes", status, box=False)
    verb("on", "switch a box on", on)
    verb("off", "switch a box off", off).add_argument("--hard", action="store_true", help="cut its power, quietly")
    verb("cut", "unplug its network cable", _fault(lambda box, _: box.link_cut()))
    verb("heal", "plug the cable in again, and end any shaping", _fault(lambda box, _: box.link_heal()))
    for name, text, act in (("ssh", "log in, or run a command over SSH", ssh), ("exec", "run inside", execute)):
        verb(name, text, act).add_argument("command", nargs=argparse.REMAINDER, metavar="CMD")
    shaping = verb("shape", "delay, drop or slow its frames, each way; no option: none of it", _fault(_shape))
    for option, text in (
        ("--delay-ms", "one way"),
        ("--jitter-ms", "plus and minus"),
        ("--loss", "probability, 0 to 1"),
        ("--rate-mbit", "0: no limit"),
    ):
        shaping.add_argument(option, type=float, default=0.0, metavar="NUMBER", help=text)
    skewing = verb("skew", "shift its wall clock", _fault(lambda box, options: box.clock_skew(options.seconds)))
    skewing.add_argument("seconds", type=float, help="e.g. +3600 or -5.5; 0 for none")
    leaking = verb("leak", "let its stage leak, once it has been started anew", _fault(_leak))
    leaking.add_argument("mb_per_hour", type=float, help="in 10^6 bytes; 0 ends it")
    memory = verb("mem", "cap its memory", _fault(lambda box, options: box.memory_limit(options.mib << 20 or None)))
    memory.add_argument("mib", type=int, metavar="MIB", help="0 for no cap")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0, or 1 with one line that says why."""
    options = parser().parse_args(arguments)
    try:
        act: Callable[[Lab, argparse.Namespace], int] = options.act
        return act(Lab(), options)
    except LabError as error:
        print(error.for_terminal(), file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

"""Real boxes on one machine: systemd-nspawn containers with a disk, an address, an sshd and a journal of their own.

For tests: `from tests.lab.lab import Lab, LabBox`, or the fixtures in `tests.lab.fixtures`.
For people: `python -m tests.lab up 3` as root.
"""

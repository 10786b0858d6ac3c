"""Real boxes on one machine: systemd-nspawn containers with a disk, an address, an sshd and a journal of their own.

For people: `python -m tests.lab up 3` as root, `--help` for the rest.

For tests (marker `lab`), the fixtures of `tests.lab.fixtures`: `lab` is one lab a test run; `fresh_lab` the same with
empty disks; `box` is box1 for one fault, mended afterwards.

    box = lab.box("box2")
    since = box.journal_cursor()          # take it after `on`, whose look at sshd's banner is a connection too
    before = box.tree_digest()
    ...                                   # what is tested
    assert box.sshd_counts(since).sessions == ("command",)
    assert changed_paths(before, box.tree_digest()) == {"/etc/motd": "changed"}
    lab.save("provisioned")               # boxes restart; later `lab.restore("provisioned")`, about 3 s for four boxes
    box.power_cut(); box.on()             # unsynced writes are lost, neighbours saw no FIN or RST
"""

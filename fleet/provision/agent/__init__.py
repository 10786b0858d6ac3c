"""The program that runs on a box while it is provisioned: standard library only, Python ≥ 3.10, sent over the
connection and never written to the box's disk. `fleet.provision.transport` packs these modules; `main.serve` runs them.
"""

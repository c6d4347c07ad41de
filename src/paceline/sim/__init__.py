"""The production core under a virtual clock: engines, environments, trainer and faults are models.

    workload ─▶ Simulation(core) ─▶ journal, like any other ─▶ metrics

`docs/simulator.md` says what is modelled and what is not.
"""

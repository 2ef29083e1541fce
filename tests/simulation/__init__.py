"""A whole cluster in one thread and virtual time, and hypothesis to disturb it.

Real: the router from its public API to its `Join` streams, both role engines with their loop, the KV agents with their
protocol. Simulated: time, the streams and links between processes, the worker's front, the clients, and the model.

Read in this order:

* `test_attempts` plays the simulation; `machine` says what can happen, rule by rule, and what holds in the end.
* `cluster` builds and moves all of it: `move`, `pass_time`, `submit`, `kill`.
* The parts: `client`, `worker` and `kv_thread`; `stream` and `wires` are what is between them, where messages wait to
  be delivered, lost, repeated or damaged; `virtual_time`; `hash_model`, whose text depends on every byte of context.
* The books kept from outside: `engine_books`, `router_books`, and in `kv_thread`. They trust no deadline and no memory
  of what they watch, and say at once what is wrong, where a cluster that heals itself would hide it.
* `test_found` has what the simulation found, as the shortest order of events that shows it.

A failing run prints the steps that lead to it, and with `make test-faults` the seed: FAULT_SEED and FAULT_ROUNDS say
from where and how long. `@reproduce_failure` on `machine.Attempts`, as printed, plays one example again.
"""

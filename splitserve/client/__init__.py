"""The client library: what an application uses to call a router. Needs neither torch nor the serving extra.

`splitserve.Client` is in `sync`, `splitserve.AsyncClient` in `aio`; both build requests in `requests`, read answers
with `fold` and hand out the types of `types`.
"""
